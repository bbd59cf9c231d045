"""The device, random generators and processes of a run, and how processes end together: errors and stop signals.

``aploss train`` is one process; ``torchrun -m aploss train`` and ``accelerate launch -m aploss train`` start many, on
one machine or several. DistributedDataParallel and collectives are Accelerate's.
"""

import atexit
import ctypes
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from aploss.errors import AplossError, ConfigError, RunError

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

STEP_TIMEOUT = timedelta(minutes=10)  # of collectives in a step: a rank that hangs longer ends the run
MAIN_TIMEOUT = timedelta(hours=2)  # of other ranks while rank 0 works alone: COCO's metrics, cached features
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
# Engines of "accelerate launch" that shard the weights, which our checkpoints hold in one piece.
REFUSED_ENGINES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")


class TrainingInterruptedError(RunError):
    """Ctrl-C or SIGTERM: everything is saved, and the message says how to resume."""

    exit_code = 128 + signal.SIGINT


class FailedRankError(RunError):
    """One of several ranks cannot continue, mostly because another one has died; the last checkpoint is kept."""


# --- device ---


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
        if device.type == "cuda":
            if device.index is None:
                device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)
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


def emulates_bfloat16(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the device is a CPU without bfloat16 instructions; False where the system does not tell."""
    with suppress(OSError):
        flags = {*cpuinfo.read_text(encoding="utf-8").split()}
        return device.type == "cpu" and not flags & {"avx512_bf16", "amx_bf16", "bf16"}  # the last is ARM's
    return False


def keep_freed_memory() -> None:
    """Makes this process keep the memory that it frees, if its C library is glibc.

    By default, glibc returns large blocks to the system, and every step of a training on a CPU pays for their pages
    again: up to a third of its time.
    """
    mmap_max, trim_threshold = -4, -1
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


# --- random generators ---


@contextmanager
def seeded(seed: int, *, deterministic: bool) -> Iterator[None]:
    """Seeds all random generators for a block and restores them, and the switches of torch, afterwards.

    With ``deterministic``, torch chooses algorithms that give the same bits in every run.
    """
    filling: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])
        stack.callback(setattr, filling, "fill_uninitialized_memory", filling.fill_uninitialized_memory)
        stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - third-party code draws from it
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)  # a device without such an algorithm trains, too
            filling.fill_uninitialized_memory = False
        cudnn.benchmark = not deterministic
        yield


# --- processes ---


def is_main_process() -> bool:
    """Whether this process writes the files and prints, by the environment of the launcher alone."""
    return os.environ.get("RANK", "0") == "0"


def was_restarted() -> bool:
    """Whether ``torchrun --max-restarts`` or ``sbatch --requeue`` has started this process again."""
    return any(int(os.environ.get(name) or 0) > 0 for name in (RESTARTS, "SLURM_RESTART_COUNT"))


@contextmanager
def start_accelerator(device: torch.device, *, advice: str = "resume with --resume") -> "Iterator[Accelerator]":
    """Joins the processes that a launcher started; a single process without one.

    A process group that exists already is used. The precision and accumulation of a user's ``accelerate config`` have
    no effect: the run's config decides, see :class:`~aploss.training.step.Stepper`.

    Args:
        device: the device of this process.
        advice: the end of the message of a FailedRankError.

    Raises:
        ConfigError: for FSDP and other engines that shard the weights.
        FailedRankError: for an unexpected error of one of several processes; gloo reports lost peers by plain
            RuntimeErrors.
    """
    from accelerate import Accelerator  # takes longer to import than a help text should
    from accelerate.state import is_initialized
    from accelerate.utils import InitProcessGroupKwargs

    for engine in REFUSED_ENGINES:
        if os.environ.get(f"ACCELERATE_USE_{engine}", "").lower() in ("1", "true"):
            raise ConfigError(f"{engine} is not supported: run accelerate config again without it, or use torchrun")
    if not dist.is_initialized():
        if int(os.environ.get(RESTARTS, 0)) > 0:
            _join_restarted(device)
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    # Accelerate's state is global: the first accelerator of a process decides, also for the user's own.
    first = {} if is_initialized() else {"cpu": device.type == "cpu", "mixed_precision": "no"}
    accelerator = Accelerator(**first, kwargs_handlers=[InitProcessGroupKwargs(timeout=STEP_TIMEOUT)])
    accelerator.state.device, accelerator.native_amp = device, False
    if not accelerator.is_main_process:
        logging.getLogger("aploss").setLevel(logging.ERROR)  # rank 0 logs the same
    try:
        yield accelerator
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, AplossError) or accelerator.num_processes == 1:
            raise
        reason = " ".join(str(error).split())[:200]
        raise FailedRankError(
            f"rank {accelerator.process_index} cannot continue: {reason}; if another process has died, {advice}"
        ) from error


def _join_restarted(device: torch.device) -> None:
    """Starts the process group of a restarted worker under new keys.

    torchrun keeps its store over restarts, with the addresses of dead processes, for which gloo would wait.
    """
    store, rank, size = next(rendezvous("env://", timeout=STEP_TIMEOUT))
    store = dist.PrefixStore(f"restart-{os.environ[RESTARTS]}", store)  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=STEP_TIMEOUT)


def on_main(accelerator: "Accelerator", function: Callable[[], T]) -> T:
    """Calls a function on rank 0 alone; its result, or its error, comes to every rank."""
    if accelerator.num_processes == 1:
        return function()
    outcome: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            outcome = [(function(), None)]
        except BaseException as error:  # Ctrl-C, too: nobody is left waiting
            dist.broadcast_object_list([(None, RunError(f"rank 0 stopped: {error}"))], group=_patient_group())
            raise
    dist.broadcast_object_list(outcome, group=_patient_group())
    result, problem = outcome[0]
    if problem is not None:
        raise problem
    return result  # type: ignore[no-any-return]


@cache
def _patient_group() -> Any:
    """A process group with a longer timeout than the steps have."""
    return dist.new_group(backend="gloo", timeout=MAIN_TIMEOUT)


def main_first(accelerator: "Accelerator", function: Callable[[], T]) -> T:
    """Calls a function on every rank, on rank 0 before the others; its error there is raised on all."""
    result: list[T] = []
    on_main(accelerator, lambda: result.append(function()))
    return result[0] if result else function()


# --- signals ---


class _Stop(KeyboardInterrupt):
    """A signal as an exception; like Ctrl-C it is not caught by ``except Exception``."""


class StopSignals:
    """While active, Ctrl-C and SIGTERM end a run in order.

    Inside :meth:`deferred` the first one only sets ``requested``, so that the step can be finished and saved; a second
    Ctrl-C interrupts at once. Outside, the first one ends the block with :class:`TrainingInterruptedError` and
    ``message``. Outside the main thread, where Python allows no handlers, nothing happens.
    """

    ECHO_SECONDS = 1.0  # on Ctrl-C the terminal and torchrun both send the signal: that counts once

    def __init__(self, message: str = "stopped") -> None:
        self.requested, self.message = False, message
        self._is_deferred, self._first_at = False, 0.0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is _Stop:
            raise TrainingInterruptedError(self.message)

    @contextmanager
    def deferred(self) -> Iterator["StopSignals"]:
        """A block that checks ``requested`` itself."""
        self._is_deferred = True
        try:
            yield self
        finally:
            self._is_deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a forked data loader worker, which the main process ends
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first_at = True, now
            if not self._is_deferred:
                raise _Stop(self.message)
        elif number == signal.SIGINT and now - self._first_at > self.ECHO_SECONDS:
            raise KeyboardInterrupt
