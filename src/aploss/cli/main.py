"""The `aploss` command: finds the sub-command, parses its options, prints user errors as one line.

Only the module of the command that was asked for is imported, so that ``aploss --help`` answers at once.
"""

import logging
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from aploss.cli.command import EXIT_PROBLEMS, Command, close_to, newest_run, open_page, require_at_least, shortened
from aploss.errors import AplossError, missing_package

if TYPE_CHECKING:
    from aploss.cli.options import Parser

# command words → (module of aploss.cli, line for the overview); the last word names the command
COMMANDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("demo",): ("demo", "train on built-in data in a few minutes, and show the result"),
    ("train",): ("train", "train a detector on VOC, COCO, YOLO or built-in data"),
    ("eval",): ("eval", "score a run on data, or a detections file against annotations"),
    ("predict",): ("predict", "detect objects in images with a trained run"),
    ("app",): ("app", "see in the browser what a run finds, or two runs side by side"),
    ("export",): ("export", "export a trained run to ONNX"),
    ("data", "check"): ("data", "count a dataset and list every problem in it"),
    ("data", "show"): ("data", "draw a contact sheet with the boxes"),
    ("data", "convert"): ("data", "write a dataset in another format"),
    ("compare",): ("compare", "train with several losses over several seeds, and compare"),
    ("reproduce",): ("reproduce", "reproduce a table or figure of the paper"),
    ("theory",): ("theory", "put the paper's theorems to the test, a page each"),
    ("bench",): ("bench", "measure the losses, the data loading and the training step"),
}

# What other tools call it, and words that come to mind.
OTHER_NAMES = {
    **dict.fromkeys(("evaluate", "evaluation", "test", "val", "validate", "score", "metrics"), "eval"),
    **dict.fromkeys(("detect", "infer", "inference", "run"), "predict"),
    **dict.fromkeys(("fit", "training", "finetune", "fine-tune"), "train"),
    **dict.fromkeys(("check", "info", "stats", "inspect", "analyze"), "data check"),
    **dict.fromkeys(("show", "view", "draw", "visualize", "visualise"), "data show"),
    **dict.fromkeys(("serve", "gui", "ui", "web"), "app"),
    **dict.fromkeys(("losses", "detectors", "models", "recipes", "list"), "train --help"),
    "resume": "train --resume --out",
    "tune": "compare --tune --data",
    "convert": "data convert",
    "benchmark": "bench",
    "quickstart": "demo",
    "onnx": "export",
}
PAGES = ("report", "results", "plot", "plots", "curves")  # what a run has a page of
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

EXIT_USER_ERROR = AplossError.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for what the user can put right."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    command = next((found for length in (2, 1) if (found := tuple(words[:length])) in COMMANDS), ())
    try:
        code = _run(command, words[len(command) :]) if command else _without_command(words)
        sys.stdout.flush()  # a closed pipe or a full disk is found here, not when the interpreter ends
    except BrokenPipeError:  # as `aploss ... | head` does: whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as shells have it: 128 + SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        line, code = _in_words(error)
        print(f"{' '.join(['aploss', *command])}: {line}", file=sys.stderr)
    return code


