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

NATIVE_SCORES, NATIVE_TARGETS = (torch.float32, torch.float64), (torch.float32, torch.float64, torch.int64)
CACHED_BLOCK = 256
MIN_SCORES_PER_THREAD = 1 << 16
MAX_CELLS_PER_ROW = 48  # of the lookup table: most cells then hold no edge, or one
MAX_CELLS = 1 << 24  # of a group's table: whole numbers up to here are exact in float32
MAX_STEPS = 8  # from a cell to the row of a score, one row at a time; a search by halving leaves no more
_NO_GROUPS = np.empty(0, np.int64)


# Functions that kernels call need no entry point from Python.
_inside: Any = numba.njit(**{**OPTIONS, "no_cpython_wrapper": True})


class Axis(NamedTuple):
    """How P sorted positives in G groups cut the score axis into R rows.

    Attributes:
        first_positive: of each group, and P [G + 1].
        first_row: of each group, and R [G + 1].
        inverse: 1 / (2 delta); 0 for delta = 0.
        edges: the left edge of each row; infinity for the first of a group and behind the last [R + 1].
        gaps: how far the exact breakpoint lies below the edge, as a share of 2 delta [R + 1]. For delta = 0 it is 1, as
            a step counts in full where it begins.
        lengths: from this breakpoint to the next, as a share of 2 delta [R + 1].
        ramps: how many ramps the row lies on; on none, every step function is constant [R + 1].
        starts, ends: the rows in which the ramp of each positive starts and ends [P]; for delta = 0 the row of its
            score and the first row of its group.
        own_rows: the row of each positive's own score [P].
        shares: its distance to the edge of that row, as a share of 2 delta [P].
    """

    first_positive: Any
    first_row: Any
    inverse: float
    edges: Any
    gaps: Any
    lengths: Any
    ramps: Any
    starts: Any
    ends: Any
    own_rows: Any
    shares: Any

    def lines(self) -> tuple[Any, ...]:
        """What kernels read to integrate over the rows."""
        return self.first_row, self.gaps, self.lengths, self.ramps, self.starts, self.ends


# ---- Kernels -------------------------------------------------------------------------------------


@Kernel
def find_positives(targets, scores, soft, negative, index, values):
    """Marks the negatives [N]; collects flat index and score of the positives, for which it needs N + 1 places.

    Returns:
        The number of positives, of negatives, of invalid targets and of invalid scores.
    """
    found, negatives, bad_targets, bad_scores = np.uint64(0), len(targets), 0, 0
    size, step = np.uint64(len(targets)), np.uint64(CACHED_BLOCK)
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
def _place_edges(
    positives, delta, first_positive, first_row, edges, gaps, lengths, ramps, starts, ends, own_rows, shares
):
    """Merges the starts s_i - delta and the ends s_i + delta of the ramps, for each group; see :class:`Axis`.

    An edge is the smallest number of the scores' dtype that is not below the breakpoint.
    """
    inverse, size = 0.5 / delta if delta > 0 else 0.0, 2 * len(positives)
    rounded, totals, lost = np.empty(size, edges.dtype), np.empty(size), np.empty(size)
    for k in range(size):  # starts at even places, ends at odd ones
        s, offset = positives[k >> 1], delta if k & 1 else -delta
        totals[k] = s + offset
        seen = totals[k] - s
        lost[k] = (s - (totals[k] - seen)) + (offset - seen)  # by rounding (Knuth)
        rounded[k] = totals[k]
        if rounded[k] < totals[k] or (rounded[k] == totals[k] and lost[k] > 0):
            rounded[k] = np.nextafter(rounded[k], edges.dtype.type(np.inf))
    for row in range(len(edges)):
        edges[row], lengths[row] = np.inf, 0.0
        gaps[row] = ramps[row] = 0.0 if delta > 0 else 1.0
    for g in range(len(first_positive) - 1):
        start = end = first_positive[g]
        stop, high, low = first_positive[g + 1], 0.0, 0.0
        for row in range(first_row[g] + 1, first_row[g + 1]):
            if delta == 0:
                is_tied = end > first_positive[g] and positives[end] == positives[end - 1]
                edges[row], ends[end] = positives[end], first_row[g]
                starts[end] = starts[end - 1] if is_tied else row
                end += 1
                continue
            k = 2 * start
            if start >= stop or rounded[k] > rounded[2 * end + 1]:
                k = 2 * end + 1
                ends[end] = row
                end += 1
            else:
                starts[start] = row
                start += 1
            if ramps[row - 1] > 0:  # a length below 0 makes up for two edges that rounding swapped
                lengths[row - 1] = ((totals[k] - high) + (lost[k] - low)) * inverse
            high, low, edges[row], ramps[row] = totals[k], lost[k], rounded[k], start - end
            if edges[row] < np.inf:
                gaps[row] = (edges[row] - high - low) * inverse
        row = first_row[g]
        for i in range(first_positive[g], stop):
            while row + 1 < first_row[g + 1] and edges[row + 1] <= positives[i]:
                row += 1
            own_rows[i], shares[i] = row, (positives[i] - edges[row]) * inverse


