"""The CPU backend, compiled by numba: O(N + P log P) for P positives among N scores.

It adds to the page in :mod:`aploss.losses.ranking` that only the positives are sorted. Their
breakpoints s_i - delta and s_i + delta cut the score axis into *rows*; every negative finds its row
through a lookup table and is counted there together with its distance to the row's left edge. See
:mod:`.segments` for the same mathematics in torch operations, and for why edges are exact.

Rows are numbered group by group. The first row of a group lies below all of its breakpoints, where
every step function is 0. Sums over scores are sums of integers (fixed point), so results are the
same bits for any number of threads. NumPy arrays throughout; tensors only at the boundary.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, no-any-return"

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from .compiled import OPTIONS, Kernel
from .rules import Ratio
from .torch_backend import Found, Positives, Problem, Ranks, Reduce, Status, TorchBackend

SCORE_DTYPES, TARGET_DTYPES = (torch.float32, torch.float64), (torch.float32, torch.float64, torch.int64)
BLOCK = 256
MIN_SCORES_PER_THREAD = 1 << 16
_NO_GROUPS = np.empty(0, np.int32)
MAX_CELLS_PER_ROW = 16  # of the lookup table: most cells then hold no edge, or one

# Functions that kernels call need no entry point from Python.
_inside: Any = numba.njit(**{**OPTIONS, "no_cpython_wrapper": True})


# ---- Kernels -------------------------------------------------------------------------------------


@Kernel
def find_positives(targets, scores, soft, negative, index, values):
    """Marks the negatives [N]; collects flat index and score of the positives, for which it needs N + 1 places.

    Returns:
        The number of positives, of negatives, of invalid targets and of invalid scores.
    """
    found, negatives, bad_targets, bad_scores = np.uint64(0), len(targets), 0, 0
    size, step = np.uint64(len(targets)), np.uint64(BLOCK)
    for block in range(np.uint64(0), size, step):
        stop = block + step if block + step < size else size
        others, infinite = False, False
        for i in range(block, stop):  # vectorised: most blocks hold finite negatives only
            negative[i] = targets[i] == 0
            others |= targets[i] != 0
            infinite |= not abs(scores[i]) < np.inf
        if others:
            first = last = found
            for i in range(block, stop):  # without a branch, which a processor would often guess wrong
                index[last] = i
                last += np.uint64(not negative[i])
            negatives -= np.int64(last - first)
            for k in range(first, last):
                i = np.uint64(index[k])
                if targets[i] == 1 or (soft and targets[i] > 0 and targets[i] < 1):
                    index[found], values[found] = i, scores[i]
                    found += np.uint64(1)
                else:
                    bad_targets += targets[i] != -1
        if infinite:
            for i in range(block, stop):
                bad_scores += targets[i] != -1 and not abs(scores[i]) < np.inf
    return np.int64(found), negatives, bad_targets, bad_scores


# What the kernels exchange, for P positives in G groups that cut the axis into R rows: the rows of three arrays, as
# each array takes time to compile and to pass.
# ``axis``, in the dtype of the scores [8, R + 1]: the left edge of each row, infinity for the first of a group and
# behind the last; the edges of the breakpoints; value at the edge and slope of the gradient's line; and, of each
# group's lookup table, the left end, the inverse width and the number of the last cell but one.
EDGE, START, END, VALUE, SLOPE, LOW, SCALE, LAST = range(8)
# ``places``, integers [4, P]: the rows in which the ramp of a positive starts and ends, its row, its flat index or -1.
FIRST_ROW, LAST_ROW, OWN_ROW, INDEX = range(4)
# ``space``, in float64 [17 + 4 K, R + 1]. Of rows: length, gap, and the number of ramps they lie on. Of positives: the
# breakpoints as sums of two numbers, which then make room for p, n, the number of negatives and the weight in the mean;
# importance (after ranking, the weighted error); changes of slope. Then, for negatives, positives and each of K columns
# of values of the positives: count, distances, integral, and the column itself, which its sum over the positives above
# replaces.
LENGTH, GAP, RAMPS, P_RANK, N_RANK, NEGATIVES, WEIGHT, OWN, CHANGE, COUNT = range(10)
EXACT, PER_KIND = P_RANK, 4


@_inside
def _cut_axis(positives, first_positive, delta, axis, places, space):
    """Cuts the score axis at s_i - delta and s_i + delta, for each group.

    An edge is the smallest number of the scores' dtype that is not below the breakpoint.

    Args:
        positives: s_i, ascending within each group [P].
        first_positive: the first positive of each group, and P [G + 1].
    """
    inverse, infinity, row = 0.5 / delta if delta > 0 else 0.0, axis.dtype.type(np.inf), 0
    for place in range(axis.shape[1]):
        axis[EDGE, place] = infinity
        space[LENGTH, place], space[GAP, place], space[RAMPS, place] = 0.0, 0.0, 0.0
    for side in range(2):
        offset = delta if side == 1 else -delta
        for i in range(len(positives)):
            high = positives[i] + offset
            seen = high - positives[i]
            low = (positives[i] - (high - seen)) + (offset - seen)  # what rounding has lost (Knuth's TwoSum)
            space[EXACT + side, i], space[EXACT + 2 + side, i], axis[START + side, i] = high, low, high
            if axis[START + side, i] < high or (axis[START + side, i] == high and low > 0):
                axis[START + side, i] = np.nextafter(axis[START + side, i], infinity)
    for g in range(len(first_positive) - 1):
        first, stop = first_positive[g], first_positive[g + 1]
        start, end, previous_high, previous_low = first, first, 0.0, 0.0
        while end < stop:
            row += 1
            if delta == 0:
                is_tied = end > first and positives[end] == positives[end - 1]
                places[FIRST_ROW, end] = places[FIRST_ROW, end - 1] if is_tied else row
                axis[EDGE, row] = positives[end]
                end += 1
                continue
            side = 1 if start >= stop or axis[START, start] > axis[END, end] else 0
            i = end if side == 1 else start
            high, low, axis[EDGE, row] = space[EXACT + side, i], space[EXACT + 2 + side, i], axis[START + side, i]
            places[FIRST_ROW + side, i] = row
            end += side
            start += 1 - side
            space[RAMPS, row] = start - end
            if space[RAMPS, row - 1] > 0:  # a length below 0 makes up for two edges that rounding swapped
                space[LENGTH, row - 1] = ((high - previous_high) + (low - previous_low)) * inverse
            if axis[EDGE, row] < infinity:
                space[GAP, row] = (axis[EDGE, row] - high - low) * inverse
            previous_high, previous_low = high, low
        row += 1


@_inside
def _build_tables(first_positive, delta, axis, cells_per_row, table):
    """A lookup table per group, one behind the other: how many rows start in lower cells than each one."""
    one, stop, place = axis.dtype.type(1), 0, 0
    for g in range(len(first_positive) - 1):
        first, count = stop, (first_positive[g + 1] - first_positive[g]) * (2 if delta > 0 else 1) + 1
        stop += count
        axis[LOW, g], axis[LAST, g] = axis[EDGE, first + 1], cells_per_row * count - 1
        scale = axis[LAST, g] / (axis[EDGE, stop - 1] - axis[LOW, g])
        axis[SCALE, g] = scale if scale < np.inf else 0.0
        for row in range(first + 1, stop):
            position = (axis[EDGE, row] - axis[LOW, g]) * axis[SCALE, g]  # as in _tally_negatives
            position = position if position < axis[LAST, g] else axis[LAST, g]
            table[place + np.int64(position + one) + 1] += 1
        total = first
        for cell in range(place, place + cells_per_row * count + 2):
            total += table[cell]
            table[cell] = total
        place += cells_per_row * count + 2


@_inside
def _tally_negatives(
    scores, start, stop, negative, groups, first_positive, delta, unit, axis, cells_per_row, table, rows, tallies
):
    """Counts the negatives of each row, and adds up their distances to its edge.

    Args:
        groups: the number of each score's group, or -1 for none [N]; empty for a single group.
        unit: distances are integers in this fraction of 2 delta.
        rows: gets the row of each negative, R for other scores [N].
        tallies: numbers and sums are added to it [R + 1, 2]; the last row is for scores that are not negatives.
    """
    outside, single, edges = np.uint32(axis.shape[1] - 1), len(groups) == 0, axis[EDGE]
    inverse = 0.5 / delta if delta > 0 else 0.0
    low, scale, last = axis[LOW, 0], axis[SCALE, 0], axis[LAST, 0]
    zero, one = axis.dtype.type(0), axis.dtype.type(1)
    cells, distances = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.int64)
    for block in range(np.uint64(start), np.uint64(stop), np.uint64(BLOCK)):
        size, crowded = np.uint64(stop) - block, False
        size = size if size < np.uint64(BLOCK) else np.uint64(BLOCK)
        # One loop per step: most of them are vectorised. A cell is 0 below all edges, and never falls as the score
        # rises, however it is rounded.
        for n in range(size if single else 0):
            position = (scores[block + n] - low) * scale
            position = position if position < last else last
            cells[n] = np.int32((position if position > -one else -one) + one)
        for n in range(0 if single else size):
            g = groups[block + n] if groups[block + n] > 0 else 0
            position = (scores[block + n] - axis[LOW, g]) * axis[SCALE, g]
            position = position if position < axis[LAST, g] else axis[LAST, g]
            cells[n] = np.int32((position if position > -one else -one) + one)
            cells[n] += cells_per_row * (first_positive[g] * (2 if delta > 0 else 1) + g) + 2 * g
        for n in range(size):  # most cells have two edges at most
            row, score = table[np.uint64(cells[n])], scores[block + n]
            crowded |= table[np.uint64(cells[n]) + np.uint64(1)] > row + np.uint32(2)
            row += np.uint32(edges[np.uint64(row + np.uint32(1))] <= score)
            rows[block + n] = row + np.uint32(edges[np.uint64(row + np.uint32(1))] <= score)
        for n in range(size if crowded else 0):
            row, highest = np.uint64(rows[block + n]), np.uint64(table[np.uint64(cells[n]) + np.uint64(1)])
            while row < highest:
                middle = (row + highest + np.uint64(1)) >> np.uint64(1)
                if edges[middle] <= scores[block + n]:
                    row = middle
                else:
                    highest = middle - np.uint64(1)
            rows[block + n] = row
        for n in range(size):
            distance = scores[block + n] - edges[np.uint64(rows[block + n])]  # -inf or NaN below all edges
            distance = distance if distance > 0 else zero
            share = np.float64(distance) * inverse
            distances[n] = np.int64((share if share < 1.0 else 1.0) * unit)
            rows[block + n] = rows[block + n] if negative[block + n] else outside
        for n in range(0 if single else size):
            rows[block + n] = rows[block + n] if groups[block + n] >= 0 else outside
        for n in range(size):
            row = np.uint64(rows[block + n])
            tallies[row, 0] += 1
            tallies[row, 1] += distances[n]


@_inside
def _rank_positives(positives, first_positive, delta, axis, places, space, tallies, unit):
    """The ranks of the positives: sums of f(s_j - s_i) over negatives, positives and columns.

    With C(u) the number of scores above u, such a sum is the mean of C over the ramp of i. The integral of C is
    accumulated from the top, where ranks are small.
    """
    f0, inverse, stop_row = 0.5 if delta > 0 else 1.0, 0.5 / delta if delta > 0 else 0.0, 0
    groups, last, scale = len(first_positive) - 1, len(space), 1.0 / unit  # a power of two
    for g in range(groups):
        first, stop, first_row = first_positive[g], first_positive[g + 1], stop_row
        stop_row += (stop - first) * (2 if delta > 0 else 1) + 1
        row, negatives, total = first_row, 0.0, 0.0
        for i in range(first, stop):
            while row + 1 < stop_row and axis[EDGE, row + 1] <= positives[i]:
                row += 1
            places[OWN_ROW, i] = row
            total += space[OWN, i]
        for row in range(first_row, stop_row):
            negatives += tallies[row, 0]
        for kind in range(COUNT, last, PER_KIND):
            of_positives = kind > COUNT
            for row in range(first_row, stop_row):
                space[kind, row] = 0.0 if of_positives else tallies[row, 0]
                space[kind + 1, row] = 0.0 if of_positives else tallies[row, 1] * scale
            for i in range(first if of_positives else stop, stop):
                row, value = places[OWN_ROW, i], space[kind + 3, i]
                space[kind, row] += value
                if delta > 0:
                    space[kind + 1, row] += value * ((positives[i] - axis[EDGE, row]) * inverse)
            above, integral = 0.0, 0.0
            for row in range(stop_row - 1, first_row, -1):
                count = space[kind, row]
                if delta == 0:
                    integral += count
                elif space[RAMPS, row] > 0:
                    integral += above * space[LENGTH, row] + space[kind + 1, row] + count * space[GAP, row]
                above += count
                space[kind + 2, row] = integral
            space[kind + 2, first_row] = 0.0
            for i in range(first, stop):
                above = space[kind + 2, places[FIRST_ROW, i]]
                above -= space[kind + 2, places[LAST_ROW, i]] if delta > 0 else 0.0
                space[kind + 3, i] = above - (f0 * space[kind + 3, i] if of_positives else 0.0)  # without i itself
        for i in range(first, stop):
            space[N_RANK, i], space[P_RANK, i] = space[COUNT + 3, i], space[COUNT + PER_KIND + 3, i]
            space[NEGATIVES, i] = negatives
            space[WEIGHT, i] = space[OWN, i] / (total if total > 0 else 1.0) / groups


@_inside
def _apply_ratio(ratio, places, space):
    """The loss for a rule that is a :class:`.Ratio` and one group: its four numbers, and whether it is monotone."""
    loss, smallest = 0.0, np.inf
    for i in range(places.shape[1]):
        n = space[N_RANK, i]
        denominator = ratio[0] + ratio[1] * space[P_RANK, i] + ratio[2] * n + ratio[3] * space[NEGATIVES, i]
        error = n / denominator if denominator > 0 else 0.0
        smallest = error if error < smallest or ratio[4] == 0 else smallest
        space[OWN, i] = smallest * space[WEIGHT, i]
        loss += space[OWN, i]
    return loss


@_inside
def _cut_line(first_positive, delta, axis, places, space):
    """The line sum_i own_i / n_i f(s - s_i) in each row; it is 0 in the last one, for scores that are not negatives."""
    inverse = 0.5 / delta if delta > 0 else 0.0
    for row in range(axis.shape[1]):
        axis[VALUE, row], axis[SLOPE, row], space[CHANGE, row] = 0.0, 0.0, 0.0
    for i in range(places.shape[1]):
        weight = space[OWN, i] / space[N_RANK, i] if space[N_RANK, i] != 0 else 0.0
        space[CHANGE, places[FIRST_ROW, i]] += weight
        if delta > 0:
            space[CHANGE, places[LAST_ROW, i]] -= weight
    row = 0
    for g in range(len(first_positive) - 1):
        rate, value = 0.0, 0.0
        for _ in range((first_positive[g + 1] - first_positive[g]) * (2 if delta > 0 else 1)):
            row += 1
            if delta == 0:
                value += space[CHANGE, row]
                axis[VALUE, row] = value
                continue
            rate += space[CHANGE, row]
            slope = rate if space[RAMPS, row] > 0 else 0.0
            axis[VALUE, row], axis[SLOPE, row] = value + slope * space[GAP, row], slope * inverse
            value += slope * space[LENGTH, row]
        row += 1


@_inside
def _write_gradient(scores, start, stop, rows, delta, axis, places, space, out):
    """Writes the gradient of a part of the scores: the value of its row's line for each, -own_i for positives."""
    edges, values, slopes = axis[EDGE], axis[VALUE], axis[SLOPE]
    zero, width = axis.dtype.type(0), axis.dtype.type(2 * delta)
    for i in range(np.uint64(start), np.uint64(stop)):
        row = np.uint64(rows[i])
        distance = scores[i] - edges[row]  # -inf below all edges, NaN for ignored scores
        distance = distance if distance < width else width
        distance = distance if distance > 0 else zero
        out[i] = values[row] + slopes[row] * distance
    for k in range(places.shape[1]):
        if start <= places[INDEX, k] and places[INDEX, k] < stop:
            out[places[INDEX, k]] = -space[OWN, k]


