"""The passes over all N scores as compiled CPU kernels (numba).

Each kernel works on one chunk of the scores and releases the interpreter lock, so that torch's
threads (``threads``) run several chunks at once. Unlike numba's own parallel loops this survives a
fork, may be entered from several threads, compiles in a fraction of the time, and never competes
with torch. Chunks depend on the sizes alone: results do not change with the number of threads.

Within a chunk the kernels go block by block: a vectorised sweep finds the lookup cells of a block,
and tells when all of it lies below every positive, as most of it does late in training. Segments
are looked up before the first of them is added to: a processor that has to guess whether the sum it
reads is one it still has to write takes half as long again. Indices are unsigned: numba
checks signed ones for being negative, and vectorises nothing that is checked.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from .segments import Floats, Segments
from .threads import run_together

__all__ = ["CPUPasses"]

BLOCK = 256
MOST_CHUNKS = 16
SMALLEST_CHUNK = 1 << 16
ONE, TWO, STEP = np.uint64(1), np.uint64(2), np.uint64(BLOCK)  # for unsigned indices
CELLS_PER_SEGMENT, MOST_CELLS = 8, 1 << 13  # of the lookup table


def _compiled(kernel: Callable[..., Any]) -> Any:
    try:
        return numba.njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # numba found no folder to write its cache to
        return numba.njit(nogil=True)(kernel)


class CPUPasses:
    """See :class:`aploss.losses.ranking.passes.Passes`."""

    def __init__(self, scores: Tensor, targets: Tensor, soft: bool) -> None:
        self.like, self.scores = scores, _array(scores)
        # Which blocks hold nothing but negatives; only in the others are some boxes left out. So
        # the later passes need not read the targets, nor be compiled for each of their dtypes.
        self.pure = np.empty(-(-len(self.scores) // BLOCK), np.bool_)
        self.left_out = np.empty(len(self.scores), np.bool_)
        values, notes = _array(targets), (self.pure, self.left_out)
        parts = self._in_chunks(
            lambda _, start, stop: _find_positives(values, start, stop, soft, *notes)
        )
        index = np.concatenate([index for index, _, _ in parts] or [np.empty(0, np.int64)])
        self.positive_index = torch.from_numpy(index)
        self.positive_scores = self.scores[index].astype(np.float64)
        self.num_negatives = sum(int(negatives) for _, negatives, _ in parts)
        self.bad_target = next((int(bad) for _, _, bad in parts if bad >= 0), -1)

    def negatives_per_segment(self, segments: Segments) -> tuple[Floats, Floats, int]:
        table = _lookup_table(segments)
        self.shift, self.breaks, cell_segment, *_ = table
        # The second pass finds the segments where the first one has left them.
        self.rows = np.empty(len(self.scores), cell_segment.dtype)
        self.below = np.empty(len(self.pure), np.bool_)  # blocks below all segments
        totals = np.zeros((_chunk_count(len(self.scores)), 2, segments.count + 2))
        boxes = (self.scores, self.pure, self.left_out)
        found = (self.rows, self.below)
        bad = self._in_chunks(
            lambda c, start, stop: _accumulate(*boxes, start, stop, *table, *found, *totals[c])
        )
        counts, sums = totals.sum(axis=0)[:, : segments.count]
        return counts, sums, next((int(i) for i in bad if i >= 0), -1)

    def gradient_of_negatives(self, segments: Segments, at_left: Floats, slope: Floats) -> Tensor:
        gradient = torch.empty_like(self.like)
        out = _array(gradient)
        boxes = (self.scores, self.pure, self.left_out)
        found = (self.shift, self.breaks, self.rows, self.below)
        lines = [np.append(values, [0.0, 0.0]) for values in (at_left, slope)]
        self._in_chunks(lambda _, start, stop: _evaluate(*boxes, start, stop, *found, *lines, out))
        return gradient

    def _in_chunks(self, work: Callable[[int, int, int], Any]) -> list[Any]:
        """Runs ``work(chunk, start, stop)`` for every chunk; results in the order of the chunks."""
        size = len(self.scores)
        chunks = _chunk_count(size)
        edges = [size * c // chunks // BLOCK * BLOCK for c in range(chunks)] + [size]
        jobs = [(c, edges[c], edges[c + 1]) for c in range(chunks) if edges[c] < edges[c + 1]]
        return run_together([partial(work, *job) for job in jobs])


def _lookup_table(segments: Segments) -> tuple[Any, ...]:
    """A uniform grid over the breakpoints, so that a score finds its segment without a search.

    A cell names the segment k at its left end. Few cells are cut by a breakpoint, and most of those
    by one: the segment of a value is then k, or k + 1 if the value has reached breakpoint k + 1. A
    cell with more breakpoints has its highest bit set, and a search goes on from k.

    Cell 0 stands for what is below all segments, or no negative. It names a row of its own behind
    the M segments, so that the kernels need no branch for it.

    Returns:
        shift, breakpoints (padded), segment of each cell, left end and inverse width of the cells.
    """
    breaks = segments.breakpoints
    cells = min(CELLS_PER_SEGMENT * len(breaks), MOST_CELLS)
    width = (breaks[-1] - breaks[0]) / cells
    scale = 1.0 / width if width > 0 and np.isfinite(1.0 / width) else 0.0
    # Two bytes keep the table in the fastest cache, unless there are tens of thousands.
    cell_segment = np.empty(cells + 2, np.uint16 if len(breaks) + 1 < 1 << 15 else np.uint32)
    _fill_cells(cell_segment, breaks, width, width if scale else 0.0)
    # Behind the last breakpoint: one never reached; the row of cell 0; and NaN, so that whatever
    # an ignored score is, infinite too, it stays in that row.
    padded = np.concatenate([breaks, [np.inf, 0.0, np.nan]])
    return segments.shift, padded, cell_segment, breaks[0], scale


def _array(tensor: Tensor) -> Any:
    return tensor.detach().numpy()


def _chunk_count(size: int) -> int:
    return min(max(size // SMALLEST_CHUNK, 1), MOST_CHUNKS)


@_compiled
def _highest_bit(cell_segment):  # type: ignore[no-untyped-def]
    return np.uint32(1) << np.uint32(8 * cell_segment.itemsize - 1)


@_compiled
def _fill_cells(cell_segment, breaks, width, step):  # type: ignore[no-untyped-def]
    """Fills the lookup table by one walk along the breakpoints and the edges of the cells."""
    several_breakpoints = _highest_bit(cell_segment)
    margin = width / 64  # how far rounding may carry a value into the next cell
    cell_segment[0] = len(breaks) + 1
    first, last, end = 0, 0, len(breaks) - 1
    for cell in range(1, len(cell_segment)):
        edge = breaks[0] + step * (cell - 1)
        while first < end and breaks[first + 1] <= edge - margin:
            first += 1
        while last < end and breaks[last + 1] <= edge + step + margin:
            last += 1
        if cell == len(cell_segment) - 1:
            last = end
        cell_segment[cell] = first + several_breakpoints * (last - first > 1)


@_compiled
def _find_positives(targets, start, stop, soft, pure, left_out):  # type: ignore[no-untyped-def]
    found = np.empty(256, np.int64)
    positives, negatives, bad = 0, np.int64(0), np.int64(-1)
    stop = np.uint64(stop)
    for block in range(np.uint64(start), stop, STEP):
        end = min(block + STEP, stop)
        others = 0
        for i in range(block, end):
            others += targets[i] != 0
        negatives += np.int64(end - block) - others
        pure[block // STEP] = others == 0
        if others == 0:
            continue
        for i in range(block, end):
            left_out[i] = targets[i] != 0
        for i in range(block, end):
            if not left_out[i]:
                continue
            target = targets[i]
            if target == 1 or (soft and target > 0 and target < 1):
                if positives == len(found):
                    grown = np.empty(2 * positives, np.int64)
                    grown[:positives] = found
                    found = grown
                found[positives] = i
                positives += 1
            elif target != -1 and bad < 0:
                bad = np.int64(i)
    return found[:positives].copy(), negatives, bad


@_compiled
def _locate(  # type: ignore[no-untyped-def]
    scores, pure, left_out, block, size, shift, low, scale, last_cell, cells
):
    """Lookup cells of a block. Returns the highest: 0 says that the block holds nothing to do."""
    for n in range(size):
        above = np.float64(scores[block + n]) - shift - low
        position = above * scale + 1.0 if above >= 0.0 else 0.0
        cells[n] = np.int32(position if position < last_cell else last_cell)
    highest = np.int32(0)
    for n in range(size):
        highest = max(highest, cells[n])
    if not pure[block // STEP]:
        for n in range(size):
            if left_out[block + n]:
                cells[n] = 0
    return highest


@_compiled
def _search(value, breaks, low):  # type: ignore[no-untyped-def]
    """The last segment whose left end is not above the value, from segment ``low`` on."""
    high = np.uint64(len(breaks) - 4)
    for _ in range(4):
        if breaks[low + ONE] > value:
            return low
        low += ONE
    while low < high:
        middle = (low + high + ONE) // TWO
        if breaks[middle] <= value:
            low = middle
        else:
            high = middle - ONE
    return low


@_compiled
def _first_bad(scores, pure, left_out, start, stop):  # type: ignore[no-untyped-def]
    """Index of a score that is not finite and not ignored, or -1."""
    for i in range(start, stop):
        if not (abs(scores[i]) < np.inf) and (pure[i // BLOCK] or not left_out[i]):
            return i
    return -1


@_compiled
def _accumulate(  # type: ignore[no-untyped-def]
    scores, pure, left_out, start, stop, shift, breaks, cell_segment, low, scale,
    rows, below, counts, sums
):  # fmt: skip
    """Finds the rows of all boxes, and adds up the count and the sum of every row [M + 2].

    Returns:
        the index of a score that is not finite, or -1.
    """
    several_breakpoints = _highest_bit(cell_segment)
    last_cell = np.float64(len(cell_segment) - 1)
    cells, distances = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.float64)
    infinite = np.int32(0)
    for block in range(np.uint64(start), np.uint64(stop), STEP):
        size = min(STEP, np.uint64(stop) - block)
        highest = _locate(scores, pure, left_out, block, size, shift, low, scale, last_cell, cells)
        below[block // STEP] = highest == 0
        if highest == 0:
            for n in range(size):
                infinite += np.int32(not (abs(scores[block + n]) < np.inf))
            continue
        for n in range(size):
            value = np.float64(scores[block + n]) - shift
            named = np.uint32(cell_segment[np.uint64(cells[n])])
            if named < several_breakpoints:
                row = np.uint64(named)
                row += np.uint64(value >= breaks[row + ONE])
            else:
                row = _search(value, breaks, np.uint64(named - several_breakpoints))
            rows[block + n] = row
            distances[n] = value - breaks[row]
        for n in range(size):
            row = np.uint64(rows[block + n])
            counts[row] += 1.0
            sums[row] += distances[n]
    # What is not finite makes a sum not finite; so may, rarely, an ignored score or an overflow.
    if infinite > 0 or not np.isfinite(sums).all():
        return _first_bad(scores, pure, left_out, start, stop)
    return -1


@_compiled
def _evaluate(  # type: ignore[no-untyped-def]
    scores, pure, left_out, start, stop, shift, breaks, rows, below, at_left, slope, out
):
    """Writes the value of the line [M + 2] of every negative's row."""
    stop = np.uint64(stop)
    for block in range(np.uint64(start), stop, STEP):
        end = min(block + STEP, stop)
        if below[block // STEP]:
            for i in range(block, end):
                out[i] = 0.0
            continue
        for i in range(block, end):
            row = np.uint64(rows[i])
            out[i] = at_left[row] + slope[row] * (np.float64(scores[i]) - shift - breaks[row])
        if not pure[block // STEP]:
            # An ignored score may be NaN or infinite: zero times it is not zero.
            for i in range(block, end):
                if left_out[i]:
                    out[i] = 0.0
