"""The kernels of the Triton backend that apply the rules of the losses to the positives.

See ``triton_kernels`` for the conventions. Pairs of positives are never held: a program sums over
all partners of a few of them, a tile at a time.
"""

# ruff: noqa: N803
# mypy: ignore-errors

import os

import triton
import triton.language as tl

from . import rules
from .triton_kernels import kernel, real_count, row_count

__all__ = ["apply_rule", "pair_columns", "pair_rows"]  # the kernels that Python launches

AP: tl.constexpr = tl.constexpr(0)
AUC: tl.constexpr = tl.constexpr(1)
RANK_SORT: tl.constexpr = tl.constexpr(2)
ALRP: tl.constexpr = tl.constexpr(3)

# The interpreter calls plain functions, and takes no jitted ones from modules without Triton.
jit_rule = (lambda rule: rule) if os.environ.get("TRITON_INTERPRET") == "1" else triton.jit
ap_error = jit_rule(rules.ap_error)
ap_weight = jit_rule(rules.ap_weight)
auc_error = jit_rule(rules.auc_error)
auc_weight = jit_rule(rules.auc_weight)
rank_sort_error = jit_rule(rules.rank_sort_error)
rank_sort_weight = jit_rule(rules.rank_sort_weight)
sorting_error = jit_rule(rules.sorting_error)
alrp_rank = jit_rule(rules.alrp_rank)
alrp_error = jit_rule(rules.alrp_error)
alrp_weight = jit_rule(rules.alrp_weight)


@triton.jit
def step(x, delta, HEAVISIDE: tl.constexpr):
    """f(x), the step function."""
    if HEAVISIDE:
        value = (x >= 0).to(tl.float64)
    else:
        value = tl.minimum(tl.maximum(x / (2 * delta) + 0.5, 0.0), 1.0)
    return value