cut_axis, build_tables, tally_negatives, rank_positives, cut_line, write_gradient = (
    Kernel(function.py_func)
    for function in (_cut_axis, _build_tables, _tally_negatives, _rank_positives, _cut_line, _write_gradient)
)


@Kernel
def loss_and_gradient(scores, negative, groups, values, index, order, delta, unit, cells_per_row, ratio, out):
    """All of it in one call, for one thread and one group; ``out`` gets the gradient unless it is empty.

    ``order`` sorts the positives, whose scores are ``values``.
    """
    size, count = len(scores), len(order)
    num_rows = count * (2 if delta > 0 else 1) + 1
    # Rows of matrices, as every kind of allocation takes time to compile.
    axis, positives = np.empty((8, num_rows + 1), scores.dtype), np.empty(count, np.float64)
    space, places = np.empty((COUNT + 2 * PER_KIND, num_rows + 1), np.float64), np.empty((4, count), np.int64)
    tallies, first_positive = np.empty((num_rows + 1, 2), np.int64), np.empty(2, np.int64)
    table, rows = np.empty(cells_per_row * num_rows + 2, np.uint32), np.empty(size, np.uint32)
    first_positive[0], first_positive[1] = 0, count
    for i in range(count):
        positives[i], places[INDEX, i] = values[order[i]], index[order[i]]
        space[OWN, i], space[COUNT + PER_KIND + 3, i] = 1.0, 1.0
    for row in range(num_rows + 1):
        tallies[row, 0], tallies[row, 1] = 0, 0
    for cell in range(len(table)):
        table[cell] = 0
    _cut_axis(positives, first_positive, delta, axis, places, space)
    _build_tables(first_positive, delta, axis, cells_per_row, table)
    _tally_negatives(
        scores, 0, size, negative, groups, first_positive, delta, unit, axis, cells_per_row, table, rows, tallies
    )
    _rank_positives(positives, first_positive, delta, axis, places, space, tallies, unit)
    loss = _apply_ratio(ratio, places, space)
    if len(out) > 0:
        _cut_line(first_positive, delta, axis, places, space)
        _write_gradient(scores, 0, size, rows, delta, axis, places, space, out)
    return loss


