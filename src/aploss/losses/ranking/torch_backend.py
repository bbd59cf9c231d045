"""The stages of a ranking in torch operations, for every device.

Sums over the scores are sums of integers (fixed point), which do not depend on the order of adding:
results are the same in every run, without the slow paths of deterministic algorithms.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import rules
from .problem import Found, Positives, Problem, Ranked, loss_dtype
from .segments import Segments, cut_into_segments, line_through_segments, running_minimum, sums_above

LANES = 64  # copies of the tallies, so that few scores at a time add to the same number
FRACTION_BITS = 30  # of a share in float32
PAIRS = 1 << 20  # pairs of positives held at a time: 8 MB in float64, a few times
LEAST = 1e-300  # to divide by where there is nothing


def step_at_zero(delta: float) -> float:
    """f(0), what a positive counts in its own row: 1/2, but 1 for the Heaviside step."""
    return 0.5 if delta else 1.0


class TorchBackend:
    """See :class:`aploss.losses.ranking.problem.Backend`."""

    name = "torch"
    at_once = False

    def rank(self, problem: Problem, accept: Callable[[Problem, list[int]], None]) -> Ranked:
        raise NotImplementedError

    def find(self, problem: Problem) -> Found:
        targets, boxes = problem.targets, problem.box_losses
        status = torch.zeros(5, dtype=torch.int64, device=targets.device)
        kinds = torch.empty((3, len(targets)), dtype=torch.bool, device=targets.device)
        positive, negative, ignored = kinds
        if problem.soft:
            torch.logical_and(targets > 0, targets <= 1, out=positive)
        else:
            torch.eq(targets, 1, out=positive)
        torch.eq(targets, 0, out=negative)
        torch.eq(targets, -1, out=ignored)
        torch.sum(kinds, 1, out=status[:3])
        torch.sub(torch.tensor(len(targets)), status[:3].sum(), out=status[2])
        scores = problem.scores.to(problem.dtype)
        # The largest size of what is not ignored tells of NaN, too.
        largest = torch.linalg.vector_norm(scores.masked_fill(ignored, 0.0), torch.inf)
        torch.logical_not(largest < torch.inf, out=status[3])
        if boxes is not None:
            # Two numbers in one: how many are allowed, and how many there should be.
            allowed = (boxes.clamp(0, torch.finfo(boxes.dtype).max) == boxes).sum()
            torch.ne(torch.add(status[0], allowed, alpha=1 << 32), len(boxes) * ((1 << 32) + 1), out=status[4])
        return Found(status, _Scores(positive, torch.where(negative, scores, -torch.inf)))

    def positives(self, problem: Problem, found: Found, capacity: int) -> Positives:
        index = self.positive_index(found, capacity)
        padding = None if found.all_real else index < 0
        at = index if found.all_real else index.clamp(min=0)
        extras = None
        if problem.soft:
            extras = problem.targets[at].double()
        elif problem.box_losses is not None:
            extras = problem.box_losses.detach().double()
            if len(extras) != capacity:
                extras = torch.nn.functional.pad(extras, (0, capacity - len(extras)))
        scores = problem.scores[at].to(problem.dtype)
        groups = None if problem.groups is None else problem.groups[at]
        count = found.status[0] if padding is None else (~padding).sum()
        return sort_positives(scores, index, count, padding, extras, groups)

    def positive_index(self, found: Found, capacity: int) -> Tensor:
        """The flat index of the positives, ascending; -1 behind them [capacity]."""
        index: Tensor = torch.nonzero_static(found.held.is_positive, size=capacity, fill_value=-1)
        return index[:, 0]

    def tally(self, problem: Problem, found: Found, positives: Positives) -> Tensor:
        segments = cut_into_segments(positives.scores, problem.delta, positives.groups)
        positives.held = segments
        with _any_order_of_adding():
            return self.tally_negatives(problem, found, segments)

    def tally_negatives(self, problem: Problem, found: Found, segments: Segments) -> Tensor:
        """See :meth:`tally`."""
        _locate(problem, found.held, segments)
        return _tally(found.held, segments)

    def finish(self, problem: Problem, found: Found, positives: Positives, tallies: Tensor) -> Ranked:
        with _any_order_of_adding():
            real = torch.ones_like(positives.scores, dtype=torch.float64)
            if not positives.all_real:
                real = real.cumsum_(0) <= positives.count  # ones up to there
                real = real.double()
            weight = _weights(problem, found, positives, real)
            outcome = _RULES[problem.rule](_Ranks(problem, found, positives, tallies, real, weight))
            segments: Segments = positives.held
            held = Kept(segments, found.held, outcome.pair_weights, outcome.errors, positives.index, positives.all_real)
            box_gradient = None
            if outcome.box_weights is not None:
                box_gradient = _in_given_order(problem, positives, outcome.box_weights)
        values = tuple(value.to(problem.dtype) for value in outcome.values)
        return Ranked(problem, values, box_gradient, held)

    def gradient(self, ranked: Ranked, upstream: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        problem, held = ranked.problem, ranked.held
        with _any_order_of_adding():
            factors = torch.stack(upstream[: len(held.errors)]).double()[:, None]
            if problem.num_processes > 1:
                factors = factors * problem.num_processes
            height, slope = line_through_segments(held.segments, held.pair_weights * factors[0])
            gradient: Tensor = held.at_rows(height, problem.dtype)
            if problem.delta:
                steps = held.at_rows(slope / held.scores.unit, problem.dtype)
                gradient.addcmul_(steps, held.scores.share)
            errors, index = (held.errors * factors).sum(0), held.index
            if not held.all_real:
                errors, index = errors.masked_fill_(index < 0, 0.0), index.clamp(min=0)
            gradient.index_add_(0, index, errors.to(problem.dtype), alpha=-1)
        return gradient.to(dtype)


def sort_positives(
    scores: Tensor, index: Tensor, count: Tensor, padding: Tensor | None, extras: Tensor | None, groups: Tensor | None
) -> Positives:
    """Brings positives [C], of which ``count`` are real and the others padding, into the order of a ranking."""
    if padding is None:
        scores, order = scores.sort(stable=True)
        if groups is not None:
            groups, by_group = groups[order].sort(stable=True)
            scores, order = scores[by_group], order[by_group]
        extras = None if extras is None else extras[order]
        return Positives(scores, index[order], count, extras, groups, all_real=True, order=order)
    scores, order = scores.masked_fill(padding, torch.inf).sort(stable=True)
    if groups is not None:
        last = torch.iinfo(torch.int64).max
        groups, by_group = groups.masked_fill(padding, last)[order].sort(stable=True)
        scores, order = scores[by_group], order[by_group]
    # Padding repeats the last positive; 0 if there is none.
    last_place = (count - 1).clamp_(min=0)
    place = torch.arange(len(scores), device=scores.device).minimum(last_place)
    return Positives(
        scores=scores[place].masked_fill_(count == 0, 0.0),
        index=index[order],
        count=count,
        extras=None if extras is None else extras.masked_fill(padding, 0.0)[order],
        groups=None if groups is None else groups[place],
    )


@dataclass(eq=False)
class _Scores:
    """This process's scores between the stages."""

    is_positive: Tensor  # bool [N]
    negatives: Tensor | None  # [N]; -inf for what is no negative
    row: Tensor | None = None  # int32 [N], in lanes
    share: Tensor | None = None  # [N]: distance to the row's edge, in units
    unit: float = 1.0


