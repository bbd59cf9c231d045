"""Average localisation-recall-precision loss: one ranking error for classification and boxes."""

from typing import Any, NamedTuple

from torch import Tensor

from .autograd import NonFinite, RankingLoss, RankingOperator
from .ranking.rules import ALRP as ALRP_RULE
from .traits import LossTraits, register_loss


class ALRP(NamedTuple):
    """The two parts of the aLRP loss, scalars; their sum is the loss of the paper.

    Attributes:
        classification, localisation: each has a gradient of its own.

    Example:
        >>> import torch
        >>> sum(ALRP(classification=torch.tensor(0.5), localisation=torch.tensor(0.25)))
        tensor(0.7500)
    """

    classification: Tensor
    localisation: Tensor


def alrp_loss(
    scores: Tensor,
    targets: Tensor,
    box_losses: Tensor,
    *,
    delta: float = 1.0,
    process_group: Any = None,
    groups: Tensor | int | None = None,
    weights: Tensor | None = None,
    non_finite: NonFinite = "raise",
) -> ALRP:
    """The mean localisation-recall-precision error of the rankings cut off at every positive.

    From "A Ranking-based, Balanced Loss Function Unifying Classification and Localisation in
    Object Detection" (Oksuz et al., NeurIPS 2020): the error of a positive i is

        (false positives above i + its box loss + box losses of positives above i) / rank(i),

    its first term the classification part, the others the localisation part. The scores get the error-driven gradient,
    in which box losses count: a negative above i is also blamed for the badly placed positives there. The box losses
    get their true derivative; the ranks are constants. The step function is the piecewise one everywhere, so that the
    error never exceeds 1 where no box loss does. The self-balancing of the two parts is left to the training loop.
    Takes O(N + P log P) for P positives among N scores.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored. Integer, bool or float.
        box_losses: one per positive, in the order of ``scores[targets == 1]`` [P]; finite, >= 0,
            such as (1 - IoU) / (1 - 0.5).
        delta: half the width of the step function; 0 is the Heaviside step.
        process_group, groups, weights, non_finite: see :func:`ap_loss`.

    Returns:
        the named pair (classification, localisation) of scalars, float32 (float64 for float64
        scores). 0 where there are no positives.

    Raises:
        ValueError: as :func:`ap_loss`; there is not one box loss per positive, or one is negative or not finite.

    Example:
        >>> import torch
        >>> scores = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
        >>> box_losses = torch.tensor([0.5], requires_grad=True)
        >>> loss = alrp_loss(scores, torch.tensor([0, 1, 0]), box_losses, delta=0)
        >>> loss.classification.item(), loss.localisation.item()  # 1 / 2 and 0.5 / 2
        (0.5, 0.25)
        >>> (loss.classification + loss.localisation).backward()
        >>> scores.grad.tolist(), box_losses.grad.tolist()
        ([0.5, -0.5, 0.0], [0.5])
    """
    return ALRP(*_OPERATOR.rank(scores, targets, box_losses, delta, groups, weights, process_group, non_finite))


# Scores move by the classification part alone, box losses by the localisation part.
_OPERATOR = RankingOperator(ALRP_RULE)


@register_loss("alrp")
class ALRPLoss(RankingLoss):
    """aLRP loss; returns the pair :class:`ALRP`.

    Example:
        >>> import torch
        >>> ALRPLoss(delta=0)(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0, 1, 0]), torch.tensor([0.5]))
        ALRP(classification=tensor(0.5000), localisation=tensor(0.2500))
    """

    traits = LossTraits(
        label="aLRP loss",
        colour="#56b4e9",
        dashes=(0, (3, 1, 1, 1, 1, 1)),
        marker="P",
        positive_targets="box_loss",
        ranks_across_processes=True,
        groups=True,
        box_loss="giou",
        box_weight="balanced",
    )
    _function = staticmethod(alrp_loss)

    def forward(  # type: ignore[override]
        self,
        scores: Tensor,
        targets: Tensor,
        box_losses: Tensor,
        groups: Tensor | int | None = None,
        weights: Tensor | None = None,
    ) -> ALRP:
        """See :func:`alrp_loss`."""
        loss: ALRP = self._call(scores, targets, box_losses, groups=groups, weights=weights)
        return loss
