"""What the commands share: their description, exit codes, progress, and what is said at the end."""

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aploss.errors import AplossError, ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from aploss.training import TrainConfig

EXIT_PROBLEMS = 1  # done, but something could not be used or does not hold
SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the program.

    Attributes:
        examples: lines for its help.
        add_arguments: declares its options.
        run: carries it out and gives the exit code.
        plugins: whether it builds something, and so takes ``--plugin``.
    """

    examples: str
    add_arguments: "Callable[[ArgumentParser], None]"
    run: "Callable[[Namespace], int]"
    plugins: bool = True


def require_at_least(least: float, options: "Namespace", *names: str) -> None:
    """Refuses options that are given and too small.

    Raises:
        ConfigError: naming the option.
    """
    for name in names:
        if options[name] is not None and options[name] < least:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} {options[name]}: must be at least {least:g}")


class Show(Protocol):
    """Takes how much is done, a text on what goes on, and how much there is in all."""

    def __call__(self, done: int | None = None, total: int | None = None, *, text: str = "") -> None: ...


@contextmanager
def progress(what: str, total: int | None = None, *, quiet: bool = False) -> Iterator[Show]:
    """Shows on stderr how far a command is: live on a terminal, else a line now and then.

    Args:
        what: is counted, such as "images".
        total: how many there are, where that is known already.
        quiet: show nothing.
    """
    if sys.stderr.isatty() and not quiet:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)

            def update(done: int | None = None, total: int | None = None, *, text: str = "") -> None:
                described = f"{what}: {text}" if text else what
                bar.update(task, completed=done, total=total, description=described)

            yield update
        return
    all_of_them, said = total, time.monotonic()

    def say(done: int | None = None, total: int | None = None, *, text: str = "") -> None:
        nonlocal said
        if not quiet and done is not None and time.monotonic() - said >= SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"{done:,} of {total or all_of_them:,} {what}", file=sys.stderr, flush=True)

    yield say


def run_training(config: "TrainConfig", *, resume: bool, quiet: bool, plugins: Sequence[str] = ()) -> int:
    """Trains with progress, then prints the table of AP and the path of the page.

    Args:
        config: of the run.
        resume: go on with what is in its folder.
        quiet: show only the result.
        plugins: files that the command to go on with needs, too.
    """
    from aploss import training
    from aploss.training.distributed import LostProcessError, is_main_process

    try:
        summary = training.train(config, resume=resume, quiet=quiet)
    except training.TrainingInterruptedError as interruption:
        if is_main_process():
            again = "".join(f" --plugin {shlex.quote(file)}" for file in plugins)
            print(f"{interruption}{again}", file=sys.stderr)
        return interruption.exit_code
    except LostProcessError:
        raise
    except AplossError as error:
        if is_main_process():
            raise
        return error.exit_code  # the main process says it
    if is_main_process():
        print(summary.table())
        print(f"report: {summary.folder}/report.html")
    return 0


def run_comparison(out: Path, work: Callable[[], Any]) -> int:
    """Does the work of a comparison and prints its table; says how to go on after Ctrl-C."""
    from aploss.training.distributed import TrainingInterruptedError, is_main_process

    try:
        results = work()
    except TrainingInterruptedError as interruption:
        if is_main_process():
            print("stopped, everything is saved; the same command goes on", file=sys.stderr)
        return interruption.exit_code
    if is_main_process():
        print((out / "table.md").read_text(encoding="utf-8"), end="")
        print(f"\nreport: {out / 'report.html'}")
        if not results.complete:
            print("not finished: the same command goes on", file=sys.stderr)
    return 0
