"""The ``aploss`` program: finds the command, parses its options and prints users' errors as one line.

Only the module of the requested command is imported, so that ``aploss --help`` answers at once.
"""

import logging
import os
import sys
import tempfile
import threading
import traceback
from argparse import SUPPRESS
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from typing import Any

from aploss.cli.options import EXIT_PROBLEMS, Parser, add_general_options
from aploss.errors import AplossError, ConfigError, did_you_mean, missing_package
from aploss.terminal import printable_output

# Words of the command → (module of aploss.cli, line for the overview). For ``aploss data show``, the module defines
# ``SHOW_EXAMPLES`` (the end of the help), ``add_show_arguments(parser)`` and ``run_show(options)``, the exit code.
COMMANDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("demo",): ("small", "train on built-in data in a few minutes, and show the result"),
    ("train",): ("train", "train a detector on VOC, COCO, YOLO or built-in data"),
    ("eval",): ("eval", "evaluate a run on data, or a detections file against annotations"),
    ("predict",): ("predict", "detect objects in images with a trained run"),
    ("app",): ("app", "show the detections of one or two runs in the browser"),
    ("export",): ("small", "export a trained run to ONNX"),
    ("data", "check"): ("data", "count the images and boxes of a dataset and list every problem"),
    ("data", "show"): ("data", "draw a contact sheet with the boxes"),
    ("data", "convert"): ("data", "convert a dataset to another format"),
    ("compare",): ("compare", "train with several losses over several seeds, and compare"),
    ("reproduce",): ("compare", "reproduce a table or figure of the paper"),
    ("theory",): ("small", "verify the paper's theorems in experiments"),
    ("bench",): ("small", "benchmark the losses and the training step"),
}
MAX_TEXT = 200  # characters of a user's word or of an unexpected error that are repeated in a message


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for an error the user can fix."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = next((found for length in (2, 1) if (found := tuple(words[:length])) in COMMANDS), ())
    with printable_output():
        threading.excepthook = _report_thread_error
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


def _report_thread_error(arguments: threading.ExceptHookArgs) -> None:
    """Prints the error of a background thread, such as TensorBoard's writer on a full disk, as one line."""
    name = "a thread" if arguments.thread is None else arguments.thread.name
    print(f"warning: {name} has failed: {arguments.exc_type.__name__}: {arguments.exc_value}", file=sys.stderr)


def _without_command(words: list[str]) -> int:
    """Prints the overview or the version, or raises ConfigError for an unknown command."""
    if words in (["--version"], ["-V"]):
        print(f"aploss {version('aploss')}")
    elif not words or words[0] in ("-h", "--help"):
        rows = [f"  {' '.join(command):<13} {line}" for command, (_, line) in COMMANDS.items()]
        print("usage: aploss COMMAND [options]\n", *rows, "\nRun aploss COMMAND --help for its options.", sep="\n")
    else:
        asked = " ".join(words[: 2 if words[0] == "data" else 1])[:MAX_TEXT]
        suggestion = did_you_mean(asked, [" ".join(command) for command in COMMANDS])
        raise ConfigError(f"unknown command '{asked}'{suggestion} (see aploss --help)")
    return 0


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
    # First only the general options: threads are set before torch is imported, and plugins register names that the
    # help of the command lists.
    first = Parser(prog=f"aploss {' '.join(words)}", add_help=False)
    add_general_options(first)
    general = first.parse_known_args(arguments)[0]
    set_threads(general.threads)
    if general.plugin:
        from aploss.registry import load_plugins

        load_plugins(general.plugin)
    options = make_parser(words).parse(arguments)
    logging.getLogger("aploss.losses").setLevel(logging.ERROR if options.quiet else logging.NOTSET)
    code: int = _of_command("run_{}", words)(options)
    return code


def set_threads(threads: int | None) -> None:
    """Configures the OpenMP threads of torch; OpenMP reads the environment when it is loaded.

    By default, idle threads spin and slow down everything else on their core, including the thread they wait for.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is not None:
        os.environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        import torch

        torch.set_num_threads(threads)  # if torch was imported before


def _of_command(name: str, words: tuple[str, ...]) -> Any:
    return getattr(import_module(f"aploss.cli.{COMMANDS[words][0]}"), name.format(words[-1]))


def make_parser(words: tuple[str, ...]) -> Parser:
    """Builds the parser of the command with these words, such as ``("data", "check")``."""
    line, examples = COMMANDS[words][1], _of_command(f"{words[-1].upper()}_EXAMPLES", words).strip("\n")
    description = f"{line[0].upper()}{line[1:]}."
    parser = Parser(prog=f"aploss {' '.join(words)}", description=description, epilog=f"examples:\n{examples}")
    _of_command("add_{}_arguments", words)(parser)
    add_general_options(parser)
    for action in parser._actions:
        is_informative = action.option_strings and action.default not in (None, False, SUPPRESS, [])
        if is_informative and "default" not in str(action.help):
            action.help = f"{action.help} (default: %(default)s)"
    return parser
