"""Ranking losses as torch operators, so that autograd and torch.compile know them.

A loss states its rule: from scores and targets to its values and, for each, the error-driven update
(Section 3.2), which is no derivative. From the rule two forms are made:

- run eagerly, the gradient on the scores is computed in the backward pass, already multiplied by
  what comes from above, so that the second pass over the scores is also the last;
- ``torch.ops.aploss.NAME``, of fixed shapes, computes values and gradients at once; torch.compile
  puts it into its graphs.

Gradients are computed in float32 at least and rounded to the dtype of the scores only after the
multiplication, such as by the scale of a gradient scaler.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .engine import Ranking

__all__ = ["ErrorDrivenUpdate", "loss_dtype", "ranking_operator", "scale_gradients"]


class ErrorDrivenUpdate(NamedTuple):
    """What a rule returns: K losses and how each moves the scores.

    Attributes:
        ranking: of the boxes.
        losses: K scalars.
        pair_weights: K times the factors of f(s_j - s_i) [P], or None where the negatives do not
            move; see :meth:`Ranking.gradient`.
        positive_gradients: K times the gradient on the positives [P].
    """

    ranking: Ranking
    losses: tuple[Tensor, ...]
    pair_weights: tuple[Tensor | None, ...]
    positive_gradients: tuple[Tensor, ...]

    def gradient(self, upstream: Sequence[Tensor]) -> Tensor:
        """Flat gradient on the scores of sum_k upstream_k * loss_k."""
        factors = [factor.detach().to(self.losses[0]) for factor in upstream]
        moving = [f * w for f, w in zip(factors, self.pair_weights, strict=True) if w is not None]
        positive = [f * g for f, g in zip(factors, self.positive_gradients, strict=True)]
        return self.ranking.gradient(sum(moving) if moving else None, sum(positive))  # type: ignore[arg-type]


Rule = Callable[..., ErrorDrivenUpdate]


def ranking_operator(name: str, rule: Rule, *, options: str, losses: int) -> Callable[..., Any]:
    """Makes a loss out of its rule.

    Args:
        name: registered as ``torch.ops.aploss.NAME``.
        rule: called with scores, targets and the options.
        options: the options in the language of operator schemas, such as "float delta, str group".
        losses: number of values K.

    Returns:
        a function of scores, targets and the options that returns a tuple of K losses.
    """
    returned = ", ".join(["Tensor"] * 2 * losses)
    schema = f"(Tensor scores, Tensor targets, {options}) -> ({returned})"

    def compute(scores: Tensor, targets: Tensor, *chosen: Any) -> tuple[Tensor, ...]:
        update = rule(scores, targets, *chosen)
        one, zero = torch.ones(()), torch.zeros(())
        gradients = [
            update.gradient([one if k == this else zero for k in range(losses)])
            for this in range(losses)
        ]
        return *_as_returned(update.losses, scores), *(g.to(scores.device) for g in gradients)

    operator = torch.library.custom_op(f"aploss::{name}", compute, mutates_args=(), schema=schema)

    def fake(scores: Tensor, targets: Tensor, *chosen: Any) -> tuple[Tensor, ...]:
        dtype = loss_dtype(scores.dtype)
        shapes: list[tuple[int, ...]] = [()] * losses + [(scores.numel(),)] * losses
        return tuple(scores.new_empty(shape, dtype=dtype) for shape in shapes)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0], *output[losses:])
        ctx.others = len(inputs) - 1

    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        scores, *gradients = ctx.saved_tensors
        gradient = scale_gradients(gradients, list(upstream[:losses]), scores)
        return gradient, *([None] * ctx.others)

    operator.register_fake(fake)
    operator.register_autograd(backward, setup_context=setup_context)

    def loss(scores: Tensor, targets: Tensor, *chosen: Any) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return tuple(operator(scores, targets, *chosen)[:losses])
        return tuple(_Loss.apply(scores, targets, rule, chosen))

    return loss


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loss and its gradient are computed for scores of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _as_returned(losses: Sequence[Tensor], scores: Tensor) -> tuple[Tensor, ...]:
    return tuple(loss.to(scores.device, loss_dtype(scores.dtype)) for loss in losses)


def _refuse_second_derivative(ctx: Any, *upstream: Tensor) -> Any:
    raise RuntimeError(
        "this loss has no second derivative: its gradient is computed with its value, for most "
        "as an error-driven update. Leave it out of what is differentiated twice."
    )


class _Loss(torch.autograd.Function):
    """The losses of a rule, run eagerly."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, targets: Tensor, rule: Rule, options: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        update = rule(scores, targets, *options)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(scores)
            ctx.update = update
        return _as_returned(update.losses, scores)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (scores,) = ctx.saved_tensors
        return _Gradient.apply(scores, ctx.update, *upstream), None, None, None


class _Gradient(torch.autograd.Function):
    """The gradient of a rule, connected to the scores so that a second derivative is noticed."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, update: ErrorDrivenUpdate, *upstream: Tensor) -> Tensor:
        return update.gradient(upstream).to(scores.device, scores.dtype).view(scores.shape)

    backward = staticmethod(_refuse_second_derivative)


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


scale_gradients.register_autograd(_refuse_second_derivative)
