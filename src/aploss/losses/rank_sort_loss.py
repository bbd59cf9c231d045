"""Rank & Sort loss: positives above negatives, and among themselves in the order of their IoU."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .input_checks import check_delta, check_scores_and_targets
from .positive_pairs import step_at_zero, steps_between_positives
from .ranking.across_processes import group_name
from .ranking.engine import rank_boxes
from .ranking.operator import ErrorDrivenUpdate, ranking_operator
from .traits import LossTraits, register_loss

__all__ = ["RankSort", "RankSortLoss", "rank_sort_loss"]


class RankSort(NamedTuple):
    """The two parts of the Rank & Sort loss; their sum is the loss of the paper."""

    ranking: Tensor
    sorting: Tensor


def rank_sort_loss(
    scores: Tensor, targets: Tensor, *, delta: float = 0.5, process_group: Any = None
) -> RankSort:
    """How far positives are ranked below negatives, and below positives of a lower IoU.

    From "Rank & Sort Loss for Object Detection and Instance Segmentation" (Oksuz et al., ICCV
    2021), with the error-driven "identity update" as gradient. As in that paper rank(i) sums the
    step over all boxes including i itself, which therefore counts f(0): 1/2, or 1 for the
    Heaviside step. Takes O(N + P^2) for P positives among N scores.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; in (0, 1] for positives (the IoU of their predicted box), 0 negative,
            -1 ignored.
        delta: half the width of the step function; 0 is the Heaviside step.
        process_group: rank the boxes of all its processes together; see :func:`ap_loss`.

    Returns:
        the named pair (ranking, sorting) of scalars, float32 (float64 for float64 scores), each
        with a gradient of its own. 0 where there are no positives.

    Raises:
        ValueError: shapes differ, a target is not allowed, a score is NaN or infinite, delta < 0.

    Example:
        >>> import torch
        >>> scores = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
        >>> loss = rank_sort_loss(scores, torch.tensor([0.5, 1.0, 0.0]), delta=0)
        >>> loss.ranking.item(), loss.sorting.item()  # the second has 1/2 on top: 0.25 - 0, over 2
        (0.0, 0.125)
        >>> (loss.ranking + loss.sorting).backward()
        >>> scores.grad.tolist()
        [0.125, -0.125, 0.0]
    """
    check_scores_and_targets(scores, targets)
    check_delta(delta)
    parts = _rank_sort_loss(scores, targets, float(delta), group_name(process_group))
    return RankSort(parts[0], parts[1])


@register_loss("rank-sort")
class RankSortLoss(nn.Module):
    """See :func:`rank_sort_loss`."""

    traits = LossTraits(
        label="Rank & Sort",
        colour="#cc79a7",
        dashes=(0, (8, 2)),
        marker="v",
        positives_need="iou",
        ranks_across_processes=True,
        box_loss="giou",
        box_weight="balanced",
        weighs_boxes_by_score=True,
    )

    def __init__(self, delta: float = 0.5, process_group: Any = None) -> None:
        super().__init__()
        check_delta(delta)
        self.delta = delta
        self.process_group = process_group

    def forward(self, scores: Tensor, targets: Tensor) -> RankSort:
        return rank_sort_loss(scores, targets, delta=self.delta, process_group=self.process_group)

    def extra_repr(self) -> str:
        return f"delta={self.delta}"


def _update(scores: Tensor, targets: Tensor, delta: float, group: str) -> ErrorDrivenUpdate:
    ranking = rank_boxes(scores, targets, delta, soft_targets=True, group=group)
    flat_targets = targets.detach().flatten()
    qualities = ranking.from_all(flat_targets[flat_targets > 0])  # y_i
    positives = max(ranking.num_positives, 1)
    rank = step_at_zero(delta) + ranking.positives_above + ranking.negatives_above
    ranking_error = ranking.negatives_above / rank  # its target is 0, so this is all to correct
    sorting_error, sorting_gradient = _sorting_error(ranking.positive_scores, qualities, delta)
    return ErrorDrivenUpdate(
        ranking,
        losses=(ranking_error.sum() / positives, sorting_error.sum() / positives),
        pair_weights=(1 / rank / positives, None),
        positive_gradients=(-ranking_error / positives, sorting_gradient / positives),
    )


def _sorting_error(scores: Tensor, qualities: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Current minus target sorting error of every positive [P], and the gradient of their sum [P].

    The current error is the mean of 1 - y over the positives above i; the target is that over
    those among them that belong there, y >= y_i. Those with y < y_i share the blame.
    """
    errors, gradient = torch.zeros_like(scores), torch.zeros_like(scores)
    deficits = 1 - qualities
    for block, steps in steps_between_positives(scores, delta):
        belongs = qualities[None, :] >= qualities[block, None]
        current = steps @ deficits / steps.sum(1)
        in_order = steps * belongs
        target = in_order @ deficits / in_order.sum(1)
        violating = steps.masked_fill_(belongs, 0)
        violations = violating.sum(1)
        error = torch.where(violations > 0, current - target, 0.0)
        errors[block] = error
        gradient[block] -= error
        gradient += (error / violations.where(violations > 0, 1.0)) @ violating
    return errors, gradient


_rank_sort_loss = ranking_operator(
    "rank_sort_loss", _update, options="float delta, str group", losses=2
)