@_inside
def _fill_tables(edges, first_row, first_cell, table, low, scale, last):
    """Fills a lookup table per group, one behind the other: how many rows start in lower cells than each cell.

    Args:
        first_cell: of each group's table, and their number [G + 1].
        table: zeros [first_cell[G]].
        low, scale, last: get the left end of each table, its cells per unit, and its last cell but one [G].
    """
    for g in range(len(low)):
        low[g] = edges[first_row[g] + 1]
        cells = first_cell[g + 1] - first_cell[g] - 3
        last[g] = cells if cells < MAX_CELLS else MAX_CELLS
        scale[g] = last[g] / (edges[first_row[g + 1] - 1] - low[g])
        scale[g] = scale[g] if scale[g] < np.inf else 0.0
        for row in range(first_row[g] + 1, first_row[g + 1]):
            table[first_cell[g] + _cell(edges[row], low[g], scale[g], last[g]) + 1] += 1
        lower_rows = first_row[g]
        for cell in range(first_cell[g], first_cell[g + 1]):
            lower_rows += table[cell]
            table[cell] = lower_rows


@_inside
def _cell(score, low, scale, last):
    """The cell of a score in a lookup table; 0 below all edges. It never falls as scores rise, whatever is rounded."""
    position = (score - low) * scale
    position = position if position < last else last
    return np.int32((position if position > -1 else -1.0) + 1.0)


@_inside
def _tally_scores(
    scores, start, stop, negative, groups, edges, inverse, first_cell, table, low, scale, last, unit, rows, tallies
):
    """Counts the negatives of each row, and adds up their distances to its edge.

    Args:
        groups: the number of each score's group [N]; empty for a single group.
        inverse: see :class:`Axis`.
        unit: distances are integers in this fraction of 2 delta.
        rows: gets the row of each negative, R for other scores [N].
        tallies: numbers and sums are added to it [R + 1, 2]; the last row is for scores that are not negatives.
    """
    outside, size, lowest = np.uint64(len(edges) - 1), np.uint64(stop), -edges[len(edges) - 1]
    for block in range(np.uint64(start), size, np.uint64(CACHED_BLOCK)):
        block_stop = block + np.uint64(CACHED_BLOCK) if block + np.uint64(CACHED_BLOCK) < size else size
        if len(groups) == 0:
            for n in range(block, block_stop):  # vectorised
                rows[n] = _cell(scores[n], low[0], scale[0], last[0])
        else:
            for n in range(block, block_stop):
                g = groups[n]
                rows[n] = first_cell[g] + _cell(scores[n], low[g], scale[g], last[g])
        for n in range(block, block_stop):
            cell, score = np.uint64(rows[n]), scores[n] if negative[n] else lowest
            row = np.uint64(table[cell])
            if edges[row + np.uint64(1)] <= score:  # most cells hold no edge
                highest = np.uint64(table[cell + np.uint64(1)])
                while highest > row + np.uint64(MAX_STEPS):
                    middle = (row + highest) >> np.uint64(1)
                    if edges[middle] <= score:
                        row = middle
                    else:
                        highest = middle
                while edges[row + np.uint64(1)] <= score:
                    row += np.uint64(1)
            row = row if negative[n] else outside
            distance = score - edges[row]  # -inf below all edges
            share = (distance if distance > 0 else 0.0) * inverse
            rows[n] = row
            tallies[row, 0] += 1
            tallies[row, 1] += np.int64((share if share < 1.0 else 1.0) * unit)


