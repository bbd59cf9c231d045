"""The `aploss` command: finds the sub-command, parses its options, prints user errors as one line.

Only the module of the command that was asked for is imported, so that ``aploss --help`` answers at once.
"""

import difflib
import os
import re
import sys
import tempfile
import traceback
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

from aploss.cli.command import EXIT_PROBLEMS, Command
from aploss.errors import AplossError, ConfigError, missing_package

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

# command words → (module of aploss.cli, line for the overview); the last word names the command
COMMANDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("demo",): ("demo", "train on built-in data in a few minutes, and show the result"),
    ("train",): ("train", "train a detector on VOC, COCO, YOLO or built-in data"),
    ("eval",): ("eval", "score a run on data, or a detections file against annotations"),
    ("predict",): ("predict", "detect objects in images with a trained run"),
    ("app",): ("app", "see in the browser what a run finds, or two runs side by side"),
    ("export",): ("export", "write a trained run as ONNX, OpenVINO or TorchScript"),
    ("data", "check"): ("data", "count a dataset and list every problem in it"),
    ("data", "show"): ("data", "draw a contact sheet with the boxes"),
    ("data", "convert"): ("data", "write a dataset in another format"),
    ("compare",): ("compare", "train with several losses over several seeds, and compare"),
    ("reproduce",): ("reproduce", "reproduce a table or figure of the paper"),
    ("theory",): ("theory", "put the paper's theorems to the test, a page each"),
    ("bench",): ("bench", "measure the losses, the data loading and the training step"),
}

EXIT_USER_ERROR = AplossError.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for what the user can put right."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["-V"]):
        print(f"aploss {version('aploss')}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(_overview(()))
        return 0
    command = next((found for length in (2, 1) if (found := tuple(words[:length])) in COMMANDS), None)
    if command is None:
        return _unknown_command(words)
    try:
        code = _run(command, words[len(command) :])
        sys.stdout.flush()  # a closed pipe is found here, not when the interpreter ends
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
        print(f"aploss {' '.join(command)}: {line}", file=sys.stderr)
    return code


def _in_words(error: Exception) -> tuple[str, int]:
    """What is printed of an error, in one line, and the exit code."""
    if isinstance(error, AplossError):
        return " ".join(str(error).splitlines()), error.exit_code
    if isinstance(error, OSError) and error.strerror is not None:
        name = "" if error.filename is None else f"{_shortened(str(error.filename))}: "
        return f"{name}{error.strerror}", EXIT_USER_ERROR
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return str(missing_package(error.name)), EXIT_USER_ERROR
    line, where = _shortened(" ".join(str(error).split())), ""
    with suppress(OSError):
        handle, name = tempfile.mkstemp(prefix="aploss-error-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        where = f"; the traceback is in {name}"
    return f"unexpected {type(error).__name__}: {line}{where} (--debug shows it)", EXIT_PROBLEMS


def _shortened(text: str, longest: int = 200) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."


def _run(words: tuple[str, ...], arguments: list[str]) -> int:
    command = _command(words)
    if command.plugins:  # they come first: what they register are choices of the options
        from aploss.registry import load_plugins

        load_plugins(list(_plugin_files(arguments)))
    parser = make_parser(words)
    _refuse_unknown_options(parser, arguments)
    return command.run(parser.parse_args(arguments))


def _command(words: tuple[str, ...]) -> Command:
    module = import_module(f"aploss.cli.{COMMANDS[words][0]}")
    found: Command = getattr(module, words[-1].upper())
    return found


def _plugin_files(arguments: Sequence[str]) -> Iterator[str]:
    words = iter(arguments)
    for word in words:
        if word == "--plugin":
            yield from islice(words, 1)
        elif word.startswith("--plugin="):
            yield word.partition("=")[2]


def make_parser(command: tuple[str, ...]) -> "ArgumentParser":
    """The parser of a command's options; ``command`` are its words, such as ``("data", "check")``."""
    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    definition, line = _command(command), COMMANDS[command][1]

    class Formatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
        """Keeps the lines of the examples."""

    class Parser(ArgumentParser):
        """Reports a wrong option as any other mistake."""

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            words = [action.dest for action in self._actions if not action.option_strings]
            raise ConfigError(f"{_in_one_line(message, words)} ({self.prog} --help lists the options)") from ex

    parser = Parser(
        prog=f"aploss {' '.join(command)}",
        description=line[0].upper() + line[1:] + ".",
        epilog="examples:\n" + definition.examples.strip("\n"),
        formatter_class=Formatter,
        allow_abbrev=False,  # a misspelt option must not become another one
    )
    definition.add_arguments(parser)
    if definition.plugins:
        parser.add_argument(
            "--plugin", action="append", default=[], metavar="FILE.py",
            help="Python file with losses, detectors or data formats of your own; may be repeated",
        )  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error, too")
    return parser


def _refuse_unknown_options(parser: Any, arguments: Sequence[str]) -> None:
    """Names an option that does not exist, and the one that was perhaps meant."""
    known = [name for action in parser._actions for name in action.option_strings]
    for word in arguments:
        option = word.partition("=")[0].removesuffix("+")
        if word == "--" or not option.startswith("--") or option in known:
            continue
        if any(option.startswith(f"{name}.") for name in known):  # --model.options.norm
            continue
        by_ending = [name for name in known if name.endswith(f".{option.removeprefix('--')}")]
        meant = by_ending or _close_to(option, known)
        guess = f"; did you mean {meant[0]}?" if meant else ""
        raise ConfigError(f"there is no option {_shortened(option)}{guess} ({parser.prog} --help lists them)")


def _close_to(word: str, names: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(word, names, n=1)


def _in_one_line(message: str, words: Sequence[str] = ()) -> str:
    """What jsonargparse says, shorter; ``words`` are the arguments that are no options.

    Example:
        >>> _in_one_line('Parser key "a.b": Got value: x')
        '--a.b: Got value: x'
    """
    line = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", " ".join(message.split()))
    line = re.sub(r"(?:typing\.)?Literal\[([^]]+)\]", r"choice of \1", line)
    return re.sub(r'Parser key "([^"]+)":', lambda match: f"{'' if match[1] in words else '--'}{match[1]}:", line)


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
    names = [" ".join(command) for command in COMMANDS]
    close = _close_to(" ".join(words[:2]), names) or _close_to(asked, names)
    guess = f"; did you mean 'aploss {close[0]}'?" if close else ""
    print(f"aploss: no command '{_shortened(asked)}'{guess} (aploss --help lists them)", file=sys.stderr)
    return EXIT_USER_ERROR
