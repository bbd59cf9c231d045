"""The compiled passes over very many float32 scores: by cells of the score axis.

Cells are many times narrower than the segments, so that most of them lie within one row: what is
tallied of a score needs no more than its cell and where in it the score lies. Of a *crossed* cell,
one with an edge inside, the count and the mean tell how much lies above the edge but for a small
part of the cell's width; :func:`_add_up` bounds that part, and says so where it is more than the
last bit of a float32. Sparse scores at the top, where a single one decides, are compared with the
edges one by one. The gradient is exact in every cell: scores in crossed ones look up their row.

The width of a cell is a power of two: the cell of a score, and where in it the score lies, come out
exact, for scores of any offset. Sums are of integers, so that they do not depend on the order.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, assignment, var-annotated"

import math

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .cpu_kernels import AHEAD, BLOCK, ONE, STEP, TWO, Compiled, prefetch
from .cpu_kernels import UNIT as SHARE_UNIT
from .cpu_segments import INSIDE, above, helper

CELLS_PER_SEGMENT, MOST_CELLS = 64, 1 << 17
# What a crossed cell leaves open is a part of its width.
CELLS_PER_RAMP, FEWEST_CELLS_PER_RAMP, USUAL_CELLS = 1 << 14, 1 << 12, 1 << 16
SCORES_PER_CELL = 8  # at least; fewer are not worth the tables
LOWEST = 64  # cells for scores below all edges, which take turns: none waits for the sum of the one before
SAMPLE = 4096  # scores, of which at most these shares may lie in crossed cells, and from the first listed cell on
MOST_CROSSED, MOST_LISTED = 0.4, 1 / 64
MOST_OPEN = 2.0**-23  # how much of a sum over the negatives may be left open
# A count and a sum of fractions of a cell in one integer, with room for FLUSH scores; the highest bit: it is listed.
FRACTION_BITS, FLUSH_BITS = 20, 21
COUNT_SHIFT, FLUSH = np.uint64(FRACTION_BITS + FLUSH_BITS), (1 << FLUSH_BITS) - BLOCK
UNIT, ONE_MORE, LISTED = 1 << FRACTION_BITS, ONE << COUNT_SHIFT, ONE << np.uint64(63)
# The bits of a float32 from 8 on are those of 8 and UNITs of the rest; 8.5, as places are from the middle of a cell.
MIDDLE, BITS_OF_EIGHT = np.float32(8.5), np.uint64(0x41000000)
# A number added to this one is rounded to a whole one, which stands in the lowest bits of the sum.
ROUND, BITS_OF_ROUND = np.float32(1.5 * 2**23), 0x4B400000
NOT_A_NUMBER, PAYLOAD = np.uint32(0x7FC00000), np.uint32(0x003FFFFF)  # the bits of a float32, those left for a row
FLOAT_ZERO, NO_ROW = np.float32(0), np.uint32(0xFFFFFFFF)
LANES = 8
EIGHT, EVERY_BYTE = np.uint64(LANES), np.uint64(0x0101010101010101)


def _set_bits():
    """The places, one a byte, of the set bits in each byte; and how many they are."""
    places, counts = np.zeros(256, np.uint64), np.zeros(256, np.uint64)
    for byte in range(256):
        found = [k for k in range(8) if byte >> k & 1]
        places[byte], counts[byte] = sum(k << (8 * n) for n, k in enumerate(found)), len(found)
    return places, counts


PLACES, SET_BITS = _set_bits()


def _make_grid(marks, scores, width):
    """Cells for scores between edges; ``marks`` as in :func:`.cpu_kernels._fill_table`, ``width`` is 2 delta.

    A cell reaches from half its width below a multiple of it to half its width above. The first LOWEST cells are below
    all edges, the last one is above them.

    Returns:
        axis, float32 [3]: cells per unit, and the numbers, from zero on the axis, of the first and the last cell;
        clean, int64 [R, 2]: the first cell that lies within each row alone, and one past the last;
        crossed, int64 [C, 2]: the other cells, and the row at the left end of each;
        listed, int64 [2]: the cell from which on crossed ones are listed, that is, their scores are compared with the
        edges one by one; and how many cells there are from it on, without the last.
        No clean cells if they would not help with these scores.
    """
    count = len(marks) - 2
    low, high = np.float64(marks[1]), np.float64(marks[count])
    axis, listed, nothing = np.zeros(3, np.float32), np.zeros(2, np.int64), np.empty((0, 2), np.int64)
    if not high - low < np.inf:
        return axis, nothing, nothing, listed
    exponent = _exponent(high - low, count, width)
    exponent = max(exponent, math.frexp(max(abs(low), abs(high)))[1] - 21)  # a number of cells and ROUND: an exact sum
    scale = math.ldexp(1.0, -exponent)
    first, last = math.floor(low * scale) - LOWEST, math.floor(high * scale) + 2
    size = last - first + 1
    if exponent < -100 or width * scale < FEWEST_CELLS_PER_RAMP or size * SCORES_PER_CELL > len(scores):
        return axis, nothing, nothing, listed
    axis[0], axis[1], axis[2] = scale, first, last
    clean, crossed = np.empty((count + 1, 2), np.int64), np.empty((2 * count, 2), np.int64)
    found, free = 0, LOWEST
    for row in range(count):
        place = marks[row + 1] * scale - first
        begin, end = math.ceil(place - 0.5), math.floor(place + 0.5) + 1  # two, where they meet at the edge
        clean[row, 0], clean[row, 1] = free, max(free, begin)
        for cell in range(max(free, begin), end):
            crossed[found, 0], crossed[found, 1] = cell, row
            found += 1
        free = max(free, end)
    clean[count, 0], clean[count, 1] = free, size
    crossed = crossed[:found]
    if _sample(scores, axis, crossed, listed) > MOST_CROSSED:
        clean = nothing
    return axis, clean, crossed, listed


@helper
def _exponent(span, segments, width):
    """That of the width of cells between the first and the last edge: the finest that one of three reasons asks for."""
    few_crossed = max(span / (CELLS_PER_SEGMENT * segments), span / MOST_CELLS)
    little_open = max(width / CELLS_PER_RAMP, span / USUAL_CELLS)
    not_too_much_open = max(width / (2 * FEWEST_CELLS_PER_RAMP), span / MOST_CELLS)
    return math.frexp(min(few_crossed, little_open, not_too_much_open))[1]


@helper
def _sample(scores, axis, crossed, listed):
    """The share of scores in crossed cells, in a sample, by which the cells that are listed are chosen, too."""
    tally = np.zeros(np.int64(axis[2] - axis[1]) + 1, np.int64)
    step = len(scores) // SAMPLE | 1  # odd: scores of one class in four, eight, ... would be a poor sample
    for i in range(0, len(scores), step):
        place = min(max(scores[i] * axis[0], axis[1]), axis[2])
        if place == place:
            tally[np.int64(np.floor(place + np.float32(0.5)) - axis[1])] += 1
    listed[0], found = len(tally) - 1, 0
    while found + tally[listed[0] - 1] <= MOST_LISTED * SAMPLE and listed[0] > LOWEST:
        listed[0] -= 1
        found += tally[listed[0]]
    listed[1] = len(tally) - 1 - listed[0]
    found = 0
    for k in range(len(crossed)):
        found += tally[crossed[k, 0]]
    return found / SAMPLE


@helper
def _find_cell(score, scale, base, last, lowest):
    """The cell of a score, and where in it, from the middle on; ``lowest``: where scores below all edges are put."""
    place = score * scale
    place = place if place < last else last  # NaN, too
    place = place if place > lowest else lowest
    rounded = place + ROUND
    return _bits(rounded) - base, place - (rounded - ROUND)


@helper
def _base(axis):
    """What the bits of a rounded place are for the first cell."""
    return np.uint32(BITS_OF_ROUND + np.int64(axis[1]))


@numba.njit(fastmath={"reassoc", "contract"}, **INSIDE)
def _note(noted, score):
    """Becomes NaN, and stays so, with a score that is NaN or infinite."""
    return noted + score * FLOAT_ZERO


def _tally_cells(scores, start, stop, notes, grid, marks, width):
    """Counts and sums of fractions of every cell, and of shares of every row that listed ones have reached.

    Args:
        notes: what :func:`.cpu_kernels._find_part` tells of the blocks; whether a block lies below all edges [blocks].

    Returns:
        counts and sums of cells, int64 [2, cells], and of rows [2, R]; whether any score is NaN or infinite.
    """
    pure, left_out, below = notes
    axis, listed = grid[0], grid[3]
    scale, last, base = axis[0], axis[2], _base(axis)
    cells, added, lowest = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.float32)
    for n in range(BLOCK):
        lowest[n] = axis[1] + np.float32(n % LOWEST)
    top, top_cells, places = np.uint32(listed[0]), np.uint32(listed[1]), np.empty(BLOCK + LANES, np.uint8)
    packed = np.empty(np.int64(axis[2] - axis[1]) + 1, np.uint64)
    of_cells, of_rows = np.zeros((2, len(packed)), np.int64), np.zeros((2, len(marks) - 1), np.int64)
    row_of_cell = _rows_of_top(grid)
    _clear(packed, grid)
    filled, noted = 0, FLOAT_ZERO
    for block in range(np.uint64(start), np.uint64(stop), STEP):
        size = min(STEP, np.uint64(stop) - block)
        prefetch(scores, block + AHEAD)
        highest = np.uint32(0)
        for n in range(size):
            score = scores[block + n]
            noted = _note(noted, score)
            cells[n], place = _find_cell(score, scale, base, last, lowest[n])
            added[n] = _bits(place + MIDDLE)
            highest = max(highest, cells[n])
        below[block // STEP] = highest < LOWEST
        if highest < LOWEST:
            continue
        if not pure[block // STEP]:
            for n in range(size):
                cells[n] = np.uint32(0) if left_out[block + n] else cells[n]
        found = np.uint64(0)
        for n in range(size):
            cell = np.uint64(cells[n])
            tally = packed[cell]
            packed[cell] = tally + (np.uint64(added[n]) + (ONE_MORE - BITS_OF_EIGHT))
            found |= tally  # LISTED, if any of them is
        if found >= LISTED:
            for n in range(size, BLOCK):
                cells[n] = 0
            _add_listed(scores, block, cells, top, top_cells, places, row_of_cell, marks, width, of_rows)
        filled += BLOCK
        if filled >= FLUSH:
            _flush(packed, of_cells)
            _clear(packed, grid)
            filled = 0
    _flush(packed, of_cells)
    return of_cells, of_rows, noted != noted


@helper
def _rows_of_top(grid):
    """The row at the left end of every listed cell, NO_ROW for those between them."""
    crossed, listed = grid[2], grid[3]
    rows = np.full(listed[1], NO_ROW)
    for k in range(len(crossed)):
        if crossed[k, 0] >= listed[0]:
            rows[crossed[k, 0] - listed[0]] = crossed[k, 1]
    return rows


@helper
def _add_listed(scores, block, cells, top, top_cells, places, row_of_cell, marks, width, tallies):
    """Finds the rows of the scores of a block in listed cells, and adds up the count and the shares of every row."""
    counts, shares, inverse, end = tallies[0], tallies[1], np.float32(1) / width, np.uint64(0)
    for n in range(np.uint64(0), STEP, EIGHT):
        byte = _within(cells, n, top, top_cells)
        _store_bytes(places, end, PLACES[byte] + n * EVERY_BYTE)
        end += SET_BITS[byte]
    for k in range(end):
        place = np.uint64(places[k])
        row = np.uint64(row_of_cell[np.uint64(cells[place] - top)])
        if row == NO_ROW:
            continue
        score = scores[block + place]
        while score >= marks[row + ONE]:
            row += ONE
        share = min(max((score - marks[row]) * inverse, FLOAT_ZERO), np.float32(1))
        counts[row] += 1
        shares[row] += np.int64(share * np.float32(SHARE_UNIT))


@helper
def _clear(packed, grid):
    crossed, listed = grid[2], grid[3]
    packed[:] = 0
    for k in range(len(crossed)):
        if crossed[k, 0] >= listed[0]:
            packed[crossed[k, 0]] = LISTED


@helper
def _flush(packed, tallies):
    counts, sums = tallies[0], tallies[1]
    for cell in range(np.uint64(len(packed))):
        counts[cell] += np.int64((packed[cell] & ~LISTED) >> COUNT_SHIFT)
        sums[cell] += np.int64(packed[cell] & (ONE_MORE - ONE))


def _add_up(of_cells, of_rows, grid, cuts, delta, positives):
    """Counts and sums of shares of the rows [R], from what :func:`_tally_cells` found.

    Returns:
        both; whether so little is left open by crossed cells that it does not matter.
    """
    axis, clean, crossed, listed = grid
    marks, scale, first = cuts[0], np.float64(axis[0]), np.float64(axis[1])
    counts, sums, open_above = of_rows[0].astype(np.float64), of_rows[1] / SHARE_UNIT, np.zeros(len(marks))
    share_of_cell = 1 / scale / (2 * delta)
    for row in range(1, len(clean)):
        count, moment, fractions = np.int64(0), np.int64(0), np.int64(0)
        begin = clean[row, 0]
        for cell in range(np.uint64(begin), np.uint64(clean[row, 1])):
            count += of_cells[0, cell]
            moment += of_cells[0, cell] * np.int64(cell - np.uint64(begin))
            fractions += of_cells[1, cell]
        begin_above_edge = first + begin - 0.5 - marks[row] * scale
        counts[row] += count
        sums[row] += (count * begin_above_edge + moment + fractions / UNIT) * share_of_cell
    for k in range(len(crossed)):
        cell, row = crossed[k, 0], crossed[k, 1]
        if cell < listed[0] and of_cells[0, cell] > 0:
            whole, total, begin = np.float64(of_cells[0, cell]), of_cells[1, cell] / UNIT, first + cell - 0.5
            _split(whole, total, begin, row, marks, scale, share_of_cell, counts, sums, open_above)
    _, _, _, _, ramp_start, ramp_end = cuts
    n = np.empty(len(positives))
    above(cuts, delta, counts[1:], sums[1:], n)
    for i in range(len(positives)):
        if open_above[ramp_start[i] + 1] + open_above[ramp_end[i] + 1] > MOST_OPEN * (n[i] + 1):
            return counts, sums, False
    return counts, sums, True


@helper
def _split(whole, total, begin, row, marks, scale, share_of_cell, counts, sums, open_above):
    """Divides what was tallied in a crossed cell among its rows, as if it were spread evenly but for the mean.

    Sums over all negatives depend on one thing alone, for each edge: the distances of what lies above it, added up. By
    the mean, and by Jensen's inequality, these have bounds, whatever lies where in the cell.

    Args:
        whole, total: how many scores, and the sum of their distances from the left end of the cell, in cells.
        begin, row: the left end of the cell, in cells, and its row.
        open_above: how far from these bounds what was chosen is at the most, added to [rows].
    """
    mean = total / whole
    slope = min(max(6 * (mean - 0.5), -1.0), 1.0)  # a density of 1 + slope (2x - 1) has this mean
    count, edge = whole, marks[row] * scale - begin
    while row < len(marks) - 2 and marks[row + 1] * scale - begin <= 1.0:
        following = min(max(marks[row + 1] * scale - begin, 0.0), 1.0)
        rest = 1 - following
        least, most = max(mean - following, 0.0), mean * rest
        distance = rest * rest * (0.5 + slope * (2 * rest / 3 + following - 0.5))
        distance = min(max(distance, least), most)
        count_above = whole * rest * (1 + slope * following)
        total_above = whole * distance + following * count_above
        counts[row] += count - count_above
        sums[row] += (total - total_above - edge * (count - count_above)) * share_of_cell
        open_above[row + 1] += whole * max(most - distance, distance - least) * share_of_cell
        count, total, edge, row = count_above, total_above, following, row + 1
    counts[row] += count
    sums[row] += (total - edge * count) * share_of_cell


def _make_lines(marks, grid, lines, factor):
    """Tables of the lines of the rows, times a factor, for :func:`_evaluate_cells`.

    Returns:
        the value in the middle and the rise of every cell [cells, 2], for crossed ones NaN with the row at their left
        end in its bits; the edges below and above, the height and the slope of every row [R, 4].
    """
    axis, clean, crossed, _ = grid
    table = np.zeros((np.int64(axis[2] - axis[1]) + 1, 2), np.float32)
    edges = np.zeros((len(clean), 4), np.float32)
    for row in range(len(clean)):
        height, slope = np.float64(factor) * lines[0, row], np.float64(factor) * lines[1, row]
        edges[row, 0], edges[row, 1], edges[row, 2], edges[row, 3] = marks[row], marks[row + 1], height, slope
        rise = slope / axis[0]
        at_first = height + slope * (np.float64(axis[1]) / axis[0] - marks[row])
        if row > 0:
            for cell in range(clean[row, 0], clean[row, 1]):
                table[cell, 0], table[cell, 1] = at_first + rise * cell, rise
    words = table.reshape(2 * len(table)).view(np.uint32)
    for k in range(len(crossed)):
        words[2 * crossed[k, 0]] = NOT_A_NUMBER | np.uint32(crossed[k, 1])
    return table, edges


def _evaluate_cells(scores, start, stop, notes, axis, table, edges, past_cache, out):
    """Writes the value of the line of every negative's row.

    Args:
        table, edges: see :func:`_make_lines`.
        past_cache: whether to write to memory without reading it into the cache first; ``out`` has to start at a
            multiple of 32 bytes then.
    """
    pure, left_out, below = notes
    scale, first, last, base = axis[0], axis[1], axis[2], _base(axis)
    numbers = table.reshape(2 * len(table))
    pairs, words = numbers.view(np.uint64), numbers.view(np.uint32)
    cells, places = np.zeros(BLOCK, np.uint32), np.empty(BLOCK + LANES, np.uint8)
    fractions, values = np.zeros(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for block in range(np.uint64(start), np.uint64(stop), STEP):
        size = min(STEP, np.uint64(stop) - block)
        if below[block // STEP]:
            for n in range(size):
                values[n] = 0.0
        else:
            prefetch(scores, block + AHEAD)
            for n in range(size):
                cells[n], fractions[n] = _find_cell(scores[block + n], scale, base, last, first)
            for n in range(size, BLOCK):
                cells[n] = 0
            end = np.uint64(0)
            for n in range(np.uint64(0), STEP, EIGHT):
                byte = _interpolate(pairs, cells, fractions, n, values)
                _store_bytes(places, end, PLACES[byte] + n * EVERY_BYTE)
                end += SET_BITS[byte]
            for k in range(end):
                place = np.uint64(places[k])
                score, row = scores[block + place], np.uint64(words[TWO * np.uint64(cells[place])] & PAYLOAD)
                row += np.uint64(score >= edges[row, 1])
                while score >= edges[row, 1]:  # seldom
                    row += ONE
                values[place] = edges[row, 2] + edges[row, 3] * (score - edges[row, 0])
            if not pure[block // STEP]:
                for n in range(size):
                    values[n] = FLOAT_ZERO if left_out[block + n] else values[n]
        _write(values, size, past_cache, out, block)
    _fence()


@helper
def _write(values, size, past_cache, out, block):
    """out[block : block + size] = values"""
    done = np.uint64(0)
    if past_cache:
        done = size // EIGHT * EIGHT
        for n in range(np.uint64(0), done, EIGHT):
            _store_past_cache(values, n, out, block + n)
    else:
        prefetch(out, block + AHEAD)
    for n in range(done, size):
        out[block + n] = values[n]


@intrinsic
def _store_bytes(typing_context, array, i, word):
    """array[i : i + 8] = the bytes of a word, the lowest first."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        builder.store(arguments[2], place, align=1)
        return context.get_dummy_value()

    return types.void(array, i, word), generate


