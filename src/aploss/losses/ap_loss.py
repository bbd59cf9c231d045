"""AP-loss: average precision as a loss, by error-driven update (Algorithm 1 of the paper)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .autograd import NonFinite, RankingLoss, RankingOperator
from .ranking.rules import AP, PLAIN_AP
from .traits import LossTraits, register_loss


def ap_loss(
    scores: Tensor,
    targets: Tensor,
    *,
    delta: float = 1.0,
    interpolated: bool = True,
    process_group: Any = None,
    groups: Tensor | int | None = None,
    weights: Tensor | None = None,
    non_finite: NonFinite = "raise",
) -> Tensor:
    """1 - average precision of the ranking of all anchors by their scores.

    From "Towards Accurate One-Stage Object Detection with AP-Loss" (Chen et al., CVPR 2019): Eq. (5)-(7) with the
    piecewise step function of Section 3.4 and, by default, the interpolated precision of Algorithm 1::

        loss = sum_i w_i e_i / sum_i w_i,    e_i = n_i / (1 + p_i + n_i)

    over the positives i, where n_i and p_i are the sums of f(s_j - s_i) over the negatives and the other positives, and
    w_i are the weights, 1 by default. The gradient is the paper's error-driven g_i, exactly; it is not the derivative
    of the value. Takes O(N + P log P) for P positives among N scores.

    Args:
        scores: logits (not probabilities), any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored. Integer, bool or float.
        delta: half the width of the step function, at least 1e-6; or 0 for the Heaviside step, with
            which, and without interpolation, the loss is 1 - average precision.
        interpolated: make the precision monotone in the score, as benchmarks do.
        process_group: rank the scores of all its processes together, as if on one device. The gradient is then that of
            the whole batch times the number of processes, which the averaging of DistributedDataParallel undoes.
        groups: rank scores within their group only, and average the losses of the groups that have positives. A
            dimension of the scores (0 for one ranking per image of [B, A, K] logits, -1 for one per class), or an
            integer tensor that matches the leading dimensions of the scores or is 1 there: [B], [B, 1, K], ...; equal
            numbers are one group, also in different processes.
        weights: importance of each positive, not negative; broadcast to the scores, so that [K] are
            class weights of [B, A, K] logits. The ranks themselves count every positive once.
        non_finite: ``"raise"`` an error for a score that is NaN or infinite, or return ``"nan"`` as
            loss and gradient, so that ``torch.amp.GradScaler`` skips the step.

    Returns:
        scalar in [0, 1], float32 (float64 for float64 scores). 0 if there are no positives or no negatives.

    Raises:
        ValueError: if shapes differ, an option is out of range, a target is invalid (:class:`InvalidTargetError`) or a
            score is NaN or infinite (:class:`NonFiniteScoresError`).

    Example:
        >>> import torch
        >>> scores = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
        >>> loss = ap_loss(scores, torch.tensor([0, 1, 0]), delta=0)
        >>> loss.backward()
        >>> loss.item(), scores.grad.tolist()
        (0.5, [0.5, -0.5, 0.0])
    """
    operator = _INTERPOLATED if interpolated else _PLAIN
    return operator.rank(scores, targets, None, delta, groups, weights, process_group, non_finite)[0]


_INTERPOLATED, _PLAIN = RankingOperator(AP), RankingOperator(PLAIN_AP)


@register_loss("ap")
class APLoss(RankingLoss):
    """AP-loss; a drop-in replacement for focal loss on logits of any shape.

    Example:
        >>> import torch
        >>> loss_function = APLoss(groups=0)
        >>> logits = torch.zeros(2, 3, 4, requires_grad=True)
        >>> targets = torch.zeros(2, 3, 4)
        >>> targets[:, 0, 1] = 1
        >>> loss_function(logits, targets)  # 5.5 of 11 negatives above each positive: 5.5 / 6.5
        tensor(0.8462, grad_fn=<_EagerBackward>)
    """

    traits = LossTraits(label="AP-loss", colour="#0072b2", ranks_across_processes=True, groups=True)
    _function = staticmethod(ap_loss)

    def __init__(
        self,
        delta: float = 1.0,
        interpolated: bool = True,
        process_group: Any = None,
        groups: Tensor | int | None = None,
        weights: Tensor | Sequence[float] | None = None,
        non_finite: NonFinite = "raise",
    ) -> None:
        super().__init__(delta, process_group, groups, weights, non_finite)
        self._keep(interpolated=interpolated)
