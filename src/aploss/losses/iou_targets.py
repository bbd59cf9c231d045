"""What the classification losses with IoU targets share: validation, ignored anchors, the mean over positives."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .checks import check_scores_and_targets, check_values, comparable_targets, plain
from .ranking.problem import loss_dtype
from .traits import LossTraits

# The box loss is the one that detectors with these losses are published with.
IoUTraits = partial(
    LossTraits, positive_targets="iou", divides_by_positives=True, box_loss="giou", box_weight=2.0, calibrated=True
)
AnchorLosses = Callable[[Tensor, Tensor], Tensor]


def mean_over_positives(
    anchor_losses: AnchorLosses, scores: Tensor, qualities: Tensor, num_positives: float | Tensor | None
) -> Tensor:
    """The sum of ``anchor_losses(logits, qualities)`` over the anchors that are not ignored, over the positives.

    Args:
        anchor_losses: the loss of each anchor from its logit and its IoU, 0 for negatives.
        scores: logits, any shape, any floating dtype.
        qualities: same shape; in (0, 1] for positives, 0 negative, -1 ignored.
        num_positives: the divisor; by default the number of positives, at least 1.

    Returns:
        scalar, float32 (float64 for float64 scores).
    """
    check_scores_and_targets(scores, qualities)
    if not torch.compiler.is_compiling():
        check_values(scores, qualities, soft=True)
        qualities = plain(qualities.detach())
    exact, targets = scores.to(loss_dtype(scores.dtype)), comparable_targets(qualities)
    ignored = targets == -1
    targets = targets.masked_fill(ignored, 0).to(exact.dtype)
    losses = anchor_losses(exact.masked_fill(ignored, 0.0), targets).masked_fill(ignored, 0.0)
    return losses.sum() / ((targets > 0).sum().clamp(min=1) if num_positives is None else num_positives)


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raises ValueError unless the option is a finite number in [low, high]."""
    if not (low <= value <= high and value < float("inf")):
        bound = f">= {low:g}" if high == float("inf") else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be a finite number {bound}, got {value}")
