"""The CPU backend, compiled by numba: O(N + P log P) for P positives among N scores.

It adds to the page in :mod:`aploss.losses.ranking` that only the positives are sorted. Their breakpoints s_i - delta
and s_i + delta cut the score axis into *rows*; every negative finds its row through a lookup table and is counted there
together with its distance to the row's left edge. See :mod:`.segments` for the same mathematics in torch operations,
and for why edges are exact.

Rows are numbered group by group. The first row of a group lies below all of its breakpoints, where every step function
is 0. Sums over scores are sums of integers (fixed point), so results are the same bits for any number of threads. NumPy
arrays throughout; tensors only at the boundary.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, no-any-return"

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

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
MAX_CELLS_PER_ROW = 16  # of the lookup table: most cells then hold no edge, or one
MAX_CELLS = 1 << 24  # of a group's table: whole numbers up to here are exact in float32
_NO_GROUPS = np.empty(0, np.int64)

# Functions that kernels call need no entry point from Python.
_inside: Any = numba.njit(**{**OPTIONS, "no_cpython_wrapper": True})


class Axis(NamedTuple):
    """How P sorted positives in G groups cut the score axis into R rows.

    Attributes:
        positives: s_i, ascending within each group, float64 [P].
        first_positive: of each group, and P [G + 1].
        first_row: of each group, and R [G + 1].
        first_cell: of each group's lookup table, and their number [G + 1].
        delta: half the width of the step function.
        edges: the left edge of each row; infinity for the first of a group and behind the last [R + 1].
        gaps: how far the exact breakpoint lies below the edge, as a share of 2 delta [R + 1]. For delta = 0 it is 1, as
            a step counts in full where it begins.
        lengths: from this breakpoint to the next, as a share of 2 delta [R + 1].
        ramps: how many ramps the row lies on; on none, every step function is constant [R + 1].
        starts, ends: the rows in which the ramp of each positive starts and ends [P]; for delta = 0 the row of its
            score and the first row of its group.
        own_rows: the row of each positive's own score [P].
        table: a lookup table per group, one behind the other: how many rows start in lower cells than each cell.
        low, scale, last: of each table: its left end, its cells per unit, and its last cell but one [G].
    """

    positives: Any
    first_positive: Any
    first_row: Any
    first_cell: Any
    delta: float
    edges: Any
    gaps: Any
    lengths: Any
    ramps: Any
    starts: Any
    ends: Any
    own_rows: Any
    table: Any
    low: Any
    scale: Any
    last: Any


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


@_inside
def _two_sum(a, b):
    """a + b as its rounded value and what rounding has lost (Knuth)."""
    total = a + b
    seen = total - a
    return total, (a - (total - seen)) + (b - seen)


@_inside
def _round_up(a, b, edges):
    """The smallest number of the edges' dtype that is not below a + b."""
    total, lost = _two_sum(a, b)
    rounded = edges.dtype.type(total)
    if rounded < total or (rounded == total and lost > 0):
        return np.nextafter(rounded, edges.dtype.type(np.inf))
    return rounded


@_inside
def _cell(score, low, scale, last):
    """The cell of a score in a lookup table; 0 below all edges. It never falls as scores rise, whatever is rounded."""
    position = (score - low) * scale
    position = position if position < last else last
    return np.int32((position if position > -1 else -1.0) + 1.0)


