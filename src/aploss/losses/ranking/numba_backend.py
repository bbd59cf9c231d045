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
import logging
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

from ..checks import MIN_DELTA
from .problem import COMPILED_TARGETS, Found, Positives, Problem, Ranks, Reduce, Status
from .rules import Ratio, Rule
from .torch_backend import TorchBackend

BLOCK = 256
MIN_SCORES_PER_THREAD = 1 << 16
MAX_CELLS_PER_ROW = 16  # of the lookup table: most cells then hold no edge, or one

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_log = logging.getLogger("aploss.losses")
# Functions that only kernels call need no entry point from Python, which takes a tenth of compiling them. Kernels are
# written in plain loops: each expression of whole arrays takes numba some tenths of a second to compile.
_inside: Any = numba.njit(**{**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True})


class Kernel:
    """A function compiled on its first call and cached on disk.

    A cache that cannot be read or written (full, damaged, of another user) is not used.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.is_first_call = function, True
        try:
            self.compiled: Any = numba.njit(cache=True, **OPTIONS)(function)
            self.cached = True
        except RuntimeError as error:  # numba found no writable folder for its cache
            self._disable_cache(error)

    def __call__(self, *arguments: Any) -> Any:
        try:
            result = self.compiled(*arguments)
        except Exception as error:
            if not self.cached or isinstance(error, numba.core.errors.NumbaError):
                raise
            self._disable_cache(error)
            result = self.compiled(*arguments)
        if self.is_first_call:
            self.is_first_call = False
            if self.compiled.stats.cache_misses or not self.cached:
                _log_compilation()
        return result

    def _disable_cache(self, error: Exception) -> None:
        self.compiled, self.cached = numba.njit(**OPTIONS)(self.function), False
        _warn_about_cache(f"{type(error).__name__}: {error}")


@cache
def _log_compilation() -> None:
    """After the first of the kernels, so that the user knows what the next seconds are spent on."""
    _log.warning("compiling the ranking losses for this processor, about 5 seconds; later runs load them from a cache")


@cache
def _warn_about_cache(reason: str) -> None:
    _log.warning(
        "numba's cache of compiled functions cannot be used (%s); compiling in every process instead. "
        "Set NUMBA_CACHE_DIR to a writable folder",
        reason,
    )


# ---- The passes over all scores ------------------------------------------------------------------


@Kernel
def find_positives(targets, scores, soft, negative):
    """Marks the negatives [N] and collects the positives.

    Returns:
        The flat index and the score of each positive, the number of negatives, and how many targets
        and scores are invalid.
    """
    room = BLOCK + len(targets) // 8  # grows where it has to
    index, values = np.empty(room, np.int64), np.empty(room)
    found, negatives, bad_targets, bad_scores = 0, len(targets), 0, 0
    size, step, candidates = np.uint64(len(targets)), np.uint64(BLOCK), np.empty(BLOCK, np.uint64)
    for block in range(np.uint64(0), size, step):
        stop = min(block + step, size)
        others, infinite = False, False
        for i in range(block, stop):  # vectorised: most blocks hold finite negatives only
            negative[i] = targets[i] == 0
            others |= targets[i] != 0
            infinite |= not abs(scores[i]) < np.inf
        if not (others or infinite):
            continue
        count = np.uint64(0)
        for i in range(block, stop):  # without a branch, which a processor would often guess wrong
            candidates[count] = i
            count += np.uint64(not negative[i])
        if infinite:
            for i in range(block, stop):
                bad_scores += targets[i] == 0 and not abs(scores[i]) < np.inf
        negatives -= np.int64(count)
        if found + BLOCK > len(index):
            more_index, more_values = np.empty(2 * found + BLOCK, np.int64), np.empty(2 * found + BLOCK)
            for k in range(found):
                more_index[k], more_values[k] = index[k], values[k]
            index, values = more_index, more_values
        for k in range(count):
            target, score = targets[candidates[k]], scores[candidates[k]]
            if target == 1 or (soft and target > 0 and target < 1):
                index[found], values[found] = candidates[k], score
                found += 1
                bad_scores += not abs(score) < np.inf
            else:
                bad_targets += target != -1
    return index[:found], values[:found], negatives, bad_targets, bad_scores


@_inside
def _cell(score, low, scale, last, one):
    """The lookup cell of a score, 0 below all edges; never falls as the score rises, however it is rounded."""
    position = (score - low) * scale
    position = position if position < last else last
    return np.int32((position if position > -one else -one) + one)


@_inside
def _build_tables(first_row, edges, size):
    """A lookup table per group: how many rows start in lower cells than each one.

    Returns:
        The tables one behind the other; where each begins [G + 1]; left end, inverse width and
        number of the last cell but one of each [3, G].
    """
    groups, one = len(first_row) - 1, edges.dtype.type(1)
    cells_per_row = min(max(size // (2 * len(edges)), 1), MAX_CELLS_PER_ROW)
    begin, axes = np.zeros(groups + 1, np.int64), np.empty((3, groups), edges.dtype)
    for g in range(groups):
        cells = cells_per_row * (first_row[g + 1] - first_row[g])
        begin[g + 1] = begin[g] + cells + 2
        axes[0, g], axes[2, g] = edges[first_row[g] + 1], cells - 1
        scale = axes[2, g] / (edges[first_row[g + 1] - 1] - axes[0, g])
        axes[1, g] = scale if scale < np.inf else 0
    table = np.zeros(begin[groups], np.uint32)
    for g in range(groups):
        low, scale, last = axes[0, g], axes[1, g], axes[2, g]
        for row in range(first_row[g] + 1, first_row[g + 1]):
            table[begin[g] + 1 + _cell(edges[row], low, scale, last, one)] += np.uint32(1)
        total = np.uint32(first_row[g])
        for cell in range(begin[g], begin[g + 1]):
            total += table[cell]
            table[cell] = total
    return table, begin, axes


@_inside
def _tally_negatives(scores, start, stop, negative, groups, first_row, edges, width, unit, rows):
    """Counts the negatives of each row and adds up their distances to the edge [R, 2].

    Args:
        negative: which scores are negatives [N].
        groups: the number of each score's group, or -1 for none [N]; empty for a single group.
        width: 2 delta.
        unit: distances are integers in this fraction of 2 delta.
        rows: gets the row of each negative, R for other scores [N].
    """
    table, begin, axes = _build_tables(first_row, edges, stop - start)
    tallies = np.zeros((len(edges), 2), np.int64)  # the last row for everything that is not a negative
    outside, single = np.uint32(len(edges) - 1), len(groups) == 0
    one, inverse = edges.dtype.type(1), 1.0 / width if width > 0 else 0.0
    low, scale, last = axes[0, 0], axes[1, 0], axes[2, 0]
    cells, distances, step = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.int64), np.uint64(BLOCK)
    for block in range(np.uint64(start), np.uint64(stop), step):
        # Three loops: the first is vectorised, and processors stall where they cannot tell whether a
        # load follows a store to the same place.
        size = min(step, np.uint64(stop) - block)
        if single:
            for n in range(size):
                cells[n] = _cell(scores[block + n], low, scale, last, one)
        else:
            for n in range(size):
                g = np.uint64(max(groups[block + n], 0))
                cells[n] = begin[g] + _cell(scores[block + n], axes[0, g], axes[1, g], axes[2, g], one)
        for n in range(size):
            score, cell = scores[block + n], np.uint64(cells[n])
            row, highest = np.uint64(table[cell]), np.uint64(table[cell + np.uint64(1)])
            several = highest > row + np.uint64(2)
            row += np.uint64(edges[row + np.uint64(1)] <= score)  # without branches: most cells have two edges at most
            row += np.uint64(edges[row + np.uint64(1)] <= score)
            while several and row < highest:
                middle = (row + highest + np.uint64(1)) >> np.uint64(1)
                if edges[middle] <= score:
                    row = middle
                else:
                    highest = middle - np.uint64(1)
            distance = score - edges[row]  # -inf or NaN below all edges
            distance = distance if distance > 0 else one - one
            share = np.float64(distance) * inverse
            distances[n] = np.int64((share if share < 1.0 else 1.0) * unit)
            counts = negative[block + n] and (single or groups[block + n] >= 0)
            rows[block + n] = row if counts else outside
        for n in range(size):
            row = np.uint64(rows[block + n])
            tallies[row, 0] += 1
            tallies[row, 1] += distances[n]
    return tallies[:-1]


@_inside
def _write_gradient(scores, start, stop, rows, axis, delta, own, n, index, out):
    """Writes the gradient of a part of the scores: the line of its row for each negative.

    Args:
        own: minus the gradient of the positives themselves [P]; over n, the factor of f(s_j - s_i).
        index: of the positives, -1 for those of other processes [P].
    """
    edges = axis[1]
    weights = np.empty(len(own))
    for k in range(len(own)):
        weights[k] = own[k] / n[k] if n[k] != 0 else 0.0
    exact_height, exact_slope = _line(axis, weights, delta)
    height, slope = np.empty(len(edges), edges.dtype), np.empty(len(edges), edges.dtype)
    inverse = 0.5 / delta if delta > 0 else 0.0
    for row in range(len(edges)):
        height[row] = exact_height[row]
        slope[row] = exact_slope[row] * inverse
    width = edges.dtype.type(2 * delta)
    for i in range(np.uint64(start), np.uint64(stop)):
        row = np.uint64(rows[i])
        distance = scores[i] - edges[row]  # -inf below all edges, NaN for ignored scores
        distance = distance if distance < width else width
        distance = distance if distance > 0 else width - width
        out[i] = height[row] + slope[row] * distance
    for k in range(len(index)):
        if start <= index[k] and index[k] < stop:
            out[index[k]] = -own[k]


# ---- The mathematics on the positives ------------------------------------------------------------


@_inside
def _breakpoints(positives, offset, infinity, edges, high, low):
    """s_i + offset: exactly, as a sum of two, and its edge, the next number of a dtype that is not below it."""
    for i in range(len(positives)):
        high[i] = positives[i] + offset
        seen = high[i] - positives[i]
        low[i] = (positives[i] - (high[i] - seen)) + (offset - seen)  # what rounding has lost (Knuth's TwoSum)
        edges[i] = high[i]
    for i in range(len(positives)):
        if edges[i] < high[i] or (edges[i] == high[i] and low[i] > 0):
            edges[i] = np.nextafter(edges[i], infinity)


@_inside
def _cut_axis(positives, first_positive, delta, infinity):
    """Cuts the score axis at s_i - delta and s_i + delta, for each group.

    Args:
        positives: s_i, ascending within each group, float64 [P].
        first_positive: the first positive of each group, and P [G + 1].
        infinity: in the dtype of the scores.

    Returns:
        The first row of each group, and R [G + 1]; the left edge of each row, infinity for the
        first of a group and behind the last [R + 1]; length and gap of each row and the number of
        ramps it lies on [3, R]; the rows in which the ramp of each positive starts and ends [2, P].
    """
    groups, count = len(first_positive) - 1, len(positives)
    first_row = np.empty(groups + 1, np.int64)
    for g in range(groups + 1):
        first_row[g] = first_positive[g] * (2 if delta > 0 else 1) + g
    rows = first_row[groups]
    edges, geometry = np.full(rows + 1, infinity), np.zeros((3, rows))
    lengths, gaps, ramps = geometry[0], geometry[1], geometry[2]
    bounds = np.empty((2, count), np.int64)
    ends = np.empty((2, count + 1), edges.dtype)  # of the ramps: where they start, where they end
    high, low = np.empty((2, count + 1)), np.empty((2, count + 1))
    if delta > 0:
        _breakpoints(positives, -delta, infinity, ends[0], high[0], low[0])
        _breakpoints(positives, delta, infinity, ends[1], high[1], low[1])
    for g in range(groups):
        start = end = first_positive[g]
        stop, row = first_positive[g + 1], first_row[g]
        previous_high, previous_low, inverse = 0.0, 0.0, 0.5 / delta if delta > 0 else 0.0
        while end < stop:
            row += 1
            if delta == 0:
                tied = end > first_positive[g] and positives[end] == positives[end - 1]
                edges[row] = positives[end]
                bounds[0, end] = bounds[1, end] = bounds[0, end - 1] if tied else row
                end += 1
                continue
            is_end = np.int64(start >= stop or ends[0, start] > ends[1, end])
            i = end if is_end else start
            edge, exact, lost = ends[is_end, i], high[is_end, i], low[is_end, i]
            bounds[is_end, i] = row
            end += is_end
            start += 1 - is_end
            edges[row] = edge
            ramps[row] = start - end
            if ramps[row - 1] > 0:  # a length below 0 makes up for two edges that rounding swapped
                lengths[row - 1] = ((exact - previous_high) + (lost - previous_low)) * inverse
            if edge < infinity:
                gaps[row] = (edge - exact - lost) * inverse
            previous_high, previous_low = exact, lost
    return first_row, edges, geometry, bounds


@_inside
def _sums_above(axis, delta, tallies):
    """Sums of f(s_j - s_i) over the scores j that were tallied in the rows, for each i [K, P].

    With C(u) the number of scores above u, the sum is the mean of C over the ramp of i. The integral
    of C is accumulated from the top, where ranks are small.

    Args:
        tallies: for K kinds of scores, their number and the sum of their distances [R, K, 2].
    """
    first_row, _, geometry, bounds = axis
    kinds = tallies.shape[1]
    integral = np.zeros((len(tallies), kinds))
    for g in range(len(first_row) - 1):
        above = np.zeros((kinds, 2))  # of each kind, the number of scores and the integral
        for row in range(first_row[g + 1] - 1, first_row[g], -1):
            length, gap, on_ramp = geometry[0, row], geometry[1, row], geometry[2, row] > 0
            for k in range(kinds):
                count = tallies[row, k, 0]
                if delta == 0:
                    above[k, 1] += count
                elif on_ramp:
                    above[k, 1] += above[k, 0] * length + tallies[row, k, 1] + count * gap
                above[k, 0] += count
                integral[row, k] = above[k, 1]
    sums = np.empty((kinds, bounds.shape[1]))
    for i in range(bounds.shape[1]):
        for k in range(kinds):
            sums[k, i] = integral[bounds[0, i], k] - (integral[bounds[1, i], k] if delta > 0 else 0.0)
    return sums


@_inside
def _positive_rows(axis, positives, first_positive, delta):
    """The row of each positive, and its distance to the row's edge as a share of 2 delta [P]."""
    first_row, edges = axis[0], axis[1]
    rows, shares = np.empty(len(positives), np.int64), np.zeros(len(positives))
    inverse = 0.5 / delta if delta > 0 else 0.0
    for g in range(len(first_row) - 1):
        row = first_row[g]
        for i in range(first_positive[g], first_positive[g + 1]):
            while row + 1 < first_row[g + 1] and edges[row + 1] <= positives[i]:
                row += 1
            rows[i] = row
            if delta > 0:
                shares[i] = (positives[i] - edges[row]) * inverse
    return rows, shares


