"""Ctrl-C and SIGTERM end a run after the step it is in, so that it can be saved."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopSignals"]

# On Ctrl-C the terminal and torchrun both send the signal: that is one wish, not two.
SECONDS_TO_A_SECOND_WISH = 1.0


class StopSignals:
    """While active, the first Ctrl-C or SIGTERM only sets :attr:`requested`.

    A second Ctrl-C interrupts at once. Outside the main thread, where Python allows no handlers,
    it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first_at = 0.0
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader process: it ends when this one lets it
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first_at = True, now
        elif number == signal.SIGINT and now - self._first_at > SECONDS_TO_A_SECOND_WISH:
            raise KeyboardInterrupt
