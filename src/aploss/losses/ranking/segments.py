"""The mathematics between the two passes over the scores, in torch operations: O(P log P), in float64.

The step function of the paper (Section 3.4) is piecewise linear in the score s_j of the other anchor::

    f(s_j - s_i) = 0  below s_i - delta,   1 above s_i + delta,   a straight line in between.

So the 2P breakpoints s_i -+ delta cut the score axis into segments within which the sum over the
positives, seen as a function of s_j, is linear; and a sum over the scores j needs of every segment
no more than how many scores lie in it and how far above its left end they lie in sum. That is what
the passes tally, and what this module turns into ranks and back into gradients.

A breakpoint is kept as its *edge*, the smallest number of the scores' dtype that is not below it,
and the *gap* between the two. Comparing a score with an edge is therefore exact, and so, as far as
their own size allows, is the distance of a score to an edge: the passes over all scores need
nothing else, for scores of any size and offset. Distances are shares of the ramp's width 2 delta.

With groups the axis is cut for each group, one after the other. All tensors are on one device, and
the host reads nothing from it.
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

    def sums(self, values: Tensor) -> Tensor:
        """The sum of the values [C] over the group of every positive [C]."""
        every = torch.arange(len(self.numbers) + 1, device=self.numbers.device)
        first = torch.searchsorted(self.of_positives, every)
        totals = torch.nn.functional.pad(_cumulative_sum(values), (1, 0))
        return totals[first].diff()[self.of_positives]

    def sums_of_rows(self, of_rows: Tensor) -> Tensor:
        """The sum of whole numbers per row [R] over the group of every positive [C]."""
        totals = of_rows.long().cumsum(0)
        group = self.of_positives
        last = totals[self.first_segment[group + 1] + group + 1]
        return (last - totals[self.first_segment[group] + group]).double()


@dataclass(frozen=True, eq=False)
class Segments:
    """The score axis cut at the breakpoints of C sorted positives into M segments.

    Attributes:
        delta: half the width of the step function; 0 for the Heaviside step.
        centres: the positives s_i, float64 [C].
        edges: left ends [M], ascending (within each group), in the dtype of the passes.
        gaps: how far the exact left ends lie below the edges [M].
        lengths: [M]; 0 for segments on no ramp, where every step function is constant.
        off_ramp: bool [M].
        ramps: the segments in which the step of each positive leaves 0, and has reached 1 [2, C];
            for delta = 0 the first of its ties, once [1, C].
        places: 0 .. M [M + 1].
    """

    delta: float
    centres: Tensor
    edges: Tensor
    gaps: Tensor
    lengths: Tensor
    off_ramp: Tensor
    ramps: Tensor
    places: Tensor
    groups: Groups | None = None

    @property
    def rows(self) -> int:
        """Rows R of the tallies: one below the segments (of each group), and one per segment.

        With groups, row 0 is for scores of groups without positives.
        """
        return len(self.edges) + 1 + (len(self.groups.numbers) if self.groups else 0)

    def reached(self, values: Tensor, group: Tensor | None = None) -> Tensor:
        """How many edges are not above each value, those of earlier groups included."""
        if self.groups is None or group is None:
            return torch.searchsorted(self.edges, values, right=True, out_int32=True)
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
        return tallies[..., self.places[:-1] + self.groups.of_segments + 2]

    def for_rows(self, of_segments: Tensor, below: Tensor) -> Tensor:
        """Values of segments [M] as values of rows [R]; ``below`` [1] for the other rows."""
        if self.groups is None:
            return torch.cat([below, of_segments])
        rows = below.repeat(self.rows)
        return rows.scatter_(0, self.places[:-1] + self.groups.of_segments + 2, of_segments)

    def own_places(self, scores: Tensor) -> Tensor:
        """The segment every positive lies in [C]; it has reached the first edge (of its group)."""
        if self.groups is not None:
            return self.reached(scores, self.groups.of_positives) - 1
        return torch.searchsorted(self.edges[1:], scores, right=True)


def cut_into_segments(scores: Tensor, delta: float, groups: Tensor | None = None) -> Segments:
    """Cuts the score axis at s_i - delta and s_i + delta.

    Args:
        scores: of the positives [C], ascending (within each group).
        groups: their groups [C], ascending.
    """
    size, centres = len(scores), scores.double()
    places = torch.arange((2 * size if delta else size) + 1, device=scores.device)
    if delta == 0:
        zero = torch.zeros_like(centres)
        ties = _first_of_ties(scores, groups, places[:-1])
        numbered = None if groups is None else _number_groups(groups, groups)
        return Segments(delta, centres, scores, zero, zero, zero, ties[None], places, numbered)
    offset = torch.linspace(-delta, delta, 2, dtype=torch.float64, device=scores.device)[:, None]
    # Starts of the ramps, then their ends, as rounded values and what rounding has lost.
    exact = _two_sum(centres, offset).view(2, -1)
    edges = _round_up(exact[0], exact[1], scores.dtype)
    edges, order = edges.sort(stable=True)  # starts first among equals
    numbered = None
    if groups is not None:
        of_segments, by_group = groups.repeat(2)[order].sort(stable=True)
        edges, order = edges[by_group], order[by_group]
        numbered = _number_groups(groups, of_segments)
    high_low = exact[:, order]
    # As many ramps have ended as started. Ends are in the order of the positives: the one of i, at
    # place k = 2 i + 1, has i ends and so i + 1 starts before it.
    off_ramp = torch.sub(places[:-1], order, alpha=2) == 1 - 2 * size
    distances, lengths_gaps = torch.empty_like(high_low), torch.empty_like(high_low)
    torch.sub(high_low[:, 1:], high_low[:, :-1], out=distances[:, :-1])  # the last one is on no ramp
    # Breakpoints with the same edge may be in the wrong order: a length below 0 makes up for it.
    torch.sum(distances, 0, out=lengths_gaps[0])
    torch.sub(edges - high_low[0], high_low[1], out=lengths_gaps[1])
    lengths, gaps = lengths_gaps.div_(2 * delta)
    return Segments(
        delta=delta,
        centres=centres,
        edges=edges,
        gaps=gaps.nan_to_num_(nan=0.0, posinf=0.0),  # where the edge is beyond the largest number
        lengths=lengths.masked_fill_(off_ramp, 0.0),
        off_ramp=off_ramp,
        ramps=torch.empty_like(order).scatter_(0, order, places[:-1]).view(2, -1),
        places=places,
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
    up_to = counts.cumsum(1)
    if segments.groups is None:
        above = up_to[:, -1:] - up_to  # scores in the segments above this one
    else:  # not those of later groups
        above = up_to[:, segments.groups.first_segment[segments.groups.of_segments + 1] - 1] - up_to
    if segments.delta == 0:  # H(0) = 1: equal scores count
        return (above + counts)[:, segments.ramps[0]]
    inside = torch.addcmul(sums, counts, segments.gaps).masked_fill_(segments.off_ramp, 0.0)
    # Of C, from the left end of each segment on; added up from above, where ranks are small.
    integral = inside.addcmul_(above, segments.lengths).flip(-1).cumsum(-1).flip(-1)
    starts, ends = integral[:, segments.ramps].unbind(1)
    return starts - ends


def line_through_segments(segments: Segments, weights: Tensor) -> Tensor:
    """The function g(s) = sum_i weights_i * f(s - s_i) as a straight line on every segment.

    Returns:
        its value at the edges and its slope [2, M].
    """
    groups = segments.groups
    if segments.delta == 0:
        height, slope = _cumulative_sum(weights), torch.zeros_like(weights)
        before = height - weights
    else:
        changes = torch.empty_like(segments.gaps)
        changes.scatter_(0, segments.ramps.view(-1), torch.cat([weights, -weights]))
        slope = _cumulative_sum(changes).masked_fill(segments.off_ramp, 0.0)
        rise = slope * segments.lengths
        before = _cumulative_sum(rise) - rise
        height = before + slope * segments.gaps
    if groups is not None:  # each group starts from 0
        height = height - before[groups.first_segment[groups.of_segments]]
    return torch.stack([height, slope])


def running_minimum(values: Tensor, groups: Groups | None) -> Tensor:
    """The least of the values [..., C] up to each place (within its group)."""
    if groups is None:
        return values.cummin(-1).values
    # Every group in a range of its own below those of the groups before it.
    return values.gather(-1, (values - 2.0 * groups.of_positives).cummin(-1).indices)


def _cumulative_sum(values: Tensor) -> Tensor:
    """The cumulative sum of a vector, in the same order of adding in every run, also on CUDA.

    On a single row CUDA adds up in an order that changes from run to run, so there are two.
    """
    return values.expand(2, -1).cumsum(1)[0]


def _two_sum(a: Tensor, b: Tensor) -> Tensor:
    """a + b as its rounded value and what rounding has lost [2, ...] (Knuth)."""
    both = a.new_empty(2, len(b), len(a))
    total = torch.add(a, b, out=both[0])
    seen = total - a
    torch.add(a - (total - seen), b - seen, out=both[1])
    return both


def _round_up(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of the dtype that is not below high + low."""
    rounded = high.to(dtype)
    too_low = rounded - high < low  # in float64, the difference is exact
    return rounded.nextafter(rounded.masked_fill(too_low, torch.inf))


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