@_inside
def _rank_positives(axis, positives, first_positive, delta, tallies, unit, weights, columns):
    """p, n, the number of negatives, and the weight of each positive in the mean [4, P]; see :class:`.Ranks`.

    Args:
        tallies: numbers of negatives, and sums of their distances in 1 / unit [R, 2].
        weights: of the positives [P]; may be empty.
        columns: replaced by the sums over the other positives k of f(s_k - s_i) column_k [K, P].
    """
    first_row, f0 = axis[0], 0.5 if delta > 0 else 1.0
    rows, shares = _positive_rows(axis, positives, first_positive, delta)
    both = np.zeros((len(tallies), 2 + len(columns), 2))  # positives, negatives, columns
    inverse = 1.0 / unit  # a power of two: exact, and much faster than to divide
    for row in range(len(both)):
        both[row, 1, 0], both[row, 1, 1] = tallies[row, 0], tallies[row, 1] * inverse
    for i in range(len(rows)):
        both[rows[i], 0, 0] += 1.0
        both[rows[i], 0, 1] += shares[i]
        for k in range(len(columns)):
            both[rows[i], 2 + k, 0] += columns[k, i]
            both[rows[i], 2 + k, 1] += columns[k, i] * shares[i]
    sums = _sums_above(axis, delta, both)
    ranks, groups = np.empty((4, len(positives))), len(first_row) - 1
    for g in range(groups):
        negatives, total = 0.0, 0.0
        for row in range(first_row[g], first_row[g + 1]):
            negatives += both[row, 1, 0]
        for i in range(first_positive[g], first_positive[g + 1]):
            total += weights[i] if len(weights) > 0 else 1.0
        for i in range(first_positive[g], first_positive[g + 1]):
            ranks[0, i], ranks[1, i], ranks[2, i] = sums[0, i] - f0, sums[1, i], negatives  # p without i itself
            for k in range(len(columns)):
                columns[k, i] = sums[2 + k, i] - f0 * columns[k, i]
            weight = weights[i] if len(weights) > 0 else 1.0
            ranks[3, i] = weight / (total if total > 0 else 1.0) / groups
    return ranks


