"""Average localisation-recall-precision loss: one ranking error for classification and boxes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .input_checks import check_delta, check_scores_and_targets
from .positive_pairs import step_at_zero, steps_between_positives
from .ranking.across_processes import group_name
from .ranking.engine import Ranking, rank_boxes
from .ranking.operator import loss_dtype, scale_gradients
from .traits import LossTraits, register_loss

__all__ = ["ALRP", "ALRPLoss", "alrp_loss"]

# With fewer false positives than this above it (the step function is a fraction), a positive has
# no negative to blame for the box losses above it: the quotient below would be rounding noise.
_NO_FALSE_POSITIVES = 1e-5


class ALRP(NamedTuple):
    """The two parts of the aLRP loss; their sum is the loss of the paper."""

    classification: Tensor
    localisation: Tensor


def alrp_loss(
    scores: Tensor,
    targets: Tensor,
    box_losses: Tensor,
    *,
    delta: float = 1.0,
    process_group: Any = None,
) -> ALRP:
    """The mean localisation-recall-precision error of the rankings cut off at every positive.

    From "A Ranking-based, Balanced Loss Function Unifying Classification and Localisation in
    Object Detection" (Oksuz et al., NeurIPS 2020): the error of a positive i is

        (false positives above i + its box loss + box losses of positives above i) / rank(i),

    its first term the classification part, the others the localisation part. The scores get the
    error-driven gradient, in which box losses count: a negative above i is also blamed for the
    badly placed positives there. The box losses get their true derivative; the ranks are
    constants. The step function is the piecewise one everywhere, so that the error never exceeds
    1 where no box loss does. The self-balancing of the two parts is left to the training loop.
    Takes O(N + P^2) for P positives among N scores.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored. Integer, bool or float.
        box_losses: one per positive, in the order of ``scores[targets == 1]`` [P]; finite, >= 0,
            such as (1 - IoU) / (1 - 0.5).
        delta: half the width of the step function; 0 is the Heaviside step.
        process_group: rank the boxes of all its processes together; see :func:`ap_loss`.

    Returns:
        the named pair (classification, localisation) of scalars, float32 (float64 for float64
        scores). 0 where there are no positives.

    Raises:
        ValueError: shapes differ, a target is not allowed, a score is NaN or infinite, there is
            not one box loss per positive, one is negative or not finite, delta < 0.

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
    check_scores_and_targets(scores, targets)
    check_delta(delta)
    if box_losses.ndim != 1 or not box_losses.is_floating_point():
        raise ValueError(
            "box_losses must be floating point of shape [P], got "
            f"{box_losses.dtype} of shape {tuple(box_losses.shape)}"
        )
    parts = _alrp_loss(scores, targets, box_losses, float(delta), group_name(process_group))
    return ALRP(parts[0], parts[1])


@register_loss("alrp")
class ALRPLoss(nn.Module):
    """See :func:`alrp_loss`."""

    traits = LossTraits(
        label="aLRP loss",
        colour="#56b4e9",
        dashes=(0, (3, 1, 1, 1, 1, 1)),
        marker="P",
        positives_need="box_loss",
        ranks_across_processes=True,
        box_loss="giou",
        box_weight="balanced",
    )

    def __init__(self, delta: float = 1.0, process_group: Any = None) -> None:
        super().__init__()
        check_delta(delta)
        self.delta = delta
        self.process_group = process_group

    def forward(self, scores: Tensor, targets: Tensor, box_losses: Tensor) -> ALRP:
        return alrp_loss(
            scores, targets, box_losses, delta=self.delta, process_group=self.process_group
        )

    def extra_repr(self) -> str:
        return f"delta={self.delta}"


@torch.library.custom_op("aploss::alrp_loss", mutates_args=())
def _alrp_loss(
    scores: Tensor, targets: Tensor, box_losses: Tensor, delta: float, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ranking = rank_boxes(scores, targets, delta, group=group)
    losses = _gather_box_losses(ranking, box_losses)  # E_loc(i)
    positives = max(ranking.num_positives, 1)
    false_positives = ranking.negatives_above
    rank = 1 + ranking.positives_above + false_positives
    losses_above, weight_of_losses = _pair_box_losses(ranking.positive_scores, losses, rank, delta)

    # Current minus desired error: the desired one has nothing above i.
    correctable = false_positives > _NO_FALSE_POSITIVES
    error = torch.where(correctable, (false_positives + losses_above) / rank, 0.0)
    blame = error / false_positives.where(correctable, 1.0)  # per f(x_ij), shared by the negatives
    gradient = ranking.gradient(blame / positives, -error / positives)

    dtype, device = loss_dtype(scores.dtype), scores.device
    box_gradient = weight_of_losses[ranking.own_places] * (ranking.num_processes / positives)
    return (
        ((false_positives / rank).sum() / positives).to(device, dtype),
        (((losses + losses_above) / rank).sum() / positives).to(device, dtype),
        gradient.to(device),
        box_gradient.to(box_losses.device, loss_dtype(box_losses.dtype)),
    )


@_alrp_loss.register_fake
def _(
    scores: Tensor, targets: Tensor, box_losses: Tensor, delta: float, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = loss_dtype(scores.dtype)
    return (
        scores.new_empty((), dtype=dtype),
        scores.new_empty((), dtype=dtype),
        scores.new_empty(scores.numel(), dtype=dtype),
        box_losses.new_empty(box_losses.numel(), dtype=loss_dtype(box_losses.dtype)),
    )


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], inputs[2], output[2], output[3])
    ctx.set_materialize_grads(True)


def _backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
    scores, box_losses, gradient, box_gradient = ctx.saved_tensors
    on_scores = scale_gradients([gradient], [upstream[0]], scores)
    on_boxes = scale_gradients([box_gradient], [upstream[1]], box_losses)
    return on_scores, None, on_boxes, None, None


_alrp_loss.register_autograd(_backward, setup_context=_keep_gradients)


def _gather_box_losses(ranking: Ranking, box_losses: Tensor) -> Tensor:
    """The box losses of all processes in the order of the ranking [P], float64.

    A wrong number of them travels as NaN, so that every process of the group hears of it.
    """
    expected, got = len(ranking.own_places), len(box_losses)
    own = box_losses if got == expected else box_losses.new_full((expected,), torch.nan)
    losses = ranking.from_all(own)
    if got != expected:
        raise ValueError(f"box_losses must have one value per positive, {expected}, got {got}")
    bad = losses[~(losses.isfinite() & (losses >= 0))]
    if len(bad):
        raise ValueError(f"box_losses must be finite and not negative, got {bad[0].item()}")
    return losses


def _pair_box_losses(
    scores: Tensor, losses: Tensor, rank: Tensor, delta: float
) -> tuple[Tensor, Tensor]:
    """Sums over pairs of positives, k != i.

    Returns:
        the box losses above every i, sum_k f(x_ik) E_k [P]; and what every box loss k weighs in
        the localisation part, 1 / rank(k) + sum_i f(x_ik) / rank(i) [P].
    """
    own = step_at_zero(delta)
    above, weights = -own * losses, (1 - own) / rank  # takes k = i out of the sums below
    for block, steps in steps_between_positives(scores, delta):
        above[block] += steps @ losses
        weights += (1 / rank[block]) @ steps
    return above, weights
