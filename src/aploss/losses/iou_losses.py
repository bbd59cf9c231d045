"""Binary cross-entropies whose target of a positive is the IoU of its predicted box: VFL, QFL, MAL and IA-BCE."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .focal_loss import SigmoidLoss, check_range, mean_over_positives
from .traits import LossTraits, register_loss

MIN_TARGET = 0.01  # of a positive in IA-BCE, as in the code that its authors released

# The box loss is the one that detectors with these losses are published with.
_Traits = partial(
    LossTraits, positive_targets="iou", divides_by_positives=True, box_loss="giou", box_weight=2.0, calibrated=True
)


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
        num_positives: the divisor, such as the positives of all processes; by default their number, at least 1.

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


def quality_focal_loss(
    scores: Tensor, qualities: Tensor, *, beta: float = 2.0, num_positives: float | Tensor | None = None
) -> Tensor:
    """Focal loss for targets that are IoUs.

    From "Generalized Focal Loss" (Li et al., NeurIPS 2020), Eq. (2): with p the sigmoid of the score
    and q the IoU (0 for negatives), an anchor costs |q - p|^beta BCE(p, q).

    Args:
        scores, qualities, num_positives: see :func:`varifocal_loss`.
        beta: how strongly anchors whose score is already near their IoU are down-weighted; 0, or >= 1.

    Returns:
        scalar, float32 (float64 for float64 scores). Raises as :func:`varifocal_loss`.

    Example:
        >>> import torch
        >>> quality_focal_loss(torch.zeros(2), torch.tensor([0.8, 0.0])).item()  # (0.3 ** 2 + 0.5 ** 2) * log(2)
        0.2356...
    """
    if beta != 0:  # between 0 and 1 the gradient would be infinite where score and IoU are equal
        check_range("beta", beta, 1)

    def anchor_losses(logits: Tensor, targets: Tensor) -> Tensor:
        damping = (targets - logits.sigmoid()).abs() ** beta
        return damping * F.binary_cross_entropy_with_logits(logits, targets, reduction="none")

    return mean_over_positives(anchor_losses, scores, qualities, num_positives)


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
        scores, qualities, num_positives: see :func:`varifocal_loss`.
        gamma: exponent of the IoU in the target, and of the score in the weight of negatives, >= 0.
        alpha: weight of the negatives, >= 0.

    Returns:
        scalar, float32 (float64 for float64 scores). Raises as :func:`varifocal_loss`.

    Example:
        >>> import torch
        >>> matchability_aware_loss(torch.zeros(2), torch.tensor([0.8, 0.0])).item()  # (1 + 0.5 ** 1.5) * log(2)
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
        scores, qualities, num_positives: see :func:`varifocal_loss`.
        alpha: share of the score in the target of positives, in [0, 1].
        gamma: how strongly negatives with a low score are down-weighted, >= 0.

    Returns:
        scalar, float32 (float64 for float64 scores). Raises as :func:`varifocal_loss`.

    Example:
        >>> import torch
        >>> iou_aware_bce_loss(torch.zeros(2), torch.tensor([0.8, 0.0])).item()  # (1 + 0.5 ** 2) * log(2)
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


@register_loss("vfl")
class VarifocalLoss(SigmoidLoss):
    """Varifocal loss, with which VarifocalNet, RT-DETR and D-FINE are trained.

    Example:
        >>> import torch
        >>> VarifocalLoss()(torch.zeros(2, 4), torch.eye(2, 4))  # 2 positives, 6 negatives
        tensor(1.0830)
    """

    traits = _Traits(label="Varifocal loss", colour="#882255", dashes="--", marker="^")
    _function = staticmethod(varifocal_loss)

    def __init__(self, alpha: float = 0.75, gamma: float = 2.0) -> None:
        super().__init__(alpha=alpha, gamma=gamma)


@register_loss("qfl")
class QualityFocalLoss(SigmoidLoss):
    """Quality focal loss, the classification loss of GFL.

    Example:
        >>> import torch
        >>> QualityFocalLoss()(torch.zeros(2, 4), torch.eye(2, 4))  # 2 positives, 6 negatives
        tensor(0.6931)
    """

    traits = _Traits(label="Quality focal loss", colour="#44aa99", dashes=":", marker="D")
    _function = staticmethod(quality_focal_loss)

    def __init__(self, beta: float = 2.0) -> None:
        super().__init__(beta=beta)


@register_loss("mal")
class MatchabilityAwareLoss(SigmoidLoss):
    """Matchability-aware loss, with which DEIM and DEIMv2 are trained.

    Example:
        >>> import torch
        >>> MatchabilityAwareLoss()(torch.zeros(2, 4), torch.eye(2, 4))  # 2 positives, 6 negatives
        tensor(1.4283)
    """

    traits = _Traits(label="MAL", colour="#332288", dashes=(0, (5, 1)), marker="P")
    _function = staticmethod(matchability_aware_loss)

    def __init__(self, gamma: float = 1.5, alpha: float = 1.0) -> None:
        super().__init__(gamma=gamma, alpha=alpha)


@register_loss("ia-bce")
class IoUAwareBCELoss(SigmoidLoss):
    """IoU-aware binary cross-entropy, with which LW-DETR and RF-DETR are trained.

    Example:
        >>> import torch
        >>> IoUAwareBCELoss()(torch.zeros(2, 4), torch.eye(2, 4))  # 2 positives, 6 negatives
        tensor(1.2130)
    """

    traits = _Traits(label="IA-BCE", colour="#b59b3a", dashes=(0, (3, 1, 1, 1)), marker="X")
    _function = staticmethod(iou_aware_bce_loss)

    def __init__(self, alpha: float = 0.25, gamma: float = 2.0) -> None:
        super().__init__(alpha=alpha, gamma=gamma)
