"""What is ranked, and what the stages of a ranking hand on to each other.

A backend makes a ranking in stages: it finds the positives, sorts them, tallies the negatives
between the breakpoints of the step function, applies the rule of the loss, and, in the backward
pass, computes the gradient. Everything stays on the device of the scores; the engine reads
``Found.status`` once, or never if ``max_positives`` says how many positives there may be.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loss and its gradient are computed for scores of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(eq=False, slots=True)
class Problem:
    """N scores with their targets, and the loss that is wanted.

    Attributes:
        scores: flat, contiguous, detached, any floating dtype [N], N >= 1.
        targets: flat, contiguous [N]; signed integers, float32 or float64: 1, 0 and -1, or values
            in (0, 1] for positives if ``soft``.
        rule: ``"ap"``, ``"auc"``, ``"rank-sort"`` or ``"alrp"``.
        delta: half the width of the step function; 0 is the Heaviside step.
        interpolated: of ``"ap"``: make the precision monotone.
        groups: int64 [N]: scores are ranked among those of the same number alone.
        box_losses: of ``"alrp"``: one per positive, in the order of their flat index.
        max_positives: most positives there may be; then nothing is read from the device.
        num_processes: how many processes rank together; the gradient is multiplied by it.
        dtype: of the passes over all scores, of the loss and of its gradient.
        soft: whether the targets of positives are qualities in (0, 1].
    """

    scores: Tensor
    targets: Tensor
    rule: str
    delta: float
    interpolated: bool = True
    groups: Tensor | None = None
    box_losses: Tensor | None = None
    max_positives: int | None = None
    num_processes: int = 1
    dtype: torch.dtype = field(init=False)
    soft: bool = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = loss_dtype(self.scores.dtype)
        self.soft = self.rule == "rank-sort"


@dataclass(eq=False)
class Found:
    """The positives of this process, still unsorted, and whether the input may be ranked.

    Attributes:
        status: int64 [5] on the device: positives, negatives, and how many (or any number > 0)
            targets, scores and box losses are not allowed.
        held: whatever the backend needs later.
        all_real: set by the engine if it knows that no place of the positives is padding.
    """

    status: Tensor
    held: Any = None
    all_real: bool = False


@dataclass(eq=False)
class Positives:
    """The positives in ascending order of (group and) score, padded to C places.

    Attributes:
        scores: s_i [C] in the dtype of the passes; padding repeats the last one.
        index: flat index in this process, int64 [C]; -1 for padding and for other processes'.
        count: how many of the places are real; scalar int64 tensor.
        extras: quality (``"rank-sort"``) or box loss (``"alrp"``), float64 [C].
        groups: int64 [C].
        all_real: whether it is known that no place is padding.
        order: which of this process's positives stands where [C]; None with padding or other processes'.
        held: whatever the backend needs later.
    """

    scores: Tensor
    index: Tensor
    count: Tensor
    extras: Tensor | None = None
    groups: Tensor | None = None
    held: Any = None
    all_real: bool = False
    order: Tensor | None = None


@dataclass(eq=False, slots=True)
class Ranked:
    """The losses, and what the backward pass needs.

    Attributes:
        problem: as it was given.
        values: K losses, scalars or [K], in the dtype of the loss.
        box_gradient: of ``"alrp"``: derivative of values[1] by this process's box losses.
        held: whatever the backend needs for the gradient.
    """

    problem: Problem
    values: Tensor | tuple[Tensor, ...]
    box_gradient: Tensor | None = None
    held: Any = field(default=None, repr=False)


class Backend(Protocol):
    """The stages of a ranking on some kind of device.

    Attributes:
        name: as :func:`aploss.losses.use_backend` takes it.
        at_once: whether it has :meth:`rank`.
    """

    name: str
    at_once: bool

    def rank(self, problem: Problem, accept: Callable[[Problem, list[int]], None]) -> Ranked:
        """All stages at once, for a process alone, without groups and ``max_positives``.

        Args:
            accept: is told the status, and raises if it is not accepted.
        """

    def find(self, problem: Problem) -> Found:
        """Finds the positives of this process and checks every target and score."""

    def positives(self, problem: Problem, found: Found, capacity: int) -> Positives:
        """Sorts this process's positives into ``capacity`` places."""

    def tally(self, problem: Problem, found: Found, positives: Positives) -> Tensor:
        """Counts this process's negatives, and adds up their shares, in every row [2, R].

        Returns:
            float64: counts, and sums of (s - edge) / (2 delta), clamped to [0, 1].
        """

    def finish(self, problem: Problem, found: Found, positives: Positives, tallies: Tensor) -> Ranked:
        """Applies the rule of the loss to the positives and the tallies of all processes."""

    def gradient(self, ranked: Ranked, upstream: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The flat gradient of sum_k upstream_k * values_k, in the dtype of scores or loss."""
