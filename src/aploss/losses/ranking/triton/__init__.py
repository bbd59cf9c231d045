"""The ranking on GPUs, with Triton kernels for the passes over all scores.

It adds to the torch backend that each pass reads the scores once: one kernel checks the input and packs the negatives
into bits, one tallies the negatives, one evaluates the gradient. Everything on the positives is the torch backend's.

The kernels are verified on first use: see :func:`verified_backend`.
"""

import math
import os
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..segments import Segments
from ..torch_backend import Found, Problem, Status, TorchBackend

BLOCK = 1024  # scores of a program
CHUNK = 4096  # scores that are added to the same copy of the tallies, whatever the block
SCORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TARGET_DTYPES = (torch.float32, torch.int64, torch.int32, torch.int16, torch.int8)


def _load_kernels() -> Any:
    """The module of the kernels; None without Triton 3.4, which comes with torch 2.8.

    Older versions pass Python numbers to kernels as float32.
    """
    try:
        import triton
    except ImportError:
        return None
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 4):
        return None
    from . import kernels

    return kernels


kernels = _load_kernels()


def supports(problem: Problem) -> bool:
    """Whether the kernels can rank this; the torch backend ranks everything else."""
    return (
        problem.groups is None
        and problem.scores.dtype in SCORE_DTYPES
        and problem.targets.dtype in TARGET_DTYPES
        and problem.delta < 1e30  # float32 holds its fractions
        and _runs_on(problem.scores)
    )


def _runs_on(scores: Tensor) -> bool:
    if kernels is None or hasattr(scores, "fake_mode"):  # fake tensors have nothing to read
        return False
    return os.environ.get("TRITON_INTERPRET") == "1" or (scores.is_cuda and torch.cuda.is_available())


@dataclass(eq=False)
class _GPUFound(Found):
    """The positives, this process's negatives, and how the positives cut the axis."""

    negative_bits: Tensor | None = None  # int32 [N / 32]
    segments: Segments | None = None
    tree: Tensor | None = None  # the edges as a search tree, float32


