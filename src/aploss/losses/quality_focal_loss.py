"""Quality focal loss, the classification loss of GFL."""

import torch.nn.functional as F
from torch import Tensor

from .sigmoid_loss import IoUTraits, SigmoidLoss, check_range, mean_over_positives
from .traits import register_loss


def quality_focal_loss(
    scores: Tensor, qualities: Tensor, *, beta: float = 2.0, num_positives: float | Tensor | None = None
) -> Tensor:
    """Focal loss for targets that are IoUs.

    From "Generalized Focal Loss" (Li et al., NeurIPS 2020), Eq. (2): with p the sigmoid of the score
    and q the IoU (0 for negatives), an anchor costs |q - p|^beta BCE(p, q).

    Args:
        scores: logits, any shape, any floating dtype.
        qualities: same shape; in (0, 1] for positives (the IoU of their predicted box), 0 negative, -1 ignored.
        beta: how strongly anchors whose score is already near their IoU are down-weighted; 0, or >= 1.
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
        >>> loss = quality_focal_loss(scores, torch.tensor([0.8, 0.0, -1.0]))
        >>> loss.item()  # (0.3 ** 2 + 0.5 ** 2) * log(2)
        0.2356...
    """
    if beta != 0:  # between 0 and 1 the gradient would be infinite where score and IoU are equal
        check_range("beta", beta, 1)

    def anchor_losses(logits: Tensor, targets: Tensor) -> Tensor:
        damping = (targets - logits.sigmoid()).abs() ** beta
        return damping * F.binary_cross_entropy_with_logits(logits, targets, reduction="none")

    return mean_over_positives(anchor_losses, scores, qualities, num_positives)


@register_loss("qfl")
class QualityFocalLoss(SigmoidLoss):
    """Quality focal loss as a module; see :func:`quality_focal_loss`.

    Args:
        beta: how strongly anchors whose score is already near their IoU are down-weighted; 0, or >= 1.

    Shape:
        - scores: logits of any shape, such as [B, A, K]; qualities: the same, in (0, 1] for positives
          (the IoU of their predicted box), 0 for negatives and -1 for ignored anchors.
        - Output: scalar.

    Example:
        >>> import torch
        >>> QualityFocalLoss()(torch.zeros(2, 4), torch.eye(2, 4))  # 2 positives, 6 negatives
        tensor(0.6931)
    """

    traits = IoUTraits(label="Quality focal loss", colour="#44aa99", dashes=":", marker="D")

    _function = staticmethod(quality_focal_loss)

    def __init__(self, beta: float = 2.0) -> None:
        super().__init__(beta=beta)
