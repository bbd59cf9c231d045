"""Smoothed AP: sigmoid in place of the step, and plain gradient descent (Section 4.2.3)."""

import torch
from torch import Tensor

from .autograd import Operator, Values
from .checks import check_scores_and_targets, check_values, loss_dtype
from .traits import LossModule, LossTraits, register_loss

# Pairs held at a time: 16 MB in float32.
_BLOCK = 1 << 22


def smooth_ap_loss(
    scores: Tensor, targets: Tensor, *, temperature: float = 1.0, log_space: bool = False, eps: float = 1e-7
) -> Tensor:
    """1 - AP with sigmoid(x / temperature) in place of the step function, and its derivative.

    The approximate-gradient baseline of "Towards Accurate One-Stage Object Detection with AP-Loss" (Chen et al., CVPR
    2019), Section 4.2.3, the function F of Appendix 2. Unlike the other ranking losses it pairs every positive with
    every negative: O(P N) time for P positives among N scores, in blocks of bounded memory.

    Args:
        scores: logits, any shape, any floating dtype.
        targets: same shape; 1 positive, 0 negative, -1 ignored. Integer, bool or float.
        temperature: width of the sigmoid, > 0; the smaller, the nearer to AP and the flatter.
        log_space: return -log(AP + eps) instead of 1 - AP, to leave the initial state sooner.
        eps: see ``log_space``; > 0.

    Returns:
        scalar, float32 (float64 for float64 scores). 0 where there are no positives or no negatives.

    Raises:
        ValueError: shapes differ, a target is not allowed, a score is NaN or infinite, temperature
            or eps are not positive.

    Example:
        >>> import torch
        >>> scores = torch.tensor([0.0, 0.0], requires_grad=True)
        >>> loss = smooth_ap_loss(scores, torch.tensor([1, 0]))
        >>> loss.item()  # 0.5 / (1 + 0.5)
        0.3333...
    """
    check_scores_and_targets(scores, targets)
    for name, value in (("temperature", temperature), ("eps", eps)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a finite number > 0, got {value}")
    return _OPERATOR(scores, targets, float(temperature), log_space, float(eps))[0]


@register_loss("smooth-ap")
class SmoothAPLoss(LossModule):
    """Smoothed AP.

    Example:
        >>> import torch
        >>> SmoothAPLoss()(torch.tensor([0.0, 0.0]), torch.tensor([1, 0]))  # 0.5 / (1 + 0.5)
        tensor(0.3333)
    """

    traits = LossTraits(label="Smooth-AP", colour="#5a3a00", dashes=(0, (5, 1)), marker="X")
    _function = staticmethod(smooth_ap_loss)

    def __init__(self, temperature: float = 1.0, log_space: bool = False, eps: float = 1e-7) -> None:
        super().__init__(temperature=temperature, log_space=log_space, eps=eps)
        self(torch.zeros(1), torch.zeros(1))  # raises for options out of range


def _value_and_gradient(
    scores: Tensor, targets: Tensor, temperature: float, log_space: bool, eps: float, _: bool
) -> tuple[Values, Values]:
    check_values(scores, targets)
    flat = scores.detach().flatten().to(loss_dtype(scores.dtype))
    gradient = torch.zeros_like(flat)
    is_positive, is_negative = targets.flatten() == 1, targets.flatten() == 0
    positives, negatives = flat[is_positive], flat[is_negative]
    if len(positives) == 0 or len(negatives) == 0:
        return (flat.new_zeros(()),), (gradient.view(scores.shape),)
    # Autocast would do the matrix products below in half precision.
    with torch.autocast(scores.device.type, enabled=False):
        loss, on_positives, on_negatives = _smoothed_error(positives, negatives, temperature)
    scale = 1.0
    if log_space:
        precision = 1 - loss + eps
        loss, scale = -precision.log(), float(1 / precision)
    gradient[is_positive] = on_positives.mul_(scale)
    gradient[is_negative] = on_negatives.mul_(scale)
    return (loss.to(flat.dtype),), (gradient.view(scores.shape),)


_OPERATOR = Operator(
    "smooth_ap_loss", "Tensor scores, Tensor targets, float temperature, bool log_space, float eps", _value_and_gradient
)


def _smoothed_error(positives: Tensor, negatives: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """F of Appendix 2, and its derivatives on the positives [P] and on the negatives [N]."""
    count = len(positives)
    total = positives.new_zeros((), dtype=torch.float64)
    on_positives, on_negatives = torch.zeros_like(positives), torch.zeros_like(negatives)
    rows = max(1, _BLOCK // max(count, len(negatives)))
    for first in range(0, count, rows):
        block = slice(first, first + rows)
        own = positives[block, None]
        to_negatives = (negatives - own).div_(temperature).sigmoid_()  # S(x_ij / temperature) [rows, N]
        to_positives = (positives - own).div_(temperature).sigmoid_()  # [rows, P]
        to_positives.diagonal(first).zero_()  # k != i
        false_positives = to_negatives.sum(1, dtype=torch.float64)
        rank_among_positives = 1 + to_positives.sum(1, dtype=torch.float64)
        rank = rank_among_positives + false_positives
        total += (false_positives / rank).sum()
        # F_i = n / (1 + a + n): dF/dn = (1 + a) / rank^2, dF/da = -n / rank^2
        scale = 1 / (rank**2 * count * temperature)
        for steps, weights, gradient in (
            (to_negatives, rank_among_positives * scale, on_negatives),
            (to_positives, -false_positives * scale, on_positives),
        ):
            weights = weights.to(steps.dtype)
            slopes = steps.addcmul_(steps, steps, value=-1)  # S' = S (1 - S)
            gradient += weights @ slopes
            on_positives[block] -= weights * slopes.sum(1)
    return total / count, on_positives, on_negatives
