"""The engine of all ranking losses: two passes over N scores, and O(P log P) between them.

How a loss uses it, here the AP-loss without interpolation::

    ranking = rank_boxes(scores, targets, delta)
    rank = 1 + ranking.positives_above + ranking.negatives_above
    error = ranking.negatives_above / rank                      # sum_j L_ij, Eq. (5)
    gradient = ranking.gradient(1 / rank / P, -error / P)       # Eq. (12)

Everything per positive is in ascending order of score, in float64, over all positives of the batch
(of all processes, if a group is named), on the device of the scores. ``gradient`` hands every
negative j the sum over the positives i of ``pair_weights[i] * f(s_j - s_i)``.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..input_checks import OtherProcessError, refuse_score, refuse_target
from . import across_processes
from .passes import Passes, TorchPasses
from .segments import Floats, Segments, cut_into_segments, line_through_segments, sums_of_steps

__all__ = ["Ranking", "rank_boxes"]


@dataclass(frozen=True)
class Ranking:
    """The positives of a batch in ascending order of score, and what is ranked above each.

    Attributes:
        num_negatives: negatives of the whole batch.
        positives_above: sum over the other positives k of f(s_k - s_i) [P]; rank+ is one more.
        negatives_above: sum over the negatives j of f(s_j - s_i) [P]: the false positives of i.
        positive_scores: s_i [P], ascending, relative to an arbitrary shift.
    """

    num_negatives: int
    positives_above: Tensor
    negatives_above: Tensor
    positive_scores: Tensor
    _boxes: "_Boxes"
    _segments: Segments
    _order: NDArray[np.int64]  # [P] which of the gathered positives stands at each place
    _first_own: int  # where this process's positives start among the gathered ones

    @property
    def num_positives(self) -> int:
        """Number of positives P of the whole batch."""
        return len(self._order)

    @cached_property
    def own_places(self) -> Tensor:
        """Where this process's positives, in the order of their flat index, stand in [P]."""
        place = np.empty_like(self._order)
        place[self._order] = np.arange(len(place))
        own = place[self._first_own : self._first_own + len(self._boxes.positive_scores)]
        return torch.from_numpy(own).to(self._boxes.scores.device)

    @property
    def num_processes(self) -> int:
        """How many processes rank together."""
        return dist.get_world_size(self._boxes.group) if self._boxes.group is not None else 1

    def from_all(self, own_values: Tensor) -> Tensor:
        """Brings one value per own positive (in the order of flat index) into the order of [P]."""
        device = self._boxes.scores.device
        values = own_values.detach().to(device, torch.float64)
        if self._boxes.group is not None:
            values, _ = across_processes.gather_values(values, self._boxes.group)
        return values[torch.from_numpy(self._order).to(device)]

    def gradient(self, pair_weights: Tensor | None, positive_gradient: Tensor) -> Tensor:
        """The second pass: the gradient on this process's scores.

        Args:
            pair_weights: factor of f(s_j - s_i) in the error of the pair (i, j) [P]; None for a
                loss that does not move the negatives.
            positive_gradient: gradient on the positives themselves [P].

        Returns:
            flat gradient in float32 or float64. It is the gradient of the whole batch times the
            number of processes, so that data parallelism, which averages the gradients of the
            weights, ends with that of the whole batch.
        """
        boxes, scale = self._boxes, self.num_processes
        if pair_weights is None or self.num_positives == 0:
            gradient = torch.zeros_like(boxes.scores)
        else:
            weights = _on_host(pair_weights) * scale
            at_left, slope = line_through_segments(self._segments, weights)
            gradient = boxes.passes.gradient_of_negatives(self._segments, at_left, slope)
        own = positive_gradient[self.own_places] * scale
        gradient[boxes.passes.positive_index] = own.to(gradient.dtype)
        return gradient


@dataclass(frozen=True)
class _Boxes:
    """The flat boxes of this process, checked but for the scores of the negatives."""

    scores: Tensor  # [n], float32 or float64
    targets: Tensor  # [n]
    passes: Passes
    positive_scores: Floats  # on the host, in the order of the flat index
    group: Any


