"""The ranking of CPU tensors: one compiled call each way, or parts of them on several threads.

Rankings within groups, and those of several processes, go through the stages of the torch backend
for their positives, and through the compiled kernels for their scores.
"""

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import LEAST_DELTA
from . import cpu_cells
from . import cpu_kernels as kernels
from .cpu_segments import ALRP, AP, AUC, RANK_SORT
from .problem import Found, Problem, Ranked, loss_dtype
from .segments import Segments, line_through_segments
from .torch_backend import Kept, TorchBackend

BLOCK = kernels.BLOCK
MOST_PARTS, SMALLEST_PART = 16, 1 << 16
FEWEST_FOR_CELLS = 1 << 19  # scores from which on cells pay
FEWEST_PAST_CACHE = 1 << 21  # those whose gradient leaves no room in the cache for anything else
SECONDS_OF_SILENCE = 2.0

_RULES = {"ap": AP, "auc": AUC, "rank-sort": RANK_SORT, "alrp": ALRP}
_ONE: dict[torch.dtype, Any] = {torch.float32: np.float32(1), torch.float64: np.float64(1)}
_log = logging.getLogger("aploss.losses")
_compiled_for: set[tuple[Any, ...]] = set()
_pool: tuple[int, int, ThreadPoolExecutor] | None = None

Accept = Callable[[Problem, list[int]], None]


@dataclass(eq=False, slots=True)
class _Kept:
    """A ranking of this process alone, between its forward and its backward pass."""

    scores: Any  # [N]
    index: Any  # of the positives [P]
    own: Any  # gradients on them [2, P]
    marks: Any  # edges below the rows [R + 1]
    lines: Any  # of the rows [2, R]
    notes: Any  # pure, left_out, rows, below
    cells: "_Cells | None"


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


@dataclass(eq=False, slots=True)
class _Cells:
    """What :mod:`.cpu_cells` notes of the scores of one process."""

    grid: Any
    notes: Any  # pure, left_out, below


class CPUBackend(TorchBackend):
    """See :class:`aploss.losses.ranking.problem.Backend`."""

    name = "cpu"
    at_once = True

    def rank(self, problem: Problem, accept: Accept) -> Ranked:
        """All stages at once, for a process alone and without groups.

        Args:
            accept: raises what is wrong with a status.
        """
        with _telling((problem.dtype, problem.targets.dtype, problem.rule)):
            return _rank_in_parts(problem, accept)

    def gradient(self, ranked: Ranked, upstream: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        problem, held = ranked.problem, ranked.held
        gradient = torch.empty(problem.scores.shape, dtype=problem.dtype)
        (_gradient if type(held) is _Kept else _gradient_of_stages)(problem, held, upstream, gradient)
        return gradient if gradient.dtype == dtype else gradient.to(dtype)

    def find(self, problem: Problem) -> Found:
        with _telling(("find", problem.dtype, problem.targets.dtype)):
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
        if segments.groups is not None:
            return _tally_groups(problem, found.held, segments)
        edges = segments.edges
        marks = torch.cat([edges[:1], edges, edges.new_full((1,), torch.inf)]).numpy()
        with _telling(("tally", problem.dtype)):
            tallies = _tally(problem, found.held, marks)
        return torch.from_numpy(np.stack(tallies))


def rank_directly(scores: Tensor, targets: Tensor, rule: str, options: tuple[float, bool], wanted: bool) -> Any:
    """AP or AUC of few scores, loss and gradient, with as little around the kernel as can be.

    Args:
        options: delta and interpolated.
        wanted: whether the gradient is.

    Returns:
        the loss and its gradient (or None); None if this is not the plain case, or something is wrong.
    """
    size = scores.numel()
    if not 0 < size < 2 * SMALLEST_PART or rule not in _DIRECT or scores.shape != targets.shape:
        return None
    (delta, interpolated), kind = options, (scores.dtype, targets.dtype)
    if kind not in _likes and targets.dtype in _SMALL_INTEGERS:
        targets, kind = targets.to(torch.int64), (scores.dtype, torch.int64)
    if kind not in _likes or not (delta == 0 or LEAST_DELTA <= delta < np.inf):
        return None
    if not (scores.is_contiguous() and targets.is_contiguous()):
        return None
    with _telling(kind) if kind not in _compiled_for else _QUIET:
        gradient = torch.empty_like(scores) if wanted else None
        value = kernels.at_once(
            scores.data_ptr(),
            targets.data_ptr(),
            0 if gradient is None else gradient.data_ptr(),
            size,
            _DIRECT[rule],
            interpolated,
            float(delta),  # of an integer numba would make another kernel
            *_likes[kind],
        )
    return (value, gradient) if value == value else None  # not NaN


_DIRECT = {"ap": AP, "auc": AUC}
_QUIET = nullcontext()
_SMALL_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)
# Numbers that tell the kernel the dtypes of scores and targets, for those that are usual: it is compiled for each pair.
_likes = {
    (dtype, targets): (_ONE[dtype], torch.ones((), dtype=targets).numpy()[()])
    for dtype, usual in {torch.float32: (torch.float32, torch.int64, torch.int8), torch.float64: (torch.int64,)}.items()
    for targets in usual
}


