"""Operators that compute a loss together with its gradient, for autograd and torch.compile.

Where value and gradient share most of their work, or the gradient is no derivative, the backward
pass has only to multiply what the forward pass has found by what comes from above.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .ranking.operator import loss_dtype, scale_gradients

__all__ = ["value_with_gradient"]


def value_with_gradient(
    name: str,
) -> Callable[[Callable[..., tuple[Tensor, Tensor]]], Callable[..., tuple[Tensor, Tensor]]]:
    """Makes an operator of a function that returns a loss and its gradient on the first argument.

    The function gets detached tensors, and returns the loss as scalar and the gradient flat, both
    of :func:`loss_dtype` of its first argument. No other argument gets a gradient.

    Args:
        name: registered as ``torch.ops.aploss.NAME``.
    """

    def register(
        function: Callable[..., tuple[Tensor, Tensor]],
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        operator = torch.library.custom_op(f"aploss::{name}", function, mutates_args=())
        operator.register_fake(_fake)
        operator.register_autograd(_backward, setup_context=_keep_gradient)
        return operator

    return register


def _fake(inputs: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    dtype = loss_dtype(inputs.dtype)
    return inputs.new_empty((), dtype=dtype), inputs.new_empty(inputs.numel(), dtype=dtype)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.others = len(inputs) - 1


def _backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
    inputs, gradient = ctx.saved_tensors
    return scale_gradients([gradient], [upstream], inputs), *([None] * ctx.others)
