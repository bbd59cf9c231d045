"""IoU-aware binary cross-entropy, with which LW-DETR and RF-DETR are trained."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .sigmoid_loss import IoUTraits, SigmoidLoss, check_range, mean_over_positives
from .traits import register_loss

MIN_TARGET = 0.01  # of a positive, as in the code that the authors released


def iou_aware_bce_loss(
    scores: Tensor,
    qualities: Tensor,
    *,
    alpha: float = 0.25,
    gamma: float = 2.0,
    num_positives: float | Tensor | None = None,
) -> Tensor:
    """Binary cross-entropy whose target mixes score and IoU, and focal weights on negatives.

    From "Align-DETR" (Cai et al., 2023) as LW-DETR (Chen et al., 2024) has it: with p the sigmoid of
    the score and q the IoU, an anchor costs BCE(p, t) with the constant t = p^alpha q^(1 - alpha), at
    least 0.01, if it is positive, and p^gamma BCE(p, 0) if it is negative.

    Args:
        scores: logits, any shape, any floating dtype.
        qualities: same shape; in (0, 1] for positives (the IoU of their predicted box), 0 negative, -1 ignored.
        alpha: share of the score in the target of positives, in [0, 1].
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
        >>> loss = iou_aware_bce_loss(scores, torch.tensor([0.8, 0.0, -1.0]))
        >>> loss.item()  # (1 + 0.5 ** 2) * log(2)
        0.8664...
    """
    check_range("alpha", alpha, 0, 1)
    check_range("gamma", gamma, 0)

    def anchor_losses(logits: Tensor, targets: Tensor) -> Tensor:
        positive = targets > 0
        mixed = (logits.detach().sigmoid() ** alpha * targets ** (1 - alpha)).clamp(min=MIN_TARGET)
        # p^gamma as an exponential, whose derivative has no 0^(gamma - 1) in it.
        damping = torch.where(positive, 1.0, torch.exp(gamma * F.logsigmoid(logits)))
        return damping * F.binary_cross_entropy_with_logits(logits, torch.where(positive, mixed, 0.0), reduction="none")

    return mean_over_positives(anchor_losses, scores, qualities, num_positives)


@register_loss("ia-bce")
class IoUAwareBCELoss(SigmoidLoss):
    """IoU-aware binary cross-entropy as a module; see :func:`iou_aware_bce_loss`.

    Args:
        alpha: share of the score in the target of positives, in [0, 1].
        gamma: how strongly negatives with a low score are down-weighted, >= 0.

    Shape:
        - scores: logits of any shape, such as [B, A, K]; qualities: the same, in (0, 1] for positives
          (the IoU of their predicted box), 0 for negatives and -1 for ignored anchors.
        - Output: scalar.

    Example:
        >>> import torch
        >>> IoUAwareBCELoss()(torch.zeros(2, 4), torch.eye(2, 4))  # 2 positives, 6 negatives
        tensor(1.2130)
    """

    traits = IoUTraits(label="IA-BCE", colour="#b59b3a", dashes=(0, (3, 1, 1, 1)), marker="X")

    _function = staticmethod(iou_aware_bce_loss)

    def __init__(self, alpha: float = 0.25, gamma: float = 2.0) -> None:
        super().__init__(alpha=alpha, gamma=gamma)