cut_axis = Kernel(_cut_axis.py_func)
tally_negatives = Kernel(_tally_negatives.py_func)
rank_positives = Kernel(_rank_positives.py_func)
write_gradient = Kernel(_write_gradient.py_func)


@Kernel
def loss_and_gradient(
    scores, negative, positives, index, delta, infinity, unit, of_own, of_positives, of_negatives, of_total, monotone,
    rows, out,
):  # fmt: skip
    """A loss of one value for one thread, in one call; ``out`` gets the gradient unless it is empty.

    The rule is a :class:`.Ratio`, given as its four numbers: of few and simple arguments numba finds the types fastest.
    """
    first_positive = np.empty(2, np.int64)
    first_positive[0], first_positive[1] = 0, len(positives)
    nothing, no_columns = np.empty(0), np.empty((0, 0))
    axis = _cut_axis(positives, first_positive, delta, infinity)
    no_groups = np.empty(0, np.int32)
    all_scores = (scores, 0, len(scores), negative, no_groups)
    tallies = _tally_negatives(*all_scores, axis[0], axis[1], 2 * delta, unit, rows)
    ranks = _rank_positives(axis, positives, first_positive, delta, tallies, unit, nothing, no_columns)
    own, loss, smallest = np.empty(len(positives)), 0.0, np.inf
    for i in range(len(own)):
        n = ranks[1, i]
        denominator = of_own + of_positives * ranks[0, i] + of_negatives * n + of_total * ranks[2, i]
        error = n / denominator if denominator > 0 else 0.0
        smallest = min(smallest, error) if monotone else error
        own[i] = smallest * ranks[3, i]
        loss += own[i]
    if len(out) > 0:
        _write_gradient(scores, 0, len(scores), rows, axis, delta, own, ranks[1], index, out)
    return loss