@_inside
def _sum_steps(tallies, scale, first_row, gaps, lengths, ramps, starts, ends, own_rows, shares, f0, sums):
    """Sums of f(s_j - s_i) for each positive i: the mean, over the ramp of i, of the number of scores above.

    Args:
        tallies: of the negatives [R + 1, 2]; ``scale`` turns the distances into shares of 2 delta.
        sums: columns of values of the positives, which their sums over the other positives above each replace, f(0)
            being ``f0``; the first column gets the sums over the negatives [K, P].
    """
    counts, distances, integral = np.empty(len(gaps)), np.empty(len(gaps)), np.empty(len(gaps))
    for k in range(len(sums)):
        for row in range(len(gaps)):
            counts[row] = tallies[row, 0] if k == 0 else 0.0
            distances[row] = tallies[row, 1] * scale if k == 0 else 0.0
        if k > 0:
            for i in range(len(own_rows)):
                counts[own_rows[i]] += sums[k, i]
                distances[own_rows[i]] += sums[k, i] * shares[i]
        for g in range(len(first_row) - 1):
            above, total = 0.0, 0.0  # accumulated from the top, where ranks are small
            for row in range(first_row[g + 1] - 1, first_row[g], -1):
                if ramps[row] > 0:
                    total += above * lengths[row] + distances[row] + counts[row] * gaps[row]
                above += counts[row]
                integral[row] = total
            integral[first_row[g]] = 0.0
        for i in range(len(own_rows)):
            itself = f0 * sums[k, i] if k > 0 else 0.0
            sums[k, i] = integral[starts[i]] - integral[ends[i]] - itself


@_inside
def _cut_line(own, n, first_row, gaps, lengths, ramps, starts, ends, inverse, heights, slopes):
    """The line sum_i own_i / n_i f(s - s_i) in each row, as its value at the edge and its slope [R + 1].

    It is 0 in the last row, for scores that are not negatives.
    """
    changes = np.empty(len(heights))
    for row in range(len(changes)):
        changes[row], heights[row], slopes[row] = 0.0, 0.0, 0.0
    for i in range(len(own)):
        weight = own[i] / n[i] if n[i] != 0 else 0.0
        changes[starts[i]] += weight
        changes[ends[i]] -= weight
    for g in range(len(first_row) - 1):
        rate, height = 0.0, 0.0
        for row in range(first_row[g] + 1, first_row[g + 1]):
            rate += changes[row]
            slope = rate if ramps[row] > 0 else 0.0
            heights[row], slopes[row] = height + slope * gaps[row], slope * inverse
            height += slope * lengths[row]


@_inside
def _write_gradient(scores, start, stop, rows, width, edges, heights, slopes, index, own, out):
    """Writes the gradient of a part of the scores: the value of its row's line for each, -own_i for positives."""
    zero, width = edges.dtype.type(0), edges.dtype.type(width)
    for i in range(np.uint64(start), np.uint64(stop)):
        row = np.uint64(rows[i])
        distance = scores[i] - edges[row]  # -inf below all edges, NaN for ignored scores
        distance = distance if distance < width else width
        distance = distance if distance > 0 else zero
        out[i] = heights[row] + slopes[row] * distance
    for k in range(len(index)):
        if start <= index[k] and index[k] < stop:
            out[index[k]] = -own[k]


@_inside
def _apply_ratio(ratio, negatives, sums, own):
    """The loss for a rule that is a :class:`.Ratio` and one group: its four numbers, and whether it is monotone."""
    loss, smallest = 0.0, np.inf
    for i in range(len(own)):
        denominator = ratio[0] + ratio[1] * sums[1, i] + ratio[2] * sums[0, i] + ratio[3] * negatives
        error = sums[0, i] / denominator if denominator > 0 else 0.0
        smallest = error if error < smallest or ratio[4] == 0 else smallest
        own[i] = smallest * (1.0 / len(own))
        loss += own[i]
    return loss


place_edges, fill_tables, tally_scores, sum_steps, cut_line, write_gradient = (
    Kernel(function.py_func)
    for function in (_place_edges, _fill_tables, _tally_scores, _sum_steps, _cut_line, _write_gradient)
)


