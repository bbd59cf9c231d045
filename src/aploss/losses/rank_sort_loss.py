"""Rank & Sort loss: positives above negatives, and among themselves in the order of their IoU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .autograd import NonFinite, RankingLoss, RankingOperator
from .ranking.rules import RANK_SORT
from .traits import LossTraits, register_loss


class RankSort(NamedTuple):
    """The two parts of the Rank & Sort loss, scalars; their sum is the loss of the paper.

    Attributes:
        ranking, sorting: each has a gradient of its own.

    Example:
        >>> import torch
        >>> sum(RankSort(ranking=torch.tensor(0.5), sorting=torch.tensor(0.25)))
        tensor(0.7500)
    """

    ranking: Tensor
    sorting: Tensor


def rank_sort_loss(
    scores: Tensor,
    targets: Tensor,
    *,
    delta: float = 0.5,
    process_group: Any = None,
    groups: Tensor | int | None = None,
    weights: Tensor | None = None,
    non_finite: NonFinite = "raise",
) -> RankSort:
    """How far positives are ranked below negatives, and below positives of a lower IoU.

    From "Rank & Sort Loss for Object Detection and Instance Segmentation" (Oksuz et al., ICCV 2021), with the
    error-driven "identity update" as gradient. As in that paper rank(i) sums the step over all anchors including i
    itself, which therefore counts f(0): 1/2, or 1 for the Heaviside step. Takes O(N + P^2) time and O(P) memory for P
    positives among N scores.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; in (0, 1] for positives (the IoU of their predicted box), 0 negative, -1 ignored.
        delta: half the width of the step function; 0 is the Heaviside step.
        process_group, groups, weights, non_finite: see :func:`ap_loss`.

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
    return RankSort(*_OPERATOR.rank(scores, targets, None, delta, groups, weights, process_group, non_finite))


_OPERATOR = RankingOperator(RANK_SORT)


@register_loss("rank-sort")
class RankSortLoss(RankingLoss):
    """Rank & Sort loss; returns the pair :class:`RankSort`.

    Example:
        >>> import torch
        >>> RankSortLoss(delta=0)(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0.5, 1.0, 0.0]))
        RankSort(ranking=tensor(0.), sorting=tensor(0.1250))
    """

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
    _function = staticmethod(rank_sort_loss)

    def __init__(
        self,
        delta: float = 0.5,
        process_group: Any = None,
        groups: Tensor | int | None = None,
        weights: Tensor | Sequence[float] | None = None,
        non_finite: NonFinite = "raise",
    ) -> None:
        super().__init__(delta, process_group, groups, weights, non_finite)
