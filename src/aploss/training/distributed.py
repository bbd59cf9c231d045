"""One process or many, and how they end together: ranks, heartbeat, lost ranks, stop signals.

``aploss train ...`` is a world of one; ``torchrun --nproc-per-node 8 -m aploss train ...`` one of eight, on one machine
or many. Small decisions (stop, skip a step) travel over a gloo group of their own, so that they need no device and
cannot disturb the gradients' traffic.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from aploss.errors import AplossError, RunError

T = TypeVar("T")

# Other ranks may wait while rank 0 evaluates COCO; a dead one is found by its heartbeat.
COLLECTIVE_TIMEOUT = timedelta(minutes=60)
HEARTBEAT_SECONDS = 3.0
SILENCE_SECONDS = 45.0  # without a heartbeat, after which a rank counts as dead
ANSWER_SECONDS = 15.0  # for a sign of life once a connection has failed
LEFT = b"left"
RESUME_ADVICE = "resume from the last checkpoint with --resume"


class TrainingInterruptedError(RunError):
    """Ctrl-C or SIGTERM: everything is saved, and the message says how to resume."""

    exit_code = 128 + signal.SIGINT


class LostProcessError(RunError):
    """Another rank has died; the run can be resumed from its last checkpoint."""


def is_main_process() -> bool:
    """Whether this process writes the files and prints, by ``torchrun``'s environment alone."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    size: int = 1
    control: Any = None  # the gloo group for decisions, in a world of more than one

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the files and prints."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over the ranks, on every rank."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in order, on rank 0; an empty list on the others."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, found, dst=0, group=self.control)
        return found or []

    def from_main(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def on_main(self, function: Callable[[], T]) -> T:
        """Calls a function on rank 0 alone; its result, or its error, comes to every rank."""
        if self.size == 1:
            return function()
        outcome: Any = None
        if self.is_main:
            try:
                outcome = (function(), None)
            except BaseException as error:  # Ctrl-C, too: nobody is left waiting
                self.from_main((None, RunError(f"rank 0 stopped: {error}")))
                raise
        result, problem = self.from_main(outcome)
        if problem is not None:
            raise problem
        return result  # type: ignore[no-any-return]

    def main_first(self, function: Callable[[], T]) -> T:
        """Calls a function on every rank, on rank 0 before the others; its error there is raised on all."""
        result: list[T] = []
        self.on_main(lambda: result.append(function()))
        return result[0] if result else function()


@contextmanager
def start_world(device: torch.device, *, advice: str = RESUME_ADVICE) -> Iterator[World]:
    """Joins the processes that ``torchrun`` started; a world of one without it.

    The device that this process computes on decides between nccl and gloo. A process group that is already there is
    used and left as it is. When another rank has gone, a LostProcessError gives the ``advice``.
    """
    started = not dist.is_initialized()
    if started and os.environ.get("WORLD_SIZE", "1") == "1":
        yield World()
        return
    if started:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        control: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        world = World(rank=dist.get_rank(), size=dist.get_world_size(), control=control)
        with Heartbeat(world.rank, world.size, advice=advice) as heartbeat:
            try:
                yield world
                dist.barrier(group=control)  # nobody's silence is mistaken for death at the end
            except AplossError:
                raise
            except RuntimeError as error:
                # gloo and nccl raise plain RuntimeErrors, too: what counts is whether all answer.
                if isinstance(error, dist.DistNetworkError) or not heartbeat.peers_answer():
                    raise LostProcessError(f"another process of this run has died; {advice}") from error
                raise
    finally:
        if started:
            dist.destroy_process_group()


class Heartbeat:
    """Beats in a thread of its own, and ends this process when another rank has stopped beating.

    A collective operation can wait for a dead process for a very long time, above all with nccl; the thread
    continues beside it. Use as a context manager around all work with the others.

    Args:
        rank, size: of the world.
        advice: see :func:`start_world`.
        store: where the ranks write their beats; by default that of the process group.
        interval: seconds between beats.
        silence: seconds without a beat after which a rank counts as dead.
        answer: seconds for a sign of life that :meth:`peers_answer` waits for.
        give_up: what to do then; by default the process ends with a message.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        advice: str = RESUME_ADVICE,
        store: Any = None,
        interval: float = HEARTBEAT_SECONDS,
        silence: float = SILENCE_SECONDS,
        answer: float = ANSWER_SECONDS,
        give_up: Callable[[str], Any] | None = None,
    ) -> None:
        self._rank, self._size, self._advice = rank, size, advice
        self._interval, self._silence, self._answer = interval, silence, answer
        self._give_up = give_up or _end_process
        self._over = threading.Event()
        # A connection of its own: the group's may be blocked.
        self._store: Any = dist.distributed_c10d._get_default_store().clone() if store is None else store
        self._heard = {other: (b"", time.monotonic()) for other in range(size) if other != rank}
        self._thread = threading.Thread(target=self._watch, daemon=True, name="heartbeat")

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._over.set()
        self._thread.join(timeout=2 * self._interval)
        if kind is not None and not self._thread.is_alive():
            with suppress(RuntimeError):  # the host of the store may be the one that has gone
                self._store.set(_key(self._rank), LEFT)

    def peers_answer(self) -> bool:
        """Whether every other rank beats twice more in time: one beat may be older than the question."""
        asked = time.monotonic()
        heard = {rank: [beat] for rank, (beat, _) in self._heard.items()}
        while time.monotonic() < asked + self._answer:
            for rank, (beat, _) in list(self._heard.items()):
                if beat == LEFT:
                    return False
                if beat != heard[rank][-1]:
                    heard[rank].append(beat)
            if all(len(beats) > 2 for beats in heard.values()):
                return True
            time.sleep(min(0.1, self._interval))
        return False

    def _watch(self) -> None:
        beats = 0
        while not self._over.wait(self._interval if beats else 0):
            beats += 1
            with suppress(Exception):  # the store's host has gone: measured as silence like others
                self._store.set(_key(self._rank), str(beats))
                for other, (last, _) in list(self._heard.items()):
                    known = self._store.check([_key(other)])
                    beat = self._store.get(_key(other)) if known else b""
                    if beat != last:
                        self._heard[other] = (beat, time.monotonic())
            now = time.monotonic()
            silent = [other for other, (_, at) in self._heard.items() if now - at > self._silence]
            if silent and not self._over.is_set():
                self._give_up(
                    f"rank {silent[0]} of {self._size} sent no heartbeat for {self._silence:.0f} s; aborting; "
                    f"{self._advice}"
                )
                return


def _key(rank: int) -> str:
    return f"aploss/heartbeat/{rank}"


def _end_process(message: str) -> None:
    print(f"aploss: {message}", file=sys.stderr, flush=True)
    os._exit(AplossError.exit_code)  # the main thread may hang in a collective


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
