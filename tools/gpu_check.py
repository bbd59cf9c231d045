"""Compiles every Triton kernel of the losses for many GPUs, without one: ``make gpu-check``.

The backend runs on tensors without data, and what it would launch is compiled ahead of time. A kernel fails if it does
not compile, or needs more than the 48 KB of shared memory that every GPU has.

    python tools/gpu_check.py [sm_80 gfx942 ...]
"""

import itertools
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from aploss.losses.ranking.rules import AP, RANK_SORT, Rule
from aploss.losses.ranking.segments import cut_into_segments
from aploss.losses.ranking.torch_backend import Problem, Status
from aploss.losses.ranking.triton import SCORE_DTYPES, TARGET_DTYPES, TritonBackend, kernels

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
MAX_SHARED = 48 * 1024
TRITON_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
SIZE, POSITIVES = 10**6, 300


class Launch(NamedTuple):
    """A kernel as the compiler sees it."""

    kernel: str  # its name in the module of kernels
    signature: tuple[tuple[str, str], ...]  # (argument, type) of every argument; ``constexpr`` for constants
    aligned: tuple[str, ...]  # pointers that the compiler may assume to be multiples of 16
    constants: tuple[tuple[str, Any], ...]  # (argument, value)
    warps: int  # of a program


class Recorder(TritonBackend):
    """Collects what is launched instead of launching it."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: set[Launch] = set()

    def launch(self, kernel: Any, size: int, *args: Any, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        warps = options.pop("num_warps", 4)
        types = {one.name: one.annotation_type or triton_type(given.get(one.name)) for one in kernel.params}
        types |= dict.fromkeys(options, "constexpr")
        aligned = (one.name for one in kernel.params if not one.do_not_specialize_on_alignment)
        pointers = tuple(name for name in aligned if types[name][0] == "*")
        self.launches.add(Launch(kernel.__name__, tuple(types.items()), pointers, tuple(options.items()), warps))

    def read_status(self, counts: torch.Tensor) -> Status:
        return Status(POSITIVES, SIZE - POSITIVES)


def triton_type(value: Any) -> str:
    """The type of an argument."""
    if isinstance(value, torch.Tensor):
        return "*" + TRITON_TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if isinstance(value, int) and abs(value) < 2**31 else "i64"


def launches() -> list[Launch]:
    """Everything that the backend launches, for every step function, kind of target and dtype."""
    found: set[Launch] = set()
    for scores, targets in itertools.product(SCORE_DTYPES, TARGET_DTYPES):
        for rule, delta in itertools.product((AP, RANK_SORT), (0.0, 1.0)):
            found |= launches_of(scores, targets, rule, delta)
    return sorted(found, key=str)


def launches_of(score_dtype: torch.dtype, target_dtype: torch.dtype, rule: Rule, delta: float) -> set[Launch]:
    """The launches of the three passes over all scores, which do not depend on the content of the tensors."""
    scores = torch.empty(SIZE, dtype=score_dtype, device="meta")
    problem = Problem(scores, torch.empty(SIZE, dtype=target_dtype, device="meta"), rule, delta)
    backend = Recorder()
    found: Any = backend.find(problem)
    found.segments = cut_into_segments(torch.empty(POSITIVES, device="meta"), delta)
    backend.tally_negatives(problem, found, found.segments)
    backend.evaluate(problem, found, torch.empty(2, len(found.segments.edges), dtype=torch.float64, device="meta"))
    return backend.launches


def compile_launch(launch: Launch, architecture: str) -> str:
    """Compiles a kernel for an architecture such as ``sm_80`` or ``gfx942``; returns the problem, if any."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    is_cuda = architecture.startswith("sm_")
    target = GPUTarget("cuda", int(architecture[3:]), 32) if is_cuda else GPUTarget("hip", architecture, 64)
    names = [name for name, _ in launch.signature]
    source = ASTSource(
        fn=getattr(kernels, launch.kernel),
        signature=dict(launch.signature),
        constexprs=dict(launch.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    try:
        options = {"num_warps": launch.warps, "enable_fp_fusion": False}
        shared = int(triton.compile(source, target=target, options=options).metadata.shared)
    except Exception as error:  # whatever the compiler dislikes is what this is to find
        return f"does not compile: {str(error).strip()[-500:]}"
    return f"needs {shared} bytes of shared memory, more than {MAX_SHARED}" if shared > MAX_SHARED else ""


def main(architectures: list[str]) -> int:
    """Compiles, prints the problems, and returns 1 if there are any."""
    if kernels is None:
        print("skipped: needs Triton 3.4 or newer")
        return 0
    found, failed = launches(), 0
    with ProcessPoolExecutor() as pool:
        for architecture in architectures:
            problems = pool.map(partial(compile_launch, architecture=architecture), found)
            for launch, problem in zip(found, problems, strict=True):
                if problem:
                    failed += 1
                    print(f"{architecture} {launch}: {problem}")
    print(f"{len(found)} kernels compiled for {len(architectures)} GPUs, {failed} with problems")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(ARCHITECTURES)))