@numba.njit(fastmath={"reassoc", "nsz", "contract"}, **OPTIONS)
def _pair_sums(positives, deficits, first, last, i, rate):
    """Sums over positives k of f(x_ik) and f(x_ik) (1 - y_k); then of those with y_k < y_i."""
    count, deficit, violations, violating_deficit = 0.0, 0.0, 0.0, 0.0
    for k in range(np.uint64(first), np.uint64(last)):
        step = min(max((positives[k] - positives[i]) * rate + 0.5, 0.0), 1.0) if rate > 0 else 1.0
        violating = step if deficits[k] > deficits[i] else 0.0
        count += step
        deficit += step * deficits[k]
        violations += violating
        violating_deficit += violating * deficits[k]
    return count, deficit, violations, violating_deficit


@Kernel
def sort_pairs(positives, first_positive, deficits, weights, delta, gradient):
    """The sorting error of Rank & Sort; its gradient on the positives is added to ``gradient`` [P].

    The current error is the mean of 1 - y over the positives above i; the target is the mean over
    those among them that belong there, y >= y_i. Those with y < y_i share the blame.
    """
    total, rate = 0.0, 0.5 / delta if delta > 0 else 0.0
    for g in range(len(first_positive) - 1):
        first, last = first_positive[g], first_positive[g + 1]
        for i in range(first_positive[g], last):
            # Positives further below i than delta are not above it. Ties are, also for delta = 0.
            while positives[i] - positives[first] > delta:
                first += 1
            count, deficit, violations, violating = _pair_sums(positives, deficits, first, last, i, rate)
            if violations <= 0:
                continue
            error = deficit / count - (deficit - violating) / (count - violations)
            total += error * weights[i]
            gradient[i] -= error * weights[i]
            blame = error * weights[i] / violations
            for k in range(np.uint64(first), np.uint64(last)):
                step = min(max((positives[k] - positives[i]) * rate + 0.5, 0.0), 1.0) if rate > 0 else 1.0
                gradient[k] += step * blame if deficits[k] > deficits[i] else 0.0
    return total


