"""Softmax cross-entropy with online hard example mining, the classification loss of SSD."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import REAL_DTYPES, TARGET_DTYPES, NonFiniteScoresError, check_tensors, loss_dtype
from .focal_loss import check_range
from .traits import LossModule, LossTraits, register_loss


def ohem_cross_entropy(
    logits: Tensor, targets: Tensor, *, negative_ratio: float = 3.0, num_positives: float | Tensor | None = None
) -> Tensor:
    """Cross-entropy of all positives and of the hardest negatives, divided by the positives.

    From "SSD: Single Shot MultiBox Detector" (Liu et al., ECCV 2016), Section 2.2: of the
    negatives of an image only those with the largest loss count, ``negative_ratio`` times as many
    as the image has positives (rounded down). An image without positives therefore adds nothing.

    Args:
        logits: [A, K + 1] for one image, or [B, ..., K + 1] for B of them, mined separately;
            column 0 is the background. Any floating dtype.
        targets: logits' shape without the last axis, integer; 0 background, 1..K the class, -1 ignored.
        negative_ratio: negatives per positive, >= 0.
        num_positives: what the sum is divided by, such as the positives of all processes; by
            default the number of positive targets, at least 1.

    Returns:
        scalar, float32 (float64 for float64 logits), connected to the graph even if it is 0.

    Raises:
        ValueError: the shapes do not fit, targets are not integers, the ratio is negative; and,
            where not compiled, a target outside -1..K or a logit that is NaN or infinite.

    Example:
        >>> import torch
        >>> logits = torch.zeros(5, 3, requires_grad=True)  # 5 boxes, 2 classes
        >>> loss = ohem_cross_entropy(logits, torch.tensor([2, 0, 0, 0, 0]))
        >>> loss  # 1 positive and 3 of 4 negatives, log(3) each
        tensor(4.3944, grad_fn=<SumBackward0>)
    """
    _check_shapes(logits, targets)
    check_range("negative_ratio", negative_ratio, 0)
    if not torch.compiler.is_compiling():
        _check_values(logits, targets)
    if logits.ndim == 2:
        logits, targets = logits[None], targets[None]
    targets = targets.flatten(1).long()  # [B, A]
    logits = logits.flatten(1, -2).to(loss_dtype(logits.dtype))  # [B, A, K + 1]
    logits = logits.masked_fill((targets == -1)[..., None], 0.0)  # may be NaN: no gradient either
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    losses = losses.view_as(targets)
    positive = targets > 0
    counted = positive | _hardest_negatives(losses.detach(), targets, negative_ratio)
    divisor = positive.sum().clamp(min=1) if num_positives is None else num_positives
    return (torch.where(counted, losses, 0.0) / divisor).sum()  # a sum of the largest losses would overflow


@register_loss("ce-ohem")
class OHEMCrossEntropy(LossModule):
    """Softmax cross-entropy with hard negatives, the classification loss of SSD.

    Example:
        >>> import torch
        >>> OHEMCrossEntropy()(torch.zeros(5, 3), torch.tensor([2, 0, 0, 0, 0]))  # 4 log(3)
        tensor(4.3944)
    """

    traits = LossTraits(
        label="CE + OHEM",
        colour="#009e73",
        dashes="-.",
        marker="^",
        softmax=True,
        divides_by_positives=True,
        calibrated=True,
    )

    _function = staticmethod(ohem_cross_entropy)

    def __init__(self, negative_ratio: float = 3.0) -> None:
        super().__init__(negative_ratio=negative_ratio)
        check_range("negative_ratio", negative_ratio, 0)

    def forward(self, logits: Tensor, targets: Tensor, num_positives: float | Tensor | None = None) -> Tensor:
        """See :func:`ohem_cross_entropy`."""
        loss: Tensor = self._call(logits, targets, num_positives=num_positives)
        return loss


def _hardest_negatives(losses: Tensor, targets: Tensor, ratio: float) -> Tensor:
    """Which negatives of each image have its largest losses [B, A]."""
    candidates = losses.masked_fill(targets != 0, -torch.inf)
    place = candidates.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    wanted = ((targets > 0).sum(dim=1, keepdim=True) * ratio).floor()  # [B, 1]
    return (place < wanted) & (targets == 0)


def _check_shapes(logits: Tensor, targets: Tensor) -> None:
    check_tensors(logits=logits, targets=targets)
    if logits.ndim < 2 or logits.shape[:-1] != targets.shape or logits.shape[-1] < 2:
        raise ValueError(
            "logits must be [..., K + 1] with at least 2 columns and 2 axes, and targets the same "
            f"without the last axis, got {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    if logits.dtype not in REAL_DTYPES:
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    if targets.dtype in REAL_DTYPES or targets.dtype not in TARGET_DTYPES:
        raise ValueError(f"targets must be integer class numbers, got {targets.dtype}")


def _check_values(logits: Tensor, targets: Tensor) -> None:
    targets, classes = targets.flatten().long(), logits.shape[-1] - 1
    invalid = (targets < -1) | (targets > classes)
    if bool(invalid.any()):
        index = int(invalid.nonzero()[0])
        raise ValueError(
            f"targets must be 1..{classes} (class), 0 (background) or -1 (ignored), "
            f"got {targets[index]} at flat index {index}"
        )
    bad = ~logits.isfinite().all(-1).flatten() & (targets != -1)
    if bool(bad.any()):
        raise NonFiniteScoresError(f"logits must be finite, got NaN or Inf at box {int(bad.nonzero()[0])} (flat)")