@_inside
def _line(axis, weights, delta):
    """g(s) = sum_i weights_i f(s - s_i) in each row: its value at the edge and its slope [R + 1].

    The last entry, for scores that are not negatives, is 0.
    """
    first_row, _, geometry, bounds = axis
    lengths, gaps, ramps = geometry[0], geometry[1], geometry[2]
    height, slope = np.zeros(len(lengths) + 1), np.zeros(len(lengths) + 1)
    for i in range(len(weights)):
        slope[bounds[0, i]] += weights[i]
        if delta > 0:
            slope[bounds[1, i]] -= weights[i]
    for g in range(len(first_row) - 1):
        rate, value = 0.0, 0.0
        for row in range(first_row[g] + 1, first_row[g + 1]):
            if delta == 0:
                value += slope[row]
                slope[row], height[row] = 0.0, value
                continue
            rate += slope[row]
            slope[row] = rate if ramps[row] > 0 else 0.0
            height[row] = value + slope[row] * gaps[row]
            value += slope[row] * lengths[row]
    return height, slope


@Kernel
def line_at_positives(axis, positives, first_positive, weights, delta):
    """sum_i weights_i f(s_k - s_i) for each positive k [P]."""
    height, slope = _line(axis, weights, delta)
    rows, shares = _positive_rows(axis, positives, first_positive, delta)
    values = np.empty(len(rows))
    for k in range(len(rows)):
        values[k] = height[rows[k]] + slope[rows[k]] * shares[k]
    return values


