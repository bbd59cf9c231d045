"""The error-driven update of Section 3.2 as an operator of its own, for any activation function."""

from torch import Tensor

from .ranking.operator import loss_dtype
from .value_with_gradient import value_with_gradient

__all__ = ["error_driven"]


def error_driven(inputs: Tensor, outputs: Tensor, desired: Tensor) -> Tensor:
    """Makes ``outputs - desired`` the gradient of ``inputs``, whatever produced the outputs.

    The update of "Towards Accurate One-Stage Object Detection with AP-Loss" (Chen et al., CVPR
    2019), Eq. (8): the inputs x of an activation function L are moved by the error of its outputs,
    L* - L, so the gradient that ordinary backpropagation starts from is L - L*. The activation
    function is never differentiated, so it may be a step. Softmax gives the gradient of
    cross-entropy, the loss-augmented step that of the hinge loss (Appendix 4), and the L_ij of
    Eq. (3) that of the AP-loss. An output that does not matter has itself as desired output.

    Args:
        inputs: x, any shape, any floating dtype.
        outputs: L(x), same shape; gets no gradient.
        desired: L*, same shape; gets no gradient.

    Returns:
        scalar: the total error, the sum of |outputs - desired|. It is 0 if and only if nothing
        is left to correct; for the terms of the AP-loss it is the AP-loss times |P|.

    Raises:
        ValueError: the shapes differ, or the inputs are not floating point.

    Example:
        >>> import torch
        >>> logits = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        >>> one_hot = torch.tensor([0.0, 1.0, 0.0])
        >>> error_driven(logits, logits.softmax(0), one_hot).backward()
        >>> cross_entropy = torch.nn.functional.cross_entropy
        >>> expected = torch.autograd.grad(cross_entropy(logits, torch.tensor(1)), logits)[0]
        >>> torch.allclose(logits.grad, expected)
        True
    """
    for name, value in (("outputs", outputs), ("desired", desired)):
        if value.shape != inputs.shape:
            raise ValueError(
                f"{name} must have the shape of inputs, {tuple(inputs.shape)}, "
                f"got {tuple(value.shape)}"
            )
    if not inputs.is_floating_point():
        raise ValueError(f"inputs must be floating point, got {inputs.dtype}")
    loss: Tensor = _error_driven(inputs, outputs.detach(), desired.detach())[0]
    return loss


@value_with_gradient("error_driven")
def _error_driven(inputs: Tensor, outputs: Tensor, desired: Tensor) -> tuple[Tensor, Tensor]:
    dtype = loss_dtype(inputs.dtype)
    error = outputs.to(dtype) - desired.to(dtype)  # L - L* = -Delta x
    return error.abs().sum(), error.flatten()
