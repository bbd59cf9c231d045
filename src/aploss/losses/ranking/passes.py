"""The passes over all N scores: what the engine asks of a backend, and the one in torch operations.

The torch operations serve every device but the CPU, which has compiled kernels of its own
(``passes_cpu``); both give the same results.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .segments import Floats, Segments

__all__ = ["Passes", "TorchPasses"]


class Passes(Protocol):
    """The boxes of one process and the passes over them. The positives are found at once.

    Args:
        scores: flat, float32 or float64 [n].
        targets: flat [n]: 1, 0 and -1; values in (0, 1) too if ``soft``.

    Attributes:
        positive_index: flat index of the positives, ascending.
        positive_scores: their scores s_i, on the host.
        num_negatives: how many targets are 0.
        bad_target: flat index of a target that is not allowed, or -1.
    """

    positive_index: Tensor
    positive_scores: Floats
    num_negatives: int
    bad_target: int

    def __init__(self, scores: Tensor, targets: Tensor, soft: bool) -> None: ...

    def negatives_per_segment(self, segments: Segments) -> tuple[Floats, Floats, int]:
        """Counts the negatives of every segment and adds up how far above its left end they lie.

        Returns:
            counts [M] and sums [M], and the flat index of a negative whose score is not
            finite, or -1.
        """

    def gradient_of_negatives(self, segments: Segments, at_left: Floats, slope: Floats) -> Tensor:
        """Evaluates a piecewise linear function at every negative.

        Args:
            at_left: its value at the left end of every segment [M].
            slope: its slope within every segment [M].

        Returns:
            the values [n] in the dtype of the scores; 0 for what is no negative.
        """


class TorchPasses:
    """See :class:`Passes`. Goes slice by slice, so that float64 intermediates stay small."""

    SLICE = 1 << 20

    def __init__(self, scores: Tensor, targets: Tensor, soft: bool) -> None:
        self.scores, self.targets = scores, targets
        positive = (targets > 0) & (targets <= 1) if soft else targets == 1
        negative = targets == 0
        refused = ~(positive | negative | (targets == -1))
        # One transfer to the host for both numbers; nonzero() makes one of its own.
        negatives, refusals = torch.stack([negative.sum(), refused.sum()]).tolist()
        self.positive_index = positive.nonzero()[:, 0]
        self.positive_scores = scores[self.positive_index].double().cpu().numpy()
        self.num_negatives = int(negatives)
        self.bad_target = int(refused.nonzero()[0, 0]) if refusals else -1

    def negatives_per_segment(self, segments: Segments) -> tuple[Floats, Floats, int]:
        # Row 0 collects what belongs to no segment.
        breaks = self._on_device(segments.breakpoints)
        totals = breaks.new_zeros(2, segments.count + 1)
        infinite = torch.zeros((), dtype=torch.bool, device=breaks.device)
        for part in self._slices():
            value, row = self._locate(part, breaks, segments.shift)
            left = breaks[(row - 1).clamp_(min=0)]
            totals[0] += row.bincount(minlength=len(totals[0]))
            totals[1] += row.bincount(value.sub_(left), minlength=len(totals[1]))
            infinite |= ((self.targets[part] == 0) & ~self.scores[part].isfinite()).any()
        bad = -1
        if bool(infinite):
            bad = int(((self.targets == 0) & ~self.scores.isfinite()).nonzero()[0, 0])
        counts, sums = totals[:, 1:].cpu().numpy()
        return counts, sums, bad

    def gradient_of_negatives(self, segments: Segments, at_left: Floats, slope: Floats) -> Tensor:
        gradient = torch.empty_like(self.scores)
        breaks = self._on_device(segments.breakpoints)
        # Row 0, where nothing belongs to a segment, is a line that is zero.
        left = self._on_device(np.append(segments.breakpoints[0], segments.breakpoints))
        heights, slopes = (self._on_device(np.append(0.0, line)) for line in (at_left, slope))
        for part in self._slices():
            value, row = self._locate(part, breaks, segments.shift)
            gradient[part] = value.sub_(left[row]).mul_(slopes[row]).add_(heights[row])
        return gradient

    def _on_device(self, values: Floats) -> Tensor:
        return torch.from_numpy(values).to(self.scores.device)

    def _slices(self) -> Iterator[slice]:
        starts = range(0, len(self.scores), self.SLICE)
        return (slice(start, start + self.SLICE) for start in starts)

    def _locate(self, part: slice, breaks: Tensor, shift: float) -> tuple[Tensor, Tensor]:
        """Shifted scores, and 1 + their segment; 0 for what is no negative or below all."""
        value = self.scores[part].to(torch.float64) - shift
        value.masked_fill_(self.targets[part] != 0, float("-inf"))
        row = torch.searchsorted(breaks, value, right=True)
        return value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0), row
