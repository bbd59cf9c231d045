"""What the commands share: their description, exit codes, progress, and what is said at the end."""

import difflib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aploss.errors import AplossError, ConfigError, require_packages

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from aploss.training import TrainConfig

EXIT_PROBLEMS = 1  # done, but something could not be used or does not hold
SECONDS_BETWEEN_LINES = 10.0
# Settings of a run with an option of their own in comparisons: --steps, and --losses ap:delta=0.5.
OTHERWISE = ("criterion.options", "schedule.length")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the program."""

    examples: str  # lines for its help
    add_arguments: "Callable[[ArgumentParser], None]"  # declares its options
    run: "Callable[[Namespace], int]"  # does it and gives the exit code
    plugins: bool = True  # whether it builds something, and so takes --plugin
    computes: bool = True  # whether torch has work to do, and so takes --threads
    quiet: str = "show only the result, and what goes wrong"  # what --quiet does
    needs: Mapping[str, str] = field(default_factory=dict)  # places and options it needs → an example of their value
    otherwise: str = ""  # the command with more options


def close_to(word: str, names: Sequence[str]) -> list[str]:
    """The name that is spelt most like a word, if any is."""
    return difflib.get_close_matches(word, names, n=1, cutoff=0.7)  # less would mislead


def shortened(text: str, longest: int = 200) -> str:
    """Text that fits into a line."""
    return text if len(text) <= longest else f"{text[:longest]}..."


def newest_run(folder: str = "runs") -> str:
    """The run that was trained last, for the commands that are suggested; RUN where there is none."""
    runs = {file.parents[1]: file.stat().st_mtime for file in Path(folder).glob("*/checkpoints/last.pt")}
    return shlex.quote(max(runs, key=runs.__getitem__).as_posix()) if runs else "RUN"


def data_of(run: str) -> str | None:
    """What a run was trained with, where that can be read."""
    from aploss.training.run_folder import RunFolder

    try:
        return RunFolder(run).read_config().data
    except AplossError:
        return None


def open_page(page: Path) -> str:
    """The command that shows a page in the browser, on every system."""
    return f"python -m webbrowser {shlex.quote(str(page))}"


def say_next(options: "Namespace", *commands: str) -> None:
    """Names the commands that come next; on stderr, as they are no part of the result."""
    if not (options.quiet or options.get("json")):
        print("next:", "\n      ".join(commands), file=sys.stderr)


def require_at_least(least: float, options: "Namespace", *names: str) -> None:
    """Refuses options that are given and too small, by name."""
    for name in names:
        if options[name] is not None and options[name] < least:
            raise ConfigError(f"--{name.replace('_', '-')} {options[name]}: must be at least {least:g}")


@contextmanager
def progress(what: str, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Shows on stderr how far a command is: live on a terminal, else a line now and then, or nothing if ``quiet``.

    Yields what to call with how much is done, how much there is of ``what`` in all, and a ``text`` on what goes on.
    """
    from rich.console import Console
    from rich.progress import Progress

    live, said = sys.stderr.isatty() and not quiet, time.monotonic()
    bar = Progress(console=Console(stderr=True), transient=True)
    with bar if live else nullcontext():  # an older rich ends with an empty line even where the bar is disabled
        task = bar.add_task(what, total=None)

        def show(done: int | None = None, total: int | None = None, *, text: str = "") -> None:
            nonlocal said
            bar.update(task, completed=done, total=total, description=f"{what}: {text}" if text else what)
            if not (live or quiet or done is None) and time.monotonic() - said >= SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                print(f"{done:,} of {total:,} {what}", file=sys.stderr, flush=True)

        yield show


def run_training(config: "TrainConfig", options: "Namespace", *, resume: bool, shows_result: bool = True) -> int:
    """Trains with progress, then prints the table of AP, the path of the page, and what to do with the run.

    The files of ``options.plugin`` are named in the command to go on with after an interruption.
    """
    from aploss import training
    from aploss.training.distributed import LostProcessError, is_main_process

    try:
        summary = training.train(config, resume=resume, quiet=options.quiet)
    except training.TrainingInterruptedError as interruption:
        if is_main_process():
            print(interruption, *(f"--plugin {shlex.quote(file)}" for file in options.plugin), file=sys.stderr)
        return interruption.exit_code
    except AplossError as error:
        if is_main_process() or isinstance(error, LostProcessError):
            raise
        return error.exit_code  # the main process says it
    if is_main_process() and shows_result:
        print(f"{summary.table()}\nreport: {summary.folder}/report.html", flush=True)
        run, data = shlex.quote(summary.folder), shlex.quote(config.data)
        say_next(options, f"aploss predict {run} PHOTOS --out found", f"aploss eval {run} --data {data}")
    return 0


def add_comparison_options(parser: "ArgumentParser", *, trial: str, out: str) -> None:
    """The options of all comparisons, and one for each setting of a run in which rows may be alike.

    ``trial`` is how long a trial of the search is by default, ``out`` where the results go.
    """
    from jsonargparse import SUPPRESS

    from aploss.training.config import FIXED_BY_COMPARISON, config_fields

    searched = (
        "a setting that is searched with the learning rate, as criterion.box_weight=1,3, or an option of one loss, as "
        "focal:gamma=1,2; may be repeated: all combinations"
    )
    parser.add_argument("--tune-steps", type=int, help=f"length of each trial{trial}")
    parser.add_argument("--tune-over", action="append", default=[], metavar="[LOSS:]KEY=A,B", help=searched)
    parser.add_argument("--max-minutes", type=float, help="stop after so many minutes; the same command goes on")
    parser.add_argument("--out", help=f"folder of page and tables; by default {out}")
    parser.add_argument("--cache", help="folder of the runs; by default 'cache' beside --out")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ...")
    for setting in config_fields():
        if setting.key == "precision" or ("." in setting.key and setting.key not in (*FIXED_BY_COMPARISON, *OTHERWISE)):
            option = f"--{setting.key.replace('_', '-')}"
            parser.add_argument(option, type=setting.type, default=SUPPRESS, help=setting.help)


def shared_settings(options: "Namespace") -> dict[str, Any]:
    """The settings of :func:`add_comparison_options` that were given, as nested values."""
    return {key: value for key, value in options.as_dict().items() if isinstance(value, dict) or key == "precision"}


def run_comparison(options: "Namespace", default_out: Path, work: Callable[..., Any]) -> int:
    """Does the work of a comparison and prints its table; says how to go on after Ctrl-C."""
    from aploss.training.distributed import TrainingInterruptedError, is_main_process

    require_packages("scipy")  # intervals are computed at the end: say it before hours of training
    out = Path(options.out or default_out)
    try:
        results = work(out, cache=options.cache, max_minutes=options.max_minutes, quiet=options.quiet)
    except TrainingInterruptedError as interruption:
        if is_main_process():
            print("stopped, everything is saved; the same command goes on", file=sys.stderr)
        return interruption.exit_code
    if is_main_process():
        print(f"{(out / 'table.md').read_text(encoding='utf-8')}\nreport: {out / 'report.html'}", flush=True)
        if not results.complete:
            print("not finished: the same command goes on", file=sys.stderr)
        say_next(options, open_page(out / "report.html"))
    return 0
