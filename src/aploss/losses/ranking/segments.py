"""The mathematics between the two passes: O(P log P) for P positives, in float64, on the host.

The step function of the paper (Section 3.4) is piecewise linear in the score s_j of the other box::

    f(s_j - s_i) = 0  below s_i - delta,   1 above s_i + delta,   a straight line in between.

So the 2P breakpoints s_i -+ delta cut the score axis into segments within which the sum over the
positives, seen as a function of s_j, is linear; and a sum over the boxes j needs of every segment
no more than how many boxes lie in it and how far above its left end they lie in sum. That is what
the kernels count, and what this module turns into precisions and back into gradients.

Only sums of terms that are not negative are formed, relative to a shift near the positives and to
the segments' own ends: neither an offset of all scores nor a few huge ones cost digits.

It is numpy's work, wherever the scores are: an operation on a few hundred numbers costs numpy a
third of what it costs torch on the CPU, and less than starting a kernel on a GPU.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Segments", "cut_into_segments", "line_through_segments", "sums_of_steps"]

Floats = NDArray[np.float64]


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
    breakpoints: Floats
    ramp_start: NDArray[np.int64]
    ramp_end: NDArray[np.int64]

    @property
    def count(self) -> int:
        """Number of segments M."""
        return len(self.breakpoints)

    @cached_property
    def lengths(self) -> Floats:
        """Lengths of the segments on a ramp [M - 1]; 0 where every step function is constant."""
        on_a_ramp = self.at_ramps(1, -1).cumsum()[:-1] > 0
        return np.diff(self.breakpoints) * on_a_ramp

    def at_ramps(self, start: Any, end: Any) -> NDArray[Any]:
        """Values at the segments in which ramps start and end [M]: each breakpoint is one's."""
        values = np.empty(self.count, np.result_type(start))
        values[self.ramp_start], values[self.ramp_end] = start, end
        return values


def cut_into_segments(positive_scores: Floats, delta: float, shift: float) -> Segments:
    """Cuts the score axis at s_i - delta and s_i + delta.

    Args:
        positive_scores: s_i - shift of the positives [P], ascending.
    """
    rank = np.arange(len(positive_scores))
    if delta == 0:
        return Segments(shift, delta, positive_scores, rank, rank)
    starts, ends = positive_scores - delta, positive_scores + delta
    # Both halves are sorted: the place of each in the merged order is its rank in its own half
    # plus the number of the other half's that come before it.
    ramp_start = rank + ends.searchsorted(starts, side="left")
    ramp_end = rank + starts.searchsorted(ends, side="right")
    breakpoints = np.empty(2 * len(rank))
    breakpoints[ramp_start], breakpoints[ramp_end] = starts, ends
    return Segments(shift, delta, breakpoints, ramp_start, ramp_end)


def sums_of_steps(segments: Segments, counts: Floats, sums: Floats) -> Floats:
    """Adds up f(s_j - s_i) over the boxes j that were counted, for every positive i.

    With C(u) the number of boxes above u, the sum is the mean of C over the ramp of i:
    sum_j f(s_j - s_i) = 1/(2 delta) * integral of C from s_i - delta to s_i + delta.

    Args:
        counts: boxes in every segment [..., M], for any number of sets of boxes.
        sums: sum of their distances to the segment's left end [..., M].

    Returns:
        the sums [..., P].
    """
    at_least = _suffix_sums(counts)  # boxes in this segment or above
    if segments.delta == 0:
        # H(0) = 1: equal scores count, and equal positives share the boxes at their score.
        first = segments.breakpoints.searchsorted(segments.breakpoints, side="left")
        return at_least[..., first]
    lengths = segments.lengths
    above = np.zeros_like(counts)  # integral of C from the segment's left end on
    inside = np.where(lengths > 0, sums[..., :-1], 0.0)
    above[..., :-1] = _suffix_sums(at_least[..., 1:] * lengths + inside)
    over_ramp = above[..., segments.ramp_start] - above[..., segments.ramp_end]
    return over_ramp / (2 * segments.delta)


def line_through_segments(segments: Segments, weights: Floats) -> tuple[Floats, Floats]:
    """The function g(s) = sum_i weights_i * f(s - s_i) as a straight line on every segment.

    Returns:
        its value at the segments' left ends [M] and its slopes [M].
    """
    if segments.delta == 0:
        return weights.cumsum(), np.zeros_like(weights)
    rate = weights / (2 * segments.delta)
    slope = segments.at_ramps(rate, -rate).cumsum()
    slope[:-1][segments.lengths == 0] = 0.0
    slope[-1] = 0.0
    at_left = np.zeros_like(slope)
    (slope[:-1] * segments.lengths).cumsum(out=at_left[1:])
    return at_left, slope


def _suffix_sums(values: Floats) -> Floats:
    return values[..., ::-1].cumsum(axis=-1)[..., ::-1]
