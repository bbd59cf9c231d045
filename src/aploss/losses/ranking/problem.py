"""What is ranked, and what the stages of a ranking pass to each other.

A backend runs the stages on its own arrays (NumPy for the CPU, tensors elsewhere): it finds the positives, sorts them,
tallies the negatives between the breakpoints of the step function, computes the ranks, and evaluates the gradient. The
engine applies the rule of the loss in between. Only ``find``, ``rank`` and ``gradient`` read the N scores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rules import Rule

COMPILED_SCORES = (torch.float32, torch.float64)  # the numba backend converts others
COMPILED_TARGETS = (torch.float32, torch.int64, torch.float64)


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loss and its gradient are computed for scores of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(eq=False, slots=True)
class Problem:
    """N scores with their targets, and the loss to compute.

    Attributes:
        scores: flat, contiguous, detached, any floating dtype [N], N >= 1.
        targets: flat, contiguous [N]; signed integers, float32 or float64: 1, 0 and -1, or values
            in (0, 1] for positives if the rule has soft targets.
        rule: see :mod:`.rules`.
        delta: half the width of the step function; 0 is the Heaviside step.
        groups: int64 [N]: scores are ranked among scores of the same number only.
        weights: importance of the positives, broadcast to ``shape``.
        box_losses: one per positive, in the order of their flat index, for aLRP.
        thresholds: average the loss over these IoU thresholds, or over so many quantiles of the IoU;
            see :mod:`.levels`.
        shape: of the scores as the user passed them.
        num_processes: how many processes rank together; the gradient is multiplied by it.
        dtype: of the passes over all scores, of the loss and of its gradient.
    """

    scores: Tensor
    targets: Tensor
    rule: Rule
    delta: float
    groups: Tensor | None = None
    weights: Tensor | None = None
    box_losses: Tensor | None = None
    thresholds: Sequence[float] | int | None = None
    shape: Sequence[int] = ()
    num_processes: int = 1
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = loss_dtype(self.scores.dtype)


class Status(NamedTuple):
    """Counts from checking the input; anything but the first two must be 0."""

    positives: int
    negatives: int
    bad_targets: int = 0
    bad_scores: int = 0
    bad_boxes: int = 0
    bad_weights: int = 0
    bad_arguments: int = 0


@dataclass(eq=False)
class Found:
    """The positives of this process, unsorted. Backends add what they need later.

    Attributes:
        status: on the host.
        index: the flat index of the positives, ascending [P].
    """

    status: Status
    index: Any


@dataclass(eq=False)
class Positives:
    """One array [P] per property of the positives; None for those that the problem does not have.

    Attributes:
        scores: s_i in float64.
        index: flat index in this process, int64; -1 for positives of other processes.
        groups: int64.
        weights: importance, float64.
        qualities: soft targets, float64.
        box_losses: float64.
        classes: the last dimension of the index, for quantiles within each class.
        members: which positives count at each of T thresholds, 1 or 0, float64 [T, P].
        shares: the factor of each positive's error at each threshold, float64 [T, P].
    """

    scores: Any
    index: Any
    groups: Any = None
    weights: Any = None
    qualities: Any = None
    box_losses: Any = None
    classes: Any = None
    members: Any = None
    shares: Any = None

    def columns(self) -> dict[str, Any]:
        """The properties that there are, by name."""
        return {
            field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None
        }

    def select(self, order: Any) -> "Positives":
        """The positives at the given places, in that order."""
        return Positives(**{name: values[order] for name, values in self.columns().items()})


@dataclass(eq=False)
class Ranks:
    """The arguments of a rule, see :mod:`.rules`, and the weight of each positive in the mean [P].

    ``above`` are the sums of f(s_k - s_i) over the other positives k that count at each threshold [T, P], if there are
    thresholds.
    """

    p: Any
    n: Any
    negatives: Any
    above: Any
    weights: Any


Reduce = Callable[[Tensor], None]
