"""Compiled kernels of the CPU backend (numba). See :mod:`.segments` for the mathematics.

The kernels over all scores work on one part of them and release the interpreter lock, so that
several threads run several parts at once. Parts depend on the sizes alone, so results do not change
with the number of threads.

They go block by block: a vectorised sweep finds the lookup cells of a block, and tells when all of
it lies below every positive, as most of it does late in training. Rows are found before the first
of them is added to: a processor that has to guess whether the sum it reads is one it still has to
write takes half as long again. Indices are unsigned: numba checks signed ones for being negative,
and vectorises nothing that is checked.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, assignment"

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from .cpu_segments import ALRP, OPTIONS, RANK_SORT, alrp, cut, errors, helper, line, sort_pairs

BLOCK = 256
STEP, ONE, TWO, BYTE = np.uint64(BLOCK), np.uint64(1), np.uint64(2), np.uint64(255)
AHEAD = np.uint64(4 * BLOCK)
STREAMS = np.uint64(8)  # places that are read in turns: memory answers to several faster than to one
MOST_SMALL_ROWS = (1 << 15) - 4  # of two bytes, and one bit more
CELLS_PER_SEGMENT, MOST_CELLS = 16, 1 << 17  # of the lookup table
# A count and a sum of shares in one integer: room for FLUSH scores of FRACTION bits each.
FRACTION_BITS, FLUSH_BITS = 28, 17
UNIT, COUNT_SHIFT, FLUSH = 1 << FRACTION_BITS, FRACTION_BITS + FLUSH_BITS, 1 << FLUSH_BITS
ONE_MORE = np.int64(1 << COUNT_SHIFT)


class Compiled:
    """A kernel that is called from Python: compiled at its first call, and cached on disk.

    A cache that cannot be read or written (full, damaged, of another user) is done without.
    """

    no_cache: Callable[[Exception], None] = staticmethod(lambda error: None)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        try:
            self.call: Any = numba.njit(cache=True, **OPTIONS)(function)
            self.cached = True
        except RuntimeError as error:  # numba found no folder to write its cache to
            self._give_up_cache(error)

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.call(*arguments)
        except Exception as error:
            if not self.cached or isinstance(error, numba.core.errors.NumbaError):
                raise
            self._give_up_cache(error)
            return self.call(*arguments)

    def _give_up_cache(self, error: Exception) -> None:
        self.call, self.cached = numba.njit(**OPTIONS)(self.function), False
        Compiled.no_cache(error)


@intrinsic
def prefetch(typing_context, array, i):
    """Asks for the numbers of a block from array[i] on, of at most four bytes each; i may be beyond the end.

    A processor itself reads ahead to the end of a page of memory alone.
    """

    def generate(context, builder, signature, arguments):
        word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        start = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        for offset in range(0, 4 * BLOCK, 64):
            place = builder.gep(start, [word(offset)])
            builder.call(function, [place, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, i), generate


# ---- The first pass over the targets -------------------------------------------------------------


@helper
def _find_pure(targets, block, stop, pure):
    others_too = False
    for i in range(block, min(block + STEP, stop)):
        others_too |= targets[i] != 0
    pure[block // STEP] = not others_too


@helper
def _find_part(targets, start, stop, soft, pure, left_out):
    """Which blocks hold negatives alone, what is left out of the others, and the positives.

    Returns:
        flat index of the positives, number of negatives, number of targets not allowed.
    """
    found, others = np.empty(64, np.int64), np.empty(BLOCK, np.uint64)
    positives, negatives, bad = 0, np.int64(stop - start), np.int64(0)
    stop = np.uint64(stop)
    blocks = (stop - np.uint64(start) + STEP - ONE) // STEP
    in_turn = blocks // STREAMS
    for k in range(in_turn):
        for stream in range(STREAMS):
            _find_pure(targets, np.uint64(start) + (stream * in_turn + k) * STEP, stop, pure)
    for k in range(STREAMS * in_turn, blocks):
        _find_pure(targets, np.uint64(start) + k * STEP, stop, pure)
    for block in range(np.uint64(start), stop, STEP):
        if pure[block // STEP]:
            continue
        end = min(block + STEP, stop)
        for i in range(block, end):
            left_out[i] = targets[i] != 0
        count = np.uint64(0)
        for i in range(block, end):  # without a branch, which a processor would often guess wrong
            others[count] = i
            count += np.uint64(left_out[i])
        negatives -= np.int64(count)
        if positives + BLOCK > len(found):
            grown = np.empty(2 * positives + BLOCK, np.int64)
            for k in range(positives):
                grown[k] = found[k]
            found = grown
        for k in range(count):
            target = targets[others[k]]
            is_positive = target == 1 or (soft and target > 0 and target < 1)
            found[np.uint64(positives)] = others[k]
            positives += is_positive
            bad += not is_positive and target != -1
    return found[:positives], negatives, bad


@helper
def _count_bad_scores(scores, start, stop, pure, left_out, positives):
    """How many scores that are not ignored are NaN or infinite."""
    suspicious = np.int64(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        suspicious += not (abs(scores[i]) < np.inf)
    if suspicious == 0:
        return suspicious
    bad = np.int64(0)
    for i in range(np.uint64(start), np.uint64(stop)):
        bad += not (abs(scores[i]) < np.inf) and (pure[i // STEP] or not left_out[i])
    for i in positives:
        bad += not (abs(scores[i]) < np.inf)
    return bad


# ---- The lookup table ----------------------------------------------------------------------------


@helper
def _cell(score, low, scale, last, one):
    """The lookup cell of a score; never falls as the score rises, however the steps round."""
    position = (score - low) * scale
    position = position if position < last else last
    position = position if position > -one else -one
    return np.int32(position + one)


@helper
def _several(table):
    """The bit that says that several edges lie in a cell."""
    return np.uint32(1) << np.uint32(8 * table.itemsize - 1)


@helper
def _fill_table(marks, count, one, table):
    """Fills a table by which a score finds its row, the number of edges it has reached.

    A cell of the score axis names the number of edges below the cell; a score in it has reached
    these, and those within the cell that it is not below: mostly none or one. A cell with more has
    its highest bit set, and a search goes on from there.

    Args:
        marks: the lowest edge, then all ``count`` edges ascending, then infinity: marks[row] is
            the edge below a row, and marks[row + 1] the one above it.
        one: 1 in the dtype of the edges.

    Returns:
        left end, inverse width of the cells and number of the last cell, in that dtype.
    """
    low = marks[0]
    last = one * np.float32(len(table) - 2)
    width = marks[count] - low
    scale = last / width if width > 0 else one - one
    if not abs(scale) < np.inf:
        scale = one - one
    table[:] = 0
    for k in range(count):  # without a branch, as everywhere here: where edges lie cannot be guessed
        table[np.uint64(_cell(marks[k + 1], low, scale, last, one))] += 1
    reached, several = np.uint32(0), _several(table)
    for cell in range(len(table)):
        here = np.uint32(table[cell])
        table[cell] = reached + several * np.uint32(here > 1)
        reached += here
    return low, scale, last


@helper
def _search(score, marks, low, high):
    """The row of a score, which is one of low..high."""
    while low < high:
        middle = (low + high) // TWO
        if marks[middle + ONE] <= score:
            low = middle + ONE
        else:
            high = middle
    return low


@helper
def _find_rows(scores, block, size, marks, table, low, scale, last, one, cells, rows, distances):
    """Rows of a block of scores, and how far above their rows' edges they lie.

    Returns:
        whether any score has reached an edge.
    """
    for n in range(size):
        cells[n] = _cell(scores[block + n], low, scale, last, one)
    highest = np.int32(0)
    for n in range(size):
        highest = max(highest, cells[n])
    if highest == 0:
        return False
    several, end = _several(table), np.uint64(len(marks) - 2)
    for n in range(size):
        score = scores[block + n]
        named = np.uint32(table[np.uint64(cells[n])])
        if named < several:
            row = np.uint64(named)
            row += np.uint64(score >= marks[row + ONE])
        else:
            row = _search(score, marks, np.uint64(named - several), end)
        rows[block + n] = row
        distances[n] = score - marks[row]
    return True


# ---- The first pass over the scores --------------------------------------------------------------


@helper
def _tally_part(
    scores, start, stop, pure, left_out, marks, table, low, scale, last, one, width,
    rows, below, counts, sums
):  # fmt: skip
    """Finds the rows of all scores; adds up the count and the shares of every row [R].

    float32 shares are added as integers, together with the count, in one addition per score;
    float64 ones as they are.
    """
    cells, distances = np.empty(BLOCK, np.int32), np.empty(BLOCK, scores.dtype)
    fixed = np.empty(BLOCK, np.int32)
    # Twice, in turns: late in training many scores in a row add to the same number.
    packed, packed_too = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64)
    filled = 0
    inverse = one / width if width > 0 else one - one
    whole = one * np.float32(UNIT)
    for block in range(np.uint64(start), np.uint64(stop), STEP):
        size = min(STEP, np.uint64(stop) - block)
        reached = _find_rows(scores, block, size, marks, table, low, scale, last, one, cells, rows, distances)
        below[block // STEP] = not reached
        if not reached:
            continue
        if not pure[block // STEP]:
            for n in range(size):
                if left_out[block + n]:
                    rows[block + n] = 0
        if scores.itemsize == 4:
            for n in range(size):
                share = distances[n] * inverse
                share = share if share > 0 else one - one  # row 0; NaN
                fixed[n] = np.int32(share * whole if share < one else whole)
            half = size // TWO
            for n in range(half):
                packed[np.uint64(rows[block + n])] += np.int64(fixed[n]) + ONE_MORE
                packed_too[np.uint64(rows[block + half + n])] += np.int64(fixed[half + n]) + ONE_MORE
            if half + half < size:
                packed[np.uint64(rows[block + size - ONE])] += np.int64(fixed[size - ONE]) + ONE_MORE
            filled += BLOCK
            if filled == FLUSH:
                _flush(packed, counts, sums)
                _flush(packed_too, counts, sums)
                filled = 0
        else:
            for n in range(size):
                row = np.uint64(rows[block + n])
                share = distances[n] * inverse
                share = share if share > 0 else one - one
                counts[row] += 1.0
                sums[row] += share if share < one else one
    if scores.itemsize == 4:
        _flush(packed, counts, sums)
        _flush(packed_too, counts, sums)


@helper
def _flush(packed, counts, sums):
    for row in range(len(packed)):
        counts[row] += packed[row] >> COUNT_SHIFT
        sums[row] += (packed[row] & ((1 << COUNT_SHIFT) - 1)) / UNIT
        packed[row] = 0


# ---- The second pass -----------------------------------------------------------------------------


@helper
def _evaluate_part(scores, start, stop, pure, left_out, rows, below, marks, lines, width, factor, out):
    """Writes the value of the line of every negative's row, times a factor."""
    height, slope = lines[0], lines[1]
    stop = np.uint64(stop)
    for block in range(np.uint64(start), stop, STEP):
        end = min(block + STEP, stop)
        if below[block // STEP]:
            for i in range(block, end):
                out[i] = 0.0
            continue
        for i in range(block, end):
            row = np.uint64(rows[i])
            distance = scores[i] - marks[row]
            distance = distance if distance < width else width  # infinite where it overflows
            distance = distance if distance > 0 else width - width
            out[i] = factor * (height[row] + slope[row] * distance)
        if not pure[block // STEP]:
            # An ignored score may be NaN or infinite: zero times it is not zero.
            for i in range(block, end):
                if left_out[i]:
                    out[i] = 0.0


# ---- What Python calls ---------------------------------------------------------------------------


def _sort_and_cut(scores, index, delta, one):
    """Scores and order of the sorted positives, and :func:`.cpu_segments.cut`."""
    found = np.empty(len(index))
    for i in range(len(index)):
        found[i] = scores[index[i]] + 0.0  # no negative zero: its bits are not those of zero
    order = _order(found)
    positives = np.empty(len(index))
    for i in range(len(index)):
        positives[i] = found[order[i]]
    return positives, order, cut(positives, delta, one)


@helper
def _order(values):
    """The stable order of finite float64 numbers: byte by byte of their bits, the lowest first."""
    size = len(values)
    keys, sorted_keys = values.view(np.uint64).copy(), np.empty(size, np.uint64)
    order, sorted_order = np.arange(size), np.empty(size, np.int64)
    differing = np.uint64(0)
    for i in range(size):
        # Bits ascend with the number; those of negative ones descend.
        negative = keys[i] >> np.uint64(63)
        keys[i] ^= (~negative + ONE) | (ONE << np.uint64(63))
        differing |= keys[i] ^ keys[0]
    for shift in range(np.uint64(0), np.uint64(64), np.uint64(8)):
        if (differing >> shift) & BYTE == 0:
            continue  # as float32 leaves the last three bytes
        places = np.zeros(257, np.uint64)
        for i in range(size):
            places[((keys[i] >> shift) & BYTE) + ONE] += ONE
        for k in range(256):
            places[k + 1] += places[k]
        for i in range(size):
            byte = (keys[i] >> shift) & BYTE
            place = places[byte]
            places[byte] += ONE
            sorted_keys[place], sorted_order[place] = keys[i], order[i]
        keys, sorted_keys, order, sorted_order = sorted_keys, keys, sorted_order, order
    return order


def _prepare_table(marks, one, scores, small):
    """The lookup table for so many scores, of the dtype of ``small``; see :func:`_fill_table`."""
    segments = len(marks) - 2
    cells = min(CELLS_PER_SEGMENT * segments, MOST_CELLS, max(scores // 2, 64))
    table, axis = np.empty(cells + 2, small.dtype), np.full(3, one)
    axis[0], axis[1], axis[2] = _fill_table(marks, segments, one, table)
    return table, axis  # an array: Python would make float64 of a float32


def _tally(scores, start, stop, notes, marks, table, axis, one, width):
    """Counts and sums of shares of every row [R]; see :func:`_tally_part`."""
    pure, left_out, rows, below = notes
    low, scale, last = axis[0], axis[1], axis[2]
    counts, sums = np.zeros(len(marks) - 1), np.zeros(len(marks) - 1)
    _tally_part(
        scores, start, stop, pure, left_out, marks, table, low, scale, last, one, width,
        rows, below, counts, sums
    )  # fmt: skip
    return counts, sums


def _finish(rule, interpolated, delta, cuts, positives, order, extras, tallies, negatives, one):
    """Applies the rule of a loss; ``extras`` are qualities or box losses in the order given.

    Returns:
        values [2], lines of the rows [2, R], gradients of both values on the positives [2, P],
        derivatives by the box losses [P], the latter two in the order of the flat index.
    """
    counts, sums = tallies
    values, weights, own, p, n = errors(rule, interpolated, delta, cuts, positives, counts, sums, negatives)
    if rule in (RANK_SORT, ALRP):
        extras = _in_order(extras, order)
    if rule == RANK_SORT:
        values[1] = sort_pairs(positives, extras, delta, own[1])
    elif rule == ALRP:
        p = alrp(delta, cuts, positives, extras, p, n, values, weights, own)
    boxes, gradients = np.empty(len(order)), np.empty((2, len(order)))
    for i in range(len(order)):
        boxes[order[i]] = p[i]
        gradients[0, order[i]], gradients[1, order[i]] = own[0, i], own[1, i]
    return values, _rows_lines(cuts, weights, delta, one), gradients, boxes


@helper
def _in_order(values, order):
    ordered = np.empty(len(order))
    for i in range(len(order)):
        ordered[i] = values[order[i]]
    return ordered


@helper
def _rows_lines(cuts, weights, delta, one):
    """Height and slope of the line of every row, in the dtype of ``one`` [2, R]."""
    height, slope = line(cuts, weights, delta)
    lines = np.full((2, len(height) + 1), one - one)
    for k in range(len(height)):
        lines[0, k + 1] = height[k]
        if delta > 0:
            lines[1, k + 1] = slope[k] / (2 * delta)
    return lines


def _write_positives(index, own, first, second, out):
    for i in range(len(index)):
        out[index[i]] = own[0, i] * first + own[1, i] * second


def _dense_groups(groups, numbers, spread, dense):
    """Which of the numbers [G], ascending, each score's group is; -1 for none.

    ``spread`` is the distance from the first to the last number if that is small, or 0.
    """
    first = numbers[0]
    if spread == 0:
        for i in range(len(groups)):
            place = np.searchsorted(numbers, groups[i])
            known = place < len(numbers) and numbers[place] == groups[i]
            dense[i] = place if known else -1
        return
    table = np.full(spread + 1, -1, np.int32)
    for place in range(len(numbers)):
        table[numbers[place] - first] = place
    for i in range(len(groups)):
        inside = groups[i] >= first and groups[i] - first <= spread
        dense[i] = table[groups[i] - first] if inside else -1


def _group_tables(marks, first_row, one):
    """A lookup table for every group, one behind the other.

    Args:
        marks: the edge below every row [R + 1]; infinite for the rows below all segments.
        first_row: the row below the segments of every group, and one past the last [G + 1].

    Returns:
        tables, where each begins [G + 1], left end and inverse width of the cells [G].
    """
    count = len(first_row) - 1
    begin = np.empty(count + 1, np.int64)
    begin[0] = 0
    for g in range(count):
        begin[g + 1] = begin[g] + CELLS_PER_SEGMENT * (first_row[g + 1] - first_row[g]) + 2
    table = np.empty(begin[count], np.int32)
    lows, scales = np.full(count, one), np.full(count, one)
    for g in range(count):
        cells = begin[g + 1] - begin[g]
        low, high = marks[first_row[g] + 1], marks[first_row[g + 1] - 1]
        last = one * np.float32(cells - 2)
        scale = last / (high - low) if high > low else one - one
        if not abs(scale) < np.inf:
            scale = one - one
        row = first_row[g]
        for cell in range(cells):
            while row + 1 < first_row[g + 1] and _cell(marks[row + 1], low, scale, last, one) < cell:
                row += 1
            table[begin[g] + cell] = row
        lows[g], scales[g] = low, scale
    return table, begin, lows, scales


def _tally_groups(scores, start, stop, notes, marks, dense, tables, one, width):
    """Counts and sums of shares of every row [R]; notes the rows. Row 0 is for everything else."""
    pure, left_out, rows, below = notes
    table, begin, lows, scales = tables
    counts, sums = np.zeros(len(marks) - 1), np.zeros(len(marks) - 1)
    inverse = one / width if width > 0 else one - one
    for i in range(np.uint64(start), np.uint64(stop)):
        below[i // STEP] = False
        group = np.int64(dense[i])
        if group < 0 or (not pure[i // STEP] and left_out[i]):
            rows[i] = 0
            continue
        score, where = scores[i], np.uint64(group)
        last = one * np.float32(begin[where + ONE] - begin[where] - 2)
        cell = _cell(score, lows[where], scales[where], last, one)
        row = np.uint64(table[np.uint64(begin[where] + cell)])
        row += np.uint64(marks[row + ONE] <= score)
        while marks[row + ONE] <= score:
            row += ONE
        rows[i] = row
        share = (score - marks[row]) * inverse
        share = share if share > 0 else one - one
        counts[row] += 1.0
        sums[row] += share if share < one else one
    return counts, sums


_sort_and_cut_here, _table_here = helper(_sort_and_cut), helper(_prepare_table)
_tally_here = helper(_tally)


@intrinsic
def _pointer(typing_context, address, like):
    """The address of numbers of the type of ``like``, as a pointer."""
    pointer = types.CPointer(like)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address, like), generate


def _at_once(scores_at, targets_at, gradient_at, size, rule, interpolated, delta, one, like_targets):
    """All of AP or AUC over few scores, forward and, if there is an address for it, the gradient.

    Arrays come as addresses, and none is returned: handing arrays to and fro costs more than the
    work on a thousand scores does.

    Returns:
        the loss; NaN if something is not allowed, or there are too many positives for small rows.
    """
    scores, targets = carray(_pointer(scores_at, one), size), carray(_pointer(targets_at, like_targets), size)
    blocks = np.empty((2, (size + BLOCK - 1) // BLOCK), np.bool_)
    pure, below = blocks[0], blocks[1]
    left_out, rows = np.empty(size, np.bool_), np.empty(size, np.uint16)
    index, negatives, bad = _find_part(targets, 0, size, False, pure, left_out)
    bad += _count_bad_scores(scores, 0, size, pure, left_out, index)
    if bad > 0 or len(index) > MOST_SMALL_ROWS // 2:
        return np.nan
    positives, order, cuts = _sort_and_cut_here(scores, index, delta, one)
    marks, widths = cuts[0], np.full(1, one)
    widths[0] = 2 * delta
    counts, sums = np.zeros(len(marks) - 1), np.zeros(len(marks) - 1)
    if len(index) > 0:
        table, axis = _table_here(marks, one, size, rows)
        notes = pure, left_out, rows, below
        start = np.int64(0)  # of a literal numba would make another helper
        counts, sums = _tally_here(scores, start, size, notes, marks, table, axis, one, widths[0])
    values, weights, own, _, _ = errors(rule, interpolated, delta, cuts, positives, counts, sums, negatives)
    if gradient_at == 0:
        return values[0]
    gradient = carray(_pointer(gradient_at, one), size)
    if len(index) == 0:
        gradient[:] = 0.0
        return values[0]
    lines = _rows_lines(cuts, weights, delta, one)
    _evaluate_part(scores, 0, size, pure, left_out, rows, below, marks, lines, widths[0], one, gradient)
    for i in range(len(order)):
        gradient[index[order[i]]] = own[0, i]
    return values[0]


at_once, sort_and_cut = Compiled(_at_once), Compiled(_sort_and_cut)
find_targets, count_bad_scores = Compiled(_find_part.py_func), Compiled(_count_bad_scores.py_func)
prepare_table, tally, finish = Compiled(_prepare_table), Compiled(_tally), Compiled(_finish)
dense_groups, group_tables = Compiled(_dense_groups), Compiled(_group_tables)
tally_groups = Compiled(_tally_groups)
evaluate, write_positives = Compiled(_evaluate_part.py_func), Compiled(_write_positives)
