"""What the user sees of training: a live bar on a terminal, plain lines elsewhere, or nothing."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Row = dict[str, Any]
ShowImages = Callable[[int, int], None]  # called with images done, and images in all
SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Prints only warnings; the base of the others."""

    def begin(self, total: int, done: int) -> None:
        """The work starts at step ``done`` of ``total``."""

    def step(self, done: int) -> None:
        """A step is done."""

    def row(self, row: Row) -> None:
        """A row of the metrics was written."""

    @contextmanager
    def images(self, what: str) -> Iterator[ShowImages]:
        """While images are looked at; ``what`` is done with them, such as validating."""
        yield lambda done, total: None

    def note(self, text: str) -> None:
        """Something worth knowing."""

    def warn(self, text: str) -> None:
        """A problem; shown in every mode."""
        print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """The work is over, for whatever reason."""


class SilentProgress(Progress):
    """Prints nothing at all, for all ranks but rank 0."""

    def warn(self, text: str) -> None:
        """Rank 0 prints it."""


class PlainProgress(Progress):
    """A line from time to time, for logs and pipes."""

    def begin(self, total: int, done: int) -> None:
        self._total, self._first, self._started = total, done, time.monotonic()
        self._last_line = self._started

    def row(self, row: Row) -> None:
        step, now = row["step"], time.monotonic()
        if row["kind"] == "validation":
            self.note(f"step {step}/{self._total}  {describe_validation(row)}")
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            left = (now - self._started) / max(1, step - self._first) * (self._total - step)
            self.note(f"step {step}/{self._total}  {describe_training(row)}  {describe_seconds(left)} left")
        else:
            return
        self._last_line = now

    @contextmanager
    def images(self, what: str) -> Iterator[ShowImages]:
        said = time.monotonic()

        def show(done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                self.note(f"{what}  {done}/{total} images")

        yield show

    def note(self, text: str) -> None:
        print(text, flush=True)


class RichProgress(Progress):
    """A live bar with loss, AP, images/s and time left; notes scroll above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichBar

        self._console = Console()
        self._bar = RichBar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}  {task.fields[metric]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("training", total=None, loss="", metric="")
        self._running = False

    def begin(self, total: int, done: int) -> None:
        self._bar.update(self._task, total=total, completed=done)
        self._bar.start()
        self._running = True

    def step(self, done: int) -> None:
        self._bar.update(self._task, completed=done)

    def row(self, row: Row) -> None:
        if row["kind"] == "validation":
            self._bar.update(self._task, metric=f"AP {row['AP'] or 0:.3f}")
            self.note(f"step {row['step']}  {describe_validation(row)}")
        else:
            self._bar.update(self._task, loss=describe_training(row))

    @contextmanager
    def images(self, what: str) -> Iterator[ShowImages]:
        """A second bar below that of training, or one alone when training is over."""
        alone = not self._running
        if alone:
            self._bar.update(self._task, visible=False)
            self._bar.start()
        task = self._bar.add_task(what, total=None, loss="images", metric="")
        try:
            yield lambda done, total: self._bar.update(task, completed=done, total=total)
        finally:
            self._bar.refresh()
            self._bar.remove_task(task)
            if alone:
                self._bar.stop()

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def warn(self, text: str) -> None:
        self._console.print(text, style="yellow", highlight=False, markup=False)

    def end(self) -> None:
        self._bar.stop()
        self._running = False


def make_progress(*, quiet: bool, is_main: bool = True) -> Progress:
    """The progress display for this output: only warnings, live or plain; none on other ranks than 0."""
    if not is_main:
        return SilentProgress()
    if quiet:
        return Progress()
    return RichProgress() if sys.stdout.isatty() else PlainProgress()


def describe_training(row: Row) -> str:
    """One line of a training row."""
    speed = row["images_per_second"]
    return f"loss {row['loss']:.3f}  {speed:.{int(speed < 10)}f} images/s"


def describe_validation(row: Row) -> str:
    """One line of a validation row."""
    values = [f"{name} {row[name]:.3f}" for name in ("AP", "AP50", "AP75") if row[name] is not None]
    return "validation  " + ("  ".join(values) or "no objects")


def describe_seconds(seconds: float) -> str:
    """A duration in readable units.

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
