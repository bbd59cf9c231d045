"""The mathematics between the two passes over the scores: O(P log P) for P positives, in float64.

The step function of the paper (Section 3.4) is piecewise linear in the score s_j of the other
anchor::

    f(s_j - s_i) = 0  below s_i - delta,   1 above s_i + delta,   a straight line in between.

So the 2P breakpoints s_i -+ delta cut the score axis into segments within which the sum over the
positives, seen as a function of s_j, is linear; and a sum over the scores j needs of every segment
no more than how many scores lie in it and how far above its left end they lie in sum. That is what
the passes tally, and what this module turns into ranks and back into gradients.

A breakpoint is kept as its *edge*, the smallest number of the scores' dtype that is not below it,
and the *gap* between the two. Comparing a score with an edge is therefore exact, and so, as far as
their own size allows, is the distance of a score to an edge: the passes over all scores need
nothing else, for scores of any size and offset. Distances are shares of the ramp's width 2 delta.

With groups the axis is cut anew for every group, one after the other. All tensors are on one
device, and nothing is read from it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups that have positives, G of at most C, numbered in ascending order.

    Attributes:
        numbers: their numbers as given, int64 [C]; the last one is repeated.
        of_positives: the group of every positive, 0..G-1 [C].
        of_segments: the group of every segment [M].
        first_segment: of every group; M behind the last [C + 1].
    """

    numbers: Tensor
    of_positives: Tensor
    of_segments: Tensor
    first_segment: Tensor

    def sizes(self, count: Tensor) -> Tensor:
        """Positives in the group of every positive, of which the first ``count`` are real [C]."""
        every = torch.arange(len(self.numbers) + 1, device=self.numbers.device)
        first = torch.searchsorted(self.of_positives, every).minimum(count)
        return first.diff()[self.of_positives]

    def sums(self, of_rows: Tensor) -> Tensor:
        """Sums of whole numbers per row [R] over the group of every positive [C]."""
        totals = of_rows.long().cumsum(0)
        group = self.of_positives
        last = totals[self.first_segment[group + 1] + group + 1]
        return (last - totals[self.first_segment[group] + group]).double()


@dataclass(frozen=True, eq=False)
class Segments:
    """The score axis cut at the breakpoints of C sorted positives into M segments.

    Attributes:
        delta: half the width of the step function; 0 for the Heaviside step.
        edges: left ends [M], ascending (within each group), in the dtype of the passes.
        gaps: how far the exact left ends lie below the edges [M].
        lengths: [M]; 0 for segments on no ramp, where every step function is constant.
        on_ramp: bool [M].
        ramp_start: the segment in which the step of each positive leaves 0 [C].
        ramp_end: the segment in which it has reached 1 [C].
    """

    delta: float
    edges: Tensor
    gaps: Tensor
    lengths: Tensor
    on_ramp: Tensor
    ramp_start: Tensor
    ramp_end: Tensor
    groups: Groups | None = None

    @property
    def rows(self) -> int:
        """Rows R of the tallies: one below the segments (of each group), and one per segment.

        With groups, row 0 is for scores of groups without positives.
        """
        return len(self.edges) + 1 + (len(self.groups.numbers) if self.groups else 0)

    def reached(self, values: Tensor, group: Tensor | None = None, *, small: bool = True) -> Tensor:
        """How many edges are not above each value, those of earlier groups included."""
        if self.groups is None or group is None:
            return torch.searchsorted(self.edges, values, right=True, out_int32=small)
        low, high = self.groups.first_segment[group], self.groups.first_segment[group + 1]
        for _ in range(len(self.edges).bit_length()):
            middle = (low + high) // 2
            reached = self.edges[middle.clamp(max=len(self.edges) - 1)] <= values
            reached &= middle < high
            low, high = torch.where(reached, middle + 1, low), torch.where(reached, high, middle)
        return low

    def rows_of_segments(self, tallies: Tensor) -> Tensor:
        """The columns of the segments among those of the rows: [..., R] to [..., M]."""
        if self.groups is None:
            return tallies[..., 1:]
        places = torch.arange(len(self.edges), device=tallies.device)
        return tallies[..., places + self.groups.of_segments + 2]

    def for_rows(self, of_segments: Tensor, below: Tensor) -> Tensor:
        """Values of segments [M] as values of rows [R]; ``below`` [1] for the other rows."""
        if self.groups is None:
            return torch.cat([below, of_segments])
        places = torch.arange(len(self.edges), device=of_segments.device)
        rows = below.repeat(self.rows)
        return rows.scatter_(0, places + self.groups.of_segments + 2, of_segments)


