"""The passes over all N scores in torch operations: the backend of every device but the CPU.

The same three functions as in ``kernels_cpu``, with the same results. The scores are taken slice by
slice, so that the float64 intermediates stay small beside them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .segments import Segments

__all__ = ["find_positives", "gradient_of_negatives", "negatives_per_segment"]

SLICE = 1 << 20


def find_positives(targets: Tensor, soft: bool) -> tuple[Tensor, int, int]:
    """See :func:`aploss.losses.ranking.kernels_cpu.find_positives`."""
    positive = targets > 0 if soft else targets == 1
    negative = targets == 0
    allowed = positive & (targets <= 1) if soft else positive
    refused = ~(allowed | negative | (targets == -1))
    # One transfer to the host for both numbers; nonzero() needs one of its own.
    negatives, refusals = torch.stack([negative.sum(), refused.sum()]).tolist()
    bad = int(refused.nonzero()[0, 0]) if refusals else -1
    return positive.nonzero()[:, 0], int(negatives), bad


def negatives_per_segment(
    scores: Tensor, targets: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, int]:
    """See :func:`aploss.losses.ranking.kernels_cpu.negatives_per_segment`."""
    # Row 0 collects what belongs to no segment.
    counts = segments.breakpoints.new_zeros(segments.count + 1)
    sums = torch.zeros_like(counts)
    infinite = torch.zeros((), dtype=torch.bool, device=scores.device)
    for part in _slices(len(scores)):
        value, row = _rows(scores[part], targets[part], segments)
        left = segments.breakpoints[(row - 1).clamp_(min=0)]
        counts.index_add_(0, row, torch.ones_like(value))
        sums.index_add_(0, row, value.sub_(left))
        infinite |= ((targets[part] == 0) & ~scores[part].isfinite()).any()
    bad = -1
    if infinite.item():
        bad = int(((targets == 0) & ~scores.isfinite()).nonzero()[0, 0])
    return counts[1:], sums[1:], bad


def gradient_of_negatives(
    scores: Tensor, targets: Tensor, segments: Segments, at_left: Tensor, slope: Tensor
) -> Tensor:
    """See :func:`aploss.losses.ranking.kernels_cpu.gradient_of_negatives`."""
    gradient = torch.empty_like(scores)
    zero = at_left.new_zeros(1)
    at_left, slope = torch.cat([zero, at_left]), torch.cat([zero, slope])
    left = torch.cat([segments.breakpoints[:1], segments.breakpoints])
    for part in _slices(len(scores)):
        value, row = _rows(scores[part], targets[part], segments)
        value.sub_(left[row]).mul_(slope[row]).add_(at_left[row])
        gradient[part] = torch.where(row > 0, value, 0.0)
    return gradient


def _slices(size: int) -> Iterator[slice]:
    return (slice(start, start + SLICE) for start in range(0, size, SLICE))


def _rows(scores: Tensor, targets: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Shifted scores and 1 + their segment; 0 for what is no negative or below all segments."""
    value = scores.to(torch.float64) - segments.shift
    value.masked_fill_(targets != 0, float("-inf"))
    row = torch.searchsorted(segments.breakpoints, value, right=True)
    return value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0), row
