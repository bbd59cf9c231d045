"""The kernels of the Triton backend; ``triton.py`` launches them and says what for.

Those of the losses' rules are in ``triton_rules``. Conventions:

- ``find_positives``, ``tally_negatives`` and ``evaluate_gradient`` run over all scores: float32 and
  integers, one read of their inputs, blocks of any size. All others are over the positives, in
  float64.
- How many positives there are is read from the device: ``count`` is min(positives, capacity), and
  loops end there. The capacity only says how large the buffers are, so that results are the same
  for every capacity; and no size is a constant of the compiler, so that few kernels are built.
- Sums do not depend on an order that may vary: integers where many programs add to one number,
  tiles of one size, one after the other, where floats are added.
- Segment r - 1 is the one of row r; row 0 is below all edges (see ``torch_backend``).
"""

# ruff: noqa: N803
# mypy: ignore-errors

import functools

import triton
import triton.language as tl

__all__ = [
    "check_box_losses",
    "cut_segments",
    "evaluate_gradient",
    "find_positives",
    "integrate_tallies",
    "line_through_segments",
    "reduce_tallies",
    "sort_positives",
    "store_own_gradient",
    "tally_negatives",
]  # the kernels that Python launches

# Numbers that change from step to step, and with them where small tensors lie, must not make the
# compiler build kernels of their own.
kernel = functools.partial(
    triton.jit,
    do_not_specialize=[
        "capacity", "copies", "field_bits", "given_size", "out_size", "processes", "room", "rows",
        "size",
    ],
    do_not_specialize_on_alignment=[
        "count_on_device", "ends", "exact", "extras", "gaps", "given", "lengths", "lost", "out",
        "owners", "ramps", "second_upstream", "starts", "upstream",
    ],
)  # fmt: skip


# ---- over all scores -----------------------------------------------------------------------------


