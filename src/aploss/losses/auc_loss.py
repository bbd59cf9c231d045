"""AUC-loss: the area under the ROC curve as a loss, by the same error-driven update."""

from typing import Any

import torch
from torch import Tensor, nn

from .input_checks import check_delta, check_scores_and_targets
from .ranking.across_processes import group_name
from .ranking.engine import rank_boxes
from .ranking.operator import ErrorDrivenUpdate, ranking_operator
from .traits import LossTraits, register_loss

__all__ = ["AUCLoss", "auc_loss"]


def auc_loss(
    scores: Tensor, targets: Tensor, *, delta: float = 1.0, process_group: Any = None
) -> Tensor:
    """1 - area under the ROC curve: the share of (positive, negative) pairs in the wrong order.

    Section 3.1 of the AP-loss paper, where it is the ranking loss that AP is compared with: its
    activation L'_ij = f(x_ij) / |N| gives every pair the same weight, wherever it stands in the
    ranking. Arguments, gradient and errors as in :func:`aploss.losses.ap_loss`.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored.
        delta: half the width of the step function; 0 is the Heaviside step.
        process_group: rank the boxes of all its processes together.

    Returns:
        scalar in [0, 1]; 0 where there are no positives or no negatives.

    Example:
        >>> import torch
        >>> auc_loss(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0, 1, 0]), delta=0)
        tensor(0.5000)
    """
    check_scores_and_targets(scores, targets)
    check_delta(delta)
    loss: Tensor = _auc_loss(scores, targets, float(delta), group_name(process_group))[0]
    return loss


@register_loss("auc")
class AUCLoss(nn.Module):
    """See :func:`auc_loss`."""

    traits = LossTraits(
        label="AUC-loss",
        colour="#e69f00",
        dashes=":",
        marker="D",
        ranks_across_processes=True,
    )

    def __init__(self, delta: float = 1.0, process_group: Any = None) -> None:
        super().__init__()
        check_delta(delta)
        self.delta = delta
        self.process_group = process_group

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        return auc_loss(scores, targets, delta=self.delta, process_group=self.process_group)

    def extra_repr(self) -> str:
        return f"delta={self.delta}"


def _update(scores: Tensor, targets: Tensor, delta: float, group: str) -> ErrorDrivenUpdate:
    ranking = rank_boxes(scores, targets, delta, group=group)
    pairs = max(ranking.num_positives, 1) * max(ranking.num_negatives, 1)
    error = ranking.negatives_above / pairs  # [P] sum_j L'_ij / |P|
    return ErrorDrivenUpdate(
        ranking,
        losses=(error.sum(),),
        pair_weights=(torch.full_like(error, 1 / pairs),),
        positive_gradients=(-error,),
    )


_auc_loss = ranking_operator("auc_loss", _update, options="float delta, str group", losses=1)