def cut_into_segments(scores: Tensor, delta: float, groups: Tensor | None = None) -> Segments:
    """Cuts the score axis at s_i - delta and s_i + delta.

    Args:
        scores: of the positives [C], ascending (within each group).
        groups: their groups [C], ascending.
    """
    size = len(scores)
    places = torch.arange(2 * size, device=scores.device)
    if delta == 0:
        zero = torch.zeros(size, dtype=torch.float64, device=scores.device)
        ties = _first_of_ties(scores, groups, places[:size])
        numbered = None if groups is None else _number_groups(groups, groups)
        return Segments(delta, scores, zero, zero, zero, ties, ties, numbered)
    offset = torch.full((2, 1), delta, dtype=torch.float64, device=scores.device)
    offset[0].neg_()
    # Starts of the ramps, then their ends, as rounded values and what rounding has lost.
    exact = torch.stack(_two_sum(scores.double(), offset)).view(2, -1)
    edges = _round_up(exact[0], exact[1], scores.dtype)
    edges, order = edges.sort(stable=True)  # starts first among equals
    numbered = None
    if groups is not None:
        of_segments, by_group = groups.repeat(2)[order].sort(stable=True)
        edges, order = edges[by_group], order[by_group]
        numbered = _number_groups(groups, of_segments)
    high_low = exact[:, order]
    high, low = high_low
    # More ramps have started than ended, the one at this segment's own left end included.
    on_ramp = torch.sub(places, (order < size).cumsum(0), alpha=2) < -1
    # Breakpoints with the same edge may be in the wrong order: a length below 0 makes up for it.
    lengths = (high_low.roll(-1, 1) - high_low).sum(0).div_(2 * delta).masked_fill_(~on_ramp, 0.0)
    gaps = ((edges.double() - high) - low) / (2 * delta)
    place = torch.empty_like(order).scatter_(0, order, places)
    return Segments(
        delta=delta,
        edges=edges,
        gaps=gaps.nan_to_num_(nan=0.0, posinf=0.0),  # where the edge is beyond the largest number
        lengths=lengths,
        on_ramp=on_ramp,
        ramp_start=place[:size],
        ramp_end=place[size:],
        groups=numbered,
    )


def sums_above(segments: Segments, counts: Tensor, sums: Tensor) -> Tensor:
    """Adds up f(s_j - s_i) over the scores j that were tallied, for every positive i.

    With C(u) the number of scores above u, the sum is the mean of C over the ramp of i:
    sum_j f(s_j - s_i) = 1/(2 delta) * integral of C from s_i - delta to s_i + delta.

    Args:
        counts: scores in every segment [K, M], for K sets of scores (of any weights).
        sums: sum of their distances to the segment's edge [K, M].

    Returns:
        the sums [K, C].
    """
    at_least = suffix_sums(counts)  # scores in this segment or above
    if segments.groups is not None:  # not those of later groups
        last = segments.groups.first_segment[segments.groups.of_segments + 1]
        at_least = at_least - torch.nn.functional.pad(at_least, (0, 1))[:, last]
    if segments.delta == 0:  # H(0) = 1: equal scores count
        return at_least[:, segments.ramp_start]
    inside = (sums + counts * segments.gaps) * segments.on_ramp
    # Of C, from the left end of each segment on.
    integral = suffix_sums((at_least - counts) * segments.lengths + inside)
    return integral[:, segments.ramp_start] - integral[:, segments.ramp_end]


def line_through_segments(segments: Segments, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The function g(s) = sum_i weights_i * f(s - s_i) as a straight line on every segment.

    Returns:
        its value at the edges [M] and its slope [M].
    """
    groups = segments.groups
    if segments.delta == 0:
        height, slope = _prefix_sums(weights), torch.zeros_like(weights)
        before = height - weights
    else:
        rate = weights.new_empty(len(segments.edges))
        rate[segments.ramp_start], rate[segments.ramp_end] = weights, -weights
        slope = _prefix_sums(rate) * segments.on_ramp
        rise = slope * segments.lengths
        before = _prefix_sums(rise) - rise
        height = before + slope * segments.gaps
    if groups is not None:  # every group starts from 0
        height = height - before[groups.first_segment[groups.of_segments]]
    return height, slope


def running_minimum(values: Tensor, groups: Groups | None) -> Tensor:
    """The least of the values [C] up to each place (within its group)."""
    if groups is None:
        return values.cummin(0).values
    # Every group in a range of its own below those of the groups before it.
    return values[(values - 2.0 * groups.of_positives).cummin(0).indices]


def suffix_sums(values: Tensor) -> Tensor:
    """Sums from every place to the last [..., M]."""
    return values.flip(-1).cumsum(-1).flip(-1)


def _prefix_sums(values: Tensor) -> Tensor:
    # In two rows: on one alone, CUDA adds up in an order that changes from run to run.
    return torch.stack([values, values]).cumsum(1)[0]


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b as its rounded value and what rounding has lost (Knuth)."""
    total = a + b
    seen = total - a
    return total, (a - (total - seen)) + (b - seen)


def _round_up(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of the dtype that is not below high + low."""
    rounded = high.to(dtype)
    too_low = rounded.double() - high < low  # the difference is exact
    return torch.where(too_low, rounded.nextafter(torch.full_like(rounded, torch.inf)), rounded)


def _first_of_ties(scores: Tensor, groups: Tensor | None, places: Tensor) -> Tensor:
    """The first of the places that share the score (and group) of each [C]."""
    is_new = scores[1:] != scores[:-1]
    if groups is not None:
        is_new |= groups[1:] != groups[:-1]
    firsts = torch.nn.functional.pad(is_new, (1, 0), value=True)
    return torch.where(firsts, places, 0).cummax(0).values


def _number_groups(of_positives: Tensor, of_segments: Tensor) -> Groups:
    is_new = torch.ones_like(of_positives)
    is_new[1:] = of_positives[1:] != of_positives[:-1]
    dense = is_new.cumsum(0) - 1
    numbers = of_positives[-1:].repeat(len(dense)).scatter_(0, dense, of_positives)
    dense_segments = torch.searchsorted(numbers, of_segments)
    every = torch.arange(len(dense) + 1, device=dense.device)
    return Groups(numbers, dense, dense_segments, torch.searchsorted(dense_segments, every))