@Kernel
def running_minimum(values, first_positive):
    """The smallest value up to each place within its group [P]."""
    smallest = values.copy()
    for g in range(len(first_positive) - 1):
        for i in range(first_positive[g] + 1, first_positive[g + 1]):
            smallest[i] = min(smallest[i], smallest[i - 1])
    return smallest


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
def sort_pairs(positives, first_positive, qualities, weights, delta):
    """The sorting error of Rank & Sort and its gradient on the positives [P].

    The current error is the mean of 1 - y over the positives above i; the target is the mean over
    those among them that belong there, y >= y_i. Those with y < y_i share the blame.
    """
    gradient, deficits, total = np.zeros(len(positives)), np.empty(len(positives)), 0.0
    for i in range(len(positives)):
        deficits[i] = 1 - qualities[i]
    rate = 0.5 / delta if delta > 0 else 0.0
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
    return total, gradient


# ---- The backend ---------------------------------------------------------------------------------


@dataclass(eq=False)
class _Found(Found):
    """The positives, this process's other scores, and how the positives cut the axis."""

    positive_scores: Any = None  # float64
    scores: Any = None  # [N], float32 or float64
    negative: Any = None  # bool [N]
    axis: Any = None  # see cut_axis
    first_positive: Any = None  # of each group [G + 1]
    rows: Any = None  # of the scores, uint32 [N]