@intrinsic
def _interpolate(typing_context, pairs, cells, fractions, n, out):
    """out[n + k] = value + rise * fractions[n + k] for LANES of k, with the pair of cells[n + k]; and which are NaN.

    Both numbers of a cell come by one read, which is not what would be made of the same in Python.

    Returns:
        a byte with the bits of those that are NaN.
    """

    def generate(context, builder, signature, arguments):
        number, pair, word = ir.FloatType(), ir.IntType(64), ir.IntType(32)

        def at(which, index, kind):
            data = context.make_array(signature.args[which])(context, builder, arguments[which]).data
            return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())

        def of_pairs(side):
            every_other = ir.Constant(ir.VectorType(word, LANES), list(range(side, 2 * LANES, 2)))
            return builder.shuffle_vector(both, both, every_other)

        both = ir.Constant(ir.VectorType(pair, LANES), ir.Undefined)
        for k in range(LANES):
            cell = builder.load(at(1, builder.add(arguments[3], pair(k)), word), align=4)
            both = builder.insert_element(both, builder.load(at(0, builder.zext(cell, pair), pair), align=8), word(k))
        both = builder.bitcast(both, ir.VectorType(number, 2 * LANES))
        share = builder.load(at(2, arguments[3], ir.VectorType(number, LANES)), align=4)
        values = builder.fadd(of_pairs(0), builder.fmul(of_pairs(1), share))
        builder.store(values, at(4, arguments[3], ir.VectorType(number, LANES)), align=4)
        return _as_byte(builder, builder.fcmp_unordered("uno", values, values))

    return types.uint64(pairs, cells, fractions, n, out), generate