@Kernel
def loss_and_gradient(scores, negative, values, index, order, delta, cells, unit, ratio, negatives, out):
    """All of it in one call, for one thread and one group; ``out`` gets the gradient unless it is empty.

    Args:
        values, index: of the positives at first, which ``order`` sorts.
        cells: of the lookup table.
        ratio: see ``_apply_ratio``.
        negatives: their number.
    """
    count, dtype, no_groups = len(order), scores.dtype, np.empty(0, np.int64)
    inverse, f0, size = (0.5 / delta, 0.5, 2 * count + 2) if delta > 0 else (0.0, 1.0, count + 2)
    first_positive, first_row, first_cell = np.empty(2, np.int64), np.empty(2, np.int64), np.empty(2, np.int64)
    first_positive[0], first_row[0], first_cell[0] = 0, 0, 0
    first_positive[1], first_row[1], first_cell[1] = count, size - 1, cells
    positives, places, sums = np.empty(count), np.empty(count, np.int64), np.empty((2, count))
    for i in range(count):
        positives[i], places[i] = values[order[i]], index[order[i]]
        sums[0, i] = sums[1, i] = 1.0
    table, tallies = np.empty(cells, np.uint32), np.empty((size, 2), np.int64)
    for cell in range(cells):
        table[cell] = 0
    for row in range(size):
        tallies[row, 0] = tallies[row, 1] = 0
    edges, gaps, lengths, ramps = np.empty(size, dtype), np.empty(size), np.empty(size), np.empty(size)
    starts, ends, own_rows = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    low, scale, last = np.empty(1, dtype), np.empty(1, dtype), np.empty(1, dtype)
    shares, own, rows = np.empty(count), np.empty(count), np.empty(len(scores), np.uint32)
    _place_edges(
        positives, delta, first_positive, first_row, edges, gaps, lengths, ramps, starts, ends, own_rows, shares
    )
    _fill_tables(edges, first_row, first_cell, table, low, scale, last)
    _tally_scores(
        scores, 0, len(scores), negative, no_groups, edges, inverse,
        first_cell, table, low, scale, last, unit, rows, tallies,
    )  # fmt: skip
    share_of_unit = 1.0 / unit if delta > 0 else 0.0
    _sum_steps(tallies, share_of_unit, first_row, gaps, lengths, ramps, starts, ends, own_rows, shares, f0, sums)
    loss = _apply_ratio(ratio, negatives, sums, own)
    if len(out) > 0:
        heights, slopes = np.empty(size, dtype), np.empty(size, dtype)
        _cut_line(own, sums[0], first_row, gaps, lengths, ramps, starts, ends, inverse, heights, slopes)
        _write_gradient(scores, 0, len(scores), rows, 2 * delta, edges, heights, slopes, places, own, out)
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
    flat = (scores if scores.dtype in NATIVE_SCORES else scores.to(torch.float32)).numpy()
    marks, size = (targets if targets.dtype in NATIVE_TARGETS else targets.to(torch.float32)).numpy(), len(flat)
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
class _CPUFound(Found):
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
        size, num_rows = len(flat), status.positives * (2 if problem.delta > 0 else 1) + 1
        cells, unit = _cells_per_row(size, num_rows) * num_rows + 2, _fixed_point_unit(size)
        out = np.empty(size if needs_gradient else 0, flat.dtype)
        options = (problem.delta, cells, unit, _ratio_of(rule.error, rule.monotone), status.negatives)
        loss = loss_and_gradient(flat, negative, values, index, values.argsort(), *options, out)
        value = torch.scalar_tensor(loss, dtype=problem.dtype)
        return (value,), (torch.from_numpy(out),) if needs_gradient else ()

    def find(self, problem: Problem) -> Found:
        scores, negative, index, values, status = _find(problem)
        boxes, weights = self.count_bad_others(problem)
        status = status._replace(bad_boxes=int(boxes), bad_weights=int(weights))
        return _CPUFound(status, index, values.astype(np.float64), scores, negative)

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
        first_positive, groups = _groups_of_scores(problem, found, positives)
        found.axis = axis = _cut_axis(positives.scores, first_positive, problem.delta, scores.dtype)
        tables = _make_tables(axis, size)
        found.rows = np.empty(size, np.uint32)

        def tally_part(start: int, stop: int) -> Any:
            tallies = np.zeros((len(axis.edges), 2), np.int64)
            rest = (axis.inverse, *tables, unit, found.rows, tallies)
            tally_scores(scores, start, stop, found.negative, groups, axis.edges, *rest)
            return tallies

        parts = _in_parts(size, tally_part)
        tallies = parts[0] if len(parts) == 1 else sum(parts)
        if reduce is not None:
            tallies, unit = tallies / [1.0, unit], 1.0
            reduce(torch.from_numpy(tallies))
        columns = positives.members if positives.box_losses is None else [positives.box_losses]
        sums = np.ones((2 if columns is None else 2 + len(columns), len(positives.scores)))
        if columns is not None:
            sums[2:] = columns
        scale, f0 = (1.0 / unit, 0.5) if axis.inverse else (0.0, 1.0)
        sum_steps(tallies, scale, *axis.lines(), axis.own_rows, axis.shares, f0, sums)
        above = sums[2:] if positives.box_losses is None else sums[2]
        negatives, weights = _negatives_and_weights(axis, tallies, positives.weights)
        return Ranks(sums[1], sums[0], negatives, above, weights)

    def running_minimum(self, found: Any, values: Any) -> Any:
        groups = np.split(values, found.axis.first_positive[1:-1], axis=-1)
        return np.concatenate([np.minimum.accumulate(group, axis=-1) for group in groups], axis=-1)

    def sort_pairs(self, problem: Problem, found: Any, positives: Positives, weights: Any) -> tuple[Any, Any]:
        gradient, first_positive = np.zeros(len(weights)), found.axis.first_positive
        total = sort_pairs(positives.scores, first_positive, 1 - positives.qualities, weights, problem.delta, gradient)
        return total, gradient

    def line_at_positives(self, problem: Problem, found: Any, positives: Positives, weights: Any) -> Any:
        scores, rows = positives.scores.astype(found.scores.dtype), found.axis.own_rows.astype(np.uint32)
        return _evaluate_line(found.axis, scores, rows, weights, np.ones_like(weights), _NO_GROUPS, 2 * problem.delta)

    def tensor(self, values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.as_tensor(values, dtype=dtype)

    def gradient(self, problem: Problem, found: Any, positives: Positives, ranks: Ranks, own: Any) -> Tensor:
        own, width = own * problem.num_processes, 2 * problem.delta
        return torch.from_numpy(
            _evaluate_line(found.axis, found.scores, found.rows, own, ranks.n, positives.index, width)
        )


def _cut_axis(scores: Any, first_positive: Any, delta: float, dtype: Any) -> Axis:
    """Cuts the score axis at s_i - delta and s_i + delta, for each group."""
    per_positive, count, groups = 2 if delta > 0 else 1, len(scores), np.arange(len(first_positive))
    first_row = first_positive * per_positive + groups
    edges, (gaps, lengths, ramps) = np.empty(first_row[-1] + 1, dtype), np.empty((3, first_row[-1] + 1))
    rows = (edges, gaps, lengths, ramps, *np.empty((3, count), np.int64), np.empty(count))
    place_edges(scores, delta, first_positive, first_row, *rows)
    return Axis(first_positive, first_row, 0.5 / delta if delta > 0 else 0.0, *rows)


def _cells_per_row(size: int, num_rows: int) -> int:
    """How fine the lookup tables are: most cells hold no edge, or one."""
    return min(max(size // (4 * num_rows), 3), MAX_CELLS_PER_ROW)


def _make_tables(axis: Axis, size: int) -> tuple[Any, ...]:
    """The arguments of :func:`fill_tables` from ``first_cell`` on, filled."""
    groups = np.arange(len(axis.first_row))
    first_cell = axis.first_row * _cells_per_row(size, len(axis.edges) - 1) + 2 * groups
    ends = np.empty((3, len(groups) - 1), axis.edges.dtype)
    table = np.zeros(first_cell[-1], np.uint32)
    fill_tables(axis.edges, axis.first_row, first_cell, table, *ends)
    return first_cell, table, *ends


def _evaluate_line(axis: Axis, scores: Any, rows: Any, own: Any, n: Any, index: Any, width: float) -> Any:
    """See :func:`cut_line` and :func:`write_gradient`."""
    out, heights, slopes = np.empty_like(scores), np.empty_like(axis.edges), np.empty_like(axis.edges)
    cut_line(own, n, *axis.lines(), axis.inverse, heights, slopes)
    rest = (rows, width, axis.edges, heights, slopes, index, own, out)
    _in_parts(len(scores), lambda start, stop: write_gradient(scores, start, stop, *rest))
    return out


def _negatives_and_weights(axis: Axis, tallies: Any, weights: Any) -> tuple[Any, Any]:
    """The number of negatives ranked with each positive, and its weight in the mean [P]."""
    num_groups, sizes = len(axis.first_row) - 1, np.diff(axis.first_positive)
    negatives = np.add.reduceat(tallies[:-1, 0], axis.first_row[:-1])
    group = np.repeat(np.arange(num_groups), sizes)
    weights = np.ones(len(group)) if weights is None else weights
    totals = np.bincount(group, weights)
    return negatives[group], weights / np.where(totals > 0, totals, 1)[group] / num_groups


def _groups_of_scores(problem: Problem, found: Any, positives: Positives) -> tuple[Any, Any]:
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
