"""AUC-loss: the area under the ROC curve as a loss, by the same error-driven update."""

from typing import Any

from torch import Tensor

from .autograd import RankingLoss, RankingOperator
from .traits import LossTraits, register_loss


def auc_loss(
    scores: Tensor,
    targets: Tensor,
    *,
    delta: float = 1.0,
    process_group: Any = None,
    groups: Tensor | int | None = None,
    max_positives: int | None = None,
) -> Tensor:
    """1 - area under the ROC curve: the share of (positive, negative) pairs in the wrong order.

    Section 3.1 of the AP-loss paper, where it is the ranking loss that AP is compared with: its
    activation L'_ij = f(x_ij) / |N| gives every pair the same weight, wherever it stands in the
    ranking. Arguments, gradient and errors as in :func:`aploss.losses.ap_loss`.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored.
        delta: half the width of the step function; 0 is the Heaviside step.
        groups, max_positives, process_group: see :func:`ap_loss`.

    Returns:
        scalar in [0, 1]; 0 where there are no positives or no negatives.

    Example:
        >>> import torch
        >>> auc_loss(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0, 1, 0]), delta=0)
        tensor(0.5000)
    """
    return _OPERATOR.rank(scores, targets, None, delta, True, groups, max_positives, process_group)[0]


_OPERATOR = RankingOperator("auc")


@register_loss("auc")
class AUCLoss(RankingLoss):
    """See :func:`auc_loss`."""

    traits = LossTraits(
        label="AUC-loss", colour="#e69f00", dashes=":", marker="D", ranks_across_processes=True, groups=True
    )

    def forward(self, scores: Tensor, targets: Tensor, groups: Tensor | int | None = None) -> Tensor:
        return auc_loss(scores, targets, **self.options(groups))
