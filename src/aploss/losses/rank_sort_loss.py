"""Rank & Sort loss: positives above negatives, and among themselves in the order of their IoU."""

from typing import Any, NamedTuple

from torch import Tensor

from .autograd import RankingLoss, RankingOperator
from .traits import LossTraits, register_loss


class RankSort(NamedTuple):
    """The two parts of the Rank & Sort loss; their sum is the loss of the paper."""

    ranking: Tensor
    sorting: Tensor


def rank_sort_loss(
    scores: Tensor,
    targets: Tensor,
    *,
    delta: float = 0.5,
    process_group: Any = None,
    groups: Tensor | int | None = None,
    max_positives: int | None = None,
) -> RankSort:
    """How far positives are ranked below negatives, and below positives of a lower IoU.

    From "Rank & Sort Loss for Object Detection and Instance Segmentation" (Oksuz et al., ICCV
    2021), with the error-driven "identity update" as gradient. As in that paper rank(i) sums the
    step over all anchors including i itself, which therefore counts f(0): 1/2, or 1 for the
    Heaviside step. Takes O(N + P^2) time and O(P) memory for P positives
    among N scores.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; in (0, 1] for positives (the IoU of their predicted box), 0 negative,
            -1 ignored.
        delta: half the width of the step function; 0 is the Heaviside step.
        groups, max_positives, process_group: see :func:`ap_loss`.

    Returns:
        the named pair (ranking, sorting) of scalars, float32 (float64 for float64 scores), each
        with a gradient of its own. 0 where there are no positives.

    Raises:
        ValueError: as :func:`ap_loss`.

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
    parts = _OPERATOR.rank(scores, targets, None, delta, True, groups, max_positives, process_group)
    return RankSort(*parts)


_OPERATOR = RankingOperator("rank-sort", pairs=((0, 0), (0, 1)))


@register_loss("rank-sort")
class RankSortLoss(RankingLoss):
    """See :func:`rank_sort_loss`."""

    traits = LossTraits(
        label="Rank & Sort",
        colour="#cc79a7",
        dashes=(0, (8, 2)),
        marker="v",
        positive_targets="iou",
        ranks_across_processes=True,
        groups=True,
        box_loss="giou",
        box_weight="balanced",
        weight_boxes_by_score=True,
    )

    def __init__(self, delta: float = 0.5, process_group: Any = None, max_positives: int | None = None) -> None:
        super().__init__(delta, process_group, max_positives)

    def forward(self, scores: Tensor, targets: Tensor, groups: Tensor | int | None = None) -> RankSort:
        return rank_sort_loss(scores, targets, **self.options(groups))
