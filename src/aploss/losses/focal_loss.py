"""Focal loss, the loss that the AP-loss replaces in RetinaNet."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autograd import loss_dtype
from .checks import check_scores_and_targets, check_values
from .traits import LossTraits, register_loss

__all__ = ["FocalLoss", "focal_loss"]


def focal_loss(
    scores: Tensor,
    targets: Tensor,
    *,
    alpha: float = 0.25,
    gamma: float = 2.0,
    num_positives: float | Tensor | None = None,
) -> Tensor:
    """Sigmoid focal loss, summed over all boxes and divided by the number of positives.

    From "Focal Loss for Dense Object Detection" (Lin et al., ICCV 2017), Eq. (5): a box whose
    label has the probability p_t costs -alpha_t (1 - p_t)^gamma log(p_t). The same as
    torchvision's ``sigmoid_focal_loss`` on the boxes that are not ignored; only the scores and
    the targets are kept for the backward pass. Logits of any size give finite gradients.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored. Integer, bool or float.
        alpha: weight of the positives, in [0, 1]; the negatives have 1 - alpha.
        gamma: how much boxes that are right already are damped, >= 0; 0 is cross-entropy.
        num_positives: what the sum is divided by, such as the positives of all processes; by
            default the number of positive targets, at least 1.

    Returns:
        scalar, float32 (float64 for float64 scores). Without positives, the sum itself.

    Raises:
        ValueError: shapes differ, alpha or gamma are out of range; and, where not compiled, a
            target that is not allowed or a score that is NaN or infinite.

    Example:
        >>> import torch
        >>> scores = torch.tensor([0.0, 0.0, 5.0], requires_grad=True)
        >>> loss = focal_loss(scores, torch.tensor([1, 0, -1]))
        >>> loss  # (0.25 + 0.75) * 0.5 ** 2 * log(2)
        tensor(0.1733, grad_fn=<DivBackward0>)
    """
    check_scores_and_targets(scores, targets)
    _check_options(alpha, gamma)
    if not torch.compiler.is_compiling():
        check_values(scores, targets)
    total: Tensor = _FocalSum.apply(scores, targets, alpha, gamma)
    return total / ((targets == 1).sum().clamp(min=1) if num_positives is None else num_positives)


@register_loss("focal")
class FocalLoss(nn.Module):
    """See :func:`focal_loss`."""

    traits = LossTraits(
        label="Focal loss",
        colour="#d55e00",
        dashes="--",
        marker="s",
        divides_by_positives=True,
        calibrated=True,
    )

    def __init__(self, alpha: float = 0.25, gamma: float = 2.0) -> None:
        super().__init__()
        _check_options(alpha, gamma)
        self.alpha = alpha
        self.gamma = gamma

    def forward(
        self, scores: Tensor, targets: Tensor, num_positives: float | Tensor | None = None
    ) -> Tensor:
        return focal_loss(
            scores, targets, alpha=self.alpha, gamma=self.gamma, num_positives=num_positives
        )

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, gamma={self.gamma}"


class _FocalSum(torch.autograd.Function):
    """The sum over all boxes. Its backward is made of torch operations, so it has one itself."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
        ctx.save_for_backward(scores, targets)
        ctx.options = alpha, gamma
        wrong_logit = _wrong_logit(scores, targets)
        losses = wrong_logit.sigmoid().pow_(gamma)  # (1 - p_t)^gamma
        losses.mul_(_softplus(wrong_logit))
        one = losses.new_ones(())
        return losses.mul_(torch.where(targets == 1, alpha * one, (1 - alpha) * one)).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        scores, targets = ctx.saved_tensors
        alpha, gamma = ctx.options
        wrong_logit = _wrong_logit(scores, targets)
        wrong = wrong_logit.sigmoid()  # 1 - p_t
        # d/dz of sigmoid(z)^gamma softplus(z), which has no 0^(gamma - 1) in it.
        slope = wrong.pow(gamma) * (wrong + gamma * (1 - wrong) * _softplus(wrong_logit))
        weights = torch.where(targets == 1, -alpha * upstream, (1 - alpha) * upstream)
        return (slope * weights).to(scores.dtype), None, None, None


def _wrong_logit(scores: Tensor, targets: Tensor) -> Tensor:
    """The logit z of being wrong: -s for positives and s for negatives.

    What is ignored is never wrong: its z is -infinity, its loss and its slope are 0.
    """
    exact = scores.to(loss_dtype(scores.dtype))
    return torch.where(targets == 1, -exact, exact).masked_fill_(targets == -1, -torch.inf)


def _softplus(logit: Tensor) -> Tensor:
    """log(1 + e^z), which is -log(p_t); equal to z in float64 beyond 40."""
    return F.softplus(logit, threshold=40.0)


def _check_options(alpha: float, gamma: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    if not 0 <= gamma < float("inf"):
        raise ValueError(f"gamma must be a finite number >= 0, got {gamma}")
