"""How a loss gets its gradient in eager mode and in graphs of torch.compile.

The gradient of most losses here is not the derivative of their value but an error-driven update
(Section 3.2 of the AP-loss paper); for others, value and gradient share most of their work. An
:class:`Operator` therefore computes both in the forward pass, and the backward pass multiplies the
gradient by the upstream gradient. There are two mechanisms around it:

- in eager mode, one ``autograd.Function``;
- in compiled graphs, one ``custom_op`` per loss, ``torch.ops.aploss.NAME``.

Gradients are kept in float32 at least and rounded to the dtype of the scores only after the
multiplication, for instance by the scale of a gradient scaler.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .checks import REAL_DTYPES, check_distributed, check_ranking_options, check_tensors, check_transforms, loss_dtype
from .ranking.engine import Options, rank_scores, resolve_group
from .ranking.rules import Rule
from .traits import LossModule

Values = tuple[Tensor, ...]
NonFinite = Literal["raise", "nan"]


class Operator:
    """A loss of K values with a gradient of its own; called with the arguments of ``compute``.

    Args:
        name: registered as ``torch.ops.aploss.NAME``.
        arguments: the arguments of ``compute``, as in an operator schema.
        compute: returns K scalars, and one gradient per pair, in the shape of the argument and the
            dtype of the loss; no gradients if its last argument, not in the schema, is False.
        pairs: which argument gets a gradient from which value; by default the first one from the
            only value. The first argument's dtype is that of the values.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        compute: Callable[..., tuple[Values, Values]],
        *,
        pairs: Sequence[tuple[int, int]] = ((0, 0),),
    ) -> None:
        self.compute, self.pairs = compute, tuple(pairs)
        self.num_values = 1 + max(value for _, value in pairs)
        returned = ", ".join(["Tensor"] * (self.num_values + len(self.pairs)))
        self.custom_op = torch.library.custom_op(
            f"aploss::{name}",
            self._values_and_gradients,
            mutates_args=(),
            schema=f"({arguments}) -> ({returned})",
            tags=(torch.Tag.cudagraph_unsafe,),  # the host reads from the device
        )
        self.custom_op.register_fake(self._fake)
        self.custom_op.register_autograd(self._backward, setup_context=self._setup_context)

    def __call__(self, *arguments: Any) -> Values:
        if torch.compiler.is_compiling():
            return tuple(self.custom_op(*arguments)[: self.num_values])
        check_transforms(*arguments)
        values: Values = _Eager.apply(self, *arguments)
        return values

    def _values_and_gradients(self, *arguments: Any) -> Values:
        values, gradients = self.compute(*arguments, True)
        return *values, *gradients

    def _fake(self, *arguments: Any) -> Values:
        first = arguments[0]
        values = [first.new_empty((), dtype=loss_dtype(first.dtype)) for _ in range(self.num_values)]
        inputs = [arguments[argument] for argument, _ in self.pairs]
        return *values, *(tensor.new_empty(tensor.shape, dtype=loss_dtype(tensor.dtype)) for tensor in inputs)

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Values) -> None:
        ctx.save_for_backward(*output[self.num_values :])
        ctx.num_inputs, ctx.dtypes = len(inputs), [inputs[argument].dtype for argument, _ in self.pairs]

    def _backward(self, ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(self.multiply(ctx.saved_tensors, ctx.dtypes, upstream, ctx.num_inputs))

    def multiply(
        self, gradients: Sequence[Tensor], dtypes: Sequence[torch.dtype], upstream: Sequence[Tensor], num_inputs: int
    ) -> list[Tensor | None]:
        """Sums the gradients of the pairs into one gradient per argument, cast to the dtype of the argument."""
        result: list[Any] = [None] * num_inputs
        for (argument, value), gradient in zip(self.pairs, gradients, strict=True):
            product, before = gradient * upstream[value], result[argument]
            result[argument] = product if before is None else before + product
        for (argument, _), dtype in zip(self.pairs, dtypes, strict=True):
            if result[argument].dtype != dtype:
                result[argument] = result[argument].to(dtype)
        return result


class _Eager(torch.autograd.Function):
    """The values of an operator in eager mode."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, *arguments: Any) -> Values:
        values, gradients = operator.compute(*arguments, any(ctx.needs_input_grad))
        ctx.operator, ctx.gradients, ctx.num_inputs = operator, gradients, len(arguments)
        ctx.dtypes = [arguments[argument].dtype for argument, _ in operator.pairs]
        return values

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return None, *ctx.operator.multiply(ctx.gradients, ctx.dtypes, upstream, ctx.num_inputs)
        with torch.no_grad():  # create_graph=True: a second derivative must be an error, not silently 0
            gradients = ctx.operator.multiply(ctx.gradients, ctx.dtypes, upstream, ctx.num_inputs)
        return None, *(g if g is None else _NoSecondDerivative.apply(g.requires_grad_()) for g in gradients)


class _NoSecondDerivative(torch.autograd.Function):
    """The identity; raises when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        raise RuntimeError("the losses of aploss have no second derivative: their gradient cannot be differentiated")


class RankingOperator(Operator):
    """The operator of a ranking loss.

    A new ranking loss is a :class:`~aploss.losses.ranking.rules.Rule` and a function that calls
    :meth:`rank`; no backend has to know of it.

    Example:
        >>> import torch
        >>> rule = Rule("reciprocal_rank", lambda p, n, negatives, f0, above: n / (1 + n))
        >>> operator = RankingOperator(rule)
        >>> operator.rank(torch.tensor([2.0, 1.0]), torch.tensor([0, 1]), delta=0)
        (tensor(0.5000),)
    """

    _ARGUMENTS = (
        "Tensor scores, Tensor targets, Tensor? box_losses, float delta, Tensor? groups, int? dimension, "
        "Tensor? weights, str process_group, str non_finite, float[]? thresholds, int? quantiles"
    )

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        pairs = {"": ((0, 0),), "sorting": ((0, 0), (0, 1)), "localisation": ((0, 0), (2, 1))}[rule.second]
        super().__init__(f"{rule.name}_loss", self._ARGUMENTS, self._rank, pairs=pairs)

    def rank(
        self,
        scores: Tensor,
        targets: Tensor,
        box_losses: Tensor | None = None,
        delta: float = 1.0,
        groups: Tensor | int | None = None,
        weights: Tensor | None = None,
        process_group: Any = None,
        non_finite: NonFinite = "raise",
        thresholds: Sequence[float] | int | None = None,
    ) -> Values:
        """The values of the loss; see :func:`aploss.losses.ap_loss` for the arguments."""
        if process_group is not None:
            check_distributed()
        if not torch.compiler.is_compiling():
            check_transforms(scores, targets)
            options = Options(self.rule, delta, groups, weights, process_group, non_finite, thresholds)
            values: Values = _Eager.apply(self, scores, targets, box_losses, options)
            return values
        of_scores, dimension = (None, groups) if isinstance(groups, int) else (groups, None)
        name = "" if process_group is None else process_group.group_name
        levels, quantiles = (None, thresholds) if isinstance(thresholds, int) else (thresholds, None)
        rest = (dimension, weights, name, non_finite, levels, quantiles)
        return self(scores, targets, box_losses, float(delta), of_scores, *rest)

    def _rank(self, scores: Tensor, targets: Tensor, box_losses: Tensor | None, *rest: Any) -> tuple[Values, Values]:
        options = rest[0]
        if not isinstance(options, Options):  # in a compiled graph, as the schema has them
            delta, groups, dimension, weights, name, non_finite, levels, quantiles, _ = rest
            groups, thresholds = dimension if groups is None else groups, quantiles if levels is None else levels
            options = Options(self.rule, delta, groups, weights, resolve_group(name), non_finite, thresholds)
        return rank_scores(scores, targets, options, box_losses, needs_gradient=rest[-1])


class RankingLoss(LossModule):
    """Base class of the ranking losses as modules: checks and keeps the options that all of them share.

    Args:
        delta, process_group, groups, weights, non_finite: see :func:`aploss.losses.ap_loss`.
    """

    def __init__(
        self,
        delta: float = 1.0,
        process_group: Any = None,
        groups: Tensor | int | None = None,
        weights: Tensor | Sequence[float] | None = None,
        non_finite: NonFinite = "raise",
    ) -> None:
        check_ranking_options(delta, non_finite)
        values = None if weights is None else torch.as_tensor(weights, dtype=torch.get_default_dtype())
        super().__init__(delta=delta, process_group=process_group, groups=groups, weights=values, non_finite=non_finite)

    def forward(
        self, scores: Tensor, targets: Tensor, groups: Tensor | int | None = None, weights: Tensor | None = None
    ) -> Any:
        """Computes the loss. ``groups`` and ``weights`` override the values given to the constructor."""
        return self._call(scores, targets, groups=groups, weights=weights)


def error_driven(inputs: Tensor, outputs: Tensor, desired: Tensor) -> Tensor:
    """Makes ``outputs - desired`` the gradient of ``inputs``, whatever produced the outputs.

    The update of "Towards Accurate One-Stage Object Detection with AP-Loss" (Chen et al., CVPR 2019), Eq. (8): the
    inputs x of an activation function L are moved by the error of its outputs, L* - L, so the gradient that ordinary
    backpropagation starts from is L - L*. The activation function is never differentiated, so it may be a step. Softmax
    gives the gradient of cross-entropy, the loss-augmented step that of the hinge loss (Appendix 4), and the L_ij of
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
        check_tensors(inputs=inputs, **{name: value})
        if value.shape != inputs.shape:
            raise ValueError(f"{name} must have the shape of inputs, {tuple(inputs.shape)}, got {tuple(value.shape)}")
    if inputs.dtype not in REAL_DTYPES:
        raise ValueError(f"inputs must be floating point, got {inputs.dtype}")
    return _error_driven(inputs, outputs.detach(), desired.detach())[0]


def _total_error(inputs: Tensor, outputs: Tensor, desired: Tensor, _: bool) -> tuple[Values, Values]:
    dtype = loss_dtype(inputs.dtype)
    error = outputs.to(dtype) - desired.to(dtype)  # L - L* = -Delta x
    return (error.abs().sum(),), (error,)


_error_driven = Operator("error_driven", "Tensor inputs, Tensor outputs, Tensor desired", _total_error)
