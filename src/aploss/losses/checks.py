"""Validation of the arguments of a loss: every message says which value is wrong, where, and what to pass instead."""

import math
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor


class _InvalidValueError(ValueError):
    """Base class of the errors that say which value is wrong, and where."""

    def __init__(self, message: str, *, value: float | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.value, self.index = value, index


class NonFiniteScoresError(_InvalidValueError):
    """A score that takes part in the loss is NaN or infinite.

    Attributes:
        value: the score; None for the logits of a softmax loss.
        index: its place in the flattened scores; None for the logits of a softmax loss.

    Example:
        >>> from aploss import ap_loss
        >>> try:
        ...     ap_loss(torch.tensor([0.0, torch.nan]), torch.tensor([1, 0]))
        ... except NonFiniteScoresError as error:
        ...     print(error.value, error.index)
        nan 1
    """


class InvalidTargetError(_InvalidValueError):
    """A target is neither positive, negative nor ignored.

    Attributes:
        value: the target.
        index: its place in the flattened targets.

    Example:
        >>> from aploss import ap_loss
        >>> try:
        ...     ap_loss(torch.zeros(2), torch.tensor([1, 255]))
        ... except InvalidTargetError as error:
        ...     print(error.value, error.index)
        255 1
    """


class OtherProcessError(ValueError):
    """Another process of the group was given invalid input, so that no process can continue.

    Attributes:
        cause: what was invalid: ``"score"`` (NaN or infinite), ``"target"`` or ``"arguments"``.

    Example:
        >>> OtherProcessError("score").cause
        'score'
    """

    def __init__(self, cause: Literal["score", "target", "arguments"]) -> None:
        super().__init__(f"another process of the group was given {_CAUSES[cause]}; its own error says which")
        self.cause = cause


_CAUSES = {"score": "a score that is NaN or infinite", "target": "an invalid target", "arguments": "invalid arguments"}


REAL_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TARGET_DTYPES = (*REAL_DTYPES, torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensors(**values: Tensor) -> None:
    """Raises ValueError unless both are dense tensors of numbers, with data, on one device."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            kind = "nested" if value.is_nested else f"{value.layout} of {value.dtype}"
            raise ValueError(f"{name} must be a dense tensor, got {kind}; convert it first, as with to_dense()")
        if value.is_meta or (not torch.compiler.is_compiling() and torch._is_zerotensor(value)):
            raise ValueError(f"{name} must hold data, got a tensor without any, as on the meta device")
    first, second = values.values()
    if first.device != second.device:
        raise ValueError(f"{' and '.join(values)} must be on one device, got {first.device} and {second.device}")


def check_scores_and_targets(scores: Tensor, targets: Tensor) -> None:
    """Raises ValueError unless both are tensors of one shape and device, and scores are floating point."""
    check_tensors(scores=scores, targets=targets)
    if scores.shape != targets.shape:
        hint = ""
        if scores.shape[:-1] == targets.shape:
            hint = "; for class indices, pass one-hot targets: torch.nn.functional.one_hot(targets, num_classes)"
        raise ValueError(
            f"scores and targets must have the same shape, got {tuple(scores.shape)} and {tuple(targets.shape)}{hint}"
        )
    if scores.dtype not in REAL_DTYPES:
        hint = "; are the arguments swapped? scores come first" if targets.is_floating_point() else ""
        hint = "; convert them first, with float()" if scores.is_floating_point() else hint
        raise ValueError(f"scores must be floating point, got {scores.dtype}{hint}")
    if targets.dtype not in TARGET_DTYPES:
        raise ValueError(f"targets must be integer, bool or floating point, got {targets.dtype}")


MIN_DELTA = 1e-6  # below, a float32 score and its neighbour may lie on both sides of a ramp


def check_ranking_options(delta: float, non_finite: str) -> None:
    """Raises ValueError unless delta is 0 or at least ``MIN_DELTA``, and non_finite ``"raise"`` or ``"nan"``."""
    if not (delta == 0 or MIN_DELTA <= delta < math.inf):
        raise ValueError(f"delta must be 0 (the Heaviside step) or a finite number >= {MIN_DELTA}, got {delta}")
    if non_finite not in ("raise", "nan"):
        raise ValueError(f"non_finite must be 'raise' or 'nan', got {non_finite!r}")


def check_weights(weights: Tensor, scores: Tensor) -> Tensor:
    """The weights, detached.

    Raises:
        ValueError: if they cannot be broadcast to the scores, or are complex or on another device.
    """
    if not isinstance(weights, Tensor):
        raise ValueError(f"weights must be a tensor, got {type(weights).__name__}")
    try:
        fits = torch.broadcast_shapes(weights.shape, scores.shape) == scores.shape
    except RuntimeError:
        fits = False
    if not fits or weights.device != scores.device or weights.is_complex():
        raise ValueError(
            f"weights must be real numbers on {scores.device} that can be broadcast to scores {tuple(scores.shape)}, "
            f"got {weights.dtype} of shape {tuple(weights.shape)} on {weights.device}"
        )
    return weights.detach().resolve_neg()


def check_box_losses(box_losses: Tensor, device: torch.device) -> None:
    """Raises ValueError unless they are a floating point tensor [P] on the device."""
    if not isinstance(box_losses, Tensor):
        raise ValueError(f"box_losses must be a tensor, got {type(box_losses).__name__}")
    if box_losses.ndim != 1 or not box_losses.is_floating_point():
        raise ValueError(
            f"box_losses must be floating point of shape [P], got {box_losses.dtype} of shape {tuple(box_losses.shape)}"
        )
    if box_losses.device != device:
        raise ValueError(f"scores and box_losses must be on one device, got {device} and {box_losses.device}")


def broadcast_groups(groups: Tensor | int, scores: Tensor) -> Tensor:
    """The group of every score, flat int64 [N]; see ``groups`` of :func:`ap_loss`.

    Raises:
        ValueError: if there is no such dimension, or the tensor does not fit the scores.
    """
    if isinstance(groups, Tensor):
        if groups.device != scores.device:
            raise ValueError(f"groups must be on the device of scores, {scores.device}, got {groups.device}")
        if groups.is_floating_point() or groups.is_complex():
            raise ValueError(f"groups must be integers, got {groups.dtype}")
        fits = groups.ndim <= scores.ndim and all(
            own in (1, other) for own, other in zip(groups.shape, scores.shape, strict=False)
        )
        if not fits:
            raise ValueError(
                f"groups must match the leading dimensions of scores, {tuple(scores.shape)}, or be 1 there, "
                f"got {tuple(groups.shape)}; groups=-1 makes one group per class"
            )
        numbers = groups.to(torch.int64).reshape(groups.shape + (1,) * (scores.ndim - groups.ndim))
        return numbers.expand(scores.shape).reshape(-1).contiguous()
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise ValueError(f"groups must be an integer tensor or a dimension, got {type(groups).__name__}")
    if not -scores.ndim <= groups < scores.ndim:
        raise ValueError(f"groups must be a dimension of scores, which have {scores.ndim}, got {groups}")
    shape = [1] * scores.ndim
    shape[groups] = -1
    numbers = torch.arange(scores.shape[groups], device=scores.device)
    return numbers.view(shape).expand(scores.shape).reshape(-1).contiguous()


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loss and its gradient are computed for scores of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def comparable_targets(targets: Tensor) -> Tensor:
    """Targets in a dtype that has -1, so that comparing with it cannot wrap around."""
    if targets.dtype in (torch.bool, torch.uint8, torch.float16, torch.bfloat16):
        return targets.to(torch.float32)
    return targets


def raise_invalid_target(targets: Tensor, scores: Tensor, *, soft: bool) -> NoReturn:
    """Raises the InvalidTargetError for the first invalid target, with its likely cause."""
    flat = comparable_targets(targets.detach().reshape(-1))
    positive = (flat > 0) & (flat <= 1) if soft else flat == 1
    index = _first(~(positive | (flat == 0) | (flat == -1)))
    value = flat[index].item()
    hint = ""
    if value in (255, -100):
        hint = f"; mark ignored anchors with -1: targets.masked_fill(targets == {value:.0f}, -1)"
    elif value == int(value) if math.isfinite(value) else False:
        hint = "; for class indices, pass one-hot targets: torch.nn.functional.one_hot"
    elif bool(((scores == 0) | (scores == 1) | (scores == -1)).all()):
        hint = "; are the arguments swapped? scores come first"
    elif not soft and 0 < value < 1:
        hint = "; only losses for IoU targets, such as rank_sort_loss, take soft targets"
    expected = "in (0, 1] (positive: its IoU)" if soft else "1 (positive)"
    message = f"targets must be {expected}, 0 (negative) or -1 (ignored), got {value} at flat index {index}{hint}"
    raise InvalidTargetError(message, value=value, index=index)


def raise_non_finite_score(scores: Tensor, targets: Tensor) -> NoReturn:
    """Raises the NonFiniteScoresError for the first score that is neither finite nor ignored."""
    flat, flat_targets = scores.detach().reshape(-1), comparable_targets(targets.reshape(-1))
    index = _first(~flat.isfinite() & (flat_targets != -1))
    value = flat[index].item()
    raise NonFiniteScoresError(f"scores must be finite, got {value} at flat index {index}", value=value, index=index)


def raise_invalid_box_loss(box_losses: Tensor) -> NoReturn:
    """Raises the ValueError for the first invalid box loss."""
    index = _first(~(box_losses.isfinite() & (box_losses >= 0)))
    raise ValueError(f"box_losses must be finite and not negative, got {box_losses[index].item()} at {index}")


def check_values(scores: Tensor, targets: Tensor, *, soft: bool = False) -> None:
    """Raises ValueError unless every target is 1 (in (0, 1] if soft), 0 or -1 and every score that counts is finite.

    For the losses that do not use the ranking engine. Reads the device once.
    """
    if scores.numel() == 0:
        return
    flat = comparable_targets(targets)
    ignored = flat == -1
    allowed = (((flat >= 0) & (flat <= 1) if soft else (flat == 0) | (flat == 1)) | ignored).sum()
    lowest, highest = torch.aminmax(scores.detach().masked_fill(ignored, 0.0))
    finite = (lowest > -torch.inf) & (highest < torch.inf)
    bad_targets, bad_scores = torch.stack([targets.numel() - allowed, (~finite).long()]).tolist()
    if bad_targets:
        raise_invalid_target(targets, scores, soft=soft)
    if bad_scores:
        raise_non_finite_score(scores, targets)


def _first(bad: Tensor) -> int:
    return int(bad.nonzero()[0, 0])


def check_distributed() -> None:
    """Raises ValueError if torch.distributed is not initialised."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ValueError("process_group needs torch.distributed: call torch.distributed.init_process_group() first")


def check_transforms(*arguments: Any) -> None:
    """Raises RuntimeError for tensors within a transform of ``torch.func``."""
    for value in arguments:
        if isinstance(value, Tensor) and torch.func.debug_unwrap(value) is not value:
            raise RuntimeError(
                "the losses of aploss cannot be called within transforms of torch.func (grad, vmap, ...): take their "
                "gradient with backward() or torch.autograd.grad, and rank several sets of scores with groups="
            )
