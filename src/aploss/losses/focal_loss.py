"""Focal loss, which the AP-loss replaces in RetinaNet, and what it shares with the losses in ``iou_losses.py``."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_scores_and_targets, check_values, comparable_targets, loss_dtype
from .traits import LossModule, LossTraits, register_loss


def focal_loss(
    scores: Tensor,
    targets: Tensor,
    *,
    alpha: float = 0.25,
    gamma: float = 2.0,
    num_positives: float | Tensor | None = None,
) -> Tensor:
    """Sigmoid focal loss, summed over all anchors and divided by the number of positives.

    From "Focal Loss for Dense Object Detection" (Lin et al., ICCV 2017), Eq. (5): an anchor whose label has the
    probability p_t costs -alpha_t (1 - p_t)^gamma log(p_t). Equal to torchvision's ``sigmoid_focal_loss`` on the
    anchors that are not ignored. Logits of any size give finite gradients.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored. Integer, bool or float.
        alpha: weight of the positives, in [0, 1]; the negatives have 1 - alpha.
        gamma: how strongly anchors that are already right are down-weighted, >= 0; 0 is cross-entropy.
        num_positives: the divisor, such as the number of positives of all processes; by default the
            number of positive targets, at least 1.

    Returns:
        scalar, float32 (float64 for float64 scores). Without positives, the sum itself.

    Raises:
        ValueError: if shapes differ, alpha or gamma are out of range, a target is invalid, or a
            score is NaN or infinite (not checked in compiled graphs).

    Example:
        >>> import torch
        >>> scores = torch.tensor([0.0, 0.0, 5.0], requires_grad=True)
        >>> loss = focal_loss(scores, torch.tensor([1, 0, -1]))
        >>> loss.item()  # (0.25 + 0.75) * 0.5 ** 2 * log(2)
        0.1732...
    """
    check_range("alpha", alpha, 0, 1)
    check_range("gamma", gamma, 0)

    def anchor_losses(logits: Tensor, targets: Tensor) -> Tensor:
        positive = targets > 0
        wrong = torch.where(positive, -logits, logits)  # the logit of being wrong
        # (1 - p_t)^gamma as an exponential, whose derivative has no 0^(gamma - 1) in it.
        damping = torch.exp(gamma * F.logsigmoid(wrong))
        # -log(p_t); equal to its argument in float64 beyond 40. Of two Python numbers, torch.where would make float32.
        weights = torch.where(positive, alpha, logits.new_full((), 1 - alpha))
        return damping * F.softplus(wrong, threshold=40.0) * weights

    return mean_over_positives(anchor_losses, scores, targets, num_positives, soft=False)


class SigmoidLoss(LossModule):
    """Base class of the losses on sigmoids as modules."""

    def __init__(self, **options: float) -> None:
        super().__init__(**options)
        self(torch.zeros(1), torch.zeros(1))  # raises for options out of range

    def forward(self, scores: Tensor, targets: Tensor, num_positives: float | Tensor | None = None) -> Tensor:
        """The loss as a scalar; ``num_positives`` is the divisor, by default the number of positives, at least 1."""
        loss: Tensor = self._call(scores, targets, num_positives=num_positives)
        return loss


@register_loss("focal")
class FocalLoss(SigmoidLoss):
    """Sigmoid focal loss, with which RetinaNet is trained.

    Example:
        >>> import torch
        >>> FocalLoss()(torch.zeros(2, 4), torch.eye(2, 4))  # 2 positives, 6 negatives
        tensor(0.4332)
    """

    traits = LossTraits(
        label="Focal loss", colour="#d55e00", dashes="--", marker="s", divides_by_positives=True, calibrated=True
    )
    _function = staticmethod(focal_loss)

    def __init__(self, alpha: float = 0.25, gamma: float = 2.0) -> None:
        super().__init__(alpha=alpha, gamma=gamma)


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


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raises ValueError unless the option is a finite number in [low, high]."""
    if not (low <= value <= high and value < float("inf")):
        bound = f">= {low:g}" if high == float("inf") else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be a finite number {bound}, got {value}")
