"""Output of commands that is safe on any terminal: progress, warnings, and names from a dataset or file system.

Only the progress display imports rich, when it is built, so that ``aploss --help`` answers at once.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, Self, TextIO, cast

SECONDS_BETWEEN_LINES = 15.0
# Control characters except tab and line feed, Unicode's overrides of the writing direction, and unpaired surrogates,
# from JSON or a file name that is not UTF-8, which cannot be written.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with control characters and unpaired surrogates as visible escapes.

    Example:
        >>> print(printable("\x1b[31mred\n"), end="")
        \x1b[31mred
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PrintableStream:
    """A text stream that writes printable text; characters that its encoding lacks are written as escapes."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        if hasattr(terminal, "reconfigure"):
            terminal.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Writes the text with control characters as escapes."""
        return self.terminal.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


@contextmanager
def printable_output() -> Iterator[None]:
    """Makes everything that is printed safe: class and file names, error messages, warnings, tracebacks."""
    stdout, stderr = map(cast(Any, PrintableStream), (sys.stdout, sys.stderr))
    with redirect_stdout(stdout), redirect_stderr(stderr):
        yield


class Progress:
    """Live bars of rich on a terminal, a line from time to time elsewhere.

    Args:
        quiet: show warnings only.
        is_main: False to show nothing at all, on all ranks but rank 0.
    """

    def __init__(self, *, quiet: bool, is_main: bool = True) -> None:
        from rich import progress
        from rich.console import Console

        shows, self._warns = is_main and not quiet, is_main
        terminal = getattr(sys.stdout, "terminal", sys.stdout)  # bars need control sequences
        self._console = Console(file=terminal, soft_wrap=True, quiet=not shows)
        columns = ("{task.description}", progress.BarColumn(bar_width=None), progress.MofNCompleteColumn())
        more = ("{task.fields[text]}", progress.TimeRemainingColumn(compact=True))
        self._is_live = shows and sys.stdout.isatty()
        self._bars = progress.Progress(*columns, *more, console=self._console, expand=True, disable=not self._is_live)
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_live:  # else rich would print an empty line
            self._bars.stop()

    def note(self, text: str) -> None:
        """Shows a line of information."""
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        self._console.print(printable(text), highlight=False, markup=False)

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
        number = self._bars.add_task(description, total=None, completed=done, text=text)
        task = next(one for one in self._bars.tasks if one.id == number)

        def show(done: int, total: int, text: str | None = None) -> None:
            self._bars.update(number, completed=done, total=total, text=task.fields["text"] if text is None else text)
            if not self._is_live and time.monotonic() >= self._next_line:
                left = "" if task.time_remaining is None else f"  {describe_seconds(task.time_remaining)} left"
                self.note(f"{description} {done}/{total}  {task.fields['text']}{left}")

        try:
            yield show
        finally:
            self._bars.refresh()
            self._bars.remove_task(number)


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