@intrinsic
def _within(typing_context, cells, n, first, count):
    """Which of cells[n : n + LANES] are first, ..., first + count - 1, as the bits of a byte."""

    def generate(context, builder, signature, arguments):
        word, lanes = ir.IntType(32), ir.VectorType(ir.IntType(32), LANES)

        def spread(value):
            one = builder.insert_element(ir.Constant(lanes, ir.Undefined), value, word(0))
            return builder.shuffle_vector(one, one, ir.Constant(lanes, [0] * LANES))

        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        found = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), lanes.as_pointer()), align=4)
        distance = builder.sub(found, spread(arguments[2]))
        return _as_byte(builder, builder.icmp_unsigned("<", distance, spread(arguments[3])))

    return types.uint64(cells, n, first, count), generate


def _as_byte(builder, bits):
    return builder.zext(builder.bitcast(bits, ir.IntType(LANES)), ir.IntType(64))


@intrinsic
def _store_past_cache(typing_context, values, n, out, i):
    """out[i : i + LANES] = values[n : n + LANES]"""

    def generate(context, builder, signature, arguments):
        def at(which):
            data = context.make_array(signature.args[which])(context, builder, arguments[which]).data
            place = builder.gep(data, [arguments[which + 1]])
            return builder.bitcast(place, ir.VectorType(ir.FloatType(), LANES).as_pointer())

        stored = builder.store(builder.load(at(0), align=4), at(2), align=4 * LANES)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(values, n, out, i), generate


@intrinsic
def _bits(typing_context, number):
    """The bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(number), generate


@intrinsic
def _fence(typing_context):
    """What was written past the cache is seen by other threads from here on."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


make_grid, make_lines, add_up = Compiled(_make_grid), Compiled(_make_lines), Compiled(_add_up)
tally_cells, evaluate_cells = Compiled(_tally_cells), Compiled(_evaluate_cells)
