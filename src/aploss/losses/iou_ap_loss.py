"""IoU-AP: AP-loss averaged over IoU thresholds, the loss for COCO's own metric."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .autograd import NonFinite, RankingLoss, RankingOperator
from .ranking.rules import IOU_AP, PLAIN_IOU_AP
from .traits import LossTraits, register_loss


def iou_ap_loss(
    scores: Tensor,
    qualities: Tensor,
    *,
    thresholds: int | Sequence[float] = 9,
    interpolated: bool = False,
    delta: float = 1.0,
    process_group: Any = None,
    groups: Tensor | int | None = None,
    weights: Tensor | None = None,
    non_finite: NonFinite = "raise",
) -> Tensor:
    """AP-loss averaged over IoU thresholds, so that well placed boxes are ranked first.

    COCO's AP is the mean over IoU thresholds t of the average precision AP_t. This loss is the same mean of
    :func:`ap_loss`: at threshold t the positives P_t whose predicted box overlaps its object by at least t are
    positives, the other positives are ignored. The negatives above a positive are the same at every threshold, so that
    all thresholds share one pass over the scores and the loss costs what AP-loss does::

        loss = mean over t of sum_i w_i e_ti / sum_i w_i,    e_ti = n_i / (1 + p_ti + n_i)

    over i in P_t, where n_i and p_ti are the sums of f(s_j - s_i) over the negatives and over the
    other positives in P_t. The gradient is the mean of the error-driven gradients.

    Args:
        scores: logits, any shape, any floating dtype. With two or more dimensions, the last is the classes.
        qualities: targets of the same shape; in (0, 1] for positives (the IoU of their predicted
            box), 0 negative, -1 ignored.
        thresholds: IoU thresholds in [0, 1]; 0 counts every positive. Or their number T: the thresholds are the T
            quantiles of the IoU within each class (9: the deciles), and have half of the weight in the mean; the other
            half has threshold 0. So no class is without positives at any threshold, however poor its boxes are.
        interpolated: make the precision monotone in the score at each threshold.
        delta: half the width of the step function, at least 1e-6; or 0 for the Heaviside step.
        process_group, groups, weights, non_finite: see :func:`ap_loss`, which gets them at each
            threshold; quantiles are of all processes, within each group.

    Returns:
        scalar in [0, 1], float32 (float64 for float64 scores). A threshold that no positive reaches contributes 0.

    Raises:
        ValueError: as :func:`ap_loss`, and for invalid thresholds.

    Example:
        >>> import torch
        >>> scores = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
        >>> qualities = torch.tensor([0.0, 0.4, 0.8])
        >>> loss = iou_ap_loss(scores, qualities, thresholds=(0, 0.5), delta=0)
        >>> loss.item()  # at 0 (1/2 + 1/3) / 2; at 0.5, where the second score is ignored, 1/2
        0.4583...
        >>> loss.backward()
        >>> scores.grad  # the best box is pushed up most
        tensor([ 0.4583, -0.1250, -0.3333])
    """
    operator = _INTERPOLATED if interpolated else _PLAIN
    rest = (delta, groups, weights, process_group, non_finite, _checked(thresholds))
    return operator.rank(scores, qualities, None, *rest)[0]


_INTERPOLATED, _PLAIN = RankingOperator(IOU_AP), RankingOperator(PLAIN_IOU_AP)


def _checked(thresholds: int | Sequence[float]) -> int | list[float]:
    """Raises ValueError unless it is a number of thresholds, at least 1, or thresholds in [0, 1]."""
    if isinstance(thresholds, int) and not isinstance(thresholds, bool) and thresholds >= 1:
        return thresholds
    if isinstance(thresholds, Sequence) and len(thresholds) and not isinstance(thresholds, str):
        values = [float(value) for value in thresholds]
        if all(0 <= value <= 1 for value in values):
            return values
    raise ValueError(f"thresholds must be a number of quantiles >= 1, or IoUs in [0, 1], got {thresholds!r}")


@register_loss("iou-ap")
class IoUAPLoss(RankingLoss):
    """AP-loss averaged over IoU thresholds.

    Example:
        >>> import torch
        >>> logits = torch.zeros(2, 3, 4, requires_grad=True)
        >>> qualities = torch.zeros(2, 3, 4)
        >>> qualities[:, 0, 1] = torch.tensor([0.5, 0.9])
        >>> IoUAPLoss(thresholds=(0.5, 0.75))(logits, qualities)  # 11 / (1.5 + 11) and 11 / 12
        tensor(0.8983, grad_fn=<_EagerBackward>)
    """

    traits = LossTraits(
        label="IoU-AP",
        colour="#0072b2",
        dashes="-.",
        marker="*",
        positive_targets="iou",
        ranks_across_processes=True,
        groups=True,
        box_loss="giou",
    )
    _function = staticmethod(iou_ap_loss)

    def __init__(
        self,
        thresholds: int | Sequence[float] = 9,
        interpolated: bool = False,
        delta: float = 1.0,
        process_group: Any = None,
        groups: Tensor | int | None = None,
        weights: Tensor | Sequence[float] | None = None,
        non_finite: NonFinite = "raise",
    ) -> None:
        super().__init__(delta, process_group, groups, weights, non_finite)
        self._keep(thresholds=_checked(thresholds), interpolated=interpolated)
