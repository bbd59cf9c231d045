"""Checks of what a user hands to a loss: every message says which value, where, what is meant."""

import math
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "NonFiniteScoresError",
    "OtherProcessError",
    "check_delta",
    "check_scores_and_targets",
    "check_values",
    "refuse_score",
    "refuse_target",
]

HARD_TARGETS = "1 (positive), 0 (negative) or -1 (ignored)"
SOFT_TARGETS = "in (0, 1] (positive: its IoU), 0 (negative) or -1 (ignored)"


class NonFiniteScoresError(ValueError):
    """A score that takes part in the loss is NaN or infinite."""


class OtherProcessError(ValueError):
    """Another process of the group refused its own input, so that no process can go on.

    Attributes:
        cause: what it refused: ``"score"`` (NaN or infinite), ``"target"`` or ``"arguments"``.
    """

    def __init__(self, cause: Literal["score", "target", "arguments"]) -> None:
        super().__init__(
            f"another process of the group was given {_CAUSES[cause]}; its own error says which"
        )
        self.cause = cause


_CAUSES = {
    "score": "a score that is NaN or infinite",
    "target": "a target that is not allowed",
    "arguments": "arguments that do not fit together",
}


def check_scores_and_targets(scores: Tensor, targets: Tensor) -> None:
    """Raises ValueError unless both are tensors of one shape and device, and scores are floats."""
    for name, value in (("scores", scores), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    if scores.shape != targets.shape:
        raise ValueError(
            f"scores and targets must have the same shape, got {tuple(scores.shape)} and "
            f"{tuple(targets.shape)}"
        )
    if not scores.is_floating_point():
        raise ValueError(f"scores must be floating point, got {scores.dtype}")
    if targets.is_complex():
        raise ValueError(f"targets must be integer, bool or floating point, got {targets.dtype}")
    if scores.device != targets.device:
        raise ValueError(
            f"scores and targets must be on one device, got {scores.device} and {targets.device}"
        )


def check_delta(delta: float) -> None:
    """Raises ValueError unless delta is finite and not negative."""
    if not (math.isfinite(delta) and delta >= 0):
        raise ValueError(
            f"delta must be a finite number >= 0 (0 is the Heaviside step), got {delta}"
        )


def refuse_target(targets: Tensor, index: int, *, soft: bool) -> None:
    """Raises the ValueError for the target at a flat index."""
    raise ValueError(
        f"targets must be {SOFT_TARGETS if soft else HARD_TARGETS}, "
        f"got {targets.reshape(-1)[index].item()} at flat index {index}"
    )


def refuse_score(scores: Tensor, index: int) -> None:
    """Raises the NonFiniteScoresError for the score at a flat index."""
    raise NonFiniteScoresError(
        f"scores must be finite, got {scores.reshape(-1)[index].item()} at flat index {index}"
    )


def check_values(scores: Tensor, targets: Tensor) -> None:
    """Raises ValueError unless every target is 1, 0 or -1 and every score that counts is finite.

    For the losses that do not run on the engine. Reads both once and makes no copy, unless it finds
    something to complain about.
    """
    if scores.numel() == 0:
        return
    if not _all_allowed(targets):
        bad = (targets != 1) & (targets != 0) & (targets != -1)
        refuse_target(targets, int(bad.flatten().nonzero()[0]), soft=False)
    # NaN and infinity survive a sum; a sum that overflows is looked at more closely.
    if not bool(scores.detach().sum(dtype=torch.float32).isfinite()):
        bad = ~scores.isfinite() & (targets != -1)
        if bool(bad.any()):
            refuse_score(scores, int(bad.flatten().nonzero()[0]))


def _all_allowed(targets: Tensor) -> bool:
    if targets.dtype == torch.bool:
        return True
    if targets.is_floating_point():
        return bool(((targets == 0) | (targets.abs() == 1)).all())
    lowest, highest = torch.stack(targets.aminmax()).tolist()
    return bool(lowest >= -1 and highest <= 1)
