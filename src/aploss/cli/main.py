"""The ``aploss`` program: finds the command, parses its options and prints users' errors as one line.

Only the module of the requested command is imported, so that ``aploss --help`` answers at once.
"""

import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from aploss.cli.command import EXIT_PROBLEMS, Command, require_at_least
from aploss.errors import AplossError, ConfigError, did_you_mean, missing_package

if TYPE_CHECKING:
    from aploss.cli.options import Parser

# Words of the command → (module of aploss.cli, line for the overview). The last word names the command.
COMMANDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("demo",): ("demo", "train on built-in data in a few minutes, and show the result"),
    ("train",): ("train", "train a detector on VOC, COCO, YOLO or built-in data"),
    ("eval",): ("eval", "evaluate a run on data, or a detections file against annotations"),
    ("predict",): ("predict", "detect objects in images with a trained run"),
    ("app",): ("app", "show the detections of one or two runs in the browser"),
    ("export",): ("export", "export a trained run to ONNX"),
    ("data", "check"): ("data", "count the images and boxes of a dataset and list every problem"),
    ("data", "show"): ("data", "draw a contact sheet with the boxes"),
    ("data", "convert"): ("data", "convert a dataset to another format"),
    ("compare",): ("compare", "train with several losses over several seeds, and compare"),
    ("reproduce",): ("reproduce", "reproduce a table or figure of the paper"),
    ("theory",): ("theory", "verify the paper's theorems in experiments, with a page for each"),
    ("bench",): ("bench", "benchmark the losses, the data loading and the training step"),
}
MAX_TEXT = 200  # characters of a user's word or of an unexpected error that are repeated in a message


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for an error the user can fix."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    command = next((found for length in (2, 1) if (found := tuple(words[:length])) in COMMANDS), ())
    try:
        code = _run(command, words[len(command) :]) if command else _without_command(words)
        sys.stdout.flush()  # raises here, not at interpreter exit, if the pipe is closed or the disk full
    except BrokenPipeError:  # as in `aploss ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as shells report it
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        line, code = _describe(error)
        print(f"{' '.join(['aploss', *command])}: {line}", file=sys.stderr)
    return code


def _without_command(words: list[str]) -> int:
    """Prints the overview or the version, or raises ConfigError for an unknown command."""
    if words in (["--version"], ["-V"]):
        print(f"aploss {version('aploss')}")
        return 0
    prefix = tuple(words[:1]) if any(command[:1] == tuple(words[:1]) for command in COMMANDS) else ()
    rest = words[len(prefix) :]
    if not rest or rest[0] in ("-h", "--help"):
        print(_overview(prefix))
        return AplossError.exit_code if prefix and not rest else 0
    asked = " ".join([*prefix, rest[0]])[:MAX_TEXT]
    suggestion = did_you_mean(asked, [" ".join(command) for command in COMMANDS])
    raise ConfigError(f"unknown command '{asked}'{suggestion} (see aploss --help)")


def _overview(prefix: tuple[str, ...]) -> str:
    rows = {" ".join(words): line for words, (_, line) in COMMANDS.items() if words[: len(prefix)] == prefix}
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {line}" for name, line in rows.items()]
    return "\n".join(["usage: aploss COMMAND [options]", "", *lines, "", "Run aploss COMMAND --help for its options."])


def _describe(error: Exception) -> tuple[str, int]:
    """The line to print for an error, and the exit code."""
    if isinstance(error, AplossError):
        return " ".join(str(error).splitlines()), error.exit_code
    if isinstance(error, OSError) and error.strerror is not None:
        name = "" if error.filename is None else f"{str(error.filename)[:MAX_TEXT]}: "
        return f"{name}{error.strerror}", AplossError.exit_code
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return str(missing_package(error.name)), AplossError.exit_code
    line, where = " ".join(str(error).split())[:MAX_TEXT], ""
    with suppress(OSError):
        handle, name = tempfile.mkstemp(prefix="aploss-error-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        where = f"; traceback in {name}"
    return f"unexpected {type(error).__name__}: {line}{where} (--debug prints it)", EXIT_PROBLEMS


def _run(words: tuple[str, ...], arguments: list[str]) -> int:
    prepare_threads(arguments)
    command = _command(words)
    if command.plugins:  # before the parser is built: plugins add names that its help lists
        from aploss.cli.options import option_values
        from aploss.registry import load_plugins

        load_plugins(option_values("--plugin", arguments))
    options = make_parser(words, arguments).parse()
    if command.computes and options.threads is not None:
        require_at_least(1, options, "threads")
        import torch

        torch.set_num_threads(options.threads)  # if torch was imported before the environment was set
    logger = logging.getLogger("aploss.losses")
    level = logger.level
    try:
        if options.quiet:
            logger.setLevel(logging.ERROR)
        return command.run(options)
    finally:
        logger.setLevel(level)


def prepare_threads(arguments: Sequence[str]) -> None:
    """Configures the OpenMP threads of torch; call it before torch is imported.

    OpenMP reads the environment once, when it is loaded. By default, idle threads spin and slow down everything else on
    their core, including the thread they are waiting for.
    """
    from aploss.cli.options import option_values

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for threads in option_values("--threads", arguments):
        if threads.isdecimal() and int(threads) > 0:
            os.environ |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def _command(words: tuple[str, ...]) -> Command:
    command: Command = getattr(import_module(f"aploss.cli.{COMMANDS[words][0]}"), words[-1].upper())
    return command


def make_parser(words: tuple[str, ...], arguments: Sequence[str] = ()) -> "Parser":
    """Builds the parser of a command.

    Args:
        words: the words of the command, such as ``("data", "check")``.
        arguments: the arguments to parse; the help of ``train`` shows the defaults that follow from them.
    """
    from aploss.cli.options import Parser

    command, line = _command(words), COMMANDS[words][1]
    parser = Parser(
        prog=f"aploss {' '.join(words)}",
        description=line[0].upper() + line[1:] + ".",
        epilog="examples:\n" + command.examples.strip("\n"),
        arguments=arguments,
    )
    command.add_arguments(parser)
    general = parser.add_argument_group("general")
    if command.computes:
        general.add_argument("--threads", type=int, metavar="N", help="number of CPU threads; all cores by default")
    general.add_argument("--quiet", action="store_true", help="print only results, warnings and errors")
    if command.plugins:
        general.add_argument(
            "--plugin", action="append", default=[], metavar="FILE.py",
            help="Python file that registers losses, detectors or data formats; may be repeated",
        )  # fmt: skip
    general.add_argument("--debug", action="store_true", help="print the traceback of errors")
    general.add_argument("-h", "--help", action="help", help="show this help and exit")
    return parser
