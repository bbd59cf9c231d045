"""The stages of a ranking as Triton kernels, for CUDA and ROCm.

Forward, a handful of launches: the positives are found while the targets and scores are read and
checked, sorted, their breakpoints cut the score axis into segments, the negatives are tallied per
segment, and the rule of the loss is applied. Backward: the line through the segments is evaluated
at every negative. Per score (float32, with float32 targets) 20.4 bytes are moved in all, four reads
and a write; nothing is read by the host but the status, by the engine.

Negatives are added to one of many copies of the tallies in integers (fixed point): one global
atomic addition each, in any order, with the same sum. See ``triton_kernels`` for what else makes
results the same for every block size and capacity, and ``torch_backend`` for the mathematics.
"""

import math
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .problem import Found, Positives, Problem, Ranked, loss_dtype
from .torch_backend import TorchBackend

LIMIT = 1 << 13  # most positives; pairs of them take time beyond
BLOCK = 1024  # scores of a program
TILE = 1024  # segments or positives that a single program handles at a time
PAIR_ROWS, PAIR_TILE = 16, 32  # positives whose pairs a program handles at a time
CHUNK = 4096  # scores that are added to the same copy of the tallies, whatever the block

SCORES = (torch.float32, torch.float16, torch.bfloat16)
TARGETS = (torch.float32, torch.int64, torch.int32, torch.int16, torch.int8)
# As in triton_rules.
_RULES = {"ap": 0, "auc": 1, "rank-sort": 2, "alrp": 3}


def _load_kernels() -> tuple[Any, Any]:
    """The modules of the kernels; None without Triton 3.4, which comes with torch 2.8.

    Older versions hand numbers of Python to kernels as float32.
    """
    try:
        import triton
    except ImportError:
        return None, None
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 4):
        return None, None
    from . import triton_kernels, triton_rules

    return triton_kernels, triton_rules


kernels, rules = _load_kernels()


def supports(problem: Problem) -> bool:
    """Whether the kernels can rank this; everything else is for torch operations."""
    allowed = (
        problem.groups is None
        and problem.scores.dtype in SCORES
        and problem.targets.dtype in TARGETS
        and problem.scores.numel() > 0
        and (problem.max_positives or 0) <= LIMIT
        and (problem.delta == 0 or 1e-30 < problem.delta < 1e30)  # float32 holds its fractions
    )
    return allowed and _triton_runs_on(problem.scores)


def _triton_runs_on(scores: Tensor) -> bool:
    if kernels is None or hasattr(scores, "fake_mode"):  # fake tensors have nothing to read
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return scores.is_cuda and torch.cuda.is_available()


@dataclass(eq=False)
class _Held:
    """This process's scores between the stages."""

    own_status: Tensor  # int64 [5]; that of Found may be the sum over processes
    negative_bits: Tensor  # int32 [N / 32]
    scores: Tensor  # of the positives in any order [room]
    index: Tensor  # int64 [room]


@dataclass(eq=False)
class _Segments:
    """The score axis, cut at the breakpoints of the positives: see ``cut_segments``."""

    edges: Tensor  # float32 [M]
    tree: Tensor  # the edges as a search tree, float32
    exact: Tensor  # float64 [4, M]: the breakpoints as sum of two, gaps and lengths
    owners: Tensor  # int32 [2, M]: whose breakpoint, from 1, negative for ends; ramps going on
    places: Tensor  # int32 [2, C]: segments in which the ramp of a positive starts and ends


@dataclass(eq=False)
class _Kept:
    """What the backward pass needs."""

    segments: _Segments
    negative_bits: Tensor
    index: Tensor  # [C]
    count: Tensor
    pair_weights: Tensor  # [C]
    own: Tensor  # [1 or 2, C]