def _scores(problem: Problem) -> Any:
    scores, dtype = problem.scores, problem.dtype
    return (scores if scores.dtype == dtype else scores.to(dtype)).numpy()


def _rank_in_parts(problem: Problem, accept: Accept) -> Ranked:
    scores_later = _are_for_cells(problem)
    notes, status = _find(problem, scores_later=scores_later)
    boxes = np.empty(0)
    if problem.box_losses is not None:
        boxes = problem.box_losses.double().numpy().copy()
        status[4] = int(not (np.isfinite(boxes) & (boxes >= 0)).all())
    accept(problem, status)
    one, rule = _ONE[problem.dtype], _RULES[problem.rule]
    positives, order, cuts = kernels.sort_and_cut(notes.scores, notes.index, problem.delta, one)
    cells, suspicious, tallies = None, True, (_NOTHING, _NOTHING)
    if scores_later and len(order):
        cells, suspicious, tallies = _tally_cells(problem, notes, cuts, positives)
    if scores_later and suspicious:
        status[3] = _count_bad_scores(notes)
        accept(problem, status)
    if cells is None and len(order):
        tallies = _tally(problem, notes, cuts[0])
    if problem.soft:
        boxes = problem.targets.numpy()[notes.index].astype(np.float64)
    values, lines, own, box_weights = kernels.finish(
        rule, problem.interpolated, problem.delta, cuts, positives, order, boxes, tallies, np.int64(status[1]), one
    )
    noted = (notes.pure, notes.left_out, notes.rows, notes.below)
    kept = _Kept(notes.scores, notes.index, own, cuts[0], lines, noted, cells)
    box_gradient = None
    if problem.box_losses is not None:
        box_gradient = torch.from_numpy(box_weights).to(loss_dtype(problem.box_losses.dtype))
    values = torch.from_numpy(values[: 1 if problem.rule in _DIRECT else 2])
    return Ranked(problem, values.to(problem.dtype), box_gradient, kept)


_NOTHING = np.zeros(1)


def _gradient(problem: Problem, kept: _Kept, upstream: tuple[Tensor, ...], out: Tensor) -> None:
    if len(kept.index) == 0:
        out.zero_()
        return
    kind = type(_ONE[problem.dtype])
    first = float(upstream[0])
    second = float(upstream[1]) if problem.rule == "rank-sort" else 0.0
    gradient, width, factor = out.numpy(), kind(2 * problem.delta), kind(first)
    if kept.cells is None:
        _evaluate(kept.scores, kept.notes, kept.marks, kept.lines, width, factor, gradient)
    else:
        finite = bool(np.isfinite(factor))  # NaN in the tables has a meaning of its own
        _evaluate_cells(kept, kept.cells, factor if finite else kind(1), gradient)
        if not finite:
            out.mul_(first)
    kernels.write_positives(kept.index, kept.own, first, second, gradient)


def _gradient_of_stages(problem: Problem, held: Kept, upstream: tuple[Tensor, ...], out: Tensor) -> None:
    factors = torch.stack(upstream[: len(held.errors)]).double()[:, None] * problem.num_processes
    lines = line_through_segments(held.segments, held.pair_weights * factors[0])
    of_rows = [
        held.segments.for_rows(values, values.new_zeros(1)).to(problem.dtype)
        for values in (lines[0], lines[1] / (2 * problem.delta or 1.0))
    ]
    notes: _Notes = held.scores
    one = _ONE[problem.dtype]
    noted = (notes.pure, notes.left_out, notes.rows, notes.below)
    _evaluate(
        notes.scores, noted, notes.marks, torch.stack(of_rows).numpy(), type(one)(2 * problem.delta), one, out.numpy()
    )
    errors = (held.errors * factors).sum(0).to(problem.dtype)
    here = held.index >= 0
    out[held.index[here]] = -errors[here]


