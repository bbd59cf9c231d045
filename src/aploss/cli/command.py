"""Helpers shared by the commands: the type of counts, run folders and a progress bar."""

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from aploss.terminal import printable, terminal

if TYPE_CHECKING:
    from aploss.training.run_folder import RunFolder

EXIT_PROBLEMS = 1  # the command finished, but some input was unusable or a claim does not hold


def positive_int(text: str) -> int:
    """The argparse type of counts and sizes."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return number


def run_folder_of(path: str) -> "RunFolder | None":
    """The run folder that a path names or, for a checkpoint, lies in; None for a file without a run."""
    from aploss.training.run_folder import RunFolder

    candidates = (RunFolder(path), RunFolder(Path(path).parent.parent))
    return next((folder for folder in candidates if folder.exists), None)


def free_folder(name: str, is_free: Callable[[Path], bool]) -> Path:
    """The first free one of ``runs/NAME``, ``runs/NAME-2``, ..."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(folder for one in names if is_free(folder := Path("runs") / one))


@contextmanager
def progress(unit: str, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Shows a progress bar on stderr if that is a terminal.

    Yields:
        A function of the number done, the total, and optionally a ``text`` that describes the current step.
    """
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(file=terminal(sys.stderr)), transient=True)
    is_live = sys.stderr.isatty() and not quiet
    with bar if is_live else nullcontext():  # older versions of rich print an empty line for a disabled bar
        task = bar.add_task(unit, total=None)

        def show(done: int | None = None, total: int | None = None, *, text: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{unit}: {printable(text)}" if text else unit)

        yield show