def rank_directly(
    scores: Tensor, targets: Tensor, rule: Rule, delta: float, needs_gradient: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Loss and gradient of the plain case, with as little Python as possible around the kernels.

    The plain case has one process and thread, one value, no groups, weights or box losses. None for
    any other, and for invalid input, on which the stages of :class:`NumbaBackend` raise.
    """
    size = scores.numel()
    if (
        type(rule.error) is not Ratio
        or rule.second
        or not (delta == 0 or MIN_DELTA <= delta < np.inf)
        or not (size and scores.is_contiguous() and targets.is_contiguous())
        or _num_parts(size) > 1  # the stages are split over threads
    ):
        return None
    flat, flat_targets = scores.detach().numpy().reshape(-1), targets.detach().numpy().reshape(-1)
    negative = np.empty(size, np.bool_)
    index, positives, _, bad_targets, bad_scores = find_positives(flat_targets, flat, 0, negative)
    if len(index) == 0 or bad_targets or bad_scores:
        return None
    order = positives.argsort()
    out = np.empty(size if needs_gradient else 0, flat.dtype)
    loss = loss_and_gradient(
        flat, negative, positives[order], index[order], float(delta), _INFINITY[flat.dtype], _fixed_point_unit(size),
        *rule.error, rule.monotone + 0, np.empty(size, np.uint32), out,
    )  # fmt: skip
    gradient = torch.from_numpy(out.reshape(scores.shape)) if needs_gradient else None
    return torch.scalar_tensor(loss, dtype=scores.dtype), gradient


_INFINITY = {np.dtype(kind): kind(np.inf) for kind in (np.float32, np.float64)}


def _fixed_point_unit(size: int) -> float:
    """The integer that stands for a distance of 2 delta; sums of as many must not overflow."""
    return 2.0 ** (62 - size.bit_length())


class NumbaBackend(TorchBackend):
    """The stages of :class:`.torch_backend.TorchBackend` on NumPy arrays."""

    name = "cpu"

    def find(self, problem: Problem) -> Found:
        scores, targets = problem.scores.to(problem.dtype).numpy(), problem.targets
        if targets.dtype not in COMPILED_TARGETS:
            targets = targets.to(torch.float32)
        negative = np.empty(len(scores), np.bool_)
        index, values, *counts = find_positives(targets.numpy(), scores, problem.rule.soft_targets + 0, negative)
        others = problem.box_losses, problem.weights
        status = Status(len(index), *counts, *(0 if given is None else _count_bad(given) for given in others))
        return _Found(status, index, values, scores, negative)

    def positives(self, problem: Problem, found: Any, **given: Tensor) -> Positives:
        columns = {name: value.numpy() for name, value in given.items()}
        return Positives(found.positive_scores, found.index, **columns)

    def from_tensors(self, columns: dict[str, Tensor]) -> Positives:
        return Positives(**{name: value.numpy() for name, value in columns.items()})

    def sort(self, positives: Positives) -> Positives:
        if positives.groups is None:
            return positives.select(positives.scores.argsort())
        return positives.select(np.lexsort((positives.scores, positives.groups)))

    def rank(self, problem: Problem, found: Any, positives: Positives, reduce: Reduce | None) -> Ranks:
        scores, size, delta = found.scores, len(found.scores), problem.delta
        found.first_positive, groups = _number_groups(problem, positives)
        found.rows = np.empty(size, np.uint32)
        weights, boxes, members = positives.weights, positives.box_losses, positives.members
        above = _NO_COLUMNS if boxes is None else boxes[None].copy()
        above = above if members is None else members.copy()
        axis = (positives.scores, found.first_positive, delta)
        kind = scores.dtype.type
        numbers = (2 * delta, _fixed_point_unit(size))
        found.axis = cut_axis(*axis, kind(np.inf))
        rest = (found.negative, groups, *found.axis[:2], *numbers, found.rows)
        parts = _in_parts(size, lambda start, stop: tally_negatives(scores, start, stop, *rest))
        tallies = sum(parts) / [1.0, numbers[1]]
        if reduce is not None:
            reduce(torch.from_numpy(tallies))
        given = (_NOTHING if weights is None else weights, above)
        p, n, negatives, shares = rank_positives(found.axis, *axis, tallies, 1.0, *given)
        return Ranks(p, n, negatives, above if boxes is None else above[0], shares)

    def running_minimum(self, found: Any, values: Any) -> Any:
        rows = [running_minimum(row, found.first_positive) for row in values.reshape(-1, values.shape[-1])]
        return np.stack(rows).reshape(values.shape)

    def sort_pairs(self, problem: Problem, found: Any, positives: Positives, weights: Any) -> tuple[Any, Any]:
        return sort_pairs(positives.scores, found.first_positive, positives.qualities, weights, problem.delta)

    def line_at_positives(self, problem: Problem, found: Any, positives: Positives, weights: Any) -> Any:
        return line_at_positives(found.axis, positives.scores, found.first_positive, weights, problem.delta)

    def tensor(self, values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        if isinstance(values, float):  # faster than as_tensor
            return torch.scalar_tensor(values, dtype=dtype)
        return torch.as_tensor(values, dtype=dtype)

    def gradient(self, problem: Problem, found: Any, positives: Positives, ranks: Ranks, own: Any) -> Tensor:
        gradient = torch.empty(len(found.scores), dtype=problem.dtype)
        own = own * problem.num_processes
        rest = (found.rows, found.axis, problem.delta, own, ranks.n, positives.index, gradient.numpy())
        _in_parts(len(found.scores), lambda start, stop: write_gradient(found.scores, start, stop, *rest))
        return gradient


_NOTHING, _NO_COLUMNS, _NO_GROUPS = np.empty(0), np.empty((0, 0)), np.empty(0, np.int32)


def _count_bad(given: Tensor) -> int:
    """How many values, of box losses or weights, are negative or not finite."""
    return int((~((given >= 0) & (given < torch.inf))).sum())


def _number_groups(problem: Problem, positives: Positives) -> tuple[Any, Any]:
    """The first positive of each group, and P [G + 1]; the group of each score, or -1 [N] (empty without groups)."""
    count = len(positives.scores)
    if problem.groups is None:
        return np.array([0, count]), _NO_GROUPS
    numbers, first = np.unique(positives.groups, return_index=True)
    given = problem.groups.numpy()
    low, high = int(numbers[0]), int(numbers[-1])
    if high - low <= max(2 * len(given), 1 << 20):  # a table of all numbers in between
        dense = np.full(high - low + 2, -1, np.int32)
        dense[numbers - low] = np.arange(len(numbers))
        inside = (given >= low) & (given <= high)
        groups = dense[np.where(inside, given - low, high - low + 1)]
    else:
        place = np.searchsorted(numbers, given).clip(max=len(numbers) - 1)
        groups = np.where(numbers[place] == given, place, -1).astype(np.int32)
    return np.append(first, count), groups


def _num_parts(size: int) -> int:
    """How many threads share the scores: torch's number, where each has enough to do."""
    return min(torch.get_num_threads(), max(size // MIN_SCORES_PER_THREAD, 1))


def _in_parts(size: int, work: Callable[[int, int], Any]) -> list[Any]:
    """``work(start, stop)`` on equal parts of the scores, each on a thread of its own."""
    threads = _num_parts(size)
    if threads == 1:
        return [work(0, size)]
    bounds = itertools.pairwise([size * part // threads for part in range(threads + 1)])
    # A forked process inherits no threads: the pool belongs to a process.
    return list(_thread_pool(os.getpid(), threads).map(lambda part: work(*part), bounds))


@cache
def _thread_pool(process: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="aploss")
