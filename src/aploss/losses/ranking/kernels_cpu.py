"""The passes over all N scores as compiled CPU kernels (numba).

Each kernel works on one chunk ``[start, stop)`` and releases the interpreter lock, so that a pool
of ordinary threads runs several chunks at once. Unlike numba's own parallel loops this survives a
fork, may be entered from several threads, compiles in a fraction of the time, and never uses more
threads than torch does. Chunks depend on the sizes alone: results do not change with the number
of threads.

Within a chunk the kernels go block by block. One vectorised sweep tells whether a block has
anything but negatives far below every positive; most blocks have not, late in training.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .segments import Segments

__all__ = ["find_positives", "gradient_of_negatives", "negatives_per_segment"]

FloatArray = NDArray[np.float64]

BLOCK = 256
CHUNK = 1 << 17
MOST_CHUNKS = 16


def _compiled(kernel: Callable[..., Any]) -> Any:
    try:
        return numba.njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # no folder that numba could write its cache to
        return numba.njit(nogil=True)(kernel)


def find_positives(targets: Tensor, soft: bool) -> tuple[Tensor, int, int]:
    """Finds the positives of flat targets.

    Returns:
        flat indices of the positives (ascending), number of negatives, and the flat index of the
        first target that is not allowed, or -1.
    """
    values = _array(targets)
    parts = _in_chunks(len(values), lambda _, a, b: _find_positives(values, a, b, soft))
    bad = next((int(bad) for _, _, bad in parts if bad >= 0), -1)
    index = np.concatenate([index for index, _, _ in parts]) if parts else np.empty(0, np.int64)
    return torch.from_numpy(index), sum(int(n) for _, n, _ in parts), bad


def negatives_per_segment(
    scores: Tensor, targets: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, int]:
    """Counts the negatives of every segment and adds up how far they lie above its left end.

    Returns:
        counts [M] and sums [M] (float64), and the flat index of a negative whose score is not
        finite, or -1.
    """
    values, kinds, table = _array(scores), _array(targets), _LookupTable(segments, scores.dtype)
    chunks = _chunk_count(len(values))
    counts = np.zeros((chunks, segments.count))
    sums = np.zeros((chunks, segments.count))
    bad = _in_chunks(
        len(values),
        lambda c, a, b: _accumulate(values, kinds, a, b, *table.arguments, counts[c], sums[c]),
    )
    return (
        torch.from_numpy(counts.sum(axis=0)),
        torch.from_numpy(sums.sum(axis=0)),
        next((int(i) for i in bad if i >= 0), -1),
    )


def gradient_of_negatives(
    scores: Tensor, targets: Tensor, segments: Segments, at_left: Tensor, slope: Tensor
) -> Tensor:
    """Evaluates the piecewise linear gradient at every negative; other entries are zero.

    Args:
        at_left: value at the left end of every segment [M].
        slope: slope within every segment [M].
    """
    values, kinds, table = _array(scores), _array(targets), _LookupTable(segments, scores.dtype)
    gradient = torch.empty_like(scores)
    out, left_values, slopes = _array(gradient), _array(at_left), _array(slope)
    _in_chunks(
        len(values),
        lambda _, a, b: _evaluate(values, kinds, a, b, *table.arguments, left_values, slopes, out),
    )
    return gradient


class _LookupTable:
    """A uniform grid over the breakpoints: most cells lie in one segment, which they name.

    A cell that a breakpoint cuts (or touches, within rounding) holds ``-1 - k`` instead, where
    ``k`` is a segment at or below all of the cell's points, and a search goes on from there.
    """

    CELLS_PER_SEGMENT = 8
    MOST_CELLS = 1 << 14

    def __init__(self, segments: Segments, dtype: torch.dtype) -> None:
        breaks = _array(segments.breakpoints)
        low, high = breaks[0], breaks[-1]
        cells = min(self.CELLS_PER_SEGMENT * len(breaks), self.MOST_CELLS)
        width = (high - low) / cells
        scale = 1.0 / width if width > 0 and np.isfinite(1.0 / width) else 0.0
        edges = low + width * np.arange(-1, cells + 2)
        at_edge = np.searchsorted(breaks, edges, side="right") - 1  # segment of every edge
        below, above = at_edge[:-3], at_edge[3:]  # edges one cell outside of the cell
        cell_segment = np.where(below == above, below, -1 - np.maximum(below, 0))
        # Everything under this score is below all segments. One step down, because the shift of
        # float32 scores is not always exact.
        threshold = np.nextafter(
            _array(torch.tensor([low + segments.shift], dtype=torch.float64)).astype(
                np.float64 if dtype == torch.float64 else np.float32
            ),
            -np.inf,
            dtype=np.float64 if dtype == torch.float64 else np.float32,
        )[0]
        self.arguments = (
            threshold,
            segments.shift,
            breaks,
            cell_segment.astype(np.int32),
            low,
            scale,
        )


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def _chunk_count(size: int) -> int:
    return min(max(-(-size // CHUNK), 1), MOST_CHUNKS)


_pool: tuple[int, int, ThreadPoolExecutor] | None = None


def _threads() -> int:
    return min(torch.get_num_threads(), MOST_CHUNKS)


def _executor(threads: int) -> ThreadPoolExecutor:
    """The pool of this process (a fork inherits none) with that many threads."""
    global _pool
    if _pool is None or _pool[:2] != (os.getpid(), threads):
        _pool = (os.getpid(), threads, ThreadPoolExecutor(threads, thread_name_prefix="aploss"))
    return _pool[2]


def _in_chunks(size: int, work: Callable[[int, int, int], Any]) -> list[Any]:
    """Runs ``work(chunk, start, stop)`` for every chunk; results are in the order of the chunks."""
    chunks = _chunk_count(size)
    edges = [size * c // chunks for c in range(chunks + 1)]
    jobs = [(c, edges[c], edges[c + 1]) for c in range(chunks) if edges[c] < edges[c + 1]]
    threads = min(_threads(), len(jobs))
    if threads <= 1:
        return [work(*job) for job in jobs]
    return list(_executor(threads).map(lambda job: work(*job), jobs))


@_compiled
def _find_positives(targets, start, stop, soft):  # type: ignore[no-untyped-def]
    found = np.empty(256, np.int64)
    positives, negatives, bad = 0, 0, -1
    for block in range(start, stop, BLOCK):
        end = min(block + BLOCK, stop)
        others = 0
        for i in range(block, end):
            others += targets[i] != 0
        negatives += end - block - others
        if others == 0:
            continue
        for i in range(block, end):
            target = targets[i]
            if target == 0 or target == -1:
                continue
            if target == 1 or (soft and target > 0 and target < 1):
                if positives == len(found):
                    grown = np.empty(2 * positives, np.int64)
                    grown[:positives] = found
                    found = grown
                found[positives] = i
                positives += 1
            elif bad < 0:
                bad = i
    return found[:positives].copy(), negatives, bad


@_compiled
def _segment_from(value, breaks, segment):  # type: ignore[no-untyped-def]
    """The segment of a value known to lie in or above `segment`: the last one with left end <= it."""
    last = len(breaks) - 1
    for _ in range(8):
        if segment >= last or breaks[segment + 1] > value:
            return segment
        segment += 1
    low, high = segment, last  # breaks[low] <= value; the answer is in [low, high]
    while low < high:
        middle = (low + high + 1) // 2
        if breaks[middle] <= value:
            low = middle
        else:
            high = middle - 1
    return low


@_compiled
def _accumulate(  # type: ignore[no-untyped-def]
    scores, targets, start, stop, threshold, shift, breaks, cell_segment, low, scale, counts, sums
):
    last_cell = len(cell_segment) - 1
    high = breaks[-1]
    top = len(breaks) - 1
    bad = -1
    for block in range(start, stop, BLOCK):
        end = min(block + BLOCK, stop)
        above, infinite = 0, 0
        for i in range(block, end):
            above += scores[i] >= threshold
            infinite += not (abs(scores[i]) < np.inf)
        if infinite > 0:
            for i in range(block, end):
                if bad < 0 and targets[i] == 0 and not (abs(scores[i]) < np.inf):
                    bad = i
            continue
        if above == 0:
            continue
        for i in range(block, end):
            if targets[i] != 0 or scores[i] < threshold:
                continue
            value = np.float64(scores[i]) - shift
            if value < low:
                continue
            if value >= high:
                counts[top] += 1.0
                continue
            segment = cell_segment[min(np.int64((value - low) * scale), last_cell)]
            if segment < 0:
                segment = _segment_from(value, breaks, -1 - segment)
            counts[segment] += 1.0
            sums[segment] += value - breaks[segment]
    return bad


@_compiled
def _evaluate(  # type: ignore[no-untyped-def]
    scores,
    targets,
    start,
    stop,
    threshold,
    shift,
    breaks,
    cell_segment,
    low,
    scale,
    left_values,
    slopes,
    out,
):
    last_cell = len(cell_segment) - 1
    high = breaks[-1]
    at_top = left_values[-1]
    for block in range(start, stop, BLOCK):
        end = min(block + BLOCK, stop)
        above = 0
        for i in range(block, end):
            above += scores[i] >= threshold
            out[i] = 0.0
        if above == 0:
            continue
        for i in range(block, end):
            if targets[i] != 0 or scores[i] < threshold:
                continue
            value = np.float64(scores[i]) - shift
            if value < low:
                continue
            if value >= high:
                out[i] = at_top
                continue
            segment = cell_segment[min(np.int64((value - low) * scale), last_cell)]
            if segment < 0:
                segment = _segment_from(value, breaks, -1 - segment)
            out[i] = left_values[segment] + slopes[segment] * (value - breaks[segment])
