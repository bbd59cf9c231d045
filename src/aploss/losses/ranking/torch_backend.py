"""The stages of a ranking, what they pass to each other, and the backend that runs them in torch operations.

A backend runs the stages on its own arrays (NumPy for the CPU, tensors elsewhere): it finds the positives, sorts them,
tallies the negatives between the breakpoints of the step function, computes the ranks, and evaluates the gradient. The
engine applies the rule of the loss in between. Only ``find``, ``rank`` and ``gradient`` read the N scores.

:class:`TorchBackend` serves every device. It adds to the page in :mod:`aploss.losses.ranking` that only the positives
are sorted: a negative finds its segment of the score axis by bisection (see :mod:`.segments`). Sums over the scores are
sums of integers (fixed point), which do not depend on the order of adding: results are the same in every run, without
the slow paths of deterministic algorithms. The host reads one small tensor, the status.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import loss_dtype
from .rules import Rule
from .segments import Segments, cut_into_segments, line_through_segments, running_minimum, sums_above

LANES = 64  # copies of the tallies, so that few scores at a time add to the same number
FRACTION_BITS = 30  # of a distance in float32
MAX_PAIRS = 1 << 20  # pairs of positives held at a time: 8 MB in float64, a few times


@dataclass(eq=False, slots=True)
class Problem:
    """N scores with their targets, and the loss to compute.

    Attributes:
        scores: flat, contiguous, detached, any floating dtype [N], N >= 1.
        targets: flat, contiguous [N]; signed integers, float32 or float64: 1, 0 and -1, or values
            in (0, 1] for positives if the rule has soft targets.
        rule: see :mod:`.rules`.
        delta: half the width of the step function; 0 is the Heaviside step.
        groups: int64 [N]: scores are ranked among scores of the same number only.
        weights: importance of the positives, broadcast to ``shape``.
        box_losses: one per positive, in the order of their flat index, for aLRP.
        thresholds: average the loss over these IoU thresholds, or over so many quantiles of the IoU.
        shape: of the scores as the user passed them.
        num_processes: how many processes rank together; the gradient is multiplied by it.
        dtype: of the passes over all scores, of the loss and of its gradient.
    """

    scores: Tensor
    targets: Tensor
    rule: Rule
    delta: float
    groups: Tensor | None = None
    weights: Tensor | None = None
    box_losses: Tensor | None = None
    thresholds: Sequence[float] | int | None = None
    shape: Sequence[int] = ()
    num_processes: int = 1
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = loss_dtype(self.scores.dtype)


class Status(NamedTuple):
    """Counts from checking the input; anything but the first two must be 0."""

    positives: int
    negatives: int
    bad_targets: int = 0
    bad_scores: int = 0
    bad_boxes: int = 0
    bad_weights: int = 0


@dataclass(eq=False)
class Found:
    """The positives of this process, unsorted. Backends add what they need later.

    Attributes:
        status: on the host.
        index: the flat index of the positives, ascending [P].
    """

    status: Status
    index: Any


@dataclass(eq=False)
class Positives:
    """One array [P] per property of the positives; None for those that the problem does not have.

    Attributes:
        scores: s_i in float64.
        index: flat index in this process, int64; -1 for positives of other processes.
        groups: int64.
        weights: importance, float64.
        qualities: soft targets, float64.
        box_losses: float64.
        classes: the last dimension of the index, for quantiles within each class.
        members: which positives count at each of T thresholds, 1 or 0, float64 [T, P].
        shares: the factor of each positive's error at each threshold, float64 [T, P].
    """

    scores: Any
    index: Any
    groups: Any = None
    weights: Any = None
    qualities: Any = None
    box_losses: Any = None
    classes: Any = None
    members: Any = None
    shares: Any = None

    def columns(self) -> dict[str, Any]:
        """The properties that there are, by name."""
        return {
            field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None
        }

    def select(self, order: Any) -> "Positives":
        """The positives at the given places, in that order."""
        return Positives(**{name: values[order] for name, values in self.columns().items()})


@dataclass(eq=False)
class Ranks:
    """The arguments of a rule, see :mod:`.rules`, and the weight of each positive in the mean [P].

    ``above`` are the sums of f(s_k - s_i) over the other positives k that count at each threshold [T, P], if there are
    thresholds.
    """

    p: Any
    n: Any
    negatives: Any
    above: Any
    weights: Any


Reduce = Callable[[Tensor], None]


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

    def rank_directly(
        self, problem: Problem, needs_gradient: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
        """Values and flat gradients where the backend has a shorter way than the stages, else None."""
        return None

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


# ---- IoU thresholds ------------------------------------------------------------------------------


def add_thresholds(backend: TorchBackend, problem: Problem, positives: Positives) -> Positives:
    """Adds ``members`` and ``shares`` [T, P] to the sorted positives of all processes.

    At each IoU threshold the positives below it are ignored. The negatives are the same at every threshold, so one pass
    over the scores serves all of them; only the sums over positives differ.
    """
    device = problem.scores.device
    columns = {
        name: backend.tensor(values, torch.int64 if name in ("index", "groups") else torch.float64, device)
        for name, values in positives.columns().items()
    }
    qualities, thresholds = columns["qualities"], problem.thresholds
    groups = columns.get("groups", torch.zeros_like(columns["index"]))
    if isinstance(thresholds, int):  # half of the measure at threshold 0, where every positive counts
        members = _above_quantiles(qualities, columns["classes"], groups, thresholds)
        members = torch.cat([torch.ones_like(members[:1]), members])
        measure = qualities.new_full((thresholds + 1, 1), 0.5 / thresholds)
        measure[0] = 0.5
    else:
        assert thresholds is not None
        dtype = problem.targets.dtype  # as a comparison with the targets would round the thresholds
        levels = torch.tensor(thresholds, dtype=dtype if dtype.is_floating_point else None, device=device)[:, None]
        members = qualities >= levels.double()
        measure = qualities.new_full(levels.shape, 1 / len(thresholds))
    members = members.double()
    shares = measure * _share_of_means(members, columns.get("weights"), groups)
    added = backend.from_tensors({**columns, "members": members, "shares": shares})
    return replace(positives, members=added.members, shares=added.shares)


def _above_quantiles(qualities: Tensor, classes: Tensor, groups: Tensor, count: int) -> Tensor:
    """Which positives reach the k-th of ``count`` quantiles within their class and group, bool [count, P].

    The k-th quantile leaves at least the fraction 1 - k / (count + 1) of the positives of each class.
    """
    order = qualities.argsort(stable=True)
    for numbers in (classes, groups):
        order = order[numbers[order].argsort(stable=True)]
    is_new = (classes[order].diff() != 0) | (groups[order].diff() != 0)
    stratum = torch.nn.functional.pad(is_new.cumsum(0), (1, 0))  # numbers the pairs of group and class
    first, behind = (torch.searchsorted(stratum, stratum, right=right) for right in (False, True))
    levels = torch.arange(1, count + 1, device=order.device)[:, None]
    ascending = qualities[order]
    members = torch.empty_like(levels * order, dtype=torch.bool)
    members[:, order] = ascending >= ascending[first + levels * (behind - first) // (count + 1)]
    return members


def _share_of_means(members: Tensor, weights: Tensor | None, groups: Tensor) -> Tensor:
    """The factor of each positive in the weighted mean over the members of its group, averaged over groups [T, P].

    Groups without members at a level do not count there.
    """
    values = members if weights is None else members * weights
    first, behind = (torch.searchsorted(groups, groups, right=right) for right in (False, True))

    def sums(of_positives: Tensor) -> Tensor:
        # With one more row: on a single one CUDA adds up in an order that changes from run to run.
        cumulative = torch.nn.functional.pad(of_positives, (1, 0, 0, 1)).cumsum(1)[:-1]
        return cumulative[:, behind] - cumulative[:, first]

    totals, is_first = sums(values), first == torch.arange(len(first), device=first.device)
    num_groups = ((sums(members) > 0) & is_first).sum(1, keepdim=True).clamp(min=1)
    return values / (totals + (totals == 0)) / num_groups