class TritonBackend(TorchBackend):
    """See :class:`.torch_backend.TorchBackend`.

    Args:
        block: scores of a program, a power of two from 32 to 4096; changes no result.
    """

    name = "triton"

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block

    def launch(self, kernel: Any, size: int, *args: Any, **options: Any) -> None:
        """Starts a kernel for ``size`` scores on the GPU of the first argument, whichever is the current one.

        Products and sums are not fused: compilers would round them differently.
        """
        device = args[0].device
        with torch.cuda.device(device) if torch.cuda.device_count() > 1 else nullcontext():
            kernel[(-(-size // self._block),)](*args, **options, enable_fp_fusion=False)

    def find(self, problem: Problem) -> Found:
        scores, size = problem.scores, problem.scores.numel()
        counts = torch.zeros(4, dtype=torch.int64, device=scores.device)
        bits = torch.empty(-(-size // 32), dtype=torch.int32, device=scores.device)
        self.launch(
            kernels.check_and_pack, size,
            problem.targets, scores, bits, counts,
            size, SOFT=problem.rule.soft_targets, BLOCK=self._block, num_warps=8,
        )  # fmt: skip
        others = torch.stack([count.to(torch.int64) for count in self.count_bad_others(problem)])
        status = self.read_status(torch.cat([counts, others]))
        index = torch.nonzero_static(self.positive_mask(problem), size=status.positives)[:, 0]
        return _GPUFound(status, index, bits)

    def read_status(self, counts: Tensor) -> Status:
        """The one thing that the host reads from the device."""
        return Status(*counts.tolist())

    def tally_negatives(self, problem: Problem, found: _GPUFound, segments: Segments) -> Tensor:
        scores, size, rows = problem.scores, problem.scores.numel(), len(segments.edges)
        found.tree = _search_tree(segments.edges)
        fixed = _fixed_point(size, rows + 1, problem.delta)
        packed = torch.zeros((fixed.copies, rows + 1), dtype=torch.int64, device=scores.device)
        self.launch(
            kernels.tally_negatives, size,
            scores, found.negative_bits, found.tree, segments.edges, packed,
            size, rows, fixed.copies, fixed.field_bits, 2 * problem.delta, fixed.units_per_score,
            HEAVISIDE=problem.delta == 0, BLOCK=self._block, CHUNK=CHUNK,
        )  # fmt: skip
        counts = (packed >> fixed.field_bits).sum(0)
        distances = (packed & ((1 << fixed.field_bits) - 1)).sum(0)
        return torch.stack([counts.double(), distances.double() * fixed.share_of_unit])

    def evaluate(self, problem: Problem, found: _GPUFound, lines: Tensor) -> Tensor:
        assert found.segments is not None
        scores, size, edges = problem.scores, problem.scores.numel(), found.segments.edges
        height, slope = lines[0], lines[1] / (2 * problem.delta or 1.0)
        rounded = height.float()
        table = torch.stack([rounded, edges, slope.float(), (height - rounded).float()], dim=1)
        gradient = torch.empty_like(scores, dtype=torch.float32)
        self.launch(
            kernels.evaluate_gradient, size,
            scores, found.negative_bits, found.tree, table, gradient,
            size, len(edges), 2 * problem.delta, HEAVISIDE=problem.delta == 0, BLOCK=self._block,
        )  # fmt: skip
        return gradient


@dataclass(frozen=True)
class _FixedPoint:
    """How the 64 bits of a tally are divided.

    Attributes:
        copies: of the tallies, so that few programs at a time add to the same number.
        field_bits: low bits, for the sum of the distances; the high ones count.
        units_per_score: 1 / unit of the distances, a power of two.
        share_of_unit: the unit as a share of 2 delta.
    """

    copies: int
    field_bits: int
    units_per_score: float
    share_of_unit: float


def _fixed_point(size: int, rows: int, delta: float) -> _FixedPoint:
    chunks = -(-size // CHUNK)  # a chunk of scores goes to one copy
    copies = min(max(8, min(128, (1 << 21) // rows)), chunks)
    count_bits = (-(-chunks // copies) * CHUNK).bit_length()
    fraction_bits = min(63 - 2 * count_bits, 40)
    if delta == 0:
        return _FixedPoint(copies, fraction_bits + count_bits, 1.0, 1.0)
    exponent = min(fraction_bits - math.frexp(2 * delta)[1], 126)
    return _FixedPoint(copies, fraction_bits + count_bits, 2.0**exponent, 2.0**-exponent / (2 * delta))


def _search_tree(edges: Tensor) -> Tensor:
    """The sorted edges in the breadth-first order of a binary search tree, from place 1 on."""
    size = 1 << len(edges).bit_length()
    place = torch.arange(1, len(edges) + 1, device=edges.device)
    lowest_bit = place & -place
    tree = torch.full((size,), torch.inf, device=edges.device)
    return tree.scatter_(0, (size + place) // (2 * lowest_bit), edges)


# ---- Verification --------------------------------------------------------------------------------

CHECK_SCORES, CHECK_POSITIVES = 4000, 40
MAX_DIFFERENCE = 1e-5  # of the loss, and of the gradient as a share of the largest
_verdicts: dict[Any, bool] = {}


def verified_backend(problem: Problem, candidate: TorchBackend | None = None) -> TorchBackend:
    """The Triton backend where it agrees with the torch backend on this device, else the torch backend.

    The kernels are developed without access to every GPU. On the first use on a device, for a rule
    and dtype, both backends rank a small problem; if Triton raises or disagrees, a warning says so,
    once, and the torch backend serves this device from then on.
    """
    if candidate is None:
        if not supports(problem):
            return TorchBackend()
        candidate = TritonBackend()
    device = problem.scores.device
    key = (device, problem.rule.name, problem.scores.dtype, problem.delta == 0)
    if _verdicts.get(device) is False:
        return TorchBackend()
    if key not in _verdicts:
        difference = _verify(candidate, problem)
        _verdicts[key] = difference is None
        if difference is not None:
            _verdicts[device] = False
            warnings.warn(
                f"the Triton kernels of aploss failed their check on {_device_name(device)} ({difference}); using "
                "torch operations on this device instead, with the same results. Please report this message with the "
                "output of `python -m torch.utils.collect_env`",
                stacklevel=2,
            )
    return candidate if _verdicts[key] else TorchBackend()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else str(device)


def _verify(candidate: TorchBackend, problem: Problem) -> str | None:
    """What is wrong with a backend on the device and dtypes of a problem; None if nothing is."""
    random = torch.Generator().manual_seed(0)
    targets = torch.zeros(CHECK_SCORES)
    targets[torch.randperm(CHECK_SCORES, generator=random)[:CHECK_POSITIVES]] = 1
    scores = torch.randn(CHECK_SCORES, generator=random).to(problem.scores)
    boxes = torch.rand(CHECK_POSITIVES, generator=random).to(scores) if problem.box_losses is not None else None
    small = Problem(scores, targets.to(problem.targets), problem.rule, problem.delta, box_losses=boxes)
    try:
        value, gradient = _loss_and_gradient(candidate, small)
    except Exception as error:  # whatever a compiler or driver raises
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    right_value, right_gradient = _loss_and_gradient(TorchBackend(), small)
    largest = right_gradient.abs().max()
    errors = torch.stack([(value - right_value).abs(), (gradient - right_gradient).abs().max() / largest])
    difference = float(errors.max())  # NaN if one of them is
    return None if difference <= MAX_DIFFERENCE else f"results differ by {difference:.3g}"


def _loss_and_gradient(backend: TorchBackend, problem: Problem) -> tuple[Tensor, Tensor]:
    from ..engine import rank_problem

    values, gradients = rank_problem(backend, problem)
    return torch.stack(values).sum(), gradients[0]
