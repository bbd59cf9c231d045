"""Device, data loader workers, random generators and the description of the environment."""

import os
import platform
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aploss.errors import ConfigError

PACKAGES = ("aploss", "torch", "torchvision", "numpy", "numba", "faster-coco-eval", "scikit-learn")


def choose_device(name: str) -> torch.device:
    """Returns the device of a name; ``"auto"`` is the first available of cuda, mps and cpu.

    Under ``torchrun`` each rank takes its own GPU; with ``accelerate launch --cpu``, ``"auto"`` is the CPU.

    Raises:
        ConfigError: if the device does not exist or cannot compute.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if name == "auto" and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
        name = "cpu"
    elif name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: unknown device {name!r}; try cpu, cuda or mps") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device: this machine has no usable cuda device")
        number = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", 0))
        if number >= torch.cuda.device_count():
            raise ConfigError(f"device: there are {torch.cuda.device_count()} GPUs, not {number + 1}")
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    try:
        torch.ones(1, device=device).item()  # torch accepts devices that this machine does not have
    except (RuntimeError, NotImplementedError, AssertionError, ImportError) as error:
        raise ConfigError(f"device: this machine cannot compute on {name!r}; try cpu, cuda or mps") from error
    return device


def choose_workers(wanted: int | None, device: torch.device, processes: int) -> int:
    """Returns the number of data loader workers: at most one on a CPU, whose cores train, several for a GPU."""
    if wanted is not None:
        return wanted
    cores = max(1, (os.cpu_count() or 1) // processes)
    return min(1, cores - 1) if device.type == "cpu" else min(8, cores)


@contextmanager
def seeded(seed: int, *, deterministic: bool) -> Iterator[None]:
    """Seeds all random generators for a block and restores them, and the switches of torch, afterwards.

    With ``deterministic``, torch chooses algorithms that give the same bits in every run.
    """
    before = capture_random_state()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    was_benchmarking = torch.backends.cudnn.benchmark
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - third-party code draws from it
        torch.manual_seed(seed)
        if deterministic:
            # Only a warning if a device lacks such an algorithm: training matters more.
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = not deterministic
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warning)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = was_benchmarking
        restore_random_state(before)


def capture_random_state() -> dict[str, Any]:
    """Returns the state of all random generators as tensors and plain values, for a checkpoint."""
    legacy: Any = np.random.get_state()  # noqa: NPY002
    kind, keys, *gauss = legacy
    version_, internal, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *gauss],
        "python": [version_, list(internal), next_gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores all random generators to a captured state."""
    torch.set_rng_state(state["torch"])
    kind, keys, *gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *gauss))  # noqa: NPY002
    version_, internal, next_gauss = state["python"]
    random.setstate((version_, tuple(internal), next_gauss))
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def describe_environment() -> dict[str, Any]:
    """Describes versions, commit, hardware and command of this process."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Returns the commit of the source tree, with a '+' if it has changes; None for an installed package."""
    source = Path(__file__).resolve().parents[3]

    def git(*words: str) -> str:
        command = ["git", "-C", str(source), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        if (source / ".git").exists():
            return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    return None


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
