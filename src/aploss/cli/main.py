"""The ``aploss`` program: finds the command, parses its options and prints users' errors as one line.

Only the module of the requested command is imported, so that ``aploss --help`` answers at once.
"""

import logging
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version

from aploss.cli.commands import COMMANDS, Parser, add_general_options, describe, make_parser
from aploss.errors import AplossError, ConfigError, did_you_mean, missing_package
from aploss.progress import printable_output
from aploss.registry import load_plugins

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
        rows = [f"  {' '.join(words):<13} {describe(words)[0]}" for words in COMMANDS]
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
    return f"unexpected {type(error).__name__}: {line}{where} (--debug prints it)", 1


def _run(words: tuple[str, ...], arguments: list[str]) -> int:
    # First only the general options: threads are set before torch is imported, and plugins register names that the
    # help of the command lists.
    first = Parser(prog=f"aploss {' '.join(words)}", add_help=False)
    add_general_options(first.add_argument)
    general = first.parse_known_args(arguments)[0]
    set_threads(general.threads)
    load_plugins(general.plugin)
    options = make_parser(words).parse(arguments)
    logging.getLogger("aploss.losses").setLevel(logging.ERROR if options.quiet else logging.NOTSET)
    run = getattr(import_module(f"aploss.cli.{COMMANDS[words][0]}"), f"run_{words[-1]}")
    return int(run(options))


def set_threads(threads: int | None) -> None:
    """Configures the OpenMP threads of torch; OpenMP reads the environment when it is loaded.

    By default, idle threads spin and slow down everything else on their core, including the thread they wait for.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is not None:
        os.environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        import torch

        torch.set_num_threads(threads)  # if torch was imported before
