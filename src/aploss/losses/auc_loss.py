"""AUC-loss: the area under the ROC curve as a loss, by the same error-driven update."""

from typing import Any

from torch import Tensor

from .autograd import NonFinite, RankingLoss, RankingOperator
from .ranking.rules import AUC
from .traits import LossTraits, register_loss


def auc_loss(
    scores: Tensor,
    targets: Tensor,
    *,
    delta: float = 1.0,
    process_group: Any = None,
    groups: Tensor | int | None = None,
    weights: Tensor | None = None,
    non_finite: NonFinite = "raise",
) -> Tensor:
    """1 - area under the ROC curve: the share of (positive, negative) pairs in the wrong order.

    Section 3.1 of the AP-loss paper, which compares AP with it: its activation
    L'_ij = f(x_ij) / |N| gives every pair the same weight, wherever it is in the ranking. The
    gradient and the errors raised are as in :func:`aploss.losses.ap_loss`.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored.
        delta: half the width of the step function; 0 is the Heaviside step.
        process_group, groups, weights, non_finite: see :func:`ap_loss`.

    Returns:
        scalar in [0, 1]; 0 if there are no positives or no negatives.

    Example:
        >>> import torch
        >>> auc_loss(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0, 1, 0]), delta=0)
        tensor(0.5000)
    """
    return _OPERATOR.rank(scores, targets, None, delta, groups, weights, process_group, non_finite)[0]


_OPERATOR = RankingOperator(AUC)


@register_loss("auc")
class AUCLoss(RankingLoss):
    """AUC-loss, the share of pairs in the wrong order.

    Example:
        >>> import torch
        >>> AUCLoss(delta=0)(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0, 1, 0]))
        tensor(0.5000)
    """

    traits = LossTraits(
        label="AUC-loss", colour="#e69f00", dashes=":", marker="D", ranks_across_processes=True, groups=True
    )
    _function = staticmethod(auc_loss)