class TritonBackend(TorchBackend):
    """See :class:`aploss.losses.ranking.problem.Backend`.

    Args:
        block: scores of a program, a power of two from 32 to 4096; changes no result.
    """

    name = "triton"

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block

    def launch(self, kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        """Starts a kernel on the GPU of the first argument, whichever is the current one.

        Products and sums are not fused, by which compilers round differently.
        """
        device = args[0].device
        chosen = torch.cuda.device(device) if torch.cuda.device_count() > 1 else nullcontext()
        with chosen:
            kernel[(programs,)](*args, **options, enable_fp_fusion=False)

    def find(self, problem: Problem) -> Found:
        scores, size = problem.scores, problem.scores.numel()
        room = problem.max_positives or LIMIT
        status = torch.zeros(5, dtype=torch.int64, device=scores.device)
        held = _Held(
            own_status=status,
            negative_bits=_empty(scores, torch.int32, -(-size // 32)),
            scores=_empty(scores, torch.float32, room),
            index=_empty(scores, torch.int64, room),
        )
        self.launch(
            kernels.find_positives, _blocks(size, self._block),
            problem.targets, scores, held.negative_bits, held.scores, held.index, status,
            size, room, SOFT=problem.soft, BLOCK=self._block, num_warps=8,
        )  # fmt: skip
        if problem.box_losses is not None:
            boxes = problem.box_losses.detach().contiguous()
            self.launch(
                kernels.check_box_losses, _blocks(len(boxes), TILE),
                boxes, status, len(boxes), TILE=TILE,
            )  # fmt: skip
        return Found(status, held)

    def positives(self, problem: Problem, found: Found, capacity: int) -> Positives:
        if capacity > LIMIT:
            found.held = super().find(problem).held
        held = found.held
        if not isinstance(held, _Held):
            return super().positives(problem, found, capacity)
        scores = _empty(held.scores, torch.float32, capacity)
        index = _empty(held.scores, torch.int64, capacity)
        extras = given = None
        if problem.soft:
            given = problem.targets
        elif problem.box_losses is not None:
            given = problem.box_losses.detach().contiguous()
        if given is not None:
            extras = _empty(held.scores, torch.float64, capacity)
        self.launch(
            kernels.sort_positives, _blocks(capacity, PAIR_ROWS),
            held.scores, held.index, _or(given, scores), scores, index, _or(extras, scores),
            held.own_status, capacity, len(_or(given, scores)),
            BY_INDEX=problem.soft, BY_PLACE=problem.box_losses is not None,
            ROWS=PAIR_ROWS, TILE=4 * PAIR_TILE,
        )  # fmt: skip
        return Positives(scores=scores, index=index, count=held.own_status[0], extras=extras)

    def tally(self, problem: Problem, found: Found, positives: Positives) -> Tensor:
        held = found.held
        if not isinstance(held, _Held):
            return super().tally(problem, found, positives)
        scores, size = problem.scores, problem.scores.numel()
        capacity = len(positives.scores)
        heaviside = problem.delta == 0
        segments = _room_for_segments(positives.scores, heaviside)
        positives.held = segments
        rows = len(segments.edges) + 1
        fixed = _fixed_point(size, rows, problem.delta)
        copies = torch.zeros((fixed.copies, rows), dtype=torch.int64, device=scores.device)
        tallies = _empty(scores, torch.float64, 2, rows)
        self.launch(
            kernels.cut_segments, _blocks(capacity, 128),
            positives.scores, positives.count, segments.edges, segments.tree,
            *segments.exact[:3], *segments.owners, *segments.places,
            capacity, problem.delta, HEAVISIDE=heaviside, TILE=128,
        )  # fmt: skip
        self.launch(
            kernels.tally_negatives, _blocks(size, self._block),
            scores, held.negative_bits, segments.tree, segments.edges, positives.count, copies,
            size, capacity, fixed.copies, fixed.field_bits, 2 * problem.delta,
            fixed.units_per_score, HEAVISIDE=heaviside, BLOCK=self._block, CHUNK=CHUNK,
        )  # fmt: skip
        self.launch(
            kernels.reduce_tallies, _blocks(rows, 32),
            copies, tallies, rows, fixed.copies, fixed.field_bits, fixed.share_of_unit,
            COLUMNS=32, TILE=32,
        )  # fmt: skip
        return tallies

    def finish(self, problem: Problem, found: Found, positives: Positives, tallies: Tensor) -> Ranked:
        held = found.held
        if not isinstance(held, _Held):
            return super().finish(problem, found, positives, tallies)
        segments: _Segments = positives.held
        scores, count, capacity = positives.scores, positives.count, len(positives.scores)
        rule, heaviside = _RULES[problem.rule], problem.delta == 0
        above = _empty(scores, torch.float64, len(segments.edges))
        pairs = _empty(scores, torch.float64, 3, capacity)
        pair_weights = _empty(scores, torch.float64, capacity)
        own = _empty(scores, torch.float64, 1 + problem.soft, capacity)
        values = _empty(scores, torch.float32, 2 if rule >= _RULES["rank-sort"] else 1)
        extras = _or(positives.extras, scores)
        pair_grid = _blocks(capacity, PAIR_ROWS)
        pair_options = {
            "RULE": _pair_rule(problem), "HEAVISIDE": heaviside, "ROWS": PAIR_ROWS,
            "TILE": PAIR_TILE,
        }  # fmt: skip
        box_gradient = None
        self.launch(
            kernels.integrate_tallies, 1,
            tallies, *segments.exact[:3], segments.owners[1], segments.exact[3], above, count,
            capacity, problem.delta, HEAVISIDE=heaviside, TILE=TILE, num_warps=8,
        )  # fmt: skip
        self.launch(
            rules.pair_rows, pair_grid,
            scores, extras, pairs, count, capacity, problem.delta, **pair_options,
        )  # fmt: skip
        self.launch(
            rules.apply_rule, 1,
            above, *segments.places, pairs, extras, tallies, found.status, count,
            values, pair_weights, own, capacity, RULE=rule, HEAVISIDE=heaviside,
            INTERPOLATED=problem.interpolated, TILE=TILE, num_warps=8,
        )  # fmt: skip
        if problem.box_losses is not None:
            dtype = loss_dtype(problem.box_losses.dtype)
            box_gradient = torch.zeros_like(problem.box_losses, dtype=dtype)
        if problem.soft or box_gradient is not None:
            out = own[-1] if box_gradient is None else box_gradient
            self.launch(
                rules.pair_columns, pair_grid,
                scores, positives.index, extras, pairs, found.status, count, out, capacity,
                len(out), problem.num_processes, problem.delta, **pair_options,
            )  # fmt: skip
        kept = _Kept(segments, held.negative_bits, positives.index, count, pair_weights, own)
        return Ranked(problem, values, box_gradient, kept)

    def gradient(self, ranked: Ranked, upstream: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        kept, problem = ranked.held, ranked.problem
        if not isinstance(kept, _Kept):
            return super().gradient(ranked, upstream, dtype)
        scores, size = problem.scores, problem.scores.numel()
        segments, capacity = kept.segments, len(kept.index)
        heaviside, processes = problem.delta == 0, problem.num_processes
        lines = _empty(scores, torch.float32, len(segments.edges), 4)
        gradient = torch.empty_like(scores, dtype=dtype)
        self.launch(
            kernels.line_through_segments, 1,
            kept.pair_weights, upstream[0], segments.edges, segments.owners[0],
            segments.exact[3], segments.exact[2], lines, kept.count, capacity, processes,
            problem.delta, HEAVISIDE=heaviside, TILE=TILE, num_warps=8,
        )  # fmt: skip
        self.launch(
            kernels.evaluate_gradient, _blocks(size, self._block),
            scores, kept.negative_bits, segments.tree, lines, kept.count, gradient,
            size, capacity, 2 * problem.delta, HEAVISIDE=heaviside, BLOCK=self._block,
        )  # fmt: skip
        self.launch(
            kernels.store_own_gradient, _blocks(capacity, 128),
            kept.own, upstream[0], upstream[-1], kept.index, gradient, kept.count, capacity,
            processes, TWO=problem.soft, TILE=128,
        )  # fmt: skip
        return gradient


@dataclass(frozen=True)
class _FixedPoint:
    """How the 64 bits of a tally are divided.

    Attributes:
        copies: of the tallies, so that few programs at a time add to the same number.
        field_bits: low bits, for the sum of the distances; the high ones count.
        units_per_score: 1 / unit of the distances, a power of two.
        share_of_unit: the unit as share of 2 delta.
    """

    copies: int
    field_bits: int
    units_per_score: float
    share_of_unit: float


def _fixed_point(size: int, rows: int, delta: float) -> _FixedPoint:
    copies = max(8, min(128, (1 << 21) // rows))
    chunks = -(-size // CHUNK)  # a chunk of scores goes to one copy
    copies = min(copies, chunks)
    count_bits = (-(-chunks // copies) * CHUNK).bit_length()
    fraction_bits = min(63 - 2 * count_bits, 40)
    if delta == 0:
        return _FixedPoint(copies, fraction_bits + count_bits, 1.0, 1.0)
    exponent = min(fraction_bits - math.frexp(2 * delta)[1], 126)
    share = 2.0**-exponent / (2 * delta)
    return _FixedPoint(copies, fraction_bits + count_bits, 2.0**exponent, share)


def _room_for_segments(positives: Tensor, heaviside: bool) -> _Segments:
    capacity = len(positives)
    count = capacity * (1 if heaviside else 2)
    tree_size = 1 << count.bit_length()
    return _Segments(
        edges=_empty(positives, torch.float32, count),
        tree=torch.full((tree_size,), torch.inf, device=positives.device),
        exact=_empty(positives, torch.float64, 4, count),
        owners=_empty(positives, torch.int32, 2, count),
        places=_empty(positives, torch.int32, 2, capacity),
    )


def _pair_rule(problem: Problem) -> int:
    """The rule as far as pairs of positives go, of which AP and AUC need no more than the steps."""
    return _RULES["ap" if problem.rule == "auc" else problem.rule]


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel gets any tensor for one that it does not use."""
    return other if tensor is None else tensor


def _empty(like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _blocks(size: int, block: int) -> int:
    return max(1, -(-size // block))
