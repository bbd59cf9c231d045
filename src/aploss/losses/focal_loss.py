"""Focal loss, the loss that the AP-loss replaces in RetinaNet."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import check_scores_and_targets, check_values, comparable_targets, plain
from .ranking.problem import loss_dtype
from .traits import LossTraits, register_loss


def focal_loss(
    scores: Tensor,
    targets: Tensor,
    *,
    alpha: float = 0.25,
    gamma: float = 2.0,
    num_positives: float | Tensor | None = None,
) -> Tensor:
    """Sigmoid focal loss, summed over all anchors and divided by the number of positives.

    From "Focal Loss for Dense Object Detection" (Lin et al., ICCV 2017), Eq. (5): an anchor whose
    label has the probability p_t costs -alpha_t (1 - p_t)^gamma log(p_t). Equal to torchvision's
    ``sigmoid_focal_loss`` on the anchors that are not ignored. Logits of any size give finite
    gradients.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored. Integer, bool or float.
        alpha: weight of the positives, in [0, 1]; the negatives have 1 - alpha.
        gamma: how strongly anchors that are already right are down-weighted, >= 0; 0 is
            cross-entropy.
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
    _check_options(alpha, gamma)
    check_scores_and_targets(scores, targets)
    if not torch.compiler.is_compiling():
        check_values(scores, targets)
        targets = plain(targets)
    flat = comparable_targets(targets)
    positive, ignored = flat == 1, flat == -1
    exact = scores.to(loss_dtype(scores.dtype))
    # The logit z of being wrong: -s for positives, s for negatives. Ignored anchors are never wrong.
    wrong = torch.where(positive, -exact, exact).masked_fill(ignored, torch.finfo(exact.dtype).min)
    # (1 - p_t)^gamma as an exponential, whose derivative has no 0^(gamma - 1) in it.
    damping = torch.exp(gamma * F.logsigmoid(wrong))
    losses = damping * F.softplus(wrong, threshold=40.0)  # -log(p_t); equal to z in float64 beyond 40
    # Of two Python numbers, torch.where would make float32, also for float64 scores.
    total = (losses * torch.where(positive, alpha, exact.new_full((), 1 - alpha))).sum()
    return total / (positive.sum().clamp(min=1) if num_positives is None else num_positives)


@register_loss("focal")
class FocalLoss(nn.Module):
    """Sigmoid focal loss as a module; see :func:`focal_loss`.

    Args:
        alpha: weight of the positives, in [0, 1]; the negatives have 1 - alpha.
        gamma: how strongly anchors that are already right are down-weighted, >= 0.
    """

    traits = LossTraits(
        label="Focal loss", colour="#d55e00", dashes="--", marker="s", divides_by_positives=True, calibrated=True
    )

    def __init__(self, alpha: float = 0.25, gamma: float = 2.0) -> None:
        super().__init__()
        _check_options(alpha, gamma)
        self.alpha = alpha
        self.gamma = gamma

    def forward(self, scores: Tensor, targets: Tensor, num_positives: float | Tensor | None = None) -> Tensor:
        """See :func:`focal_loss`."""
        return focal_loss(scores, targets, alpha=self.alpha, gamma=self.gamma, num_positives=num_positives)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, gamma={self.gamma}"


def _check_options(alpha: float, gamma: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    if not 0 <= gamma < float("inf"):
        raise ValueError(f"gamma must be a finite number >= 0, got {gamma}")