# ---- The backend ---------------------------------------------------------------------------------


class _Axis:
    """How the sorted positives cut the score axis; the arrays that the kernels exchange."""

    def __init__(self, positives: Any, index: Any, first_positive: Any, delta: float, like: Any, columns: int) -> None:
        self.positives, self.first_positive, self.delta = positives, first_positive, delta
        self.num_rows = len(positives) * (2 if delta > 0 else 1) + len(first_positive) - 1
        self.axis = np.empty((8, self.num_rows + 1), like.dtype)
        self.places = np.empty((4, len(positives)), np.int64)
        self.places[INDEX] = index
        self.space = np.empty((COUNT + PER_KIND * (2 + columns), self.num_rows + 1))
        self.space[OWN], self.space[COUNT + PER_KIND + 3] = 1.0, 1.0  # importance, and the column of the positives
        self.cells_per_row = _cells_per_row(len(like), self.num_rows)
        self.table = np.zeros(self.cells_per_row * self.num_rows + 2 * (len(first_positive) - 1), np.uint32)


def _find(problem: Problem) -> tuple[Any, Any, Any, Any, Status]:
    """The scores [N], and which of them are negatives; flat index and score of the positives [P]; their numbers."""
    scores, targets = problem.scores, problem.targets
    flat = (scores if scores.dtype in SCORE_DTYPES else scores.to(torch.float32)).numpy()
    marks, size = (targets if targets.dtype in TARGET_DTYPES else targets.to(torch.float32)).numpy(), len(flat)
    negative, index, values = np.empty(size, np.bool_), np.empty(size + 1, np.int64), np.empty(size + 1, flat.dtype)
    status = Status(*find_positives(marks, flat, problem.rule.soft_targets, negative, index, values))
    return flat, negative, index[: status.positives], values[: status.positives], status


