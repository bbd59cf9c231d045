"""Matchability-aware loss, with which DEIM and DEIMv2 are trained."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .sigmoid_loss import IoUTraits, SigmoidLoss, check_range, mean_over_positives
from .traits import register_loss


def matchability_aware_loss(
    scores: Tensor,
    qualities: Tensor,
    *,
    gamma: float = 1.5,
    alpha: float = 1.0,
    num_positives: float | Tensor | None = None,
) -> Tensor:
    """Binary cross-entropy with a power of the IoU as target, and focal weights on negatives.

    From "DEIM: DETR with Improved Matching for Fast Convergence" (Huang et al., CVPR 2025), Eq. (3), with the weights
    constant in the gradient. With p the sigmoid of the score and q the IoU, an anchor costs BCE(p, q^gamma) if it is
    positive, however poor its box, and alpha p^gamma BCE(p, 0) if it is negative.

    Args:
        scores: logits, any shape, any floating dtype.
        qualities: same shape; in (0, 1] for positives (the IoU of their predicted box), 0 negative, -1 ignored.
        gamma: exponent of the IoU in the target, and of the score in the weight of negatives, >= 0.
        alpha: weight of the negatives, >= 0.
        num_positives: the divisor, such as the number of positives of all processes; by default the
            number of positives, at least 1.

    Returns:
        scalar, float32 (float64 for float64 scores).

    Raises:
        ValueError: if shapes differ, an option is out of range, a target is invalid, or a score is
            NaN or infinite (not checked in compiled graphs).

    Example:
        >>> import torch
        >>> scores = torch.tensor([0.0, 0.0, 5.0], requires_grad=True)
        >>> loss = matchability_aware_loss(scores, torch.tensor([0.8, 0.0, -1.0]))
        >>> loss.item()  # (1 + 0.5 ** 1.5) * log(2)
        0.9382...
    """
    check_range("gamma", gamma, 0)
    check_range("alpha", alpha, 0)

    def anchor_losses(logits: Tensor, targets: Tensor) -> Tensor:
        positive = targets > 0
        weights = torch.where(positive, 1.0, alpha * logits.detach().sigmoid() ** gamma)
        powers = torch.where(positive, targets**gamma, targets)  # 0 ** 0 is 1
        return F.binary_cross_entropy_with_logits(logits, powers, weights, reduction="none")

    return mean_over_positives(anchor_losses, scores, qualities, num_positives)


@register_loss("mal")
class MatchabilityAwareLoss(SigmoidLoss):
    """Matchability-aware loss as a module; see :func:`matchability_aware_loss`.

    Args:
        gamma: exponent of the IoU in the target, and of the score in the weight of negatives, >= 0.
        alpha: weight of the negatives, >= 0.

    Shape:
        - scores: logits of any shape, such as [B, A, K]; qualities: the same, in (0, 1] for positives
          (the IoU of their predicted box), 0 for negatives and -1 for ignored anchors.
        - Output: scalar.

    Example:
        >>> import torch
        >>> MatchabilityAwareLoss()(torch.zeros(2, 4), torch.eye(2, 4))  # 2 positives, 6 negatives
        tensor(1.4283)
    """

    traits = IoUTraits(label="MAL", colour="#332288", dashes=(0, (5, 1)), marker="P")

    _function = staticmethod(matchability_aware_loss)

    def __init__(self, gamma: float = 1.5, alpha: float = 1.0) -> None:
        super().__init__(gamma=gamma, alpha=alpha)
