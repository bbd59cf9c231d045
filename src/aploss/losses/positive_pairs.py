"""The step function between all pairs of positives, a block of rows at a time.

Losses that sort positives among themselves need O(P^2) of these; P is a few thousand at most.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["step_at_zero", "steps_between_positives"]

# Pairs held at a time: 32 MB in float64.
_BLOCK = 1 << 22


def step_at_zero(delta: float) -> float:
    """f(0), what a positive counts in its own row: 1/2, but 1 for the Heaviside step."""
    return 0.5 if delta else 1.0


def steps_between_positives(scores: Tensor, delta: float) -> Iterator[tuple[slice, Tensor]]:
    """Yields slices of rows i and f(s_k - s_i) for these rows and all positives k [rows, P].

    The diagonal k = i holds f(0).
    """
    rows = max(1, _BLOCK // max(1, len(scores)))
    for first in range(0, len(scores), rows):
        block = slice(first, min(first + rows, len(scores)))
        differences = scores[None, :] - scores[block, None]  # x_ik
        if delta == 0:
            yield block, (differences >= 0).to(torch.float64)
        else:
            yield block, differences.div_(2 * delta).add_(0.5).clamp_(0, 1)
