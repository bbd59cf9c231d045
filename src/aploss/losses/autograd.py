"""How a loss gets its gradient: operators for autograd and torch.compile.

The gradient of most losses here is no derivative of their value, but an error-driven update
(Section 3.2 of the AP-loss paper); for others, value and gradient share most of their work. An
operator therefore consists of two functions: one computes the values, and a state; the other the
gradient from that state and what comes from above. Two forms are made of them:

- run eagerly, the gradient is computed in the backward pass, already multiplied by what comes from
  above, so that its pass over the scores is also the last;
- ``torch.ops.aploss.NAME``, of fixed shapes, computes values and gradients at once; torch.compile
  puts it into its graphs.

Gradients are computed in float32 at least and rounded to the dtype of the scores only after the
multiplication, such as by the scale of a gradient scaler.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_delta, check_max_positives, check_process_group
from .ranking.engine import Options, rank_directly, rank_scores, resolve_group
from .ranking.problem import loss_dtype

Values = tuple[Tensor, ...]
RANKING_ARGUMENTS = (
    "Tensor scores, Tensor targets, Tensor? box_losses, float delta, bool interpolated, "
    "Tensor? groups, int? dimension, int? max_positives, str process_group"
)


class Operator:
    """A loss of K values with a gradient of its own; called with the arguments of ``compute``.

    Args:
        name: registered as ``torch.ops.aploss.NAME``.
        arguments: those of ``compute`` in the language of operator schemas.
        compute: returns the values, K scalars, and a state for ``gradient``.
        gradient: from the state and K scalars from above to one flat gradient for each
            differentiable argument; in the dtype of the argument, or, if the third argument is
            True, in that of its loss.
        pairs: which argument gets a gradient from which value; by default the first one from the
            only value. The first argument's dtype is that of the values.
        derivative: the gradients as differentiable operations, from the state, the inputs and what
            comes from above; without it a second derivative is refused.
        reads_device: whether it waits for numbers from the device, so that CUDA graphs cannot
            hold it.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        compute: Callable[..., tuple[Values, Any]],
        gradient: Callable[[Any, Values, bool], Sequence[Tensor]],
        *,
        pairs: Sequence[tuple[int, int]] = ((0, 0),),
        derivative: Callable[..., Sequence[Tensor]] | None = None,
        reads_device: bool = True,
    ) -> None:
        self.compute, self.gradient, self.derivative = compute, gradient, derivative
        self.pairs = tuple(pairs)
        self.num_values = 1 + max(value for _, value in pairs)
        self.inputs = tuple(sorted({argument for argument, _ in pairs}))
        returned = ", ".join(["Tensor"] * (self.num_values + len(self.pairs)))
        self.operator = torch.library.custom_op(
            f"aploss::{name}",
            self._at_once,
            mutates_args=(),
            schema=f"({arguments}) -> ({returned})",
            tags=(torch.Tag.cudagraph_unsafe,) if reads_device else (),
        )
        self.operator.register_fake(self._fake)
        self.operator.register_autograd(self._backward, setup_context=self._keep)

    def __call__(self, *arguments: Any) -> Values:
        if torch.compiler.is_compiling():
            return tuple(self.operator(*arguments)[: self.num_values])
        refuse_transforms(*arguments)
        values: Values = _Eager.apply(self, *arguments)
        return values

    def _at_once(self, *arguments: Any) -> Values:
        values, state = self.compute(*arguments)
        one, zero = values[0].new_ones(()), values[0].new_zeros(())
        gradients = []
        for argument, value in self.pairs:
            unit = tuple(one if k == value else zero for k in range(self.num_values))
            gradient = self.gradient(state, unit, True)[self.inputs.index(argument)]
            like = arguments[argument]
            gradients.append(gradient[: like.numel()].to(like.device))
        return *values, *gradients

    def _fake(self, *arguments: Any) -> Values:
        first = arguments[0]
        values = [first.new_empty((), dtype=loss_dtype(first.dtype))] * self.num_values
        inputs = [arguments[argument] for argument, _ in self.pairs]
        return *(value.clone() for value in values), *(
            tensor.new_empty(tensor.numel(), dtype=loss_dtype(tensor.dtype)) for tensor in inputs
        )

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Values) -> None:
        ctx.save_for_backward(*(inputs[k] for k in self.inputs), *output[self.num_values :])
        ctx.arguments = len(inputs)

    def _backward(self, ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        inputs, gradients = saved[: len(self.inputs)], saved[len(self.inputs) :]
        result: list[Any] = [None] * ctx.arguments
        for argument, like in zip(self.inputs, inputs, strict=True):
            own = [k for k, pair in enumerate(self.pairs) if pair[0] == argument]
            factors = [upstream[self.pairs[k][1]] for k in own]
            result[argument] = _scale_gradients([gradients[k] for k in own], factors, like)
        return tuple(result)


def refuse_transforms(*arguments: Any) -> None:
    """Raises RuntimeError for tensors within a transform of ``torch.func``."""
    for value in arguments:
        if isinstance(value, Tensor) and torch.func.debug_unwrap(value) is not value:
            raise RuntimeError(
                "the losses of aploss cannot be called within transforms of torch.func (grad, "
                "vmap, ...): take their gradient by backward() or torch.autograd.grad, and rank "
                "several sets of scores at once with groups="
            )


class _Eager(torch.autograd.Function):
    """The values of an operator, run eagerly."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, *arguments: Any) -> Values:
        values, ctx.state = operator.compute(*arguments)
        ctx.operator, ctx.arguments = operator, len(arguments)
        ctx.save_for_backward(*[arguments[k] for k in operator.inputs])
        return values

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        operator, inputs = ctx.operator, ctx.saved_tensors
        if torch.is_grad_enabled() and operator.derivative is not None:
            gradients = operator.derivative(ctx.state, *inputs, *upstream)
        elif torch.is_grad_enabled():  # somebody wants to differentiate what follows
            gradients = _Gradient.apply(_gradients, (operator, ctx.state), *upstream, *inputs)
        else:
            gradients = _gradients((operator, ctx.state), *upstream, *inputs)
        result: list[Any] = [None] * (1 + ctx.arguments)
        for argument, gradient in zip(operator.inputs, gradients, strict=True):
            result[1 + argument] = gradient
        return tuple(result)


class _Direct(torch.autograd.Function):
    """A ranking loss whose value and gradient are known already; see :func:`.cpu.rank_directly`."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, targets: Tensor, value: float, gradient: Tensor, options: tuple[str, float, bool]
    ) -> Tensor:
        ctx.save_for_backward(scores, targets)
        ctx.gradient, ctx.options = gradient, options
        return torch.scalar_tensor(value, dtype=scores.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        scores, targets = ctx.saved_tensors
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:  # a second pass through a graph that was retained
            backend, ranked = rank_scores(scores, targets, Options(*ctx.options))
            gradient = backend.gradient(ranked, (torch.ones_like(upstream),), scores.dtype).view(scores.shape)
        if torch.is_grad_enabled():
            gradient = _Gradient.apply(_times, gradient, upstream, scores)
        elif upstream.item() != 1:
            gradient.mul_(upstream)
        return gradient, None, None, None, None


class _Gradient(torch.autograd.Function):
    """A gradient that is connected to its inputs, so that a second derivative is noticed."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], state: Any, *tensors: Tensor) -> Any:
        return compute(state, *tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        _refuse_second_derivative(ctx)


def _gradients(of: tuple[Operator, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The gradients of an operator, from what comes from above and its inputs."""
    operator, state = of
    upstream, inputs = tensors[: operator.num_values], tensors[operator.num_values :]
    gradients = operator.gradient(state, upstream, False)
    return tuple(map(_like, gradients, inputs))


def _times(gradient: Tensor, upstream: Tensor, scores: Tensor) -> Tensor:
    return gradient * upstream


def _like(gradient: Tensor, like: Tensor) -> Tensor:
    """A flat gradient in the shape, dtype and device of what it belongs to."""
    if gradient.dtype != like.dtype or gradient.device != like.device:
        gradient = gradient.to(like)
    if like.numel() == 0:  # the one score that an empty ranking is made of
        gradient = gradient[:0]
    return gradient.view(like.shape)


def _refuse_second_derivative(ctx: Any, *upstream: Tensor) -> Any:
    raise RuntimeError(
        "this loss has no second derivative: its gradient is computed with its value, for most "
        "as an error-driven update. Leave it out of what is differentiated twice."
    )


@torch.library.custom_op("aploss::scale_gradients", mutates_args=())
def _scale_gradients(gradients: Sequence[Tensor], upstream: Sequence[Tensor], like: Tensor) -> Tensor:
    """sum_k upstream_k * gradients_k, in the shape and dtype of ``like``."""
    total = gradients[0] * upstream[0]
    for gradient, factor in zip(gradients[1:], upstream[1:], strict=True):
        total.addcmul_(gradient, factor)
    return total.to(like.dtype).view(like.shape)


@_scale_gradients.register_fake
def _(gradients: Sequence[Tensor], upstream: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


_scale_gradients.register_autograd(_refuse_second_derivative)


def scaled(gradient: Tensor, upstream: Values, exact: bool) -> tuple[Tensor]:
    """The gradient of an operator whose state is its gradient for 1 from above."""
    return (gradient * upstream[0],)


class RankingOperator(Operator):
    """The operator of a ranking loss; see :func:`aploss.losses.ap_loss` for the arguments."""

    def __init__(self, rule: str, pairs: Sequence[tuple[int, int]] = ((0, 0),)) -> None:
        self.rule = rule
        name = rule.replace("-", "_") + "_loss"
        super().__init__(name, RANKING_ARGUMENTS, self._rank, self._rank_gradient, pairs=pairs)

    def rank(
        self,
        scores: Tensor,
        targets: Tensor,
        box_losses: Tensor | None,
        delta: float,
        interpolated: bool,
        groups: Tensor | int | None,
        max_positives: int | None,
        process_group: Any,
    ) -> Values:
        """The values of the loss."""
        if process_group is not None:
            check_process_group(process_group)
        if not torch.compiler.is_compiling():
            refuse_transforms(scores, targets)
            if max_positives is groups is process_group is box_losses is None:
                known = rank_directly(scores, targets, self.rule, delta, interpolated)
                if known is not None:
                    value, gradient = known
                    if gradient is None:
                        return (torch.scalar_tensor(value, dtype=scores.dtype),)
                    direct: Tensor = _Direct.apply(scores, targets, value, gradient, (self.rule, delta, interpolated))
                    return (direct,)
            options = Options(self.rule, delta, interpolated, groups, max_positives, process_group)
            values: Values = _Eager.apply(self, scores, targets, box_losses, options)
            return values
        of_scores, dimension = (None, groups) if isinstance(groups, int) else (groups, None)
        name = "" if process_group is None else process_group.group_name
        return self(scores, targets, box_losses, delta, interpolated, of_scores, dimension, max_positives, name)

    def _rank(self, scores: Tensor, targets: Tensor, box_losses: Tensor | None, *rest: Any) -> tuple[Values, Any]:
        options = rest[0]
        if not isinstance(options, Options):  # in a compiled graph, as the schema has them
            delta, interpolated, groups, dimension, max_positives, name = rest
            groups = dimension if groups is None else groups
            group = resolve_group(name)
            options = Options(self.rule, delta, interpolated, groups, max_positives, group)
        state = rank_scores(scores, targets, options, box_losses)
        values = state[1].values
        if isinstance(values, Tensor):  # clones may be changed in place, views may not
            values = tuple(value.clone() for value in values.to(scores.device).unbind())
        return values, state

    def _rank_gradient(self, state: Any, upstream: Values, exact: bool) -> Sequence[Tensor]:
        backend, ranked = state
        problem = ranked.problem
        dtype = problem.dtype if exact else problem.scores.dtype
        on_scores = backend.gradient(ranked, upstream, dtype)
        if ranked.box_gradient is None:
            return (on_scores,)
        return on_scores, ranked.box_gradient * upstream[1]


class RankingLoss(nn.Module):
    """A ranking loss as a module: holds the options that all of them have, see :func:`aploss.losses.ap_loss`."""

    def __init__(self, delta: float = 1.0, process_group: Any = None, max_positives: int | None = None) -> None:
        super().__init__()
        check_delta(delta)
        check_max_positives(max_positives)
        self.delta = delta
        self.process_group = process_group
        self.max_positives = max_positives

    def options(self, groups: Tensor | int | None) -> dict[str, Any]:
        """The options of the function, by name."""
        names = ("delta", "process_group", "max_positives")
        return {"groups": groups, **{name: getattr(self, name) for name in names}}

    def extra_repr(self) -> str:
        return f"delta={self.delta}"


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
            raise ValueError(f"{name} must have the shape of inputs, {tuple(inputs.shape)}, got {tuple(value.shape)}")
    if not inputs.is_floating_point():
        raise ValueError(f"inputs must be floating point, got {inputs.dtype}")
    return _error_driven(inputs, outputs.detach(), desired.detach())[0]


def _total_error(inputs: Tensor, outputs: Tensor, desired: Tensor) -> tuple[Values, Tensor]:
    dtype = loss_dtype(inputs.dtype)
    error = outputs.to(dtype) - desired.to(dtype)  # L - L* = -Delta x
    return (error.abs().sum(),), error.flatten()


_error_driven = Operator(
    "error_driven", "Tensor inputs, Tensor outputs, Tensor desired", _total_error, scaled, reads_device=False
)