def _cells_per_row(size: int, num_rows: int) -> int:
    return min(max(size // (2 * num_rows), 3), MAX_CELLS_PER_ROW)


@cache
def _ratio_of(error: Ratio, monotone: bool) -> Any:
    """The numbers of a rule for ``_apply_ratio``."""
    return np.array([*error, monotone], np.float64)


def _fixed_point_unit(size: int) -> float:
    """The integer that stands for a distance of 2 delta; sums of as many must not overflow."""
    return 2.0 ** (62 - size.bit_length())


@dataclass(eq=False)
class _Found(Found):
    """The positives, this process's other scores, and how the positives cut the axis."""

    positive_scores: Any = None  # float64 [P]
    scores: Any = None  # [N], float32 or float64
    negative: Any = None  # bool [N]
    axis: Any = None
    rows: Any = None  # of the scores [N]
    positive_rows: Any = None  # of the sorted positives


class NumbaBackend(TorchBackend):
    """The stages of :class:`.torch_backend.TorchBackend` on NumPy arrays."""

    name = "cpu"

    def rank_directly(self, problem: Problem, needs_gradient: bool) -> tuple[Any, Any] | None:
        """With as little Python as possible around the kernels; None on invalid input, for which the stages raise."""
        rule = problem.rule
        if type(rule.error) is not Ratio or rule.correction or rule.second or problem.thresholds is not None:
            return None
        if problem.groups is not None or problem.weights is not None or _num_parts(len(problem.scores)) > 1:
            return None
        flat, negative, index, values, status = _find(problem)
        if status.positives == 0 or status.bad_targets or status.bad_scores:
            return None
        size, num_rows = len(flat), len(index) * (2 if problem.delta > 0 else 1) + 1
        out = np.empty(size if needs_gradient else 0, flat.dtype)
        options = (_fixed_point_unit(size), _cells_per_row(size, num_rows), _ratio_of(rule.error, rule.monotone))
        given = (flat, negative, _NO_GROUPS, values, index, values.argsort())
        loss = loss_and_gradient(*given, problem.delta, *options, out)
        value = torch.scalar_tensor(loss, dtype=problem.dtype)
        return (value,), (torch.from_numpy(out),) if needs_gradient else ()

    def find(self, problem: Problem) -> Found:
        scores, negative, index, values, status = _find(problem)
        boxes, weights = self.count_bad_others(problem)
        status = status._replace(bad_boxes=int(boxes), bad_weights=int(weights))
        return _Found(status, index, values.astype(np.float64), scores, negative)

    def positives(self, problem: Problem, found: Any, **given: Tensor) -> Positives:
        columns = {name: value.numpy() for name, value in given.items()}
        return Positives(found.positive_scores, found.index, **columns)

    def from_tensors(self, columns: dict[str, Tensor]) -> Positives:
        return Positives(**{name: value.numpy() for name, value in columns.items()})

    def sort(self, positives: Positives) -> Positives:
        keys = (positives.scores,) if positives.groups is None else (positives.scores, positives.groups)
        return positives.select(np.lexsort(keys))

    def rank(self, problem: Problem, found: Any, positives: Positives, reduce: Reduce | None) -> Ranks:
        scores, size, unit = found.scores, len(found.scores), _fixed_point_unit(len(found.scores))
        first_positive, groups = _number_groups(problem, positives)
        columns = positives.members if positives.box_losses is None else positives.box_losses[None]
        count = 0 if columns is None else len(columns)
        found.axis = made = _Axis(positives.scores, positives.index, first_positive, problem.delta, scores, count)
        above = slice(COUNT + 3 * PER_KIND - 1, None, PER_KIND), slice(len(positives.scores))
        if columns is not None:
            made.space[above] = columns
        if positives.weights is not None:
            made.space[OWN, above[1]] = positives.weights
        found.rows = np.empty(size, np.uint32)
        ends = (made.positives, first_positive, made.delta, made.axis, made.places, made.space)
        cut_axis(*ends)
        build_tables(first_positive, made.delta, made.axis, made.cells_per_row, made.table)
        rest = (first_positive, made.delta, unit, made.axis, made.cells_per_row, made.table, found.rows)

        def tally_part(start: int, stop: int) -> Any:
            tallies = np.zeros((made.num_rows + 1, 2), np.int64)
            tally_negatives(scores, start, stop, found.negative, groups, *rest, tallies)
            return tallies

        tallies = sum(_in_parts(size, tally_part))
        if reduce is not None:
            tallies, unit = tallies / [1.0, unit], 1.0
            reduce(torch.from_numpy(tallies))
        rank_positives(*ends, tallies, unit)
        p, n, negatives, weights = made.space[P_RANK : WEIGHT + 1, above[1]].copy()
        sums = made.space[above]
        return Ranks(p, n, negatives, sums if positives.box_losses is None else sums[0], weights)

    def running_minimum(self, found: Any, values: Any) -> Any:
        groups = np.split(values, found.axis.first_positive[1:-1], axis=-1)
        return np.concatenate([np.minimum.accumulate(group, axis=-1) for group in groups], axis=-1)

    def sort_pairs(self, problem: Problem, found: Any, positives: Positives, weights: Any) -> tuple[Any, Any]:
        gradient, first_positive = np.zeros(len(weights)), found.axis.first_positive
        total = sort_pairs(positives.scores, first_positive, 1 - positives.qualities, weights, problem.delta, gradient)
        return total, gradient

    def line_at_positives(self, problem: Problem, found: Any, positives: Positives, weights: Any) -> Any:
        made, scores = found.axis, positives.scores.astype(found.scores.dtype)
        made.space[N_RANK] = 1.0
        return _gradient(made, scores, made.places[OWN_ROW], weights, False)

    def tensor(self, values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.as_tensor(values, dtype=dtype)

    def gradient(self, problem: Problem, found: Any, positives: Positives, ranks: Ranks, own: Any) -> Tensor:
        return torch.from_numpy(_gradient(found.axis, found.scores, found.rows, own * problem.num_processes, True))


def _gradient(made: _Axis, scores: Any, rows: Any, own: Any, on_positives: bool) -> Any:
    """See ``_write_gradient``."""
    out, places = np.empty(len(scores), scores.dtype), made.places if on_positives else made.places[:, :0]
    made.space[OWN, : len(own)] = own
    cut_line(made.first_positive, made.delta, made.axis, made.places, made.space)
    rest = (rows, made.delta, made.axis, places, made.space, out)
    _in_parts(len(scores), lambda start, stop: write_gradient(scores, start, stop, *rest))
    return out


def _number_groups(problem: Problem, positives: Positives) -> tuple[Any, Any]:
    """The first positive of each group, and P [G + 1]; the group of each score, or -1 [N] (empty without groups)."""
    count = len(positives.scores)
    if problem.groups is None:
        return np.array([0, count]), _NO_GROUPS
    numbers, first = np.unique(positives.groups, return_index=True)
    given = problem.groups.numpy()
    place = np.searchsorted(numbers, given).clip(max=len(numbers) - 1)
    return np.append(first, count), np.where(numbers[place] == given, place, -1).astype(np.int32)


def _num_parts(size: int) -> int:
    """How many threads share the scores: torch's number, where each has enough to do."""
    return min(torch.get_num_threads(), max(size // MIN_SCORES_PER_THREAD, 1))


def _in_parts(size: int, work: Callable[[int, int], Any]) -> list[Any]:
    """``work(start, stop)`` on equal parts of the scores, each on a thread of its own where it has enough to do."""
    threads = _num_parts(size)
    if threads == 1:
        return [work(0, size)]
    bounds = itertools.pairwise([size * part // threads for part in range(threads + 1)])
    # A forked process inherits no threads: the pool belongs to a process.
    return list(_thread_pool(os.getpid(), threads).map(lambda part: work(*part), bounds))


@cache
def _thread_pool(process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="aploss")
