"""AP-loss: average precision as a loss, by error-driven update (Algorithm 1 of the paper)."""

from typing import Any

from torch import Tensor

from .autograd import RankingLoss, RankingOperator
from .traits import LossTraits, register_loss


def ap_loss(
    scores: Tensor,
    targets: Tensor,
    *,
    delta: float = 1.0,
    interpolated: bool = True,
    process_group: Any = None,
    groups: Tensor | int | None = None,
    max_positives: int | None = None,
) -> Tensor:
    """1 - average precision of the ranking of all anchors by their scores.

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
        process_group: rank the scores of all its processes together, as if on one device. The
            gradient is then that of the whole batch times the number of processes, which the
            averaging of DistributedDataParallel undoes.
        groups: rank scores within their group alone, and average the losses of the groups that
            have positives. An integer tensor of the shape of the scores (equal numbers are one
            group, also in different processes), or a dimension of them: 0 for one ranking per
            image of [B, A, K] logits, -1 for one per class.
        max_positives: there are no more positives than that (in each process). On a GPU nothing is
            read from the device then, so that CUDA graphs can hold the loss. More positives, or
            input that is refused otherwise, make the loss and its gradient NaN; the next call
            without this option says what it was.

    Returns:
        scalar in [0, 1], float32 (float64 for float64 scores). 0 where there are no positives or
        no negatives.

    Raises:
        ValueError: shapes differ, a target is not allowed, a score is NaN or infinite (then it is
            a :class:`NonFiniteScoresError`), an option is out of range.

    Example:
        >>> import torch
        >>> scores = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
        >>> loss = ap_loss(scores, torch.tensor([0, 1, 0]), delta=0)
        >>> loss.backward()
        >>> loss.item(), scores.grad.tolist()
        (0.5, [0.5, -0.5, 0.0])
    """
    return _OPERATOR.rank(scores, targets, None, delta, interpolated, groups, max_positives, process_group)[0]


_OPERATOR = RankingOperator("ap")


@register_loss("ap")
class APLoss(RankingLoss):
    """See :func:`ap_loss`."""

    traits = LossTraits(label="AP-loss", colour="#0072b2", ranks_across_processes=True, groups=True)

    def __init__(
        self, delta: float = 1.0, interpolated: bool = True, process_group: Any = None, max_positives: int | None = None
    ) -> None:
        super().__init__(delta, process_group, max_positives)
        self.interpolated = interpolated

    def forward(self, scores: Tensor, targets: Tensor, groups: Tensor | int | None = None) -> Tensor:
        return ap_loss(scores, targets, interpolated=self.interpolated, **self.options(groups))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, interpolated={self.interpolated}"
