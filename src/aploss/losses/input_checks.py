"""Checks of what a user hands to a loss: every message says which value, where, what is meant."""

import math

from torch import Tensor

__all__ = [
    "NonFiniteScoresError",
    "check_delta",
    "check_scores_and_targets",
    "refuse_score",
    "refuse_target",
]

HARD_TARGETS = "1 (positive), 0 (negative) or -1 (ignored)"
SOFT_TARGETS = "in (0, 1] (positive: its IoU), 0 (negative) or -1 (ignored)"


class NonFiniteScoresError(ValueError):
    """A score that takes part in the ranking is NaN or infinite."""


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
