"""Focal loss, the loss that the AP-loss replaces in RetinaNet."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autograd import Operator, Values
from .checks import check_scores_and_targets, comparable_targets
from .ranking.engine import check_status
from .ranking.problem import loss_dtype
from .traits import LossTraits, register_loss


def focal_loss(
    scores: Tensor,
    targets: Tensor,
    *,
    alpha: float = 0.25,
    gamma: float = 2.0,
    num_positives: float | Tensor | None = None,
    check_later: bool = False,
) -> Tensor:
    """Sigmoid focal loss, summed over all anchors and divided by the number of positives.

    From "Focal Loss for Dense Object Detection" (Lin et al., ICCV 2017), Eq. (5): an anchor whose
    label has the probability p_t costs -alpha_t (1 - p_t)^gamma log(p_t). The same as
    torchvision's ``sigmoid_focal_loss`` on the anchors that are not ignored. Value and gradient
    are computed together. Logits of any size give finite gradients.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored. Integer, bool or float.
        alpha: weight of the positives, in [0, 1]; the negatives have 1 - alpha.
        gamma: how much anchors that are right already are damped, >= 0; 0 is cross-entropy.
        num_positives: what the sum is divided by, such as the positives of all processes; by
            default the number of positive targets, at least 1.
        check_later: read nothing from the device, so that CUDA graphs can hold the loss. Input
            that is refused otherwise makes the loss NaN; the next call of a loss that reads says
            what it was.

    Returns:
        scalar, float32 (float64 for float64 scores). Without positives, the sum itself.

    Raises:
        ValueError: shapes differ, alpha or gamma are out of range, a target is not allowed or a
            score is NaN or infinite.

    Example:
        >>> import torch
        >>> scores = torch.tensor([0.0, 0.0, 5.0], requires_grad=True)
        >>> loss = focal_loss(scores, torch.tensor([1, 0, -1]))
        >>> loss  # (0.25 + 0.75) * 0.5 ** 2 * log(2)
        tensor(0.1733, grad_fn=<_EagerBackward>)
    """
    check_scores_and_targets(scores, targets)
    _check_options(alpha, gamma)
    (loss,) = _OPERATOR(scores, targets, alpha, gamma, num_positives is None, check_later)
    return loss if num_positives is None else loss / num_positives


@register_loss("focal")
class FocalLoss(nn.Module):
    """See :func:`focal_loss`."""

    traits = LossTraits(
        label="Focal loss", colour="#d55e00", dashes="--", marker="s", divides_by_positives=True, calibrated=True
    )

    def __init__(self, alpha: float = 0.25, gamma: float = 2.0, check_later: bool = False) -> None:
        super().__init__()
        _check_options(alpha, gamma)
        self.alpha = alpha
        self.gamma = gamma
        self.check_later = check_later

    def forward(self, scores: Tensor, targets: Tensor, num_positives: float | Tensor | None = None) -> Tensor:
        return focal_loss(
            scores,
            targets,
            alpha=self.alpha,
            gamma=self.gamma,
            num_positives=num_positives,
            check_later=self.check_later,
        )

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, gamma={self.gamma}"


@dataclass(eq=False)
class _State:
    """What the backward pass needs: the gradient, and what a second derivative is made of."""

    gradient: Tensor
    positive: Tensor
    ignored: Tensor
    count: Tensor | None
    options: tuple[float, float]


def _value_and_gradient(
    scores: Tensor, targets: Tensor, alpha: float, gamma: float, normalise: bool, later: bool
) -> tuple[Values, _State]:
    flat = comparable_targets(targets)
    positive, ignored = flat == 1, flat == -1
    logit = _wrong_logit(scores.detach(), positive, ignored)
    counts = torch.stack([positive.sum(), (flat == 0).sum(), ignored.sum()])
    wrong = logit.sigmoid()  # 1 - p_t
    damped = wrong**gamma
    losses = damped * _softplus(logit)
    # d/dz of sigmoid(z)^gamma softplus(z), which has no 0^(gamma - 1) in it.
    right = (1 - wrong).mul_(losses)
    slope = damped.mul_(wrong).add_(right, alpha=gamma)
    one = losses.new_ones(())
    weights = torch.where(positive, alpha * one, (1 - alpha) * one)
    total = losses.mul_(weights).sum()
    gradient = slope.mul_(torch.where(positive, -alpha * one, (1 - alpha) * one))
    bad_targets = targets.numel() - counts.sum()
    status = torch.stack([counts[0], counts[1], bad_targets, _not_finite(logit)])
    check_status(status, scores, targets, later=later)
    if later:
        total = total.masked_fill(status[2:].sum() > 0, torch.nan)
    count = counts[0].clamp(min=1) if normalise else None
    state = _State(gradient, positive, ignored, count, (alpha, gamma))
    return (total if count is None else total / count,), state


def _gradient(state: _State, upstream: Values, exact: bool) -> tuple[Tensor]:
    factor = upstream[0] if state.count is None else upstream[0] / state.count
    return ((state.gradient * factor).view(-1),)


def _derivative(state: _State, scores: Tensor, upstream: Tensor) -> tuple[Tensor]:
    """The gradient once more, of operations that can be differentiated."""
    alpha, gamma = state.options
    factor = upstream if state.count is None else upstream / state.count
    logit = _wrong_logit(scores, state.positive, state.ignored)
    wrong = logit.sigmoid()
    slope = wrong.pow(gamma) * (wrong + gamma * (1 - wrong) * _softplus(logit))
    weights = torch.where(state.positive, -alpha * factor, (1 - alpha) * factor)
    return ((slope * weights).to(scores.dtype),)


_OPERATOR = Operator(
    "focal_loss",
    "Tensor scores, Tensor targets, float alpha, float gamma, bool normalise, bool check_later",
    _value_and_gradient,
    _gradient,
    derivative=_derivative,
)


def _wrong_logit(scores: Tensor, positive: Tensor, ignored: Tensor) -> Tensor:
    """The logit z of being wrong: -s for positives and s for negatives.

    What is ignored is never wrong: its z is the lowest number, its loss and its slope are 0.
    """
    exact = scores.to(loss_dtype(scores.dtype))
    lowest = torch.finfo(exact.dtype).min
    return torch.where(positive, -exact, exact).masked_fill(ignored, lowest)


def _not_finite(logit: Tensor) -> Tensor:
    if logit.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=logit.device)
    lowest, highest = torch.aminmax(logit)
    return (~((lowest > -torch.inf) & (highest < torch.inf))).long()


def _softplus(logit: Tensor) -> Tensor:
    """log(1 + e^z), which is -log(p_t); equal to z in float64 beyond 40."""
    return F.softplus(logit, threshold=40.0)


def _check_options(alpha: float, gamma: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    if not 0 <= gamma < float("inf"):
        raise ValueError(f"gamma must be a finite number >= 0, got {gamma}")
