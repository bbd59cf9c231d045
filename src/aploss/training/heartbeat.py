"""Notices within a minute that another process of a run has died, whatever it was waiting for."""

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist

__all__ = ["Heartbeat"]

INTERVAL_SECONDS = 3.0
SILENCE_SECONDS = 45.0
EXIT_CODE = 2


class Heartbeat:
    """Beats in a thread of its own, and ends this process when another has stopped beating.

    A collective operation can wait for a dead process for a very long time, above all with nccl;
    the thread goes on beside it. Use as a context manager around all work with the others.

    Args:
        rank: number of this process.
        size: how many there are.
        give_up: what to do when one is silent; by default the process ends with a message.
    """

    def __init__(
        self, rank: int, size: int, *, give_up: Callable[[str], Any] | None = None
    ) -> None:
        self._rank, self._size = rank, size
        self._give_up = give_up or _end_process
        self._over = threading.Event()
        # A connection of its own: the process group's may be blocked by what it waits for.
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store = shared.clone() if hasattr(shared, "clone") else shared
        self._thread = threading.Thread(target=self._watch, daemon=True, name="heartbeat")

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(timeout=2 * INTERVAL_SECONDS)

    def _watch(self) -> None:
        heard = {rank: (0, time.monotonic()) for rank in range(self._size)}
        beats = 0
        while not self._over.wait(INTERVAL_SECONDS):
            beats += 1
            try:
                self._store.set(_key(self._rank), str(beats))
                for rank in heard:
                    count = int(self._store.get(_key(rank))) if self._known(rank) else 0
                    if count != heard[rank][0]:
                        heard[rank] = (count, time.monotonic())
            except Exception:  # the store's host has gone: its silence is measured like any other
                pass
            silent = [r for r, (_, at) in heard.items() if time.monotonic() - at > SILENCE_SECONDS]
            if silent and not self._over.is_set():
                self._give_up(
                    f"process {silent[0]} of {self._size} has not been heard of for "
                    f"{SILENCE_SECONDS:.0f} s: the run ends here; go on from the last checkpoint "
                    "with --resume"
                )
                return

    def _known(self, rank: int) -> bool:
        return bool(self._store.check([_key(rank)]))


def _key(rank: int) -> str:
    return f"aploss/heartbeat/{rank}"


def _end_process(message: str) -> None:
    print(f"aploss: {message}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)  # the main thread hangs in a collective: no exception reaches it
