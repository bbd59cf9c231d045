"""Checks of what a user hands to a loss: every message says which value, where, what is meant."""

import math
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

HARD_TARGETS = "1 (positive), 0 (negative) or -1 (ignored)"
SOFT_TARGETS = "in (0, 1] (positive: its IoU), 0 (negative) or -1 (ignored)"


class NonFiniteScoresError(ValueError):
    """A score that takes part in the loss is NaN or infinite.

    Attributes:
        value: the score; None if it is not known any more.
        index: its place in the flattened scores; None if it is not known any more.
    """

    def __init__(self, message: str, *, value: float | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.value = value
        self.index = index


class OtherProcessError(ValueError):
    """Another process of the group refused its own input, so that no process can go on.

    Attributes:
        cause: what it refused: ``"score"`` (NaN or infinite), ``"target"`` or ``"arguments"``.
    """

    def __init__(self, cause: Literal["score", "target", "arguments"]) -> None:
        super().__init__(f"another process of the group was given {_CAUSES[cause]}; its own error says which")
        self.cause = cause


_CAUSES = {
    "score": "a score that is NaN or infinite",
    "target": "a target that is not allowed",
    "arguments": "arguments that do not fit together",
}


def check_tensors(**values: Tensor) -> None:
    """Raises ValueError unless both are tensors, on one device."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    first, second = (value.device for value in values.values())
    if first != second:
        raise ValueError(f"{' and '.join(values)} must be on one device, got {first} and {second}")


def check_scores_and_targets(scores: Tensor, targets: Tensor) -> None:
    """Raises ValueError unless both are tensors of one shape and device, and scores are floats."""
    check_tensors(scores=scores, targets=targets)
    if scores.shape != targets.shape:
        raise ValueError(
            f"scores and targets must have the same shape, got {tuple(scores.shape)} and {tuple(targets.shape)}"
        )
    if not scores.is_floating_point():
        raise ValueError(f"scores must be floating point, got {scores.dtype}")
    if targets.is_complex():
        raise ValueError(f"targets must be integer, bool or floating point, got {targets.dtype}")


LEAST_DELTA = 1e-30


def check_delta(delta: float) -> None:
    """Raises ValueError unless delta is 0 or a width that divisions by it survive."""
    if not (math.isfinite(delta) and (delta == 0 or delta >= LEAST_DELTA)):
        raise ValueError(
            "delta must be a finite number >= 0 (0 is the Heaviside step; nothing else below "
            f"{LEAST_DELTA}), got {delta}"
        )


def check_max_positives(max_positives: int | None) -> None:
    """Raises ValueError unless it is None or an integer >= 1."""
    if max_positives is None:
        return
    if isinstance(max_positives, bool) or not isinstance(max_positives, int) or max_positives < 1:
        raise ValueError(f"max_positives must be an integer >= 1 or None, got {max_positives!r}")


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


def groups_of_scores(groups: Tensor | int | None, scores: Tensor) -> Tensor | None:
    """The group of every score, flat int64 [N]; see ``groups`` of :func:`ap_loss`.

    Raises:
        ValueError: no such dimension, or the tensor does not fit the scores.
    """
    if groups is None:
        return None
    if isinstance(groups, Tensor):
        if groups.shape != scores.shape or groups.device != scores.device:
            raise ValueError(
                f"groups must have the shape and device of scores, {tuple(scores.shape)} on "
                f"{scores.device}, got {tuple(groups.shape)} on {groups.device}"
            )
        if groups.is_floating_point() or groups.is_complex():
            raise ValueError(f"groups must be integers, got {groups.dtype}")
        return groups.detach().reshape(-1).to(torch.int64).contiguous()
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise ValueError(f"groups must be an integer tensor or a dimension, got {type(groups).__name__}")
    if not -scores.ndim <= groups < scores.ndim:
        raise ValueError(f"groups must be a dimension of scores, which have {scores.ndim}, got {groups}")
    shape = [1] * scores.ndim
    shape[groups] = -1
    numbers = torch.arange(scores.shape[groups], device=scores.device)
    return numbers.view(shape).expand(scores.shape).reshape(-1)


def comparable_targets(targets: Tensor) -> Tensor:
    """Targets in a dtype that has -1: what is compared with it must not wrap around."""
    if targets.dtype in COMPARABLE:
        return targets
    if targets.dtype == torch.bool:
        return targets.view(torch.int8)
    if targets.dtype in (torch.float16, torch.bfloat16):
        return targets.to(torch.float32)
    if targets.dtype == torch.uint8:
        return targets.to(torch.int16)
    if targets.dtype in (torch.uint16, torch.uint32):
        return targets.to(torch.int64)
    return targets.to(torch.float64) if targets.dtype == torch.uint64 else targets


COMPARABLE = (torch.float32, torch.int64, torch.int8, torch.int32, torch.int16, torch.float64)


def refuse_target(targets: Tensor, *, soft: bool) -> NoReturn:
    """Raises the ValueError for the first target that is not allowed."""
    flat = comparable_targets(targets.detach().reshape(-1))
    positive = (flat > 0) & (flat <= 1) if soft else flat == 1
    index = _first(~(positive | (flat == 0) | (flat == -1)))
    raise ValueError(
        f"targets must be {SOFT_TARGETS if soft else HARD_TARGETS}, got {flat[index].item()} at flat index {index}"
    )


def refuse_score(scores: Tensor, targets: Tensor) -> NoReturn:
    """Raises the NonFiniteScoresError for the first score that is not finite nor ignored."""
    flat, flat_targets = scores.detach().reshape(-1), comparable_targets(targets.reshape(-1))
    index = _first(~flat.isfinite() & (flat_targets != -1))
    value = flat[index].item()
    raise NonFiniteScoresError(f"scores must be finite, got {value} at flat index {index}", value=value, index=index)


def refuse_box_loss(box_losses: Tensor) -> NoReturn:
    """Raises the ValueError for the first box loss that is not allowed."""
    index = _first(~(box_losses.isfinite() & (box_losses >= 0)))
    raise ValueError(f"box_losses must be finite and not negative, got {box_losses[index].item()} at {index}")


def refuse_earlier_call(status: list[int]) -> None:
    """Raises what was wrong in an earlier call that read nothing from the device, if anything.

    Args:
        status: positives above the allowed number, and how many targets, scores and box losses
            were not allowed.
    """
    surplus, bad_targets, bad_scores, bad_boxes = status
    earlier = "in an earlier call with max_positives, whose loss is NaN:"
    if bad_targets:
        raise ValueError(f"{earlier} targets must be allowed values, and {bad_targets} were not")
    if bad_scores:
        raise NonFiniteScoresError(f"{earlier} scores must be finite, and some were not")
    if bad_boxes:
        raise ValueError(f"{earlier} box_losses must be one per positive, finite and not negative, and were not")
    if surplus > 0:
        raise ValueError(f"{earlier} there were {surplus} positives more than allowed")


def check_values(scores: Tensor, targets: Tensor) -> None:
    """Raises ValueError unless every target is 1, 0 or -1 and every score that counts is finite.

    For the losses that do not run on the engine. Reads the device once.
    """
    if scores.numel() == 0:
        return
    bad_targets, bad_scores = values_status(scores, targets).tolist()
    if bad_targets:
        refuse_target(targets, soft=False)
    if bad_scores:
        refuse_score(scores, targets)


def values_status(scores: Tensor, targets: Tensor) -> Tensor:
    """How many targets, and whether any scores, are not allowed: int64 [2] on the device."""
    flat = comparable_targets(targets)
    ignored = flat == -1
    allowed = ((flat == 0) | (flat == 1) | ignored).sum()
    lowest, highest = torch.aminmax(scores.detach().masked_fill(ignored, 0.0))
    finite = (lowest > -torch.inf) & (highest < torch.inf)
    return torch.stack([targets.numel() - allowed, (~finite).long()])


def _first(bad: Tensor) -> int:
    return int(bad.nonzero()[0, 0])


def check_process_group(process_group: Any) -> None:
    """Raises ValueError if torch.distributed is not initialised."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ValueError(
            "process_group was given, but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() first"
        )