def _find(problem: Problem, *, scores_later: bool = False) -> tuple[_Notes, list[int]]:
    """Notes and status; with ``scores_later`` only the scores of positives are looked at."""
    scores, targets = _scores(problem), problem.targets.numpy()
    notes = _Notes(scores, None, *_blocks(len(scores)))

    def work(start: int, stop: int) -> Any:
        # Two kernels: one would be compiled for every pair of dtypes.
        found = kernels.find_targets(targets, start, stop, problem.soft, notes.pure, notes.left_out)
        if scores_later:
            return found, len(found[0]) - int(np.isfinite(scores[found[0]]).sum())
        return found, kernels.count_bad_scores(scores, start, stop, notes.pure, notes.left_out, found[0])

    parts = _in_parts(len(scores), work, _as_many_as_threads())  # which changes nothing: there is nothing to round
    notes.index = np.concatenate([index for (index, _, _), _ in parts])
    negatives = sum(part[1] for part, _ in parts)
    bad_targets = sum(part[2] for part, _ in parts)
    bad_scores = sum(bad for _, bad in parts)
    return notes, [len(notes.index), negatives, bad_targets, bad_scores, 0]


def _count_bad_scores(notes: _Notes) -> int:
    def work(start: int, stop: int) -> Any:
        own = notes.index[(notes.index >= start) & (notes.index < stop)]
        return kernels.count_bad_scores(notes.scores, start, stop, notes.pure, notes.left_out, own)

    return sum(_in_parts(len(notes.scores), work))


def _are_for_cells(problem: Problem) -> bool:
    """Whether :mod:`.cpu_cells` may rank these scores. It knows of bad ones only after other mistakes are told.

    Half-precision ones have so many ties, on the edges, too, that cells leave too much open.
    """
    large = problem.scores.dtype == torch.float32 and problem.scores.numel() >= FEWEST_FOR_CELLS
    return large and problem.delta > 0 and problem.box_losses is None


def _tally_cells(
    problem: Problem, notes: _Notes, cuts: Any, positives: Any
) -> tuple[_Cells | None, bool, tuple[Any, Any]]:
    """As :func:`_tally`, by cells; None if they are of no use to these scores. And whether any score may be bad."""
    size, width, marks = len(notes.scores), 2.0 * problem.delta, cuts[0]
    grid = cpu_cells.make_grid(marks, notes.scores, width)
    if len(grid[1]) == 0:
        return None, True, (_NOTHING, _NOTHING)
    noted = (notes.pure, notes.left_out, np.empty(len(notes.pure), np.bool_))

    def work(start: int, stop: int) -> Any:
        return cpu_cells.tally_cells(notes.scores, start, stop, noted, grid, marks, np.float32(width))

    parts = _in_parts(size, work, _as_many_as_threads())  # sums are of integers
    suspicious = any(part[2] for part in parts)
    of_cells, of_rows = sum(part[0] for part in parts), sum(part[1] for part in parts)
    counts, sums, enough = cpu_cells.add_up(of_cells, of_rows, grid, cuts, problem.delta, positives)
    return _Cells(grid, noted) if enough else None, suspicious, (counts, sums)


def _tally(problem: Problem, notes: _Notes, marks: Any) -> tuple[Any, Any]:
    """Counts and sums of every row; notes the rows."""
    one, size = _ONE[problem.dtype], len(notes.scores)
    table, axis = kernels.prepare_table(marks, one, size, _small_integers(len(marks)))
    return _tally_in_parts(problem, notes, kernels.tally, marks, table, axis)


