"""The progress display of long commands: bars on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.progress
from rich.console import Console

from aploss.terminal import printable, terminal

SECONDS_BETWEEN_LINES = 15.0


class Progress(rich.progress.Progress):
    """Live bars of rich on a terminal, a line from time to time elsewhere.

    Args:
        quiet: show warnings only.
        is_main: False to show nothing at all, on all ranks but rank 0.
    """

    def __init__(self, *, quiet: bool, is_main: bool = True) -> None:
        self._shows, self._warns = is_main and not quiet, is_main
        console = Console(file=terminal(sys.stdout), soft_wrap=True, quiet=not self._shows)
        columns = ("{task.description}", rich.progress.BarColumn(bar_width=None), rich.progress.MofNCompleteColumn())
        more = ("{task.fields[text]}", rich.progress.TimeRemainingColumn(compact=True))
        is_live = self._shows and sys.stdout.isatty()
        super().__init__(*columns, *more, console=console, expand=True, disable=not is_live)
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def stop(self) -> None:
        """Ends the bars; without any, rich would print an empty line."""
        if not self.disable:
            super().stop()

    def note(self, text: str) -> None:
        """Shows a line of information."""
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        self.console.print(printable(text), highlight=False, markup=False)

    def warn(self, text: str) -> None:
        """Shows a warning, also if quiet."""
        if self._warns:
            print(printable(text), file=sys.stderr, flush=True)  # rich puts it above its bars

    @contextmanager
    def task(self, description: str, *, done: int = 0, text: str = "images") -> Iterator[Callable[..., None]]:
        """Shows a task, such as validating: as a bar, or from time to time as a line.

        Yields:
            A function of the number of steps or images done, their total and optionally a new text about the task.
        """
        number = self.add_task(description, total=None, completed=done, text=text)
        task = self.tasks[self.task_ids.index(number)]

        def show(done: int, total: int, text: str | None = None) -> None:
            self.update(number, completed=done, total=total, text=task.fields["text"] if text is None else text)
            if self.disable and time.monotonic() >= self._next_line:
                left = "" if task.time_remaining is None else f"  {describe_seconds(task.time_remaining)} left"
                self.note(f"{description} {done}/{total}  {task.fields['text']}{left}")

        try:
            yield show
        finally:
            self.refresh()
            self.remove_task(number)


def describe_seconds(seconds: float) -> str:
    """Formats a duration in readable units.

    Example:
        >>> describe_seconds(45), describe_seconds(150), describe_seconds(8000), describe_seconds(1e6)
        ('45 s', '2 min 30 s', '2 h 13 min', '12 days')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{round(minutes / 1440)} days"
