"""Ranking losses as torch operators, so that autograd and torch.compile know them.

An operator returns the values of a loss and, with them, its error-driven gradient: the update of
Section 3.2 is no derivative, so there is nothing to differentiate in the backward pass but a
product. The gradient is kept in float32 at least and rounded to the dtype of the scores only after
it was multiplied by what comes from above, such as the scale of a gradient scaler.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["loss_dtype", "register_error_driven", "scale_gradients"]


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loss and its gradient are computed for scores of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.custom_op("aploss::scale_gradients", mutates_args=())
def scale_gradients(
    gradients: Sequence[Tensor], upstream: Sequence[Tensor], like: Tensor
) -> Tensor:
    """sum_k upstream_k * gradients_k, in the shape and dtype of ``like``."""
    total = gradients[0] * upstream[0]
    for gradient, factor in zip(gradients[1:], upstream[1:], strict=True):
        total.addcmul_(gradient, factor)
    return total.to(like.dtype).view(like.shape)


@scale_gradients.register_fake
def _(gradients: Sequence[Tensor], upstream: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _refuse_second_derivative(ctx: Any, gradient: Tensor) -> None:
    raise RuntimeError(
        "a ranking loss has no second derivative: its gradient is an error-driven update, "
        "not the derivative of a function. Leave it out of what is differentiated twice."
    )


scale_gradients.register_autograd(_refuse_second_derivative)


def register_error_driven(operator: Any, losses: int) -> None:
    """Registers the backward pass of an operator.

    Args:
        operator: takes the scores first, then its other arguments, none of which gets a gradient;
            returns ``losses`` scalars, then as many flat gradients on the scores.
        losses: how many.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0], *output[losses:])
        ctx.others = len(inputs) - 1
        ctx.set_materialize_grads(True)

    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        scores, *gradients = ctx.saved_tensors
        gradient = scale_gradients(gradients, list(upstream[:losses]), scores)
        return gradient, *([None] * ctx.others)

    operator.register_autograd(backward, setup_context=setup_context)
