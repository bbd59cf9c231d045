"""The mathematics on the positives between the passes, compiled; see :mod:`.segments`.

The same as in torch operations, for the scores of one process without groups: a loop over a few
hundred numbers costs less than one call of an operation on them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any

import numba
import numpy as np

from . import rules

AP, AUC, RANK_SORT, ALRP = 0, 1, 2, 3
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
# Functions that only kernels call need no way in from Python, which takes a tenth of the time of compiling them.
INSIDE: dict[str, Any] = {**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
helper = numba.njit(**INSIDE)
_ap_error, _ap_weight = helper(rules.ap_error), helper(rules.ap_weight)
_auc_error, _auc_weight = helper(rules.auc_error), helper(rules.auc_weight)
_rank_sort_error = helper(rules.rank_sort_error)
_rank_sort_weight, _sorting_error = helper(rules.rank_sort_weight), helper(rules.sorting_error)
_alrp_rank, _alrp_error = helper(rules.alrp_rank), helper(rules.alrp_error)
_alrp_weight = helper(rules.alrp_weight)


@helper
def cut(positives, delta, one):
    """Cuts the score axis at s_i - delta and s_i + delta; see :func:`.segments.cut_into_segments`.

    Args:
        positives: s_i, ascending, float64 [P].

    Returns:
        marks (see :func:`_fill_table`), and of the M segments the lengths, gaps and how many ramps
        they lie on; segments in which the ramp of each positive starts and ends [P].
    """
    size = len(positives)
    ramp_start, ramp_end = np.empty(size, np.int64), np.empty(size, np.int64)
    infinity = one * np.float32(np.inf)
    if delta == 0:
        marks = np.full(size + 2, infinity)
        for i in range(size):
            marks[i + 1] = positives[i]
            tied = i > 0 and positives[i] == positives[i - 1]
            ramp_start[i] = ramp_start[i - 1] if tied else i
        marks[0] = marks[1]
        nothing = np.zeros(size)
        return marks, nothing, nothing, np.zeros(size, np.int64), ramp_start, ramp_start
    high, low, edges = np.empty(2 * size), np.empty(2 * size), np.full(2 * size, infinity)
    for i in range(2 * size):
        score = positives[i if i < size else i - size]
        offset = -delta if i < size else delta
        total = score + offset  # and what rounding has lost (Knuth)
        seen = total - score
        lost = (score - (total - seen)) + (offset - seen)
        edges[i] = total
        if edges[i] < total or (edges[i] == total and lost > 0):
            edges[i] = np.nextafter(edges[i], infinity)
        high[i], low[i] = total, lost
    return _merge(edges, high, low, delta, infinity, ramp_start, ramp_end)


@helper
def _merge(edges, high, low, delta, infinity, ramp_start, ramp_end):
    size = len(ramp_start)
    marks = np.full(2 * size + 2, infinity)
    lengths, gaps, ramps = np.zeros(2 * size), np.zeros(2 * size), np.zeros(2 * size, np.int64)
    start, end, before = 0, 0, 0
    for k in range(2 * size):
        if start < size and edges[start] <= edges[size + end]:
            this = start
            ramp_start[start] = k
            start += 1
        else:
            this = size + end
            ramp_end[end] = k
            end += 1
        if k > 0 and ramps[k - 1] > 0:
            length = (high[this] - high[before]) + (low[this] - low[before])
            lengths[k - 1] = length / (2 * delta)
        marks[k + 1] = edges[this]
        ramps[k] = start - end
        if edges[this] < infinity:
            gaps[k] = (edges[this] - high[this] - low[this]) / (2 * delta)
        before = this
    marks[0] = marks[1]
    return marks, lengths, gaps, ramps, ramp_start, ramp_end


@helper
def _places(positives, marks, delta):
    """The segment each positive lies in, and its distance to the edge, as share [P]."""
    places, shares = np.empty(len(positives), np.int64), np.zeros(len(positives))
    row = 0
    for i in range(len(positives)):
        while row + 1 < len(marks) - 1 and marks[row + 1] <= positives[i]:
            row += 1
        places[i] = row - 1
        if delta > 0:
            shares[i] = (positives[i] - marks[row]) / (2 * delta)
    return places, shares


@helper
def above(cuts, delta, counts, sums, out):
    """Sums of f(s_j - s_i) over what was tallied in the segments [M]; into ``out`` [P]."""
    _, lengths, gaps, ramps, ramp_start, ramp_end = cuts
    size = len(lengths)
    integral = np.zeros(size + 1)
    count_above = 0.0
    for k in range(size - 1, -1, -1):
        if delta == 0:
            count_above += counts[k]
            integral[k] = count_above
            continue
        integral[k] = integral[k + 1]
        if ramps[k] > 0:
            integral[k] += count_above * lengths[k] + sums[k] + counts[k] * gaps[k]
        count_above += counts[k]
    for i in range(len(out)):
        out[i] = integral[ramp_start[i]]
        if delta > 0:
            out[i] -= integral[ramp_end[i]]


@helper
def line(cuts, weights, delta):
    """g(s) = sum_i weights_i f(s - s_i) on every segment: value at the edge and slope [M]."""
    _, lengths, gaps, ramps, ramp_start, ramp_end = cuts
    size = len(lengths)
    height, slope = np.zeros(size), np.zeros(size)
    if delta == 0:
        total = 0.0
        for k in range(size):
            total += weights[k]
            height[k] = total
        return height, slope
    for i in range(len(weights)):
        slope[ramp_start[i]] += weights[i]
        slope[ramp_end[i]] -= weights[i]
    rate, value = 0.0, 0.0
    for k in range(size):
        rate += slope[k]
        slope[k] = rate if ramps[k] > 0 else 0.0
        height[k] = value + slope[k] * gaps[k]
        value += slope[k] * lengths[k]
    return height, slope


@helper
def errors(rule, interpolated, delta, cuts, positives, counts, sums, negatives):
    """Errors of AP, AUC and the ranking part of Rank & Sort; see :mod:`.rules`.

    Returns:
        values [2], pair weights [P], gradients of both values on the positives [2, P], and p + f(0)
        and n of every positive [P].
    """
    size = len(positives)
    f0 = 0.5 if delta > 0 else 1.0
    values, weights, own = np.zeros(2), np.empty(size), np.zeros((2, size))
    p, n = np.empty(size), np.empty(size)
    above(cuts, delta, counts[1:], sums[1:], n)
    if rule != AUC:
        places, shares = _places(positives, cuts[0], delta)
        own_counts, own_sums = np.zeros(len(cuts[1])), np.zeros(len(cuts[1]))
        for i in range(size):
            own_counts[places[i]] += 1.0
            own_sums[places[i]] += shares[i]
        above(cuts, delta, own_counts, own_sums, p)
    lowest = np.inf
    for i in range(size):
        if rule == AUC:
            error, weight = _auc_error(n[i], negatives), _auc_weight(negatives)
        elif rule == AP:
            error = _ap_error(p[i] - f0, n[i])
            lowest = min(lowest, error) if interpolated else error
            error, weight = lowest, _ap_weight(lowest, n[i])
        else:
            error = _rank_sort_error(p[i] - f0, n[i], f0)
            weight = _rank_sort_weight(p[i] - f0, n[i], f0)
        values[0] += error / size
        weights[i] = weight / size
        own[0, i] = -error / size
    return values, weights, own, p, n


@helper
def alrp(delta, cuts, positives, box_losses, p, n, values, weights, own):
    """aLRP, from p + f(0) and n. Returns the derivatives by the box losses [P]."""
    size = len(positives)
    f0 = 0.5 if delta > 0 else 1.0
    places, shares = _places(positives, cuts[0], delta)
    own_counts, own_sums = np.zeros(len(cuts[1])), np.zeros(len(cuts[1]))
    losses_above, over_rank = np.empty(size), np.empty(size)
    for i in range(size):
        own_counts[places[i]] += box_losses[i]
        own_sums[places[i]] += box_losses[i] * shares[i]
    above(cuts, delta, own_counts, own_sums, losses_above)
    values[0] = 0.0
    for i in range(size):
        over_rank[i] = 1 / _alrp_rank(p[i] - f0, n[i]) / size
        others = losses_above[i] - f0 * box_losses[i]
        error = _alrp_error(n[i], others, over_rank[i])
        values[0] += n[i] * over_rank[i]
        values[1] += (box_losses[i] + others) * over_rank[i]
        weights[i] = _alrp_weight(error, n[i])
        own[0, i] = -error
    height, slope = line(cuts, over_rank, delta)
    for i in range(size):
        value = height[places[i]] + slope[places[i]] * shares[i]
        losses_above[i] = value + (1 - f0) * over_rank[i]
    return losses_above


@numba.njit(fastmath={"reassoc", "nsz", "contract"}, **INSIDE)
def _pair_sums(positives, deficits, first, i, delta):
    """Sums over the positives k from ``first`` on, of f(x_ik) and f(x_ik) (1 - y_k).

    Returns:
        both sums over all of them, then over those with y_k < y_i.
    """
    count, deficit, violations, violating_deficit = 0.0, 0.0, 0.0, 0.0
    score, own = positives[i], deficits[i]
    rate = 0.5 / delta if delta > 0 else 0.0
    for k in range(np.uint64(first), np.uint64(len(positives))):
        step = 1.0
        if delta > 0:
            step = min(max((positives[k] - score) * rate + 0.5, 0.0), 1.0)
        violating = step if deficits[k] > own else 0.0
        count += step
        deficit += step * deficits[k]
        violations += violating
        violating_deficit += violating * deficits[k]
    return count, deficit, violations, violating_deficit


@helper
def sort_pairs(positives, qualities, delta, gradient):
    """Sorting error of Rank & Sort, and its gradient on the positives [P].

    The current error is the mean of 1 - y over the positives above i; the target is that over
    those among them that belong there, y >= y_i. Those with y < y_i share the blame.
    """
    size, first, total = len(positives), 0, 0.0
    deficits = np.empty(size)
    for i in range(size):
        deficits[i] = 1 - qualities[i]
    rate = 0.5 / delta if delta > 0 else 0.0
    for i in range(size):
        # Positives further below i than delta are not above it. Equal ones are, for delta = 0.
        while positives[i] - positives[first] > delta:
            first += 1
        sums = _pair_sums(positives, deficits, first, i, delta)
        count, deficit, violations, violating_deficit = sums
        if violations <= 0:
            continue
        error = _sorting_error(deficit, count, deficit - violating_deficit, count - violations)
        error /= size
        total += error
        gradient[i] -= error
        blame = error / violations
        for k in range(np.uint64(first), np.uint64(size)):
            step = 1.0
            if delta > 0:
                step = min(max((positives[k] - positives[i]) * rate + 0.5, 0.0), 1.0)
            gradient[k] += step * blame if deficits[k] > deficits[i] else 0.0
    return total
