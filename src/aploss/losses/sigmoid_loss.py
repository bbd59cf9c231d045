"""What the classification losses with sigmoids share: validation, ignored anchors, the mean over positives."""

from collections.abc import Callable

import torch
from torch import Tensor

from .checks import check_scores_and_targets, check_values, comparable_targets, loss_dtype
from .traits import LossModule


def mean_over_positives(
    anchor_losses: Callable[[Tensor, Tensor], Tensor],
    scores: Tensor,
    targets: Tensor,
    num_positives: float | Tensor | None,
    *,
    soft: bool = True,
) -> Tensor:
    """The sum of the losses of all anchors that are not ignored, divided by the number of positives.

    Args:
        anchor_losses: the loss of each anchor from its logit and its target, 0 for negatives.
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive (in (0, 1] if soft), 0 negative, -1 ignored.
        num_positives: the divisor; by default the number of positives, at least 1.

    Returns:
        scalar, float32 (float64 for float64 scores).
    """
    check_scores_and_targets(scores, targets)
    if not torch.compiler.is_compiling():
        check_values(scores, targets, soft=soft)
    exact, targets = scores.to(loss_dtype(scores.dtype)), comparable_targets(targets.detach())
    ignored = targets == -1
    targets = targets.masked_fill(ignored, 0).to(exact.dtype)
    losses = anchor_losses(exact.masked_fill(ignored, 0.0), targets).masked_fill(ignored, 0.0)
    divisor = (targets > 0).sum().clamp(min=1) if num_positives is None else num_positives
    return (losses / divisor).sum()  # a sum of the largest losses would overflow


class SigmoidLoss(LossModule):
    """Base class of these losses as modules."""

    def __init__(self, **options: float) -> None:
        super().__init__(**options)
        self(torch.zeros(1), torch.zeros(1))  # raises for options out of range

    def forward(self, scores: Tensor, targets: Tensor, num_positives: float | Tensor | None = None) -> Tensor:
        """The loss as a scalar; ``num_positives`` is the divisor, by default the number of positives, at least 1."""
        loss: Tensor = self._call(scores, targets, num_positives=num_positives)
        return loss


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raises ValueError unless the option is a finite number in [low, high]."""
    if not (low <= value <= high and value < float("inf")):
        bound = f">= {low:g}" if high == float("inf") else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be a finite number {bound}, got {value}")
