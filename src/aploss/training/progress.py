"""The progress display: a live bar on a terminal, plain lines elsewhere, or warnings only."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aploss.evaluation import HEADLINE_METRICS
from aploss.terminal import printable, terminal

Row = dict[str, Any]
ShowImages = Callable[[int, int], None]  # called with the number of images done and their total
SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Shows warnings only; the base class of the others."""

    def begin(self, total: int, done: int) -> None:
        """Training starts at step ``done`` of ``total``."""

    def step(self, done: int) -> None:
        """A step is done."""

    def row(self, row: Row) -> None:
        """A row of metrics was written."""

    @contextmanager
    def images(self, task: str) -> Iterator[ShowImages]:
        """Shows the progress of a task over images, such as validating."""
        yield lambda done, total: None

    def note(self, text: str) -> None:
        """Shows a line of information."""

    def warn(self, text: str) -> None:
        """Shows a warning, in every mode."""
        print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Training has ended, for any reason."""


class SilentProgress(Progress):
    """Shows nothing, for all ranks but rank 0."""

    def warn(self, text: str) -> None:
        """Rank 0 shows it."""


class PlainProgress(Progress):
    """Prints a line from time to time, for logs and pipes."""

    def begin(self, total: int, done: int) -> None:
        self._total, self._first, self._started = total, done, time.monotonic()
        self._last_line = self._started

    def row(self, row: Row) -> None:
        step, now = row["step"], time.monotonic()
        if row["kind"] == "validation":
            self.note(f"step {step}/{self._total}  {describe_row(row)}")
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            left = (now - self._started) / max(1, step - self._first) * (self._total - step)
            self.note(f"step {step}/{self._total}  {describe_row(row)}  {describe_seconds(left)} left")
        else:
            return
        self._last_line = now

    @contextmanager
    def images(self, task: str) -> Iterator[ShowImages]:
        last_line = time.monotonic()

        def show(done: int, total: int) -> None:
            nonlocal last_line
            if time.monotonic() - last_line >= SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                self.note(f"{task}  {done}/{total} images")

        yield show

    def note(self, text: str) -> None:
        print(text, flush=True)


class RichProgress(Progress):
    """A live bar with loss, speed and time left; notes scroll above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichBar

        self._console = Console(file=terminal(sys.stdout))
        columns = "{task.description}", BarColumn(bar_width=None), MofNCompleteColumn(), "{task.fields[text]}"
        self._bar = RichBar(
            *(TextColumn(one) if isinstance(one, str) else one for one in columns),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("training", total=None, text="", visible=False)

    def begin(self, total: int, done: int) -> None:
        self._bar.update(self._task, total=total, completed=done, visible=True)
        self._bar.start()

    def step(self, done: int) -> None:
        self._bar.update(self._task, completed=done)

    def row(self, row: Row) -> None:
        if row["kind"] == "validation":
            self.note(f"step {row['step']}  {describe_row(row)}")
        else:
            self._bar.update(self._task, text=describe_row(row))

    @contextmanager
    def images(self, task: str) -> Iterator[ShowImages]:
        """Shows a second bar below that of training, or a single one outside of training."""
        alone = not self._bar.live.is_started
        self._bar.start()
        bar = self._bar.add_task(task, total=None, text="images")
        try:
            yield lambda done, total: self._bar.update(bar, completed=done, total=total)
        finally:
            self._bar.refresh()
            self._bar.remove_task(bar)
            if alone:
                self._bar.stop()

    def note(self, text: str) -> None:
        self._console.print(printable(text), highlight=False, markup=False)

    def warn(self, text: str) -> None:
        self._console.print(printable(text), style="yellow", highlight=False, markup=False)

    def end(self) -> None:
        self._bar.update(self._task, visible=False)
        self._bar.stop()


def make_progress(*, quiet: bool, is_main: bool = True) -> Progress:
    """Chooses the progress display for this output; other ranks than 0 show nothing."""
    if not is_main:
        return SilentProgress()
    if quiet:
        return Progress()
    return RichProgress() if sys.stdout.isatty() else PlainProgress()


def describe_row(row: Row) -> str:
    """Formats a row of metrics as one line."""
    if row["kind"] == "validation":
        values = [f"{name} {row[name]:.3f}" for name in HEADLINE_METRICS if row[name] is not None]
        return "validation  " + ("  ".join(values) or "no objects")
    speed = row["images_per_second"]
    return f"loss {row['loss']:.3f}  {speed:.{int(speed < 10)}f} images/s"


def describe_seconds(seconds: float) -> str:
    """Formats a duration in readable units.

    Example:
        >>> describe_seconds(45), describe_seconds(150), describe_seconds(8000)
        ('45 s', '2 min 30 s', '2 h 13 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