def _without_command(words: list[str]) -> int:
    if words in (["--version"], ["-V"], ["-v"], ["version"]):
        print(f"aploss {version('aploss')}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(_overview(()))
        return 0
    return _unknown_command(words)


def _in_words(error: Exception) -> tuple[str, int]:
    """What is printed of an error, in one line, and the exit code."""
    if isinstance(error, AplossError):
        return " ".join(str(error).splitlines()), error.exit_code
    if isinstance(error, OSError) and error.strerror is not None:
        name = "" if error.filename is None else f"{shortened(str(error.filename))}: "
        return f"{name}{error.strerror}", EXIT_USER_ERROR
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return str(missing_package(error.name)), EXIT_USER_ERROR
    line, where = shortened(" ".join(str(error).split())), ""
    with suppress(OSError):
        handle, name = tempfile.mkstemp(prefix="aploss-error-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        where = f"; the traceback is in {name}"
    return f"unexpected {type(error).__name__}: {line}{where} (--debug shows it)", EXIT_PROBLEMS


def _run(words: tuple[str, ...], arguments: list[str]) -> int:
    prepare_threads(next(_values_of("--threads", arguments), None))
    command = _command(words)
    if command.plugins:  # they come first: what they register are choices of the options
        from aploss.registry import load_plugins

        load_plugins(list(_values_of("--plugin", arguments)))
    options = make_parser(words).parse_args(arguments)
    if command.computes and options.threads is not None:
        require_at_least(1, options, "threads")
        import torch

        torch.set_num_threads(options.threads)  # in a process that has imported torch before
    compiling = logging.getLogger("aploss.losses")
    level = compiling.level
    try:
        if options.quiet:
            compiling.setLevel(logging.ERROR)
        return command.run(options)
    finally:
        compiling.setLevel(level)


def prepare_threads(threads: str | None) -> None:
    """Sets up the threads that torch will compute with; to be called before torch is imported.

    Its OpenMP library reads the environment once, when it is loaded. By default threads that wait for work spin: they
    keep their core busy, and with it whatever else runs there, the thread they are waiting for not excepted.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is not None and threads.isdecimal() and int(threads) > 0:
        os.environ |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def _command(words: tuple[str, ...]) -> Command:
    module = import_module(f"aploss.cli.{COMMANDS[words][0]}")
    found: Command = getattr(module, words[-1].upper())
    return found


def _values_of(option: str, arguments: Sequence[str]) -> Iterator[str]:
    """What an option is given, before there is a parser."""
    words = iter(arguments)
    for word in words:
        if word == option:
            yield from islice(words, 1)
        elif word.startswith(f"{option}="):
            yield word.partition("=")[2]


def make_parser(command: tuple[str, ...]) -> "Parser":
    """The parser of a command's options; ``command`` are its words, such as ``("data", "check")``."""
    from aploss.cli.options import HelpFormatter, Parser

    definition, line = _command(command), COMMANDS[command][1]
    parser = Parser(
        prog=f"aploss {' '.join(command)}",
        description=line[0].upper() + line[1:] + ".",
        epilog="examples:\n" + definition.examples.strip("\n"),
        formatter_class=HelpFormatter,
        allow_abbrev=False,  # a misspelt option must not become another one
    )
    definition.add_arguments(parser)
    parser.needs, parser.otherwise = definition.needs, definition.otherwise
    if definition.computes:
        parser.add_argument("--threads", type=int, metavar="N", help="threads to compute with; all cores by default")
    parser.add_argument("--quiet", action="store_true", help=definition.quiet)
    if definition.plugins:
        parser.add_argument(
            "--plugin", action="append", default=[], metavar="FILE.py",
            help="Python file with losses, detectors or data formats of your own; may be repeated",
        )  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error, too")
    return parser


def _overview(prefix: tuple[str, ...]) -> str:
    rows = {" ".join(k): line for k, (_, line) in COMMANDS.items() if k[: len(prefix)] == prefix}
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {line}" for name, line in rows.items()]
    return "\n".join(["usage: aploss COMMAND [options]", "", *lines, "", "aploss COMMAND --help shows more."])


def _unknown_command(words: list[str]) -> int:
    prefix = tuple(words[:1])
    group = any(command[:1] == prefix for command in COMMANDS)
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print(_overview(prefix))
        return 0 if len(words) > 1 else EXIT_USER_ERROR
    asked = " ".join(words[:2] if group else words[:1])
    meant = _meant(words, group=group)
    guess = f"; did you mean: aploss {shortened(meant)}" if meant else ""
    if words[0] in (*PAGES, "tensorboard"):
        guess = f"; {_curves_of(words)}"
    print(f"aploss: no command '{shortened(asked)}'{guess} (aploss --help lists them)", file=sys.stderr)
    return EXIT_USER_ERROR


def _curves_of(words: list[str]) -> str:
    run = shlex.quote(words[1]) if len(words) > 1 else newest_run()
    page = Path(shlex.split(run)[0]) / "report.html"
    if words[0] == "tensorboard":
        return f"the curves of a run: tensorboard --logdir {run}"
    if page.is_file():
        return f"a training writes its page itself: {open_page(page)}"
    return f"a training writes {page.name} when it is done: aploss train --resume --out {run}"


def _meant(words: list[str], *, group: bool) -> str | None:
    """The command that was perhaps meant, with the words that follow and what is missing."""
    words = [word.removeprefix("mode=") for word in words if not word.startswith("task=")]  # of Ultralytics
    first, rest = words[0].lstrip("-").lower(), words[1:]
    names = [" ".join(command) for command in COMMANDS]
    if rest and first in ("detect", "yolo") and rest[0] in (*names, *OTHER_NAMES):
        return _meant(rest, group=False)
    is_path = group and Path(rest[0]).exists()
    if not is_path and (close := close_to(" ".join(words[:2]), names)):
        return _with_our_names(close[0], words[len(close[0].split()) :])
    if group:  # aploss data PATH, aploss data info PATH
        name = OTHER_NAMES.get(rest[0], "data check" if is_path or len(rest) == 1 else "")
        return (
            _with_our_names(name, rest if rest[0] not in OTHER_NAMES else rest[1:]) if name.startswith("data") else None
        )
    if first in OTHER_NAMES or first in names or (close := close_to(first, names)):
        return _with_our_names(OTHER_NAMES.get(first) or (first if first in names else close[0]), rest)
    if Path(words[0]).suffix.lower() in PICTURES:
        return f"predict {newest_run()} {shlex.join(words)} --out found"
    if (Path(words[0]) / "config.yaml").is_file():
        return _with_our_names("predict", words)
    return f"train --data {shlex.join(words)}" if Path(words[0]).exists() else None


def _with_our_names(name: str, rest: list[str]) -> str:
    """A command with our names of its options and what it needs, as far as that can be told."""
    command = next(found for length in (2, 1) if (found := tuple(name.split()[:length])) in COMMANDS)
    options = name.split()[len(command) :]
    if options == ["--help"]:
        return name
    if options and not rest:
        rest = {"--out": [newest_run()], "--data": ["builtin"]}.get(options[-1], [])
    with suppress(ModuleNotFoundError):  # of an extra that is not installed
        right = make_parser(command).corrected([*options, *rest])
        if right is not None:
            return " ".join([*command, right]).strip()
    return " ".join([name, shlex.join(rest)]).strip()