@dataclass(eq=False)
class Kept:
    """What the backward pass needs."""

    segments: Segments
    scores: Any  # of this process, as the backend holds them
    pair_weights: Tensor  # [C]
    errors: Tensor  # minus the gradients on the positives, of each loss that has one [K, C]
    index: Tensor  # [C]
    all_real: bool

    def at_rows(self, of_segments: Tensor, dtype: torch.dtype) -> Tensor:
        """The value of every score's row [N]; 0 for the rows below all segments."""
        rows = self.segments.for_rows(of_segments, of_segments.new_zeros(1)).to(dtype)
        assert self.scores.row is not None
        return rows.repeat(LANES).index_select(0, self.scores.row)


def _locate(problem: Problem, scores: _Scores, segments: Segments) -> None:
    """Finds the row of every score, and how far above the row's edge it lies."""
    values, groups = scores.negatives, segments.groups
    assert values is not None
    scores.negatives = None
    if groups is None or problem.groups is None:
        row = segments.reached(values)
    else:
        group = torch.searchsorted(groups.numbers, problem.groups).clamp_(max=len(groups.numbers) - 1)
        others = (groups.numbers[group] != problem.groups) | (values == -torch.inf)
        row = segments.reached(values, group).add_(group).add_(1)
        row = row.masked_fill_(others, 0).to(torch.int32)
    bits = FRACTION_BITS
    if problem.dtype == torch.float64:
        bits = 62 - len(values).bit_length()
    scores.unit = float(1 << bits)
    if problem.delta:
        edges = segments.for_rows(segments.edges, segments.edges[:1])
        share = values.sub_(edges.index_select(0, row)).mul_(scores.unit / (2 * problem.delta))
        scores.share = share.clamp_(0, scores.unit)
    lanes = torch.arange(0, LANES * segments.rows, segments.rows, dtype=torch.int32, device=row.device)
    row[: len(row) // LANES * LANES].view(-1, LANES).add_(lanes)
    scores.row = row


def _tally(scores: _Scores, segments: Segments) -> Tensor:
    """Counts the scores of every row and adds up their shares, float64 [2, R]."""
    assert scores.row is not None
    rows = segments.rows
    tallies = torch.zeros(2, LANES * rows, dtype=torch.int64, device=scores.row.device)
    ones = segments.places[1].expand(len(scores.row))  # of 0, 1, 2, ...
    tallies[0].index_add_(0, scores.row, ones)
    if scores.share is not None:
        tallies[1].index_add_(0, scores.row, scores.share.to(torch.int64))
    totals = tallies.view(2, LANES, rows).sum(1, dtype=torch.float64)
    totals[1].div_(scores.unit)
    return totals


def _weights(problem: Problem, found: Found, positives: Positives, real: Tensor) -> Tensor:
    """What every positive weighs in the mean [C]; NaN if there is something wrong."""
    count = positives.count if positives.all_real else positives.count.clamp(min=1)
    groups = positives.held.groups
    if groups is not None:
        count = groups.sizes(count) * (groups.of_positives[-1] + 1)
    weight = real / count
    if problem.max_positives is not None:
        wrong = (found.status[2:].sum() > 0) | (found.status[0] > positives.count)
        weight = weight.masked_fill_(wrong, torch.nan)
    return weight


@dataclass(eq=False)
class _Ranks:
    """What the rules of the losses are applied to."""

    problem: Problem
    found: Found
    positives: Positives
    tallies: Tensor  # [2, R]
    real: Tensor  # 1 or, for padding, 0 [C]
    weight: Tensor  # [C]

    @property
    def f0(self) -> float:
        """f(0)."""
        return step_at_zero(self.problem.delta)

    def own_places(self) -> tuple[Tensor, Tensor]:
        """The segment every positive lies in, and its distance to the edge [C]."""
        segments: Segments = self.positives.held
        place = segments.own_places(self.positives.scores)
        if self.problem.delta == 0:
            return place, torch.zeros_like(self.weight)
        return place, (segments.centres - segments.edges[place]) / (2 * self.problem.delta)

    def above(self, place: Tensor, share: Tensor, *weights: Tensor) -> Tensor:
        """Sums of f(s_k - s_i), over the positives k with these weights, and the negatives.

        Returns:
            [number of weights + 1, C]; of k = i the term f(0) is included.
        """
        segments: Segments = self.positives.held
        all_one = self.positives.all_real  # then ``real`` is
        rows = [
            row for weight in weights for row in (weight, share if all_one and weight is self.real else weight * share)
        ]
        # Adding up what lies in each segment: their places ascend.
        sums = share.new_zeros(len(rows), len(share) + 1)
        torch.cumsum(torch.stack(rows), 1, out=sums[:, 1:])
        in_segments = sums[:, torch.searchsorted(place, segments.places)].diff()
        tallies = torch.cat([in_segments, segments.rows_of_segments(self.tallies)])
        counts, sums = tallies.view(-1, 2, len(segments.edges)).unbind(1)
        return sums_above(segments, counts, sums)


@dataclass(eq=False)
class _Outcome:
    """The losses of a rule [K] and their update."""

    values: tuple[Tensor, ...]
    pair_weights: Tensor
    errors: Tensor  # minus the gradients on the positives [K or 1, C]
    box_weights: Tensor | None = None


def _ap(ranks: _Ranks) -> _Outcome:
    p, n = ranks.above(*ranks.own_places(), ranks.real)
    kept = rules.ap_error(p - ranks.f0, n)
    if ranks.problem.interpolated:
        kept = running_minimum(kept, ranks.positives.held.groups)
    losses = kept * ranks.weight
    return _Outcome((losses.sum(),), rules.ap_weight(kept, n) * ranks.weight, losses[None])


def _auc(ranks: _Ranks) -> _Outcome:
    n = sums_above(ranks.positives.held, *_negatives(ranks))[0]
    groups = ranks.positives.held.groups
    negatives = ranks.found.status[1].double()
    if groups is not None:
        negatives = groups.sums(ranks.tallies[0])
    losses = rules.auc_error(n, negatives) * ranks.weight
    return _Outcome((losses.sum(),), rules.auc_weight(negatives) * ranks.weight, losses[None])


def _negatives(ranks: _Ranks) -> tuple[Tensor, Tensor]:
    tallies = ranks.positives.held.rows_of_segments(ranks.tallies)
    return tallies[:1], tallies[1:]


def _rank_sort(ranks: _Ranks) -> _Outcome:
    n = sums_above(ranks.positives.held, *_negatives(ranks))[0]
    p, sorting, blame = _sorting_error(ranks)
    # Padding is not among those above itself: its rank stays above 0.
    p = p - (ranks.f0 if ranks.positives.all_real else ranks.f0 * ranks.real)
    ranking = rules.rank_sort_error(p, n, ranks.f0) * ranks.weight
    return _Outcome(
        values=(ranking.sum(), sorting.sum()),
        pair_weights=rules.rank_sort_weight(p, n, ranks.f0) * ranks.weight,
        errors=torch.stack([ranking, sorting - blame]),
    )


def _sorting_error(ranks: _Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Of every positive [C]: f(s_k - s_i) added up over the positives k, its weighted sorting error, its blame.

    The current error is the mean of 1 - y over the positives above i; the target is that over
    those among them that belong there, y >= y_i. Those with y < y_i share the blame.
    """
    positives, delta = ranks.positives, ranks.problem.delta
    assert positives.extras is not None
    scores, qualities = positives.held.centres, positives.extras
    deficits = 1 - qualities
    counts, errors, blames = [], [], []
    rows = max(1, PAIRS // len(scores))
    for first in range(0, len(scores), rows):
        here = slice(first, first + rows)
        differences = scores[None, :] - scores[here, None]  # x_ik
        # 2 delta f(x_ik): the errors are quotients, which the factor does not change.
        steps = differences.clamp_(-delta, delta).add_(delta) if delta else (differences >= 0).double()
        if not positives.all_real:
            steps = steps.mul_(ranks.real)
        if positives.groups is not None:
            steps.mul_(positives.groups[None, :] == positives.groups[here, None])
        both = torch.stack([steps, steps * (qualities[None, :] < qualities[here, None])])  # all, and those that violate
        count, deficit = both.sum(2), (both * deficits).sum(2)
        error = rules.sorting_error(deficit[0], count[0], deficit[0] - deficit[1], count[0] - count[1])
        error = error * ranks.weight[here]
        if not positives.all_real:  # padding has nothing above it
            error = error.masked_fill_(count[1] == 0, 0.0)
        counts.append(count[0] / (2 * delta or 1.0))
        errors.append(error)
        blames.append((both[1].mul_((error / count[1].clamp(min=LEAST))[:, None])).sum(0))
    if len(errors) == 1:
        return counts[0], errors[0], blames[0]
    return torch.cat(counts), torch.cat(errors), torch.stack(blames).sum(0)


def _alrp(ranks: _Ranks) -> _Outcome:
    place, share = ranks.own_places()
    box_losses = ranks.positives.extras  # E_loc(i)
    assert box_losses is not None
    p, losses_above, n = ranks.above(place, share, ranks.real, box_losses)
    losses_above = torch.sub(losses_above, box_losses, alpha=ranks.f0)
    over_rank = ranks.weight / rules.alrp_rank(p - ranks.f0, n)
    error = rules.alrp_error(n, losses_above, over_rank)
    # Box loss k weighs 1 / rank(k), and f(x_ik) / rank(i) for every other i.
    height, slope = line_through_segments(ranks.positives.held, over_rank)[:, place]
    box_weights = torch.addcmul(height, slope, share)
    return _Outcome(
        values=((n * over_rank).sum(), ((box_losses + losses_above) * over_rank).sum()),
        pair_weights=rules.alrp_weight(error, n),
        errors=error[None],
        box_weights=box_weights.add_(over_rank, alpha=1 - ranks.f0),
    )


_RULES = {"ap": _ap, "auc": _auc, "rank-sort": _rank_sort, "alrp": _alrp}


def _in_given_order(problem: Problem, positives: Positives, box_weights: Tensor) -> Tensor:
    """The gradient of this process's box losses, in the order in which they were given."""
    assert problem.box_losses is not None
    box_weights = box_weights.to(loss_dtype(problem.box_losses.dtype))
    if positives.order is not None:
        return torch.empty_like(box_weights).scatter_(0, positives.order, box_weights)
    index = positives.index
    order = index.masked_fill(index < 0, torch.iinfo(torch.int64).max).argsort(stable=True)
    given = len(problem.box_losses)
    own = box_weights[order[:given]] * problem.num_processes
    return torch.nn.functional.pad(own, (0, given - len(own)))


@contextmanager
def _any_order_of_adding() -> Iterator[None]:
    """Lets scatter-adds run in any order: those below add integers, or to distinct places.

    With ``torch.use_deterministic_algorithms(True)`` torch would refuse some of them and sort all
    scores for others.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