def rank_boxes(
    scores: Tensor,
    targets: Tensor,
    delta: float,
    *,
    soft_targets: bool = False,
    group: str = "",
    backend: str = "",
) -> Ranking:
    """Makes the first pass: what is ranked above every positive.

    Args:
        scores: any shape and floating dtype.
        targets: same shape; 1, 0 and -1, or with ``soft_targets`` also values in (0, 1).
        delta: half the width of the step function; 0 is the Heaviside step.
        group: name of the process group to rank over; "" for this process alone.
        backend: "cpu" or "torch" to choose who makes the passes; by default the device does.

    Raises:
        ValueError: a target that is not allowed.
        NonFiniteScoresError: a NaN or infinite score that is not ignored.
    """
    boxes = _find_positives(scores, targets, soft_targets, group, backend)
    gathered, first_own = boxes.positive_scores, 0
    if boxes.group is not None:
        everyone, first_own = across_processes.gather_values(
            torch.from_numpy(gathered).to(boxes.scores.device), boxes.group
        )
        gathered = _on_host(everyone)
    order = gathered.argsort(kind="stable")
    sorted_scores = gathered[order]
    # A shift into the middle of the positives keeps the digits of scores with a large offset.
    # The Heaviside step needs comparisons alone, which are exact only without one.
    shift = float(sorted_scores[len(order) // 2]) if len(order) and delta else 0.0
    sorted_scores = sorted_scores - shift
    segments = cut_into_segments(sorted_scores, delta, shift)
    counts, sums, negatives = _negatives_per_segment(boxes, segments)
    per_positive = [*_sums_above(segments, sorted_scores, counts, sums), sorted_scores]
    device = boxes.scores.device
    positives_above, negatives_above, positive_scores = (
        torch.from_numpy(values).to(device) for values in per_positive
    )
    return Ranking(
        num_negatives=negatives,
        positives_above=positives_above,
        negatives_above=negatives_above,
        positive_scores=positive_scores,
        _boxes=boxes,
        _segments=segments,
        _order=order,
        _first_own=first_own,
    )


def _find_positives(
    scores: Tensor, targets: Tensor, soft: bool, group: str, backend: str
) -> _Boxes:
    # MPS has no float64: its scores are ranked on the CPU.
    device = torch.device("cpu") if scores.device.type == "mps" else scores.device
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    flat_scores = scores.detach().reshape(-1).to(device, dtype)
    flat_targets = targets.detach().reshape(-1).to(device)
    if flat_targets.dtype == torch.bool:
        flat_targets = flat_targets.view(torch.uint8)
    elif flat_targets.dtype in (torch.float16, torch.bfloat16):
        flat_targets = flat_targets.to(torch.float32)
    process_group = across_processes.resolve(group)

    passes = _passes_for(device, backend)(flat_scores, flat_targets, soft)
    positive_scores, bad_target = passes.positive_scores, passes.bad_target
    finite = np.isfinite(positive_scores)
    bad_score = -1 if finite.all() else int(passes.positive_index[int(finite.argmin())])
    _agree_on_problems(bad_score >= 0, bad_target >= 0, device, process_group)
    if bad_target >= 0:
        refuse_target(flat_targets, bad_target, soft=soft)
    if bad_score >= 0:
        refuse_score(flat_scores, bad_score)
    return _Boxes(flat_scores, flat_targets, passes, positive_scores, process_group)


def _negatives_per_segment(boxes: _Boxes, segments: Segments) -> tuple[Floats, Floats, int]:
    """Counts [M], sums [M] and number of the negatives of all processes."""
    device = boxes.scores.device
    if segments.count:
        counts, sums, bad_score = boxes.passes.negatives_per_segment(segments)
    else:  # No positive anywhere: nothing to count, but the scores are checked all the same.
        counts = sums = segments.breakpoints
        bad = ((boxes.targets == 0) & ~boxes.scores.isfinite()).nonzero()
        bad_score = int(bad[0, 0]) if len(bad) else -1
    _agree_on_problems(bad_score >= 0, False, device, boxes.group)
    if bad_score >= 0:
        refuse_score(boxes.scores, bad_score)
    negatives = boxes.passes.num_negatives
    if boxes.group is None:
        return counts, sums, negatives
    own = torch.from_numpy(np.concatenate([counts, sums, [negatives]])).to(device)
    total = _on_host(across_processes.sum_over(own, boxes.group))
    counts, sums = total[:-1].reshape(2, -1)
    return counts, sums, int(total[-1])


def _sums_above(
    segments: Segments, positive_scores: Floats, counts: Floats, sums: Floats
) -> tuple[Floats, Floats]:
    """Sums of f(s_k - s_i) over the other positives k [P] and over the negatives [P]."""
    if not segments.count:
        return positive_scores, positive_scores
    row = segments.breakpoints.searchsorted(positive_scores, side="right") - 1
    distance = positive_scores - segments.breakpoints[row]
    own_counts = np.bincount(row, minlength=segments.count)
    own_sums = np.bincount(row, distance, minlength=segments.count)
    both = np.array([own_counts, counts]), np.array([own_sums, sums])
    positives, negatives = sums_of_steps(segments, *both)
    step_at_zero = 0.5 if segments.delta else 1.0  # i itself is counted: f(0), or H(0)
    return positives - step_at_zero, negatives


def _on_host(values: Tensor) -> Floats:
    array: Floats = values.detach().cpu().numpy()
    return array


def _agree_on_problems(bad_score: bool, bad_target: bool, device: torch.device, group: Any) -> None:
    """Lets every process of the group know that one of them is about to raise."""
    if group is None:
        return
    flags = torch.tensor([float(bad_score), float(bad_target)], device=device)
    scores, targets = across_processes.sum_over(flags, group).tolist()
    if bad_score or bad_target:
        return
    if targets:
        raise OtherProcessError("target")
    if scores:
        raise OtherProcessError("score")


def _passes_for(device: torch.device, backend: str) -> type[Passes]:
    if backend == "torch" or (not backend and device.type != "cpu"):
        return TorchPasses
    from .passes_cpu import CPUPasses  # imports numba, which takes its time

    return CPUPasses
