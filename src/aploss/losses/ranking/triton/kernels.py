"""The Triton kernels over all scores; the backend beside this file launches them.

They compute in float32 and integers, read each input once, and give the same bits for every block size: sums to which
many programs add are sums of integers. Row r is the segment r - 1 of :mod:`..segments`; row 0 lies below all edges.
"""

# ruff: noqa: N803
# mypy: ignore-errors

import functools

import triton
import triton.language as tl

__all__ = ["check_and_pack", "evaluate_gradient", "tally_negatives"]  # the kernels that Python launches

# Numbers that change from step to step must not make the compiler build kernels of their own.
kernel = functools.partial(triton.jit, do_not_specialize=["copies", "field_bits", "n", "rows"])


@kernel
def check_and_pack(targets, scores, negative_bits, counts, n, SOFT: tl.constexpr, BLOCK: tl.constexpr):
    """Packs the negatives into bits; counts positives, negatives, invalid targets and scores."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    t = tl.load(targets + i, mask=inside, other=2)
    positive = ((t > 0) & (t <= 1)) if SOFT else t == 1
    negative = t == 0
    valid = positive | negative
    s = tl.load(scores + i, mask=valid, other=0.0).to(tl.float32)
    finite = tl.abs(s) < float("inf")
    bit = tl.reshape(negative.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
    word = tl.program_id(0).to(tl.int64) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(negative_bits + word, tl.sum(bit, axis=1), mask=word * 32 < n)
    tl.atomic_add(counts, tl.sum(positive.to(tl.int32)).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts + 1, tl.sum(negative.to(tl.int32)).to(tl.int64), sem="relaxed")
    invalid = tl.sum((inside & (valid == 0) & (t != -1)).to(tl.int32))
    if invalid > 0:
        tl.atomic_add(counts + 2, invalid.to(tl.int64), sem="relaxed")
    infinite = tl.sum((valid & (finite == 0)).to(tl.int32))
    if infinite > 0:
        tl.atomic_add(counts + 3, infinite.to(tl.int64), sem="relaxed")


@triton.jit
def load_negatives(scores, negative_bits, n, BLOCK: tl.constexpr):
    """Indices, scores, and which of them are negatives, of this program's block."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(negative_bits + i // 32, mask=i < n, other=0)
    negative = ((word >> (i % 32).to(tl.int32)) & 1) != 0
    return i, tl.load(scores + i, mask=negative, other=0.0).to(tl.float32), negative


@triton.jit
def find_row(tree, s, wanted, rows):
    """The number of edges that are not above each score, from a search tree in breadth-first order.

    Neighbouring threads start at the same nodes, which lie side by side: fewer cache lines are
    touched than by bisection.
    """
    node = tl.full(s.shape, 1, tl.int32)
    size = 1
    while size <= rows:
        reached = tl.load(tree + node, mask=wanted, other=float("inf")) <= s
        node = 2 * node + reached.to(tl.int32)
        size *= 2
    return node - size


@kernel
def tally_negatives(
    scores, negative_bits, tree, edges, tallies,
    n, rows, copies, field_bits, width, unit_inverse,
    HEAVISIDE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds every negative to its row of one of the copies [copies, rows + 1]: 1 in the high bits,
    its distance to the edge as an integer in the low ``field_bits``.

    The distance, at most ``width`` on any ramp, is exact to the unit: what rounding took from the
    difference is added, and the unit is a power of two.
    """
    _, s, negative = load_negatives(scores, negative_bits, n, BLOCK)
    row = find_row(tree, s, negative, rows)
    copy = (tl.program_id(0).to(tl.int64) * BLOCK // CHUNK) % copies
    base = tallies + copy * (rows + 1)
    one = tl.full((), 1, tl.int64) << field_bits
    # Most scores lie below all edges, or above all: a whole block adds them up first.
    below = negative & (row == 0)
    top = negative & (row == rows) & (rows > 0)
    tl.atomic_add(base, tl.sum(below.to(tl.int32)).to(tl.int64) * one, sem="relaxed")
    tl.atomic_add(base + rows, tl.sum(top.to(tl.int32)).to(tl.int64) * one, sem="relaxed")
    between = negative & (row > 0) & (row < rows)
    added = tl.zeros((BLOCK,), tl.int64) + one
    if not HEAVISIDE:
        edge = tl.load(edges + row - 1, mask=between, other=0.0)
        distance = s - edge
        seen = s - distance
        lost = (s - (distance + seen)) + (seen - edge)
        on_ramp = distance <= width  # elsewhere nobody uses it
        distance = tl.where(on_ramp, distance, 0.0) * unit_inverse
        whole = tl.floor(distance)
        rest = distance - whole + tl.where(on_ramp, lost, 0.0) * unit_inverse
        added += whole.to(tl.int64) + tl.floor(rest + 0.5).to(tl.int64)
    tl.atomic_add(base + row, added, mask=between, sem="relaxed")


@kernel
def evaluate_gradient(
    scores, negative_bits, tree, lines, gradient, n, rows, width, HEAVISIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """The value of its row's line for every negative, 0 for other scores.

    lines [rows, 4]: value at the edge, the edge, slope, and what rounding took from the value.
    """
    i, s, negative = load_negatives(scores, negative_bits, n, BLOCK)
    row = find_row(tree, s, negative, rows)
    reached = negative & (row > 0)
    line = lines + 4 * (row - 1)
    value = tl.load(line, mask=reached, other=0.0)
    if not HEAVISIDE:
        distance = s - tl.load(line + 1, mask=reached, other=0.0)
        distance = tl.where(distance < width, distance, width)
        rise = tl.load(line + 2, mask=reached, other=0.0) * distance
        value += rise + tl.load(line + 3, mask=reached, other=0.0)
    tl.store(gradient + i, value, mask=i < n)
