"""AP-loss: average precision as a loss, by error-driven update (Algorithm 1 of the paper)."""

from typing import Any

import torch
from torch import Tensor, nn

from .input_checks import check_delta, check_scores_and_targets
from .ranking.across_processes import group_name
from .ranking.engine import rank_boxes
from .ranking.operator import ErrorDrivenUpdate, ranking_operator
from .traits import LossTraits, register_loss

__all__ = ["APLoss", "ap_loss"]


def ap_loss(
    scores: Tensor,
    targets: Tensor,
    *,
    delta: float = 1.0,
    interpolated: bool = True,
    process_group: Any = None,
) -> Tensor:
    """1 - average precision of the ranking of all boxes by their scores.

    From "Towards Accurate One-Stage Object Detection with AP-Loss" (Chen et al., CVPR 2019):
    Eq. (5)-(7) with the piecewise step function of Section 3.4 and, by default, the interpolated
    precision of Algorithm 1. The gradient is the paper's error-driven g_i, exactly; it is not a
    derivative of the value. Takes O(N + P log P) for P positives among N scores.

    Args:
        scores: logits (not probabilities), any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored. Integer, bool or float.
        delta: half the width of the step function; 0 is the Heaviside step, with which, and
            without interpolation, the loss is 1 - average precision.
        interpolated: make the precision monotone in the score, as benchmarks do.
        process_group: rank the boxes of all its processes together, as if on one device. The
            gradient is then that of the whole batch times the number of processes, which the
            averaging of DistributedDataParallel undoes.

    Returns:
        scalar in [0, 1], float32 (float64 for float64 scores). 0 where there are no positives or
        no negatives.

    Raises:
        ValueError: shapes differ, a target is not allowed, a score is NaN or infinite, delta < 0.

    Example:
        >>> import torch
        >>> scores = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
        >>> loss = ap_loss(scores, torch.tensor([0, 1, 0]), delta=0)
        >>> loss.backward()
        >>> loss.item(), scores.grad.tolist()
        (0.5, [0.5, -0.5, 0.0])
    """
    check_scores_and_targets(scores, targets)
    check_delta(delta)
    group = group_name(process_group)
    loss: Tensor = _ap_loss(scores, targets, float(delta), interpolated, group)[0]
    return loss


@register_loss("ap")
class APLoss(nn.Module):
    """See :func:`ap_loss`."""

    traits = LossTraits(
        label="AP-loss",
        colour="#0072b2",
        ranks_across_processes=True,
    )

    def __init__(
        self, delta: float = 1.0, interpolated: bool = True, process_group: Any = None
    ) -> None:
        super().__init__()
        check_delta(delta)
        self.delta = delta
        self.interpolated = interpolated
        self.process_group = process_group

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        return ap_loss(
            scores,
            targets,
            delta=self.delta,
            interpolated=self.interpolated,
            process_group=self.process_group,
        )

    def extra_repr(self) -> str:
        return f"delta={self.delta}, interpolated={self.interpolated}"


def _update(
    scores: Tensor, targets: Tensor, delta: float, interpolated: bool, group: str
) -> ErrorDrivenUpdate:
    ranking = rank_boxes(scores, targets, delta, group=group)
    positives = max(ranking.num_positives, 1)
    rank = 1 + ranking.positives_above + ranking.negatives_above
    error = ranking.negatives_above / rank  # [P] sum_j L_ij = 1 - precision, Eq. (5)
    # Algorithm 1, lines 8-11: on the way up, the precision never falls.
    kept = error.cummin(0).values if interpolated and len(error) else error
    # Line 11 scales the row L_i; where there is no error there is nothing to scale.
    row_scale = torch.where(error > 0, kept / error, 1.0)
    return ErrorDrivenUpdate(
        ranking,
        losses=(kept.sum() / positives,),
        pair_weights=(row_scale / rank / positives,),
        positive_gradients=(-kept / positives,),
    )


_ap_loss = ranking_operator(
    "ap_loss", _update, options="float delta, bool interpolated, str group", losses=1
)
