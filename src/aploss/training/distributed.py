"""The processes of a run, on Accelerate, and how they end together: errors of rank 0, lost ranks, stop signals.

``aploss train`` is one process; ``torchrun -m aploss train`` and ``accelerate launch -m aploss train`` start many, on
one machine or several. Gradients, mixed precision and collectives are Accelerate's.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, broadcast_object_list
from torch.distributed.rendezvous import rendezvous

from aploss.errors import AplossError, ConfigError, RunError

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=60)  # other ranks wait while rank 0 evaluates COCO
RESUME_ADVICE = "resume from the last checkpoint with --resume"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"  # the only way to give Accelerate a device by name
MIXED_PRECISION = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
# Set by "accelerate launch" for engines that shard the weights, which our checkpoints hold in one piece.
REFUSED_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


class TrainingInterruptedError(RunError):
    """Ctrl-C or SIGTERM: everything is saved, and the message says how to resume."""

    exit_code = 128 + signal.SIGINT


class LostProcessError(RunError):
    """Another rank has died; the run can be resumed from its last checkpoint."""


def is_main_process() -> bool:
    """Whether this process writes the files and prints, by the environment of the launcher alone."""
    return os.environ.get("RANK", "0") == "0"


def was_restarted() -> bool:
    """Whether ``torchrun --max-restarts`` or ``sbatch --requeue`` has started this process again."""
    return any(int(os.environ.get(name) or 0) > 0 for name in (RESTARTS, "SLURM_RESTART_COUNT"))


@contextmanager
def start_accelerator(
    device: torch.device, *, precision: str = "float32", accumulate: int = 1, advice: str = RESUME_ADVICE
) -> Iterator[Accelerator]:
    """Joins the processes that a launcher started; a single process without one.

    A process group that exists already is used and left as it is. The precision and accumulation of a user's
    ``accelerate config`` are overridden.

    Args:
        device: the device of this process.
        precision: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        accumulate: forward passes per step.
        advice: the end of the message of a LostProcessError.

    Raises:
        ConfigError: for FSDP and other engines that shard the weights.
        LostProcessError: if another process has died.
    """
    for variable, engine in REFUSED_ENGINES.items():
        if os.environ.get(variable, "").lower() in ("1", "true"):
            raise ConfigError(f"{engine} is not supported: run accelerate config again without it, or use torchrun")
    started = not dist.is_initialized()
    if started and int(os.environ.get(RESTARTS, 0)) > 0:
        _join_restarted(device)
    # Accelerate's state is global, and other runs and programs of this process may differ in precision.
    is_nested = bool(AcceleratorState._shared_state)
    AcceleratorState._reset_state(reset_partial_state=True)
    before = os.environ.get(DEVICE_VARIABLE)
    os.environ[DEVICE_VARIABLE] = str(device)
    try:
        accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=MIXED_PRECISION[precision],
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulate),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
        )
    finally:
        os.environ.pop(DEVICE_VARIABLE)
        if before is not None:
            os.environ[DEVICE_VARIABLE] = before
    if precision == "float16" and device.type == "cpu":  # which Accelerate would train in float32
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    try:
        yield accelerator
    except RuntimeError as error:
        is_lost = isinstance(error, dist.DistError) or "gloo" in str(error)  # gloo raises plain RuntimeErrors
        if isinstance(error, AplossError) or accelerator.num_processes == 1 or not is_lost:
            raise
        raise LostProcessError(f"another process of this run has died; {advice}") from error
    finally:
        if started and dist.is_initialized():
            dist.destroy_process_group()
        if not is_nested:
            AcceleratorState._reset_state(reset_partial_state=True)


def _join_restarted(device: torch.device) -> None:
    """Starts the process group of a restarted worker under new keys.

    torchrun keeps its store over restarts, with the addresses of dead processes, for which gloo would wait.
    """
    store, rank, size = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    store = dist.PrefixStore(f"restart-{os.environ[RESTARTS]}", store)  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)


def sum_over_processes(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """Returns the sum of each value over all processes, on every process."""
    if accelerator.num_processes == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(total, "sum").tolist()  # type: ignore[no-any-return]


def on_main(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Calls a function on rank 0 alone; its result, or its error, comes to every rank."""
    if accelerator.num_processes == 1:
        return function()
    outcome: Any = None
    if accelerator.is_main_process:
        try:
            outcome = (function(), None)
        except BaseException as error:  # Ctrl-C, too: nobody is left waiting
            broadcast_object_list([(None, RunError(f"rank 0 stopped: {error}"))])
            raise
    result, problem = broadcast_object_list([outcome])[0]
    if problem is not None:
        raise problem
    return result  # type: ignore[no-any-return]


def main_first(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Calls a function on every rank, on rank 0 before the others; its error there is raised on all."""
    result: list[T] = []
    on_main(accelerator, lambda: result.append(function()))
    return result[0] if result else function()


class _Stop(KeyboardInterrupt):
    """A signal on its way out: like Ctrl-C nothing that catches an Exception takes it for an error of its own."""


class StopSignals:
    """While active, Ctrl-C and SIGTERM end a run in order.

    Inside :meth:`deferred` the first one only sets ``requested``, so that the step can be finished and saved; a second
    Ctrl-C interrupts at once. Outside, the first one ends the block with :class:`TrainingInterruptedError` and
    ``message``. Outside the main thread, where Python allows no handlers, nothing happens.
    """

    # On Ctrl-C the terminal and torchrun both send the signal: that is one wish, not two.
    ECHO_SECONDS = 1.0

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
        """A block that looks at ``requested`` itself."""
        self._is_deferred = True
        try:
            yield self
        finally:
            self._is_deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a forked data loader worker: it ends when the main process lets it
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first_at = True, now
            if not self._is_deferred:
                raise _Stop(self.message)
        elif number == signal.SIGINT and now - self._first_at > self.ECHO_SECONDS:
            raise KeyboardInterrupt