def _tally_in_parts(problem: Problem, notes: _Notes, kernel: Any, *tables: Any) -> tuple[Any, Any]:
    """What a kernel tallies by the marks and two more tables; notes the rows."""
    one, size, marks = _ONE[problem.dtype], len(notes.scores), tables[0]
    notes.marks, notes.rows = marks, np.empty(size, _small_integers(len(marks)).dtype)
    notes.below = np.empty(len(notes.pure), np.bool_)
    kept, width = (notes.pure, notes.left_out, notes.rows, notes.below), type(one)(2 * problem.delta)

    def work(start: int, stop: int) -> Any:
        return kernel(notes.scores, start, stop, kept, *tables, one, width)

    parts = _in_parts(size, work)
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def _tally_groups(problem: Problem, notes: _Notes, segments: Segments) -> Tensor:
    """Tallies of the rows of all groups; notes the rows."""
    groups = segments.groups
    assert groups is not None
    assert problem.groups is not None
    one, size = _ONE[problem.dtype], len(notes.scores)
    count = int(groups.of_positives[-1]) + 1
    numbers = groups.numbers[:count].numpy()
    spread = int(numbers[-1]) - int(numbers[0])
    dense = np.empty(size, np.int32)
    kernels.dense_groups(problem.groups.numpy(), numbers, spread if spread <= max(2 * size, 1 << 20) else 0, dense)
    edges = segments.edges
    beyond = edges.new_full((1,), torch.inf)
    marks = torch.cat([segments.for_rows(edges, beyond), beyond]).numpy()
    # The row below the segments of every group, see Segments.reached.
    first_row = (groups.first_segment[: count + 1] + torch.arange(1, count + 2)).numpy()
    tables = kernels.group_tables(marks, first_row, one)
    return torch.from_numpy(np.stack(_tally_in_parts(problem, notes, kernels.tally_groups, marks, dense, tables)))


def _evaluate(scores: Any, notes: Any, marks: Any, lines: Any, width: Any, factor: Any, out: Any) -> None:
    pure, left_out, rows, below = notes

    def work(start: int, stop: int) -> Any:
        kernels.evaluate(scores, start, stop, pure, left_out, rows, below, marks, lines, width, factor, out)

    _in_parts(len(scores), work)


def _evaluate_cells(kept: _Kept, cells: _Cells, factor: Any, out: Any) -> None:
    table, edges = cpu_cells.make_lines(kept.marks, cells.grid, kept.lines, factor)
    past_cache = len(out) >= FEWEST_PAST_CACHE and out.ctypes.data % 32 == 0

    def work(start: int, stop: int) -> Any:
        cpu_cells.evaluate_cells(kept.scores, start, stop, cells.notes, cells.grid[0], table, edges, past_cache, out)

    _in_parts(len(kept.scores), work, _as_many_as_threads())


def _blocks(size: int) -> tuple[Any, Any]:
    return np.empty(-(-size // BLOCK), np.bool_), np.empty(size, np.bool_)


def _small_integers(highest: int) -> Any:
    """An empty array of the integers for rows up to ``highest``, and one bit more.

    Two bytes keep the lookup table in the fastest cache.
    """
    return _TWO_BYTES if highest + 2 < 1 << 15 else _FOUR_BYTES


_TWO_BYTES, _FOUR_BYTES = np.empty(0, np.uint16), np.empty(0, np.uint32)


def _as_many_as_threads() -> int:
    """How many parts, where sums do not depend on it."""
    return min(torch.get_num_threads(), MOST_PARTS)


def _in_parts(size: int, work: Callable[[int, int], Any], most: int = MOST_PARTS) -> list[Any]:
    """Runs ``work(start, stop)`` for every part, on torch's number of threads; in their order."""
    parts = min(max(size // SMALLEST_PART, 1), most)
    edges = [size * part // parts // BLOCK * BLOCK for part in range(parts)] + [size]
    threads = min(torch.get_num_threads(), parts)
    if threads <= 1:
        return [work(*edge) for edge in itertools.pairwise(edges)]
    waiting = iter(list(enumerate(itertools.pairwise(edges))))
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
def _telling(kind: tuple[Any, ...]) -> Iterator[None]:
    """Says what is going on if compiling takes its time."""
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
    _say_once("compiling", "compiling the ranking losses for this processor; later runs find them cached")


def _say_that_there_is_no_cache(error: Exception) -> None:
    _say_once(
        "cache",
        "numba's cache of compiled functions cannot be used (%s: %s); compiling without it. "
        "NUMBA_CACHE_DIR names another folder for it",
        type(error).__name__,
        error,
    )


kernels.Compiled.no_cache = staticmethod(_say_that_there_is_no_cache)
