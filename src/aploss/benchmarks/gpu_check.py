"""Builds every Triton kernel of the losses for many GPUs, without one: ``make gpu-check``.

The backend is run on tensors without data, and what it would launch is compiled ahead of time.
It fails if a kernel

- does not compile, or keeps registers in memory (spills);
- needs more than 48 KB of shared memory, which some GPUs do not have;
- runs over all scores and computes in float64, which most GPUs do at 1/32 or 1/64 of the speed.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from aploss.losses.ranking.problem import Problem, Status
from aploss.losses.ranking.rules import AP, RANK_SORT, Rule
from aploss.losses.ranking.segments import cut_into_segments
from aploss.losses.ranking.triton import SCORE_DTYPES, TARGET_DTYPES, TritonBackend, kernels

__all__ = ["ARCHITECTURES", "Build", "Built", "build", "launches", "main"]

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
MAX_SHARED = 48 * 1024

_TRITON_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_SIZE, _POSITIVES = 10**6, 300


@dataclass(frozen=True)
class Build:
    """A kernel as the compiler sees it."""

    module: str  # that it is in
    kernel: str  # its name there
    signature: tuple[tuple[str, str], ...]  # (argument, type) of every argument; ``constexpr`` for constants
    aligned: tuple[str, ...]  # pointers that the compiler may assume to be multiples of 16
    constants: tuple[tuple[str, Any], ...]  # (argument, value)
    warps: int  # of a program
    over_all_scores: bool  # whether it has so many programs that it must be

    def __str__(self) -> str:
        types = ", ".join(kind[1:] for _, kind in self.signature[:2] if kind[0] == "*")
        constants = ", ".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.kernel}({types}; {constants})"


@dataclass(frozen=True)
class Built:
    """What became of a build; ``spills`` is None where no tool can tell."""

    build: Build
    architecture: str
    spills: int | None = None
    shared: int = 0
    float64: bool = False
    error: str = ""

    @property
    def problems(self) -> list[str]:
        found = [self.error] if self.error else []
        if self.spills:
            found.append(f"spills {self.spills} bytes or registers")
        if self.shared > MAX_SHARED:
            found.append(f"needs {self.shared} bytes of shared memory, more than {MAX_SHARED}")
        if self.float64 and self.build.over_all_scores:
            found.append("computes in float64 over all scores")
        return found


class _Recorder(TritonBackend):
    """Collects what is launched instead of launching it."""

    def __init__(self) -> None:
        super().__init__()
        self.builds: set[Build] = set()

    def launch(self, kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        warps = options.pop("num_warps", 4)
        types = {p.name: p.annotation_type or _type_of(given.get(p.name)) for p in kernel.params}
        types |= dict.fromkeys(options, "constexpr")
        build = Build(
            module=kernel.__module__,
            kernel=kernel.__name__,
            signature=tuple(types.items()),
            aligned=tuple(
                param.name
                for param in kernel.params
                if types[param.name][0] == "*" and not param.do_not_specialize_on_alignment
            ),
            constants=tuple(options.items()),
            warps=warps,
            over_all_scores=programs > _POSITIVES,
        )
        self.builds.add(build)

    def read_status(self, counts: torch.Tensor) -> Status:
        return Status(_POSITIVES, _SIZE - _POSITIVES)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TRITON_TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if isinstance(value, int) and abs(value) < 2**31 else "i64"


def launches() -> list[Build]:
    """Everything that the backend launches, for every step function, kind of target and dtype."""
    found: set[Build] = set()
    for scores, targets in itertools.product(SCORE_DTYPES, TARGET_DTYPES):
        for rule, delta in itertools.product((AP, RANK_SORT), (0.0, 1.0)):
            found |= _launches(scores, targets, rule, delta)
    return sorted(found, key=str)


def _launches(score_dtype: torch.dtype, target_dtype: torch.dtype, rule: Rule, delta: float) -> set[Build]:
    """The launches of the three passes over all scores, which do not depend on what is in the tensors."""
    scores = torch.empty(_SIZE, dtype=score_dtype, device="meta")
    problem = Problem(scores, torch.empty(_SIZE, dtype=target_dtype, device="meta"), rule, delta)
    backend = _Recorder()
    found: Any = backend.find(problem)
    found.segments = cut_into_segments(torch.empty(_POSITIVES, device="meta"), delta)
    backend.tally_negatives(problem, found, found.segments)
    backend.evaluate(problem, found, torch.empty(2, len(found.segments.edges), dtype=torch.float64, device="meta"))
    return backend.builds


def build(what: Build, architecture: str) -> Built:
    """Compiles a kernel for an architecture such as ``sm_80`` or ``gfx942``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if architecture.startswith("sm_"):
        target = GPUTarget("cuda", int(architecture[3:]), 32)
    else:
        target = GPUTarget("hip", architecture, 64)
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, (name, _) in enumerate(what.signature) if name in what.aligned
    }
    source = ASTSource(
        fn=getattr(import_module(what.module), what.kernel),
        signature=dict(what.signature),
        constexprs=dict(what.constants),
        attrs=aligned,
    )
    options = {"num_warps": what.warps, "enable_fp_fusion": False}
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:  # whatever the compiler dislikes is what this is to find
        reason = str(error).strip().splitlines()
        return Built(what, architecture, error=f"does not compile: {reason[-1] if reason else ''}")
    shared = int(compiled.metadata.shared)
    if target.backend == "cuda":
        float64 = bool(re.search(r"^\s*(?:@\S+\s+)?(?!mov|ld|st)\w[\w.]*\.f64\b",
                                 compiled.asm["ptx"], re.MULTILINE))  # fmt: skip
        spills = _spills_of_cubin(compiled.asm["cubin"])
    else:
        assembly = compiled.asm["amdgcn"]
        float64 = bool(re.search(r"^\s*v_\w*f64", assembly, re.MULTILINE))
        numbers = {name: int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])  # type: ignore[index]
                   for name in ("vgpr_spill_count", "sgpr_spill_count")}  # fmt: skip
        spills = sum(numbers.values())
    return Built(what, architecture, spills, shared, float64)


def _spills_of_cubin(cubin: bytes) -> int | None:
    """Bytes of the stack, to which registers are spilled."""
    tool = _cuobjdump()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", report)
    return int(found[1]) if found else None


@cache
def _cuobjdump() -> str | None:
    """The tool that comes with Triton, if it does."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(path) if path.exists() else None


def main() -> int:
    """Builds, reports what is wrong, and returns 1 if anything is."""
    if kernels is None:
        print("skipped: needs Triton 3.4 or newer")
        return 0
    builds = launches()
    if _cuobjdump() is None:
        print("registers and spills of NVIDIA kernels are not checked: Triton has no cuobjdump")
    failed = 0
    with ProcessPoolExecutor() as pool:
        for architecture in ARCHITECTURES:
            for built in pool.map(partial(build, architecture=architecture), builds):
                failed += bool(built.problems)
                for problem in built.problems:
                    print(f"{architecture} {built.build}: {problem}")
    print(f"{len(builds)} kernels built for {len(ARCHITECTURES)} GPUs, {failed} with problems")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