@kernel
def pair_rows(
    positives, extras, pairs, count_on_device, capacity, delta: tl.float64,
    RULE: tl.constexpr, HEAVISIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums over the positives k, i included, for every positive i.

    pairs [0]: of f(x_ik). aLRP, [1]: of f(x_ik) E_k. Rank & Sort, [1]: the sorting error of i;
    [2]: that over its violations, the sum of f(x_ik) over y_k < y_i.
    """
    count = real_count(count_on_device, capacity)
    if tl.program_id(0) * ROWS >= count:
        return
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = i < count
    s_i = tl.load(positives + i, mask=real, other=0.0).to(tl.float64)
    steps = tl.zeros((ROWS,), tl.float64)
    extra = tl.zeros((ROWS,), tl.float64)
    steps_in_order = tl.zeros((ROWS,), tl.float64)
    extra_in_order = tl.zeros((ROWS,), tl.float64)
    y_i = steps
    if RULE == RANK_SORT:
        y_i = tl.load(extras + i, mask=real, other=0.0)
    for first in range(0, count, TILE):
        k = first + tl.arange(0, TILE)
        s_k = tl.load(positives + k, mask=k < count, other=0.0).to(tl.float64)
        f = step(s_k[None, :] - s_i[:, None], delta, HEAVISIDE)
        f = tl.where((k < count)[None, :], f, 0.0)
        steps += tl.sum(f, axis=1)
        if RULE == ALRP:
            loss = tl.load(extras + k, mask=k < count, other=0.0)
            extra += tl.sum(f * loss[None, :], axis=1)
        if RULE == RANK_SORT:
            y_k = tl.load(extras + k, mask=k < count, other=0.0)
            in_order = tl.where(y_k[None, :] >= y_i[:, None], f, 0.0)
            extra += tl.sum(f * (1 - y_k)[None, :], axis=1)
            steps_in_order += tl.sum(in_order, axis=1)
            extra_in_order += tl.sum(in_order * (1 - y_k)[None, :], axis=1)
    tl.store(pairs + i, steps, mask=real)
    if RULE == ALRP:
        tl.store(pairs + capacity + i, extra, mask=real)
    if RULE == RANK_SORT:
        violations = steps - steps_in_order
        violates = real & (violations > 0)
        steps, steps_in_order = tl.where(real, steps, 1.0), tl.where(real, steps_in_order, 1.0)
        error = sorting_error(extra, steps, extra_in_order, steps_in_order)
        error = tl.where(violates, error, 0.0)
        tl.store(pairs + capacity + i, error, mask=real)
        blame = error / tl.where(violates, violations, 1.0)
        tl.store(pairs + 2 * capacity + i, blame, mask=real)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def weight_of_positives(status, count_on_device, capacity):
    """1 / P; NaN if the input must not be ranked or not all positives have a place."""
    positives = tl.load(status)
    refused = tl.load(status + 2) + tl.load(status + 3) + tl.load(status + 4)
    missing = positives > real_count(count_on_device, capacity)
    weight = 1.0 / tl.maximum(positives, 1).to(tl.float64)
    return tl.where((refused > 0) | missing, float("nan"), weight)


@kernel
def apply_rule(
    above, starts, ends, pairs, extras, tallies, status, count_on_device,
    values, pair_weights, own, capacity,
    RULE: tl.constexpr, INTERPOLATED: tl.constexpr, HEAVISIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The losses, and per positive its weight in pairs and its own gradient. One program.

    aLRP leaves weight / rank in pairs [0] for ``pair_columns``.
    """
    count = real_count(count_on_device, capacity)
    weight = weight_of_positives(status, count_on_device, capacity)
    f0 = 1.0 if HEAVISIDE else 0.5
    negatives = tl.zeros((), tl.float64)
    if RULE == AUC:
        rows = row_count(count_on_device, capacity, HEAVISIDE)
        for first in range(0, rows + 1, TILE):
            j = first + tl.arange(0, TILE)
            negatives += tl.sum(tl.load(tallies + j, mask=j <= rows, other=0.0))
    first_value = weight * 0
    second_value = weight * 0
    lowest = tl.full((), float("inf"), tl.float64)
    for first in range(0, count, TILE):
        k = first + tl.arange(0, TILE)
        real = k < count
        n = tl.load(above + tl.load(starts + k, mask=real, other=0), mask=real, other=0.0)
        if not HEAVISIDE:
            n -= tl.load(above + tl.load(ends + k, mask=real, other=0), mask=real, other=0.0)
        p = tl.load(pairs + k, mask=real, other=1.0) - f0
        if RULE == AP:
            error = ap_error(p, n)
            if INTERPOLATED:
                error = tl.where(real, error, float("inf"))
                error = tl.minimum(tl.associative_scan(error, 0, smaller), lowest)
                lowest = tl.min(error)
            pair_weight = ap_weight(error, n)
        if RULE == AUC:
            error = auc_error(n, negatives)
            pair_weight = auc_weight(negatives) + n * 0
        if RULE == RANK_SORT:
            error = rank_sort_error(p, n, f0)
            pair_weight = rank_sort_weight(p, n, f0)
            sorting = tl.load(pairs + capacity + k, mask=real, other=0.0)
            second_value += tl.sum(sorting * weight)
        if RULE == ALRP:
            loss = tl.load(extras + k, mask=real, other=0.0)
            losses_above = tl.load(pairs + capacity + k, mask=real, other=0.0) - f0 * loss
            over_rank = 1 / alrp_rank(p, n)
            error = n * over_rank
            correction = alrp_error(n, losses_above, over_rank)
            pair_weight = alrp_weight(correction, n)
            second_value += tl.sum(tl.where(real, (loss + losses_above) * over_rank * weight, 0.0))
            tl.store(pairs + k, weight * over_rank, mask=real)
        else:
            correction = error
        first_value += tl.sum(tl.where(real, error * weight, 0.0))
        tl.store(pair_weights + k, pair_weight * weight, mask=real)
        tl.store(own + k, -correction * weight, mask=real)
    tl.store(values, first_value.to(tl.float32))
    if RULE == RANK_SORT or RULE == ALRP:  # noqa: SIM109
        tl.store(values + 1, second_value.to(tl.float32))


@kernel
def pair_columns(
    positives, index, extras, pairs, status, count_on_device, out, capacity, out_size, processes,
    delta: tl.float64,
    RULE: tl.constexpr, HEAVISIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums over the positives i for every positive k.

    Rank & Sort: the gradient of the sorting part. aLRP: the derivative of the localisation part by
    the box loss of k, in the order of the index of this process's positives.
    """
    count = real_count(count_on_device, capacity)
    if tl.program_id(0) * ROWS >= count:
        return
    k = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = k < count
    s_k = tl.load(positives + k, mask=real, other=0.0).to(tl.float64)
    i_k = tl.load(index + k, mask=real, other=-1)
    total = tl.zeros((ROWS,), tl.float64)
    place = tl.zeros((ROWS,), tl.int32)
    y_k = total
    if RULE == RANK_SORT:
        y_k = tl.load(extras + k, mask=real, other=0.0)
    for first in range(0, count, TILE):
        i = first + tl.arange(0, TILE)
        s_i = tl.load(positives + i, mask=i < count, other=0.0).to(tl.float64)
        f = step(s_k[:, None] - s_i[None, :], delta, HEAVISIDE)
        if RULE == RANK_SORT:
            blame = tl.load(pairs + 2 * capacity + i, mask=i < count, other=0.0)
            y_i = tl.load(extras + i, mask=i < count, other=0.0)
            f = tl.where(y_k[:, None] < y_i[None, :], f, 0.0)
            total += tl.sum(f * blame[None, :], axis=1)
        else:
            share = tl.load(pairs + i, mask=i < count, other=0.0)
            total += tl.sum(f * share[None, :], axis=1)
            i_i = tl.load(index + i, mask=i < count, other=-1)
            before = (i_i[None, :] >= 0) & (i_i[None, :] < i_k[:, None])
            place += tl.sum(before.to(tl.int32), axis=1)
    if RULE == RANK_SORT:
        error = tl.load(pairs + capacity + k, mask=real, other=0.0)
        weight = weight_of_positives(status, count_on_device, capacity)
        tl.store(out + k, (total - error) * weight, mask=real)
    else:
        f0 = 1.0 if HEAVISIDE else 0.5
        total += (1 - f0) * tl.load(pairs + k, mask=real, other=0.0)
        own = real & (i_k >= 0) & (place < out_size)
        tl.store(out + place, (total * processes).to(out.dtype.element_ty), mask=own)
