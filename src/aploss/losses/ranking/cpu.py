"""The ranking of CPU tensors: one compiled call each way, or parts of the scores on several threads.

Rankings within groups, and those of several processes, go through the stages of the torch backend
for their positives, and through the compiled kernels for their scores.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import cpu_kernels as kernels
from .problem import Found, Positives, Problem, Ranked, loss_dtype
from .segments import Segments, line_through_segments
from .torch_backend import Kept, TorchBackend

__all__ = ["CPUBackend"]

BLOCK = kernels.BLOCK
MOST_PARTS, SMALLEST_PART = 16, 1 << 16
SECONDS_OF_SILENCE = 2.0

_RULES = {
    "ap": kernels.AP,
    "auc": kernels.AUC,
    "rank-sort": kernels.RANK_SORT,
    "alrp": kernels.ALRP,
}
_ONE = {torch.float32: np.float32(1), torch.float64: np.float64(1)}
_log = logging.getLogger("aploss.losses")
_compiled_for: set[tuple[Any, ...]] = set()
_pool: tuple[int, int, ThreadPoolExecutor] | None = None

Status = list[int]


@dataclass(eq=False)
class _Cut:
    """A ranking of this process alone, between its forward and its backward pass."""

    scores: Any  # [N]
    index: Any  # of the positives [P]
    order: Any  # that sorts them [P]
    cuts: Any
    notes: Any
    weights: Any  # [P]
    own: Any  # [2, P]


@dataclass(eq=False)
class _Notes:
    """What the passes note of the scores of one process."""

    scores: Any  # [N], float32 or float64
    index: Any  # of the positives
    pure: Any  # blocks of negatives alone
    left_out: Any  # what is no negative, in the other blocks
    rows: Any = None
    below: Any = None  # blocks below all positives
    marks: Any = None


class CPUBackend(TorchBackend):
    """See :class:`aploss.losses.ranking.problem.Backend`."""

    name = "cpu"

    def rank(self, problem: Problem, accept: Callable[[Status], None]) -> Ranked:
        """All stages at once, for a process alone and without groups.

        Args:
            accept: raises what is wrong with a status.
        """
        with _telling(problem, "rank"):
            small = len(problem.scores) < 2 * SMALLEST_PART and problem.rule in ("ap", "auc")
            status, cut, values, box_weights = (_rank_small if small else _rank)(problem, accept)
        count = 1 if problem.rule in ("ap", "auc") else 2
        box_gradient = None
        if problem.box_losses is not None:
            boxes = np.empty(status[0])
            boxes[cut.order] = box_weights
            dtype = loss_dtype(problem.box_losses.dtype)
            box_gradient = torch.from_numpy(boxes).to(dtype)
        return Ranked(
            problem, torch.from_numpy(values[:count]).to(problem.dtype), box_gradient, cut
        )

    def gradient(
        self, ranked: Ranked, upstream: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        problem = ranked.problem
        gradient = torch.empty(len(problem.scores), dtype=problem.dtype)
        with _telling(problem, "gradient"):
            if isinstance(ranked.held, _Cut):
                _gradient(problem, ranked.held, upstream, gradient)
            else:
                _gradient_of_stages(problem, ranked.held, upstream, gradient)
        return gradient.to(dtype)

    def find(self, problem: Problem) -> Found:
        with _telling(problem, "find"):
            notes, status = _find(problem)
        boxes = problem.box_losses
        if boxes is not None:
            allowed = (boxes >= 0) & (boxes < torch.inf)
            status[4] = int(not bool(allowed.all()) or len(boxes) != status[0])
        return Found(torch.tensor(status), notes)

    def positive_index(self, found: Found, capacity: int) -> Tensor:
        index = torch.full((capacity,), -1)
        known = torch.from_numpy(found.held.index[:capacity])
        index[: len(known)] = known
        return index

    def tally_negatives(self, problem: Problem, found: Found, segments: Segments) -> Tensor:
        with _telling(problem, "tally"):
            if segments.groups is not None:
                return _tally_groups(problem, found.held, segments)
            edges = segments.edges
            marks = torch.cat([edges[:1], edges, edges.new_full((1,), torch.inf)]).numpy()
            tallies = _tally(problem, found.held, marks)
        return torch.from_numpy(np.stack(tallies))


def _rank_small(problem: Problem, accept: Callable[[Status], None]) -> tuple[Any, ...]:
    one = _ONE[problem.dtype]
    scores = problem.scores.to(problem.dtype).numpy()
    (index, negatives, bad_targets), bad_scores, order, cuts, notes, outcome = kernels.forward(
        scores,
        problem.targets.numpy(),
        _RULES[problem.rule],
        problem.interpolated,
        problem.delta,
        one,
        type(one)(2 * problem.delta),
        _small_integers(2 * len(scores)),
    )
    status = [len(index), negatives, bad_targets, bad_scores, 0]
    accept(status)
    values, weights, own = outcome
    return status, _Cut(scores, index, order, cuts, notes, weights, own), values, None


def _rank(problem: Problem, accept: Callable[[Status], None]) -> tuple[Any, ...]:
    notes, status = _find(problem)
    boxes = np.empty(0)
    if problem.box_losses is not None:
        boxes = problem.box_losses.double().numpy()
        status[4] = int(not (np.isfinite(boxes) & (boxes >= 0)).all())
    accept(status)
    one, rule = _ONE[problem.dtype], _RULES[problem.rule]
    positives, order, cuts = kernels.sort_and_cut(notes.scores, notes.index, problem.delta, one)
    if len(order):
        counts, sums = _tally(problem, notes, cuts[0])
    else:
        counts = sums = np.zeros(1)
    extras = boxes[order] if len(boxes) else boxes
    if problem.soft:
        extras = problem.targets.numpy()[notes.index[order]].astype(np.float64)
    values, weights, own, box_weights = kernels.finish(
        rule,
        problem.interpolated,
        problem.delta,
        cuts,
        positives,
        extras,
        counts,
        sums,
        np.int64(status[1]),
    )
    kept = (notes.pure, notes.left_out, notes.rows, notes.below)
    cut = _Cut(notes.scores, notes.index, order, cuts, kept, weights, own)
    return status, cut, values, box_weights


def _gradient(problem: Problem, cut: _Cut, upstream: tuple[Tensor, ...], out: Tensor) -> None:
    if len(cut.order) == 0:
        out.zero_()
        return
    one = _ONE[problem.dtype]
    width = type(one)(2 * problem.delta)
    first = float(upstream[0])
    second = float(upstream[1]) if problem.rule == "rank-sort" else 0.0
    gradient = out.numpy()
    if len(cut.scores) < 2 * SMALLEST_PART:
        kernels.backward(
            cut.scores, cut.index, cut.order, cut.cuts, cut.notes, cut.weights, cut.own,
            problem.delta, first, second, one, width, gradient,
        )  # fmt: skip
        return
    heights, slopes = kernels.lines(cut.cuts, cut.weights, problem.delta, first, one)
    _evaluate(cut.scores, cut.notes, cut.cuts[0], width, heights, slopes, gradient)
    kernels.write_positives(cut.index, cut.order, cut.own, first, second, gradient)


def _gradient_of_stages(
    problem: Problem, held: Kept, upstream: tuple[Tensor, ...], out: Tensor
) -> None:
    factors = torch.stack(upstream[: len(held.own)]).double()[:, None] * problem.num_processes
    lines = line_through_segments(held.segments, held.pair_weights * factors[0])
    heights, slopes = (
        held.segments.for_rows(values, values.new_zeros(1)).to(problem.dtype).numpy()
        for values in (lines[0], lines[1] / (2 * problem.delta or 1.0))
    )
    notes: _Notes = held.scores
    width = type(_ONE[problem.dtype])(2 * problem.delta)
    kept = (notes.pure, notes.left_out, notes.rows, notes.below)
    _evaluate(notes.scores, kept, notes.marks, width, heights, slopes, out.numpy())
    own = (held.own * factors).sum(0).to(problem.dtype)
    here = held.index >= 0
    out[held.index[here]] = own[here]


def _find(problem: Problem) -> tuple[_Notes, Status]:
    scores, targets = problem.scores.to(problem.dtype).numpy(), problem.targets.numpy()
    notes = _Notes(scores, None, *_blocks(len(scores)))

    def work(start: int, stop: int) -> Any:
        return kernels.find(
            targets, scores, start, stop, problem.soft, notes.pure, notes.left_out
        )

    parts = _in_parts(len(scores), work)
    notes.index = np.concatenate([index for (index, _, _), _ in parts])
    negatives = sum(part[1] for part, _ in parts)
    bad_targets = sum(part[2] for part, _ in parts)
    bad_scores = sum(bad for _, bad in parts)
    return notes, [len(notes.index), negatives, bad_targets, bad_scores, 0]


def _tally(problem: Problem, notes: _Notes, marks: Any) -> tuple[Any, Any]:
    """Counts and sums of every row; notes the rows."""
    one, size = _ONE[problem.dtype], len(notes.scores)
    small = _small_integers(len(marks))
    table, axis = kernels.prepare_table(marks, one, size, small)
    notes.marks, notes.rows = marks, np.empty(size, small.dtype)
    notes.below = np.empty(len(notes.pure), np.bool_)
    kept = (notes.pure, notes.left_out, notes.rows, notes.below)
    width = type(one)(2 * problem.delta)

    def work(start: int, stop: int) -> Any:
        return kernels.tally(notes.scores, start, stop, kept, marks, table, axis, one, width)

    parts = _in_parts(size, work)
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def _evaluate(
    scores: Any, notes: Any, marks: Any, width: Any, heights: Any, slopes: Any, out: Any
) -> None:
    pure, left_out, rows, below = notes

    def work(start: int, stop: int) -> Any:
        kernels.evaluate(
            scores, start, stop, pure, left_out, rows, below, marks, width, heights, slopes, out
        )

    _in_parts(len(scores), work)


def _blocks(size: int) -> tuple[Any, Any]:
    return np.empty(-(-size // BLOCK), np.bool_), np.empty(size, np.bool_)


def _small_integers(highest: int) -> Any:
    """An empty array of the integers for rows up to ``highest``, and one bit more.

    Two bytes keep the lookup table in the fastest cache.
    """
    return _TWO_BYTES if highest + 2 < 1 << 15 else _FOUR_BYTES


_TWO_BYTES, _FOUR_BYTES = np.empty(0, np.uint16), np.empty(0, np.uint32)


def _in_parts(size: int, work: Callable[[int, int], Any]) -> list[Any]:
    """Runs ``work(start, stop)`` for every part, on torch's number of threads; in their order."""
    parts = min(max(size // SMALLEST_PART, 1), MOST_PARTS)
    edges = [size * part // parts // BLOCK * BLOCK for part in range(parts)] + [size]
    threads = min(torch.get_num_threads(), parts)
    if threads <= 1:
        return [work(*edge) for edge in zip(edges, edges[1:], strict=False)]
    waiting = iter(list(enumerate(zip(edges, edges[1:], strict=False))))
    results: list[Any] = [None] * parts

    def take_turns() -> None:
        for place, edge in waiting:  # threads may share the iterator of a list
            results[place] = work(*edge)

    others = [_threads(threads - 1).submit(take_turns) for _ in range(threads - 1)]
    take_turns()
    for other in others:
        other.result()
    return results


def _threads(count: int) -> ThreadPoolExecutor:
    """The pool of this process, with that many threads. A fork inherits no threads."""
    global _pool
    if _pool is None or _pool[:2] != (os.getpid(), count):
        _pool = (os.getpid(), count, ThreadPoolExecutor(count, thread_name_prefix="aploss"))
    return _pool[2]


@contextmanager
def _telling(problem: Problem, stage: str) -> Iterator[None]:
    """Says what is going on if compiling takes its time."""
    kind = (stage, problem.scores.dtype, problem.targets.dtype, problem.rule, problem.groups is None)
    if kind in _compiled_for:
        yield
        return
    timer = threading.Timer(SECONDS_OF_SILENCE, _say_that_it_compiles)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _compiled_for.add(kind)


_said: set[str] = set()


def _say_once(key: str, message: str, *arguments: Any) -> None:
    if key not in _said:
        _said.add(key)
        _log.warning(message, *arguments)


def _say_that_it_compiles() -> None:
    _say_once(
        "compiling", "compiling the ranking losses for this processor; later runs find them cached"
    )


def _say_that_there_is_no_cache(error: Exception) -> None:
    _say_once(
        "cache",
        "numba's cache of compiled functions cannot be used (%s: %s); compiling without it. "
        "NUMBA_CACHE_DIR names another folder for it",
        type(error).__name__,
        error,
    )


kernels.Compiled.no_cache = staticmethod(_say_that_there_is_no_cache)
