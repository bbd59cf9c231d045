"""The compiled passes over very many float32 scores: by cells of the score axis.

Cells are many times narrower than the segments, so that most of them lie within one row, and what
is tallied of a score needs no more than its cell and where in it the score lies. The few scores in
*crossed* cells, those with an edge inside, are listed, and compared with the edges.

The width of a cell is a power of two: the cell of a score, and where in it the score lies, come out
exact, for scores of any offset. Sums are of integers, so that they do not depend on the order.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, call-arg, assignment, var-annotated"

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .cpu_kernels import AHEAD, BLOCK, ONE, STEP, Compiled, prefetch
from .cpu_kernels import UNIT as SHARE_UNIT
from .cpu_segments import helper

CELLS_PER_SEGMENT, FEWEST_CELLS_PER_SEGMENT, MOST_CELLS = 64, 8, 1 << 16
SCORES_PER_CELL = 16  # at least; fewer are not worth the tables
CELLS_PER_RAMP = 32.0  # at least; fractions of wider cells are not fine enough
LOWEST = 64  # cells for scores below all edges, which take turns: none waits for the sum of the one before
SAMPLE, MOST_CROSSED = 1024, 0.2
# A count and a sum of fractions of a cell in one integer, with room for FLUSH scores; the highest bit: crossed.
FRACTION_BITS, FLUSH_BITS = 23, 20
COUNT_SHIFT, FLUSH = np.uint64(FRACTION_BITS + FLUSH_BITS), (1 << FLUSH_BITS) - BLOCK
UNIT, ONE_MORE = np.float32(1 << FRACTION_BITS), ONE << COUNT_SHIFT
FLOAT_ONE, BITS_OF_ONE = np.float32(1), np.uint64(0x3F800000)  # the bits of 1 + a fraction, less these: UNITs of it
HIGHEST_BIT = np.uint64(63)
CROSSED = ONE << HIGHEST_BIT
MAGNITUDE, INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)  # bits of a float32
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

    The first LOWEST cells are below all edges, the last one is above them.

    Returns:
        axis, float32 [3]: cells per unit, and the numbers, from zero on the axis, of the first and the last cell;
        the row at the left end of every cell, and at the end [cells + 1]; whether there is an edge inside [cells].
        No cells if they would not help with these scores.
    """
    count = len(marks) - 2
    low, high = np.float64(marks[1]), np.float64(marks[count])
    axis, rows, crossed = np.zeros(3, np.float32), np.empty(0, np.uint32), np.empty(0, np.bool_)
    wanted = min(CELLS_PER_SEGMENT * count, MOST_CELLS, len(scores) // SCORES_PER_CELL)
    if wanted < FEWEST_CELLS_PER_SEGMENT * count or not high - low < np.inf:
        return axis, rows, crossed
    exponent, magnitude = math.frexp((high - low) / wanted)[1], math.frexp(max(abs(low), abs(high)))[1]
    exponent = max(exponent, magnitude - 22)  # not finer than the scores themselves
    scale = math.ldexp(1.0, -exponent)
    if exponent < -100 or width * scale < CELLS_PER_RAMP:
        return axis, rows, crossed
    first, last = math.floor(low * scale) - LOWEST, math.floor(high * scale) + 1
    axis[0], axis[1], axis[2] = scale, first, last
    rows, crossed = np.empty(last - first + 2, np.uint32), np.empty(last - first + 1, np.bool_)
    row = 0
    for cell in range(len(rows)):
        while row < count and marks[row + 1] * scale <= first + cell:
            row += 1
        rows[cell] = row
        if cell < len(crossed):
            crossed[cell] = row < count and marks[row + 1] * scale < first + cell + 1
    if _share_crossed(scores, axis, crossed) > MOST_CROSSED:
        return axis, rows[:0], crossed[:0]
    return axis, rows, crossed


@helper
def _share_crossed(scores, axis, crossed):
    """The share of scores in crossed cells, in a sample."""
    found, step = 0, len(scores) // SAMPLE
    for i in range(0, step * SAMPLE, step):
        place = min(max(scores[i] * axis[0], axis[1]), axis[2])
        if place == place:
            found += crossed[np.int64(np.floor(place) - axis[1])]
    return found / SAMPLE


@helper
def _find_cell(score, scale, first, last, lowest):
    """The cell of a score, and where in it the score lies; ``lowest``: where scores below all edges are put."""
    place = score * scale
    place = place if place < last else last  # NaN, too
    place = place if place > lowest else lowest
    whole = np.floor(place)
    return np.uint32(np.int32(whole - first)), place - whole


@helper
def _lowest(axis):
    """The lowest cell for every place in a block."""
    lowest = np.empty(BLOCK, np.float32)
    for n in range(BLOCK):
        lowest[n] = axis[1] + np.float32(n % LOWEST)
    return lowest


def _tally_cells(scores, start, stop, notes, grid, marks, width):
    """Counts and sums of fractions of every cell, and of shares of every row that scores in crossed cells have reached.

    Args:
        notes: what :func:`.cpu_kernels._find_part` tells of the blocks; whether a block lies below all edges, and how
            many of its scores are in crossed cells [blocks]; of these the places within their blocks and the rows, from
            ``start`` on without gaps [N].

    Returns:
        counts and sums of cells, int64 [2, cells], and of rows [2, R]; whether any score is NaN or infinite.
    """
    pure, left_out, below, lengths, listed, rows = notes
    axis, _, crossed = grid
    scale, first, last = axis[0], axis[1], axis[2]
    cells, lowest, bits = np.empty(BLOCK, np.uint32), _lowest(axis), scores.view(np.uint32)
    added, totals = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    packed, of_cells = np.empty(len(crossed), np.uint64), np.zeros((2, len(crossed)), np.int64)
    of_rows = np.zeros((2, len(marks) - 1), np.int64)
    _clear(packed, crossed)
    filled, end, largest = 0, np.uint64(start), np.uint32(0)
    for block in range(np.uint64(start), np.uint64(stop), STEP):
        size, begin = min(STEP, np.uint64(stop) - block), end
        prefetch(scores, block + AHEAD)
        highest = np.uint32(0)
        for n in range(size):
            cells[n], fraction = _find_cell(scores[block + n], scale, first, last, lowest[n])
            added[n] = np.uint64(_bits(fraction + FLOAT_ONE)) + (ONE_MORE - BITS_OF_ONE)
            highest = max(highest, cells[n])
            largest = max(largest, bits[block + n] & MAGNITUDE)
        below[block // STEP] = highest < LOWEST
        lengths[block // STEP] = 0
        if highest < LOWEST:
            continue
        if not pure[block // STEP]:
            for n in range(size):
                cells[n] = np.uint32(0) if left_out[block + n] else cells[n]
        end = _add(cells, added, size, packed, totals, listed, end)
        lengths[block // STEP] = end - begin
        _add_listed(scores, block, cells, listed, begin, end, grid, marks, width, rows, of_rows)
        filled += BLOCK
        if filled >= FLUSH:
            _flush(packed, of_cells)
            _clear(packed, crossed)
            filled = 0
    _flush(packed, of_cells)
    return of_cells, of_rows, largest >= INFINITY


@helper
def _add(cells, added, size, packed, totals, listed, end):
    """Adds a block to the cells; lists the places of scores in crossed ones. Returns the end of the list."""
    for n in range(size):
        cell = np.uint64(cells[n])
        total = packed[cell] + added[n]
        packed[cell] = total
        totals[n] = total
    whole = size // EIGHT * EIGHT
    for n in range(np.uint64(0), whole, EIGHT):
        byte = _highest_bits(totals, n)
        _store_bytes(listed, end, PLACES[byte] + n * EVERY_BYTE)
        end += SET_BITS[byte]
    for n in range(whole, size):
        listed[end] = n
        end += totals[n] >> HIGHEST_BIT
    return end


@helper
def _add_listed(scores, block, cells, listed, begin, end, grid, marks, width, rows, tallies):
    """Finds the rows of the listed scores of a block, and adds up the count and the shares of every row."""
    of_cells, (counts, shares), inverse = grid[1], (tallies[0], tallies[1]), FLOAT_ONE / width
    for k in range(begin, end):
        place = np.uint64(listed[k])
        score, row = scores[block + place], np.uint64(of_cells[np.uint64(cells[place])])
        row += np.uint64(score >= marks[row + ONE])
        while score >= marks[row + ONE]:  # seldom
            row += ONE
        rows[k] = row
        share = min(max((score - marks[row]) * inverse, FLOAT_ONE - FLOAT_ONE), FLOAT_ONE)
        counts[row] += 1
        shares[row] += np.int64(share * np.float32(SHARE_UNIT))


@helper
def _clear(packed, crossed):
    for cell in range(np.uint64(len(packed))):
        packed[cell] = CROSSED if crossed[cell] else np.uint64(0)


@helper
def _flush(packed, tallies):
    counts, sums = tallies[0], tallies[1]
    for cell in range(np.uint64(len(packed))):
        counts[cell] += np.int64((packed[cell] & ~CROSSED) >> COUNT_SHIFT)
        sums[cell] += np.int64(packed[cell] & (ONE_MORE - ONE))


def _add_up(of_cells, of_rows, grid, marks, width):
    """Counts and sums of shares of the rows [R], from what :func:`_tally_cells` found."""
    axis, rows, crossed = grid
    scale, first = np.float64(axis[0]), np.float64(axis[1])
    counts, sums = of_rows[0].astype(np.float64), of_rows[1] / SHARE_UNIT
    for cell in range(LOWEST, len(crossed)):
        if not crossed[cell]:
            row, count = rows[cell], of_cells[0, cell]
            distance = count * (first + cell - marks[row] * scale) + of_cells[1, cell] / np.float64(UNIT)
            counts[row] += count
            sums[row] += distance / scale / width
    return counts, sums


def _make_lines(marks, grid, lines, factor):
    """Values of the lines of the rows, times a factor, at the left ends of all cells, and at the end [cells + 1].

    Lines meet at the edges: within a cell that is not crossed all values lie on the line between its two.
    """
    axis, rows, _ = grid
    table = np.zeros(len(rows), np.float32)
    for cell in range(LOWEST, len(rows)):
        row = rows[cell]
        if row > 0:
            distance = (np.float64(axis[1]) + cell) / np.float64(axis[0]) - marks[row]
            table[cell] = factor * (lines[0, row] + lines[1, row] * distance)
    return table


def _evaluate_cells(scores, start, stop, notes, marks, grid, lines, table, width, factor, past_cache, out):
    """Writes the value of the line of every negative's row, times a factor.

    Args:
        past_cache: whether to write to memory without reading it into the cache first; ``out`` has to start at a
            multiple of 32 bytes then.
    """
    pure, left_out, below, lengths, listed, rows = notes
    axis = grid[0]
    scale, first, last = axis[0], axis[1], axis[2]
    cells, fractions, values = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    end = np.uint64(start)
    for block in range(np.uint64(start), np.uint64(stop), STEP):
        size, begin = min(STEP, np.uint64(stop) - block), end
        if below[block // STEP]:
            for n in range(size):
                values[n] = 0.0
        else:
            prefetch(scores, block + AHEAD)
            for n in range(size):
                cells[n], fractions[n] = _find_cell(scores[block + n], scale, first, last, first)
            whole = size // EIGHT * EIGHT
            for n in range(np.uint64(0), whole, EIGHT):
                _interpolate(table, cells, fractions, n, values)
            for n in range(whole, size):
                cell = np.uint64(cells[n])
                values[n] = table[cell] + (table[cell + ONE] - table[cell]) * fractions[n]
            end = begin + np.uint64(lengths[block // STEP])
            for k in range(begin, end):
                place, row = np.uint64(listed[k]), np.uint64(rows[k])
                distance = scores[block + place] - marks[row]
                distance = distance if distance < width else width
                distance = distance if distance > 0 else width - width
                values[place] = factor * (lines[0, row] + lines[1, row] * distance)
            if not pure[block // STEP]:
                for n in range(size):
                    values[n] = np.float32(0) if left_out[block + n] else values[n]
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
def _interpolate(typing_context, table, cells, fractions, n, out):
    """out[n + k] = table[c] + (table[c + 1] - table[c]) * fractions[n + k] with c = cells[n + k], for LANES of k.

    Both numbers of a cell come by one read, which is not what would be made of the same in Python.
    """

    def generate(context, builder, signature, arguments):
        number, pair, word = ir.FloatType(), ir.IntType(64), ir.IntType(32)

        def at(which, index, kind):
            data = context.make_array(signature.args[which])(context, builder, arguments[which]).data
            return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())

        def of_pairs(side):
            every_other = ir.Constant(ir.VectorType(word, LANES), list(range(side, 2 * LANES, 2)))
            return builder.shuffle_vector(both, both, every_other)

        chosen = builder.load(at(1, arguments[3], ir.VectorType(word, LANES)), align=4)
        pairs = ir.Constant(ir.VectorType(pair, LANES), ir.Undefined)
        for k in range(LANES):
            cell = builder.zext(builder.extract_element(chosen, word(k)), pair)
            pairs = builder.insert_element(pairs, builder.load(at(0, cell, pair), align=4), word(k))
        both = builder.bitcast(pairs, ir.VectorType(number, 2 * LANES))
        left, right = of_pairs(0), of_pairs(1)
        share = builder.load(at(2, arguments[3], ir.VectorType(number, LANES)), align=4)
        values = builder.fadd(left, builder.fmul(builder.fsub(right, left), share))
        builder.store(values, at(4, arguments[3], ir.VectorType(number, LANES)), align=4)
        return context.get_dummy_value()

    return types.void(table, cells, fractions, n, out), generate


@intrinsic
def _highest_bits(typing_context, array, i):
    """The highest bits of array[i : i + 8], of uint64, as those of one byte."""

    def generate(context, builder, signature, arguments):
        words = ir.VectorType(ir.IntType(64), LANES)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        found = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), words.as_pointer()), align=8)
        negative = builder.icmp_signed("<", found, ir.Constant(words, [0] * LANES))
        return builder.zext(builder.bitcast(negative, ir.IntType(LANES)), ir.IntType(64))

    return types.uint64(array, i), generate


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
