"""Varifocal loss, with which VarifocalNet, RT-DETR and D-FINE are trained."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .sigmoid_loss import IoUTraits, SigmoidLoss, check_range, mean_over_positives
from .traits import register_loss


def varifocal_loss(
    scores: Tensor,
    qualities: Tensor,
    *,
    alpha: float = 0.75,
    gamma: float = 2.0,
    num_positives: float | Tensor | None = None,
) -> Tensor:
    """Binary cross-entropy with the IoU as target and weight of positives, and focal weights on negatives.

    From "VarifocalNet: An IoU-aware Dense Object Detector" (Zhang et al., CVPR 2021), Eq. (2), with the weights
    constant in the gradient, as RT-DETR and D-FINE have it. With p the sigmoid of the score and q the IoU, an anchor
    costs q BCE(p, q) if it is positive and alpha p^gamma BCE(p, 0) if it is negative.

    Args:
        scores: logits, any shape, any floating dtype.
        qualities: same shape; in (0, 1] for positives (the IoU of their predicted box), 0 negative, -1 ignored.
        alpha: weight of the negatives, >= 0.
        gamma: how strongly negatives with a low score are down-weighted, >= 0.
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
        >>> loss = varifocal_loss(scores, torch.tensor([0.8, 0.0, -1.0]))
        >>> loss.item()  # (0.8 + 0.75 * 0.5 ** 2) * log(2)
        0.6844...
    """
    check_range("alpha", alpha, 0)
    check_range("gamma", gamma, 0)

    def anchor_losses(logits: Tensor, targets: Tensor) -> Tensor:
        weights = torch.where(targets > 0, targets, alpha * logits.detach().sigmoid() ** gamma)
        return F.binary_cross_entropy_with_logits(logits, targets, weights, reduction="none")

    return mean_over_positives(anchor_losses, scores, qualities, num_positives)


@register_loss("vfl")
class VarifocalLoss(SigmoidLoss):
    """Varifocal loss as a module; see :func:`varifocal_loss`.

    Args:
        alpha: weight of the negatives, >= 0.
        gamma: how strongly negatives with a low score are down-weighted, >= 0.

    Shape:
        - scores: logits of any shape, such as [B, A, K]; qualities: the same, in (0, 1] for positives
          (the IoU of their predicted box), 0 for negatives and -1 for ignored anchors.
        - Output: scalar.

    Example:
        >>> import torch
        >>> VarifocalLoss()(torch.zeros(2, 4), torch.eye(2, 4))  # 2 positives, 6 negatives
        tensor(1.0830)
    """

    traits = IoUTraits(label="Varifocal loss", colour="#882255", dashes="--", marker="^")

    _function = staticmethod(varifocal_loss)

    def __init__(self, alpha: float = 0.75, gamma: float = 2.0) -> None:
        super().__init__(alpha=alpha, gamma=gamma)