@kernel
def find_positives(
    targets, scores, negative_bits, found_scores, found_index, status, n, room,
    SOFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the positives in any order, packs who is negative into bits, and checks everything."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    t = tl.load(targets + i, mask=inside, other=2)
    positive = ((t > 0) & (t <= 1)) if SOFT else t == 1
    negative = t == 0
    allowed = positive | negative
    s = tl.load(scores + i, mask=allowed, other=0.0).to(tl.float32)
    finite = tl.abs(s) < float("inf")

    bit = tl.reshape(negative.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
    word = tl.program_id(0).to(tl.int64) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(negative_bits + word, tl.sum(bit, axis=1), mask=word * 32 < n)

    found = tl.sum(positive.to(tl.int32))
    if found > 0:
        first = tl.atomic_add(status, found.to(tl.int64), sem="relaxed")
        place = first + tl.cumsum(positive.to(tl.int32), 0) - 1
        kept = positive & (place < room)
        tl.store(found_scores + place, tl.where(finite, s, 0.0), mask=kept)
        tl.store(found_index + place, i, mask=kept)
    tl.atomic_add(status + 1, tl.sum(negative.to(tl.int32)).to(tl.int64), sem="relaxed")
    refused = tl.sum((inside & (allowed == 0) & (t != -1)).to(tl.int32))
    if refused > 0:
        tl.atomic_add(status + 2, refused.to(tl.int64), sem="relaxed")
    infinite = tl.sum((allowed & (finite == 0)).to(tl.int32))
    if infinite > 0:
        tl.atomic_add(status + 3, infinite.to(tl.int64), sem="relaxed")


@triton.jit
def load_negatives(scores, negative_bits, n, BLOCK: tl.constexpr):
    """Indices, scores and who is a negative, of this program's block."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(negative_bits + i // 32, mask=i < n, other=0)
    negative = ((word >> (i % 32).to(tl.int32)) & 1) != 0
    return i, tl.load(scores + i, mask=negative, other=0.0).to(tl.float32), negative


@triton.jit
def find_row(tree, s, wanted, rows):
    """How many edges are not above each score, by a search tree in breadth-first order.

    Neighbouring threads start at the same nodes, which lie side by side: fewer lines of the cache
    are touched than by bisection.
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
    scores, negative_bits, tree, edges, count_on_device, tallies,
    n, capacity, copies, field_bits, width, unit_inverse,
    HEAVISIDE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds every negative to its row of one of the copies: 1 in the high bits, its distance to the
    edge as integer in the low ``field_bits``.

    The distance, at most ``width`` on any ramp, is exact to the unit: what rounding took from the
    difference is added, and the unit is a power of two.
    """
    _, s, negative = load_negatives(scores, negative_bits, n, BLOCK)
    rows = row_count(count_on_device, capacity, HEAVISIDE)
    row = find_row(tree, s, negative, rows)
    copy = (tl.program_id(0).to(tl.int64) * BLOCK // CHUNK) % copies
    base = tallies + copy * stride_of(capacity, HEAVISIDE)
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
        on_ramp = distance <= width  # others have no use for it
        distance = tl.where(on_ramp, distance, 0.0) * unit_inverse
        whole = tl.floor(distance)
        rest = distance - whole + tl.where(on_ramp, lost, 0.0) * unit_inverse
        added += whole.to(tl.int64) + tl.floor(rest + 0.5).to(tl.int64)
    tl.atomic_add(base + row, added, mask=between, sem="relaxed")


@kernel
def evaluate_gradient(
    scores, negative_bits, tree, lines, count_on_device, gradient,
    n, capacity, width, HEAVISIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The value of the line of its row at every negative; 0 at everything else."""
    i, s, negative = load_negatives(scores, negative_bits, n, BLOCK)
    row = find_row(tree, s, negative, row_count(count_on_device, capacity, HEAVISIDE))
    reached = negative & (row > 0)
    line = lines + 4 * (row - 1)
    value = tl.load(line, mask=reached, other=0.0)
    if not HEAVISIDE:
        distance = s - tl.load(line + 1, mask=reached, other=0.0)
        distance = tl.where(distance < width, distance, width)
        rise = tl.load(line + 2, mask=reached, other=0.0) * distance
        value += rise + tl.load(line + 3, mask=reached, other=0.0)
    tl.store(gradient + i, value.to(gradient.dtype.element_ty), mask=i < n)


# ---- over the positives --------------------------------------------------------------------------


@triton.jit
def real_count(count_on_device, capacity):
    """How many places hold a positive."""
    return tl.minimum(tl.load(count_on_device), capacity).to(tl.int32)


@triton.jit
def row_count(count_on_device, capacity, HEAVISIDE: tl.constexpr):
    """The highest row."""
    return real_count(count_on_device, capacity) * (1 if HEAVISIDE else 2)


@triton.jit
def stride_of(capacity, HEAVISIDE: tl.constexpr):
    """Rows of a copy of the tallies."""
    return capacity * (1 if HEAVISIDE else 2) + 1


@kernel
def check_box_losses(box_losses, status, size, TILE: tl.constexpr):
    """Counts box losses that are negative or not finite, or not one per positive."""
    k = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(box_losses + k, mask=k < size, other=0.0)
    allowed = (value >= 0) & (value < float("inf"))
    refused = tl.sum((allowed == 0).to(tl.int64)) + (tl.load(status) != size).to(tl.int64)
    tl.atomic_add(status + 4, refused, sem="relaxed")


@kernel
def sort_positives(
    found_scores, found_index, given, scores, index, extras, status, capacity, given_size,
    BY_INDEX: tl.constexpr, BY_PLACE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Puts every positive where the number of those before it says: by score, then by index.

    extras: what is ``given`` for each by its index (qualities), or in the order of index (box
    losses).
    """
    count = real_count(status, capacity)
    a = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = a < count
    s = tl.load(found_scores + a, mask=real, other=0.0)
    i = tl.load(found_index + a, mask=real, other=-1)
    rank = tl.zeros((ROWS,), tl.int32)
    place = tl.zeros((ROWS,), tl.int32)
    highest = tl.full((), float("-inf"), tl.float32)
    for first in range(0, count, TILE):
        b = first + tl.arange(0, TILE)
        s_b = tl.load(found_scores + b, mask=b < count, other=float("inf"))
        i_b = tl.load(found_index + b, mask=b < count, other=9223372036854775807)
        earlier = i_b[None, :] < i[:, None]
        lower = s_b[None, :] < s[:, None]
        before = lower | ((s_b[None, :] == s[:, None]) & earlier)
        rank += tl.sum(before.to(tl.int32), axis=1)
        place += tl.sum(earlier.to(tl.int32), axis=1)
        highest = tl.maximum(highest, tl.max(tl.where(b < count, s_b, float("-inf"))))
    # Padding repeats the highest.
    rank = tl.where(real, rank, a)
    inside = a < capacity
    padding = tl.where(count > 0, highest, 0.0)
    tl.store(scores + rank, tl.where(real, s, padding), mask=inside)
    tl.store(index + rank, i, mask=inside)
    if BY_INDEX:
        quality = tl.load(given + i, mask=real, other=0).to(tl.float64)
        tl.store(extras + rank, quality, mask=inside)
    if BY_PLACE:
        loss = tl.load(given + place, mask=real & (place < given_size), other=0.0).to(tl.float64)
        tl.store(extras + rank, loss, mask=inside)


@triton.jit
def exceeds(a, b, width):
    """Whether a - b > width, exactly."""
    difference = a - b
    seen = a - difference
    lost = (a - (difference + seen)) + (seen - b)
    return (difference > width) | ((difference == width) & (lost > 0))


@triton.jit
def put_in_tree(tree, place, edge, rows, mask):
    """Stores an edge of the sorted order where ``find_row`` looks for it."""
    size = 1
    while size <= rows:
        size *= 2
    lowest_bit = (place + 1) & -(place + 1)
    tl.store(tree + (size + place + 1) // (2 * lowest_bit), edge, mask=mask)


@triton.jit
def store_breakpoint(p, offset, place, ramps, owner, rows, width, mask,
                     edges, tree, exact, lost, gaps, owners, ramps_on):  # fmt: skip
    """Stores p + offset: exactly, as sum of two; and as edge, the next float32 not below it."""
    high = p + offset
    seen = high - p
    low = (p - (high - seen)) + (offset - seen)
    edge = high.to(tl.float32)
    rounded = edge.to(tl.float64)
    too_low = (rounded < high) | ((rounded == high) & (low > 0))
    bits = edge.to(tl.int32, bitcast=True)
    bits = tl.where(edge == 0, 1, tl.where(edge > 0, bits + 1, bits - 1))
    edge = tl.where(too_low, bits.to(tl.float32, bitcast=True), edge)
    gap = ((edge.to(tl.float64) - high) - low) / width
    tl.store(edges + place, edge, mask=mask)
    put_in_tree(tree, place, edge, rows, mask)
    tl.store(exact + place, high, mask=mask)
    tl.store(lost + place, low, mask=mask)
    tl.store(gaps + place, tl.where(tl.abs(edge) < float("inf"), gap, 0.0), mask=mask)
    tl.store(owners + place, owner, mask=mask)
    tl.store(ramps_on + place, ramps, mask=mask)


@kernel
def cut_segments(
    positives, count_on_device, edges, tree, exact, lost, gaps, owners, ramps, starts, ends,
    capacity, delta: tl.float64, HEAVISIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Merges the starts p - delta and the ends p + delta of the ramps into one ascending order.

    starts, ends: the segments in which the step of each positive leaves 0 and has reached 1. With
    the Heaviside step, the first segment whose edge is p, and none.
    """
    count = real_count(count_on_device, capacity)
    k = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = k < count
    p = tl.load(positives + k, mask=real, other=0.0).to(tl.float64)
    before_start = tl.zeros((TILE,), tl.int32)  # ends below this start; or positives below p
    before_end = tl.zeros((TILE,), tl.int32)  # starts not above this end
    half = 1
    while half < count:
        half *= 2
    while half > 0:
        probe = before_start + half
        q = tl.load(positives + probe - 1, mask=probe <= count, other=0.0).to(tl.float64)
        passed = (q < p) if HEAVISIDE else exceeds(p, q, 2 * delta)
        before_start = tl.where((probe <= count) & passed, probe, before_start)
        if not HEAVISIDE:
            probe = before_end + half
            q = tl.load(positives + probe - 1, mask=probe <= count, other=0.0).to(tl.float64)
            passed = exceeds(q, p, 2 * delta) == 0
            before_end = tl.where((probe <= count) & passed, probe, before_end)
        half = half // 2
    if HEAVISIDE:
        tl.store(starts + k, before_start, mask=real)
        tl.store(edges + k, p.to(tl.float32), mask=real)
        put_in_tree(tree, k, p.to(tl.float32), count, real)
    else:
        start, end = k + before_start, k + before_end
        tl.store(starts + k, start, mask=real)
        tl.store(ends + k, end, mask=real)
        # Ramps going on in the segment: starts so far minus ends so far.
        store_breakpoint(p, p * 0 - delta, start, 2 * k + 1 - start, k + 1, 2 * count, 2 * delta,
                         real, edges, tree, exact, lost, gaps, owners, ramps)  # fmt: skip
        store_breakpoint(p, p * 0 + delta, end, end - 2 * k - 1, -(k + 1), 2 * count, 2 * delta,
                         real, edges, tree, exact, lost, gaps, owners, ramps)  # fmt: skip


@kernel
def reduce_tallies(
    copies_of_tallies, tallies, rows, copies, field_bits, unit: tl.float64,
    COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds up the copies: counts, and distances as share of 2 delta."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    counts = tl.zeros((COLUMNS,), tl.int64)
    sums = tl.zeros((COLUMNS,), tl.int64)
    field = (tl.full((), 1, tl.int64) << field_bits) - 1
    for first in range(0, copies, TILE):
        copy = first + tl.arange(0, TILE)
        mask = (copy < copies)[:, None] & (column < rows)[None, :]
        at = copy.to(tl.int64)[:, None] * rows + column[None, :]
        packed = tl.load(copies_of_tallies + at, mask=mask, other=0)
        counts += tl.sum(packed >> field_bits, axis=0)
        sums += tl.sum(packed & field, axis=0)
    tl.store(tallies + column, counts.to(tl.float64), mask=column < rows)
    tl.store(tallies + rows + column, sums.to(tl.float64) * unit, mask=column < rows)


@kernel
def integrate_tallies(
    tallies, exact, lost, gaps, ramps, lengths, above, count_on_device,
    capacity, delta: tl.float64, HEAVISIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """With C(u) the number of negatives above u: the integral of C from every segment's left end
    on, over the ramps, as share of 2 delta. With the Heaviside step, C itself.

    So the sum of f(s_j - s_i) over the negatives j is the difference between two segments. One
    program, from the highest segment down.
    """
    rows = row_count(count_on_device, capacity, HEAVISIDE)
    sums = tallies + stride_of(capacity, HEAVISIDE)
    tiles = (rows + TILE - 1) // TILE
    higher = tl.zeros((), tl.float64)
    integral = tl.zeros((), tl.float64)
    for done in range(tiles):
        j = (tiles - 1 - done) * TILE + tl.arange(0, TILE)
        inside = j < rows
        here = tl.load(tallies + 1 + j, mask=inside, other=0.0)
        at_least = tl.cumsum(here, 0, reverse=True) + higher
        if HEAVISIDE:
            tl.store(above + j, at_least, mask=inside)
        else:
            ends = j + 1 < rows
            on_ramp = ends & (tl.load(ramps + j, mask=ends, other=0) > 0)
            high = tl.load(exact + j + 1, mask=on_ramp, other=0.0)
            high -= tl.load(exact + j, mask=on_ramp, other=0.0)
            low = tl.load(lost + j + 1, mask=on_ramp, other=0.0)
            low -= tl.load(lost + j, mask=on_ramp, other=0.0)
            length = (high + low) / (2 * delta)
            tl.store(lengths + j, length, mask=inside)
            share = tl.load(sums + 1 + j, mask=on_ramp, other=0.0)
            share += here * tl.load(gaps + j, mask=on_ramp, other=0.0)
            term = (at_least - here) * length + share
            tl.store(above + j, tl.cumsum(term, 0, reverse=True) + integral, mask=inside)
            integral += tl.sum(term)
        higher += tl.sum(here)


@kernel
def line_through_segments(
    pair_weights, upstream, edges, owners, lengths, gaps, lines, count_on_device,
    capacity, processes, delta: tl.float64, HEAVISIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """g(s) = sum_i weight_i f(s - s_i) as a line on every segment: value at the edge, edge, slope,
    and what rounding took from the value. One program, from the lowest segment up.
    """
    rows = row_count(count_on_device, capacity, HEAVISIDE)
    factor = tl.load(upstream).to(tl.float64) * processes
    slope_so_far = tl.zeros((), tl.float64)
    value_so_far = tl.zeros((), tl.float64)
    for first in range(0, rows, TILE):
        j = first + tl.arange(0, TILE)
        inside = j < rows
        if HEAVISIDE:
            weight = tl.load(pair_weights + j, mask=inside, other=0.0) * factor
            value = tl.cumsum(weight, 0) + value_so_far
            value_so_far += tl.sum(weight)
        else:
            owner = tl.load(owners + j, mask=inside, other=1)
            weight = tl.load(pair_weights + tl.abs(owner) - 1, mask=inside, other=0.0) * factor
            change = tl.where(owner > 0, weight, -weight)
            length = tl.load(lengths + j, mask=inside, other=0.0)
            slope = tl.where(length > 0, tl.cumsum(change, 0) + slope_so_far, 0.0)
            slope_so_far += tl.sum(change)
            rise = slope * length
            value = tl.cumsum(rise, 0) - rise + value_so_far
            value_so_far += tl.sum(rise)
            value += slope * tl.load(gaps + j, mask=inside, other=0.0)
            tl.store(lines + 4 * j + 1, tl.load(edges + j, mask=inside, other=0.0), mask=inside)
            tl.store(lines + 4 * j + 2, (slope / (2 * delta)).to(tl.float32), mask=inside)
        rounded = value.to(tl.float32)
        tl.store(lines + 4 * j, rounded, mask=inside)
        tl.store(lines + 4 * j + 3, (value - rounded.to(tl.float64)).to(tl.float32), mask=inside)


@kernel
def store_own_gradient(
    own, upstream, second_upstream, index, gradient, count_on_device, capacity, processes,
    TWO: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradient on this process's positives themselves."""
    k = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = k < real_count(count_on_device, capacity)
    value = tl.load(own + k, mask=real, other=0.0) * tl.load(upstream).to(tl.float64)
    if TWO:
        second = tl.load(own + capacity + k, mask=real, other=0.0)
        value += second * tl.load(second_upstream).to(tl.float64)
    i = tl.load(index + k, mask=real, other=-1)
    value = (value * processes).to(tl.float32)
    tl.store(gradient + i, value.to(gradient.dtype.element_ty), mask=i >= 0)