@_inside
def _cut_axis(positives, first_positive, delta, scores):
    """Cuts the score axis at s_i - delta and s_i + delta, for each group; returns the :class:`Axis`."""
    count, num_groups, per_positive = len(positives), len(first_positive) - 1, 2 if delta > 0 else 1
    num_rows, dtype = count * per_positive + num_groups, scores.dtype
    cells_per_row = min(max(len(scores) // (2 * num_rows), 3), MAX_CELLS_PER_ROW)
    first_row, first_cell = np.empty(num_groups + 1, np.int64), np.empty(num_groups + 1, np.int64)
    for g in range(num_groups + 1):
        first_row[g] = first_positive[g] * per_positive + g
        first_cell[g] = first_row[g] * cells_per_row + 2 * g
    edges, gaps, lengths = np.empty(num_rows + 1, dtype), np.empty(num_rows + 1), np.empty(num_rows + 1)
    ramps, starts, ends = np.empty(num_rows + 1), np.empty(count, np.int64), np.empty(count, np.int64)
    _place_edges(positives, first_positive, first_row, delta, edges, gaps, lengths, ramps, starts, ends)
    own_rows, table = np.empty(count, np.int64), np.empty(first_cell[num_groups], np.uint32)
    low, scale, last = np.empty(num_groups, dtype), np.empty(num_groups, dtype), np.empty(num_groups, dtype)
    for cell in range(len(table)):
        table[cell] = 0
    for g in range(num_groups):
        row, stop_row = first_row[g], first_row[g + 1]
        for i in range(first_positive[g], first_positive[g + 1]):
            while row + 1 < stop_row and edges[row + 1] <= positives[i]:
                row += 1
            own_rows[i] = row
        last[g] = min(cells_per_row * (stop_row - first_row[g]) - 1, MAX_CELLS)
        low[g] = edges[first_row[g] + 1]
        scale[g] = last[g] / (edges[stop_row - 1] - low[g])
        scale[g] = scale[g] if scale[g] < np.inf else 0.0
        for row in range(first_row[g] + 1, stop_row):
            table[first_cell[g] + _cell(edges[row], low[g], scale[g], last[g]) + 1] += 1
        lower_rows = first_row[g]
        for cell in range(first_cell[g], first_cell[g + 1]):
            lower_rows += table[cell]
            table[cell] = lower_rows
    bounds = (first_positive, first_row, first_cell)
    return Axis(positives, *bounds, delta, edges, gaps, lengths, ramps, starts, ends, own_rows, table, low, scale, last)


@_inside
def _place_edges(positives, first_positive, first_row, delta, edges, gaps, lengths, ramps, starts, ends):
    """Merges the starts s_i - delta and the ends s_i + delta of the ramps, for each group; see :class:`Axis`.

    An edge is the smallest number of the scores' dtype that is not below the breakpoint.
    """
    inverse = 0.5 / delta if delta > 0 else 0.0
    start_edges, end_edges = np.empty(len(positives), edges.dtype), np.empty(len(positives), edges.dtype)
    for i in range(len(positives)):
        start_edges[i], end_edges[i] = _round_up(positives[i], -delta, edges), _round_up(positives[i], delta, edges)
    for row in range(len(edges)):
        edges[row], lengths[row] = np.inf, 0.0
        gaps[row] = ramps[row] = 0.0 if delta > 0 else 1.0
    for g in range(len(first_positive) - 1):
        start = end = first_positive[g]
        stop, high, low = first_positive[g + 1], 0.0, 0.0
        for row in range(first_row[g] + 1, first_row[g + 1]):
            if delta == 0:
                is_tied = end > first_positive[g] and positives[end] == positives[end - 1]
                edges[row], ends[end] = start_edges[end], first_row[g]
                starts[end] = starts[end - 1] if is_tied else row
                end += 1
                continue
            previous_high, previous_low = high, low
            if start >= stop or start_edges[start] > end_edges[end]:
                high, low = _two_sum(positives[end], delta)
                edges[row], ends[end] = end_edges[end], row
                end += 1
            else:
                high, low = _two_sum(positives[start], -delta)
                edges[row], starts[start] = start_edges[start], row
                start += 1
            ramps[row] = start - end
            if ramps[row - 1] > 0:  # a length below 0 makes up for two edges that rounding swapped
                lengths[row - 1] = ((high - previous_high) + (low - previous_low)) * inverse
            if edges[row] < np.inf:
                gaps[row] = (edges[row] - high - low) * inverse


@_inside
def _tally_negatives(scores, start, stop, negative, groups, axis, unit, rows, tallies):
    """Counts the negatives of each row, and adds up their distances to its edge. Most loops are vectorised.

    Args:
        groups: the number of each score's group [N]; empty for a single group.
        unit: distances are integers in this fraction of 2 delta.
        rows: gets the row of each negative, R for other scores [N].
        tallies: numbers and sums are added to it [R + 1, 2]; the last row is for scores that are not negatives.
    """
    edges, table, low, scale, last = axis.edges, axis.table, axis.low, axis.scale, axis.last
    outside, inverse = np.uint64(len(edges) - 1), 0.5 / axis.delta if axis.delta > 0 else 0.0
    cells, distances, shares = np.empty(BLOCK, np.uint32), np.empty(BLOCK, scores.dtype), np.empty(BLOCK, np.int64)
    for block in range(np.uint64(start), np.uint64(stop), np.uint64(BLOCK)):
        size = np.uint64(stop) - block
        size = size if size < np.uint64(BLOCK) else np.uint64(BLOCK)
        if len(groups) == 0:
            for n in range(size):
                cells[n] = _cell(scores[block + n], low[0], scale[0], last[0])
        else:
            for n in range(size):
                g = groups[block + n]
                cells[n] = axis.first_cell[g] + _cell(scores[block + n], low[g], scale[g], last[g])
        for n in range(size):
            cell, score = np.uint64(cells[n]), scores[block + n]
            row, highest = np.uint64(table[cell]), np.uint64(table[cell + np.uint64(1)])
            while highest > row + np.uint64(2):  # most cells have two edges at most
                middle = (row + highest) >> np.uint64(1)
                if edges[middle] <= score:
                    row = middle
                else:
                    highest = middle
            row += np.uint64(edges[row + np.uint64(1)] <= score)
            row += np.uint64(edges[row + np.uint64(1)] <= score)
            row = row if negative[block + n] else outside
            rows[block + n], distances[n] = row, score - edges[row]  # -inf below all edges
        for n in range(size):
            share = (distances[n] if distances[n] > 0 else 0.0) * inverse
            shares[n] = np.int64((share if share < 1.0 else 1.0) * unit)
        for n in range(size):
            row = np.uint64(rows[block + n])
            tallies[row, 0] += 1
            tallies[row, 1] += shares[n]


@_inside
def _integrate(axis, g, counts, distances, integral):
    """The integral of C(u), the number of a group's scores above u, from each row to the top, in units of 2 delta.

    It is accumulated from the top, where ranks are small.
    """
    above, total = 0.0, 0.0
    for row in range(axis.first_row[g + 1] - 1, axis.first_row[g], -1):
        if axis.ramps[row] > 0:
            total += above * axis.lengths[row] + distances[row] + counts[row] * axis.gaps[row]
        above += counts[row]
        integral[row] = total
    integral[axis.first_row[g]] = 0.0


@_inside
def _rank_positives(axis, tallies, unit, importance, n, negatives, weights, sums):
    """The ranks of the positives: each sum of f(s_j - s_i) is the mean of C over the ramp of i.

    Args:
        importance: of the positives [P].
        n, negatives, weights: get the arguments of a rule, and the weight of each positive in the mean [P].
        sums: columns of values of the positives, which their sums over the other positives above each replace [K, P].
    """
    size, num_groups, f0 = len(axis.edges), len(axis.first_positive) - 1, 0.5 if axis.delta > 0 else 1.0
    counts, distances, integral = np.empty(size), np.empty(size), np.empty(size)
    inverse = 0.5 / axis.delta if axis.delta > 0 else 0.0
    scale = 1.0 / unit if axis.delta > 0 else 0.0
    for g in range(num_groups):
        first, stop, all_negatives = axis.first_positive[g], axis.first_positive[g + 1], 0.0
        first_row, stop_row, total = axis.first_row[g], axis.first_row[g + 1], 0.0
        for row in range(first_row, stop_row):
            counts[row], distances[row] = tallies[row, 0], tallies[row, 1] * scale
            all_negatives += counts[row]
        _integrate(axis, g, counts, distances, integral)
        for i in range(first, stop):
            n[i], negatives[i] = integral[axis.starts[i]] - integral[axis.ends[i]], all_negatives
            total += importance[i]
        for i in range(first, stop):
            weights[i] = importance[i] / (total if total > 0 else 1.0) / num_groups
        for k in range(len(sums)):
            for row in range(first_row, stop_row):
                counts[row], distances[row] = 0.0, 0.0
            for i in range(first, stop):
                row = axis.own_rows[i]
                counts[row] += sums[k, i]
                distances[row] += sums[k, i] * ((axis.positives[i] - axis.edges[row]) * inverse)
            _integrate(axis, g, counts, distances, integral)
            for i in range(first, stop):
                sums[k, i] = integral[axis.starts[i]] - integral[axis.ends[i]] - f0 * sums[k, i]  # without i itself


@_inside
def _apply_ratio(ratio, n, negatives, weights, sums, own):
    """The loss for a rule that is a :class:`.Ratio` and one group: its four numbers, and whether it is monotone."""
    loss, smallest = 0.0, np.inf
    for i in range(len(n)):
        denominator = ratio[0] + ratio[1] * sums[0, i] + ratio[2] * n[i] + ratio[3] * negatives[i]
        error = n[i] / denominator if denominator > 0 else 0.0
        smallest = error if error < smallest or ratio[4] == 0 else smallest
        own[i] = smallest * weights[i]
        loss += own[i]
    return loss


@_inside
def _cut_line(axis, own, n, heights, slopes):
    """The line sum_i own_i / n_i f(s - s_i) in each row, as its value at the edge and its slope [R + 1].

    It is 0 in the last row, for scores that are not negatives.
    """
    changes, inverse = np.empty(len(axis.edges)), 0.5 / axis.delta if axis.delta > 0 else 0.0
    for row in range(len(changes)):
        changes[row], heights[row], slopes[row] = 0.0, 0.0, 0.0
    for i in range(len(own)):
        weight = own[i] / n[i] if n[i] != 0 else 0.0
        changes[axis.starts[i]] += weight
        changes[axis.ends[i]] -= weight
    for g in range(len(axis.first_positive) - 1):
        rate, height = 0.0, 0.0
        for row in range(axis.first_row[g] + 1, axis.first_row[g + 1]):
            rate += changes[row]
            slope = rate if axis.ramps[row] > 0 else 0.0
            heights[row], slopes[row] = height + slope * axis.gaps[row], slope * inverse
            height += slope * axis.lengths[row]


@_inside
def _write_gradient(scores, start, stop, rows, delta, edges, heights, slopes, index, own, out):
    """Writes the gradient of a part of the scores: the value of its row's line for each, -own_i for positives."""
    zero, width = edges.dtype.type(0), edges.dtype.type(2 * delta)
    for i in range(np.uint64(start), np.uint64(stop)):
        row = np.uint64(rows[i])
        distance = scores[i] - edges[row]  # -inf below all edges, NaN for ignored scores
        distance = distance if distance < width else width
        distance = distance if distance > 0 else zero
        out[i] = heights[row] + slopes[row] * distance
    for k in range(len(index)):
        if start <= index[k] and index[k] < stop:
            out[index[k]] = -own[k]


cut_axis, tally_negatives, rank_positives, cut_line, write_gradient = (
    Kernel(function.py_func) for function in (_cut_axis, _tally_negatives, _rank_positives, _cut_line, _write_gradient)
)


@Kernel
def loss_and_gradient(scores, negative, groups, values, index, order, delta, unit, ratio, tallies, out):
    """All of it in one call, for one thread and one group; ``out`` gets the gradient unless it is empty.

    ``order`` sorts the positives, whose scores are ``values``.
    """
    size, count, first_positive = len(scores), len(order), np.empty(2, np.int64)
    first_positive[0], first_positive[1] = 0, count
    positives, places, rows = np.empty(count), np.empty(count, np.int64), np.empty(size, np.uint32)
    n, negatives, weights = np.empty(count), np.empty(count), np.empty(count)
    own, sums = np.empty(count), np.empty((1, count))
    for i in range(count):
        positives[i], places[i] = values[order[i]], index[order[i]]
        own[i], sums[0, i] = 1.0, 1.0
    axis = _cut_axis(positives, first_positive, delta, scores)
    _tally_negatives(scores, 0, size, negative, groups, axis, unit, rows, tallies)
    _rank_positives(axis, tallies, unit, own, n, negatives, weights, sums)
    loss = _apply_ratio(ratio, n, negatives, weights, sums, own)
    if len(out) > 0:
        heights, slopes = np.empty(len(axis.edges), scores.dtype), np.empty(len(axis.edges), scores.dtype)
        _cut_line(axis, own, n, heights, slopes)
        _write_gradient(scores, 0, size, rows, delta, axis.edges, heights, slopes, places, own, out)
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
    """See :meth:`.TorchBackend.sort_pairs`; the gradient is added to ``gradient`` [P]."""
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


def _find(problem: Problem) -> tuple[Any, Any, Any, Any, Status]:
    """The scores [N], and which of them are negatives; flat index and score of the positives [P]; their numbers."""
    scores, targets = problem.scores, problem.targets
    flat = (scores if scores.dtype in SCORE_DTYPES else scores.to(torch.float32)).numpy()
    marks, size = (targets if targets.dtype in TARGET_DTYPES else targets.to(torch.float32)).numpy(), len(flat)
    negative, index, values = np.empty(size, np.bool_), np.empty(size + 1, np.int64), np.empty(size + 1, flat.dtype)
    status = Status(*find_positives(marks, flat, problem.rule.soft_targets, negative, index, values))
    return flat, negative, index[: status.positives], values[: status.positives], status


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
        options = (problem.delta, _fixed_point_unit(size), _ratio_of(rule.error, rule.monotone))
        tallies = np.zeros((num_rows + 1, 2), np.int64)
        loss = loss_and_gradient(flat, negative, _NO_GROUPS, values, index, values.argsort(), *options, tallies, out)
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
        first_positive, groups = _number_groups(problem, found, positives)
        found.axis = axis = cut_axis(positives.scores, first_positive, problem.delta, scores)
        found.rows = np.empty(size, np.uint32)

        def tally_part(start: int, stop: int) -> Any:
            tallies = np.zeros((len(axis.edges), 2), np.int64)
            tally_negatives(scores, start, stop, found.negative, groups, axis, unit, found.rows, tallies)
            return tallies

        tallies = sum(_in_parts(size, tally_part))
        if reduce is not None:
            tallies, unit = tallies / [1.0, unit], 1.0
            reduce(torch.from_numpy(tallies))
        ones = np.ones_like(positives.scores)
        columns = positives.members if positives.box_losses is None else [positives.box_losses]
        sums = np.vstack([ones] if columns is None else [ones, *columns])
        n, negatives, weights = np.empty((3, len(ones)))
        importance = ones if positives.weights is None else positives.weights
        rank_positives(axis, tallies, unit, importance, n, negatives, weights, sums)
        above = sums[1:] if positives.box_losses is None else sums[1]
        return Ranks(sums[0], n, negatives, above, weights)

    def running_minimum(self, found: Any, values: Any) -> Any:
        groups = np.split(values, found.axis.first_positive[1:-1], axis=-1)
        return np.concatenate([np.minimum.accumulate(group, axis=-1) for group in groups], axis=-1)

    def sort_pairs(self, problem: Problem, found: Any, positives: Positives, weights: Any) -> tuple[Any, Any]:
        gradient, first_positive = np.zeros(len(weights)), found.axis.first_positive
        total = sort_pairs(positives.scores, first_positive, 1 - positives.qualities, weights, problem.delta, gradient)
        return total, gradient

    def line_at_positives(self, problem: Problem, found: Any, positives: Positives, weights: Any) -> Any:
        scores, rows = positives.scores.astype(found.scores.dtype), found.axis.own_rows.astype(np.uint32)
        return _evaluate_line(found.axis, scores, rows, weights, np.ones_like(weights), np.empty(0, np.int64))

    def tensor(self, values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.as_tensor(values, dtype=dtype)

    def gradient(self, problem: Problem, found: Any, positives: Positives, ranks: Ranks, own: Any) -> Tensor:
        own = own * problem.num_processes
        return torch.from_numpy(_evaluate_line(found.axis, found.scores, found.rows, own, ranks.n, positives.index))


def _evaluate_line(axis: Axis, scores: Any, rows: Any, own: Any, n: Any, index: Any) -> Any:
    """See ``_cut_line`` and ``_write_gradient``."""
    out, heights, slopes = np.empty_like(scores), np.empty_like(axis.edges), np.empty_like(axis.edges)
    cut_line(axis, own, n, heights, slopes)
    rest = (rows, axis.delta, axis.edges, heights, slopes, index, own, out)
    _in_parts(len(scores), lambda start, stop: write_gradient(scores, start, stop, *rest))
    return out


def _number_groups(problem: Problem, found: Any, positives: Positives) -> tuple[Any, Any]:
    """The first positive of each group, and P [G + 1]; the group of each score [N] (empty without groups).

    Negatives of groups without positives are negatives no more.
    """
    count = len(positives.scores)
    if problem.groups is None:
        return np.array([0, count]), _NO_GROUPS
    numbers, first = np.unique(positives.groups, return_index=True)
    given = problem.groups.numpy()
    place = np.searchsorted(numbers, given).clip(max=len(numbers) - 1)
    found.negative &= numbers[place] == given
    return np.append(first, count), place


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
