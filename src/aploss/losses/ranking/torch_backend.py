"""The ranking in torch operations, for every device.

It adds to the page in :mod:`aploss.losses.ranking` that only the positives are sorted: a negative finds its segment of
the score axis by bisection (see :mod:`.segments`). Sums over the scores are sums of integers (fixed point), which do
not depend on the order of adding: results are the same in every run, without the slow paths of deterministic
algorithms. The host reads one small tensor, the status.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .problem import Found, Positives, Problem, Ranks, Reduce, Status
from .segments import Segments, cut_into_segments, line_through_segments, running_minimum, sums_above

LANES = 64  # copies of the tallies, so that few scores at a time add to the same number
FRACTION_BITS = 30  # of a distance in float32
MAX_PAIRS = 1 << 20  # pairs of positives held at a time: 8 MB in float64, a few times


@dataclass(eq=False)
class _Found(Found):
    """The positives, this process's other scores, and how the positives cut the axis."""

    negatives: Tensor | None = None  # scores [N]; -inf for everything else
    segments: Segments | None = None
    row: Tensor | None = None  # int32 [N], in lanes
    share: Tensor | None = None  # distance to the row's edge, in units [N]
    unit: float = 1.0


class TorchBackend:
    """The stages of a ranking, in the order in which the engine calls them."""

    name = "torch"

    def find(self, problem: Problem) -> Found:
        """Finds the positives of this process and checks every target and score."""
        targets = problem.targets
        positive, negative, ignored = self.positive_mask(problem), targets == 0, targets == -1
        scores = problem.scores.to(problem.dtype)
        allowed = torch.stack([positive, negative, ignored]).sum(1)
        # The largest magnitude of what is not ignored reveals NaN, too.
        largest = torch.linalg.vector_norm(scores.masked_fill(ignored, 0.0), torch.inf)
        counts = [*allowed[:2], len(targets) - allowed.sum(), ~(largest < torch.inf), *self.count_bad_others(problem)]
        status = Status(*torch.stack([count.to(torch.int64) for count in counts]).tolist())
        index = torch.nonzero_static(positive, size=status.positives)[:, 0]
        return _Found(status, index, torch.where(negative, scores, -torch.inf))

    def count_bad_others(self, problem: Problem) -> list[Tensor]:
        """How many box losses, and how many weights, are negative or not finite; on the device."""
        nothing = problem.targets.new_zeros(())
        return [
            nothing if values is None else (~((values >= 0) & (values < torch.inf))).sum()
            for values in (problem.box_losses, problem.weights)
        ]

    def positive_mask(self, problem: Problem) -> Tensor:
        """Which scores belong to positives [N]."""
        targets = problem.targets
        return (targets > 0) & (targets <= 1) if problem.rule.soft_targets else targets == 1

    def positives(self, problem: Problem, found: Any, **given: Tensor) -> Positives:
        """The positives as arrays of this backend, with further properties as given."""
        return Positives(problem.scores[found.index].double(), found.index, **given)

    def from_tensors(self, columns: dict[str, Tensor]) -> Positives:
        """Positives that were gathered from all processes."""
        return Positives(**columns)

    def sort(self, positives: Positives) -> Positives:
        """Sorts the positives by group and score, stably."""
        order = positives.scores.argsort(stable=True)
        if positives.groups is not None:
            order = order[positives.groups[order].argsort(stable=True)]
        return positives.select(order)

    def tally_negatives(self, problem: Problem, found: Any, segments: Segments) -> Tensor:
        """Counts this process's negatives in each row, and adds up their distances in shares of 2 delta [2, R]."""
        _locate(problem, found, segments)
        tallies = torch.zeros(2, LANES * segments.rows, dtype=torch.int64, device=found.row.device)
        ones = segments.places[1].expand(len(found.row))  # places are 0, 1, 2, ...
        tallies[0].index_add_(0, found.row, ones)
        if found.share is not None:
            tallies[1].index_add_(0, found.row, found.share.to(torch.int64))
        totals = tallies.view(2, LANES, segments.rows).sum(1, dtype=torch.float64)
        totals[1].div_(found.unit)
        if segments.groups is None:  # scores that are not negatives lie at -inf, in row 0
            totals[0, 0] -= len(found.row) - found.status.negatives
        return totals

    def rank(self, problem: Problem, found: Any, positives: Positives, reduce: Reduce | None) -> Ranks:
        """The ranks of the sorted positives; ``reduce`` adds up the tallies [2, R] of all processes, in place."""
        segments = cut_into_segments(positives.scores.to(problem.dtype), problem.delta, positives.groups)
        found.segments = segments
        with _any_order_of_adding():
            tallies = self.tally_negatives(problem, found, segments)
        if reduce is not None:
            reduce(tallies)
        groups, f0 = segments.groups, 0.5 if problem.delta else 1.0
        rows, shares = _positive_segments(segments, problem, positives)
        ones = torch.ones_like(shares)
        columns = [] if positives.box_losses is None else [positives.box_losses]
        columns = columns if positives.members is None else list(positives.members)
        p, *above, n = _sums_with_positives(segments, rows, shares, [ones, *columns], tallies)
        above = [total - f0 * column for total, column in zip(above, columns, strict=True)]  # without i itself
        weights = ones if positives.weights is None else positives.weights
        if groups is None:
            total, negatives = weights.sum(), tallies[0].sum()
        else:
            total = groups.sums(weights) * (groups.of_positives[-1] + 1)
            negatives = groups.sums_of_rows(tallies[0])
        return Ranks(
            p - f0,  # without i itself
            n,
            negatives,
            0.0 if not above else above[0] if positives.members is None else torch.stack(above),
            weights / (total + (total == 0)),
        )

    def running_minimum(self, found: Any, values: Tensor) -> Tensor:
        """The smallest value up to each positive within its group [..., P]."""
        return running_minimum(values, found.segments.groups)

    def sort_pairs(self, problem: Problem, found: Any, positives: Positives, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Rank & Sort's sorting error, and its gradient on the positives [P].

        The current error is the mean of 1 - y over the positives above i; the target is the mean
        over those among them that belong there, y >= y_i. Those with y < y_i share the blame.
        """
        scores, qualities, delta = positives.scores, positives.qualities, problem.delta
        deficits, values, blame = 1 - qualities, [], torch.zeros_like(weights)
        step = max(1, MAX_PAIRS // len(scores))
        for first in range(0, len(scores), step):
            here = slice(first, first + step)
            differences = scores[None, :] - scores[here, None]  # x_ik
            # 2 delta f(x_ik): the errors are quotients, which the factor does not change.
            steps = differences.clamp_(-delta, delta).add_(delta) if delta else (differences >= 0).double()
            if positives.groups is not None:
                steps.mul_(positives.groups[None, :] == positives.groups[here, None])
            violating = steps * (qualities[None, :] < qualities[here, None])
            count, violations = steps.sum(1), violating.sum(1)
            deficit, violating_deficit = (steps * deficits).sum(1), (violating * deficits).sum(1)
            error = deficit / count - (deficit - violating_deficit) / (count - violations)
            values.append(error * weights[here])
            blame += (violating * (values[-1] / (violations + (violations == 0)))[:, None]).sum(0)
        errors = torch.cat(values)
        return errors.sum(), blame - errors

    def line_at_positives(self, problem: Problem, found: Any, positives: Positives, weights: Tensor) -> Tensor:
        """sum_i weights_i f(s_k - s_i) for each positive k [P]."""
        segments: Segments = found.segments
        rows, shares = _positive_segments(segments, problem, positives)
        lines = line_through_segments(segments, weights)[:, rows]
        return lines[0] + lines[1] * shares

    def tensor(self, values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An array or number of this backend as a tensor."""
        result: Tensor = values.to(device=device, dtype=dtype)
        return result

    def gradient(self, problem: Problem, found: Any, positives: Positives, ranks: Ranks, own: Tensor) -> Tensor:
        """The flat gradient of this process's scores [N], in the dtype of the loss.

        Positive i gets -own_i, its weighted error, and each negative j gets own_i f(s_j - s_i) / n_i.
        """
        own = own * -problem.num_processes
        pair_weights = -own / (ranks.n + (ranks.n == 0))
        with _any_order_of_adding():
            gradient = self.evaluate(problem, found, line_through_segments(found.segments, pair_weights))
            index = positives.index
            if problem.num_processes > 1:  # -1 for the positives of other processes
                own, index = torch.where(index < 0, 0.0, own), index.clamp(min=0)
            # Positives have 0 so far; adding lets those of other processes do nothing at place 0.
            return gradient.index_add_(0, index, own.to(gradient.dtype))

    def evaluate(self, problem: Problem, found: Any, lines: Tensor) -> Tensor:
        """The value of its segment's line for each negative, 0 for other scores [N]."""
        nothing = lines.new_zeros(1)
        height, slope = (found.segments.for_rows(line, nothing).to(problem.dtype).repeat(LANES) for line in lines)
        gradient: Tensor = height.index_select(0, found.row)
        if found.share is not None:
            gradient.addcmul_(slope.index_select(0, found.row), found.share, value=1 / found.unit)
        return gradient


def _locate(problem: Problem, found: _Found, segments: Segments) -> None:
    """Finds the row of every score, and how far above the row's edge it lies."""
    values, groups = found.negatives, segments.groups
    assert values is not None
    found.negatives = None
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
    found.unit = float(1 << bits)
    if problem.delta:
        edges = segments.for_rows(segments.edges, segments.edges[:1])
        share = values.sub_(edges.index_select(0, row)).mul_(found.unit / (2 * problem.delta))
        found.share = share.clamp_(0, found.unit)
    lanes = torch.arange(0, LANES * segments.rows, segments.rows, dtype=torch.int32, device=row.device)
    row[: len(row) // LANES * LANES].view(-1, LANES).add_(lanes)
    found.row = row


def _positive_segments(segments: Segments, problem: Problem, positives: Positives) -> tuple[Tensor, Tensor]:
    """The segment of each positive, and its distance to the edge as a share of 2 delta [P]."""
    row = segments.own_places(positives.scores.to(problem.dtype))
    if problem.delta == 0:
        return row, torch.zeros_like(positives.scores)
    return row, (segments.centres - segments.edges[row]) / (2 * problem.delta)


def _sums_with_positives(
    segments: Segments, rows: Tensor, shares: Tensor, weights: list[Tensor], tallies: Tensor
) -> Tensor:
    """Sums of f(s_k - s_i) over the positives k with each of these weights, then over the negatives.

    Returns:
        [number of weights + 1, P]; the term f(0) of k = i is included.
    """
    columns = torch.stack([column for weight in weights for column in (weight, weight * shares)])
    sums = shares.new_zeros(len(columns), len(shares) + 1)
    torch.cumsum(columns, 1, out=sums[:, 1:])
    in_segments = sums[:, torch.searchsorted(rows, segments.places)].diff()  # rows ascend
    both = torch.cat([in_segments, segments.rows_of_segments(tallies)])
    counts, distances = both.view(-1, 2, len(segments.edges)).unbind(1)
    return sums_above(segments, counts, distances)


@contextmanager
def _any_order_of_adding() -> Iterator[None]:
    """Lets scatter-adds run in any order: those here add integers, or to distinct places.

    With ``torch.use_deterministic_algorithms(True)`` torch would refuse some of them and sort all scores for others.
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
