"""The mathematics between the two passes: O(P log P) for P positives, in float64.

The step function of the paper (Section 3.4) is piecewise linear in the score s_j of the other box::

    f(s_j - s_i) = 0  below s_i - delta,   1 above s_i + delta,   a straight line in between.

So the 2P breakpoints s_i -+ delta cut the score axis into segments within which the sum over the
positives, seen as a function of s_j, is linear; and a sum over the boxes j needs of every segment
no more than how many boxes lie in it and how far above its left end they lie in sum. That is what
the kernels count, and what this module turns into precisions and back into gradients.

Only sums of terms that are not negative are formed, relative to a shift near the positives and to
the segments' own ends: neither an offset of all scores nor a few huge ones cost digits.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Segments", "cut_into_segments", "line_through_segments", "sums_of_steps"]


@dataclass(frozen=True)
class Segments:
    """The score axis cut at the breakpoints of P sorted positives.

    Attributes:
        shift: what is subtracted from every score before it is compared with a breakpoint.
        delta: half the width of the step function; 0 for the Heaviside step.
        breakpoints: left ends of the M segments [M], ascending; the last one has no right end.
        ramp_start: per positive, the segment in which its step function leaves 0 [P].
        ramp_end: per positive, the segment in which it has reached 1 [P].
    """

    shift: float
    delta: float
    breakpoints: Tensor
    ramp_start: Tensor
    ramp_end: Tensor

    @property
    def count(self) -> int:
        """Number of segments M."""
        return len(self.breakpoints)

    @cached_property
    def lengths(self) -> Tensor:
        """Lengths of the segments on a ramp [M - 1]; 0 where every step function is constant."""
        change = torch.zeros(self.count, dtype=torch.int64, device=self.breakpoints.device)
        one = torch.ones_like(self.ramp_start)
        change.index_add_(0, self.ramp_start, one).index_add_(0, self.ramp_end, -one)
        return self.breakpoints.diff() * (change.cumsum(0)[:-1] > 0)


def cut_into_segments(positive_scores: Tensor, delta: float, shift: float) -> Segments:
    """Cuts the score axis at s_i - delta and s_i + delta.

    Args:
        positive_scores: s_i - shift of the positives [P], ascending, float64.
    """
    count = len(positive_scores)
    rank = torch.arange(count, device=positive_scores.device)
    if delta == 0:
        return Segments(shift, delta, positive_scores, rank, rank)
    starts, ends = positive_scores - delta, positive_scores + delta
    breakpoints = torch.cat([starts, ends])
    # Both halves are sorted: the place of each in the merged order is its rank in its own half
    # plus the number of the other half's that come before it.
    ramp_start = rank + torch.searchsorted(ends, starts, right=False)
    ramp_end = rank + torch.searchsorted(starts, ends, right=True)
    breakpoints[ramp_start], breakpoints[ramp_end] = starts, ends
    return Segments(shift, delta, breakpoints, ramp_start, ramp_end)


def sums_of_steps(segments: Segments, counts: Tensor, sums: Tensor) -> Tensor:
    """Adds up f(s_j - s_i) over the boxes j that were counted, for every positive i.

    With C(u) the number of boxes above u, the sum is the mean of C over the ramp of i:
    sum_j f(s_j - s_i) = 1/(2 delta) * integral of C from s_i - delta to s_i + delta.

    Args:
        counts: boxes in every segment [..., M].
        sums: sum of their distances to the segment's left end [..., M].

    Returns:
        the sums [..., P], in float64.
    """
    at_least = _suffix_sums(counts)  # boxes in this segment or above
    if segments.delta == 0:
        # H(0) = 1: equal scores count, and equal positives share the boxes at their score.
        first = torch.searchsorted(segments.breakpoints, segments.breakpoints, right=False)
        return at_least[..., first]
    lengths = segments.lengths
    integral = at_least[..., 1:] * lengths + torch.where(lengths > 0, sums[..., :-1], 0.0)
    above = torch.nn.functional.pad(_suffix_sums(integral), (0, 1))
    ramps = above[..., segments.ramp_start] - above[..., segments.ramp_end]
    return ramps / (2 * segments.delta)


def line_through_segments(segments: Segments, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The function g(s) = sum_i weights_i * f(s - s_i) as a straight line on every segment.

    Returns:
        its value at the segments' left ends [M] and its slopes [M], in float64.
    """
    if segments.delta == 0:
        return weights.cumsum(0), torch.zeros_like(weights)
    change = weights.new_zeros(segments.count)
    rate = weights / (2 * segments.delta)
    change.index_add_(0, segments.ramp_start, rate).index_add_(0, segments.ramp_end, -rate)
    lengths = segments.lengths
    slope = change.cumsum(0)
    slope[:-1][lengths == 0] = 0.0
    slope[-1] = 0.0
    at_left = torch.zeros_like(slope)
    torch.cumsum(slope[:-1] * lengths, 0, out=at_left[1:])
    return at_left, slope


def _suffix_sums(values: Tensor) -> Tensor:
    return values.flip(-1).cumsum(-1).flip(-1)
