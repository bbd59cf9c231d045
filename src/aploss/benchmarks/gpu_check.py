"""Builds every Triton kernel of the losses for many GPUs, without one: ``make gpu-check``.

The backend is run on tensors without data, and what it would launch is compiled ahead of time.
It fails if a kernel

- does not compile, or keeps registers in memory (spills);
- needs more than 48 KB of shared memory, which some GPUs do not have;
- runs over all scores and computes in float64, which most GPUs do at 1/32 or 1/64 of the speed.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
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
    """What became of a build; ``registers`` and ``spills`` are None where no tool can tell."""

    build: Build
    architecture: str
    registers: int | None = None
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
        registers, spills = _resources_of_cubin(compiled.asm["cubin"])
    else:
        assembly = compiled.asm["amdgcn"]
        float64 = bool(re.search(r"^\s*v_\w*f64", assembly, re.MULTILINE))
        numbers = {name: int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])  # type: ignore[index]
                   for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")}  # fmt: skip
        registers = numbers["vgpr_count"]
        spills = numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"]
    return Built(what, architecture, registers, spills, shared, float64)


def _resources_of_cubin(cubin: bytes) -> tuple[int | None, int | None]:
    """Registers, and bytes of the stack, to which registers are spilled."""
    tool = _cuobjdump()
    if tool is None:
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", report)
    return (int(numbers[1]), int(numbers[2])) if numbers else (None, None)


@cache
def _cuobjdump() -> str | None:
    """The tool that comes with Triton, if it does."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(path) if path.exists() else None


def _build_all(builds: list[Build], architectures: list[str]) -> Iterator[Built]:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for architecture in architectures:
            yield from pool.map(partial(build, architecture=architecture), builds)


def main(arguments: list[str] | None = None) -> int:
    """Builds, reports, and returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES))
    options = parser.parse_args(arguments)
    if kernels is None:
        print("skipped: needs Triton 3.4 or newer")
        return 0
    import triton

    builds = launches()
    print(f"Triton {triton.__version__}: {len(builds)} kernels, without a GPU")
    if _cuobjdump() is None:
        print("registers and spills of NVIDIA kernels are not checked: Triton has no cuobjdump")
    everything: list[Built] = []
    for built in _build_all(builds, options.architectures):
        everything.append(built)
        for problem in built.problems:
            print(f"{built.architecture} {built.build}: {problem}")
    _report(everything)
    failed = sum(bool(built.problems) for built in everything)
    print(f"{len(everything)} built, {failed} with problems")
    return int(failed > 0)


def _report(everything: list[Built]) -> None:
    """Per kernel and architecture, the most registers and shared memory of its variants."""
    print(f"\n{'kernel':24}{'variants':>9}  registers / shared memory in bytes")
    variants = Counter(b.build.kernel for b in everything)
    architectures = list(dict.fromkeys(b.architecture for b in everything))
    print(" " * 33 + "".join(f"{name:>13}" for name in architectures))
    for kernel, number in variants.items():
        cells = []
        for architecture in architectures:
            own = [b for b in everything if (b.build.kernel, b.architecture) ==
                   (kernel, architecture)]  # fmt: skip
            registers = [b.registers for b in own if b.registers is not None]
            most = str(max(registers)) if registers else "?"
            cells.append(f"{most}/{max(b.shared for b in own)}")
        row = "".join(f"{cell:>13}" for cell in cells)
        print(f"{kernel:24}{number // len(architectures):>9}{row}")


if __name__ == "__main__":
    sys.exit(main())
