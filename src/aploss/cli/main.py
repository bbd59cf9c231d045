"""The `aploss` command: finds the sub-command, parses its options, prints user errors as one line.

A command is a module of this package with ``EXAMPLES``, ``add_arguments(parser)`` and
``run(options) -> exit code``. Only the module of the command that was asked for is imported, so
that ``aploss --help`` answers at once.
"""

import re
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

from aploss.errors import AplossError, ConfigError

__all__ = ["main"]

# command words → (module of aploss.cli, line for the overview)
COMMANDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("demo",): ("demo", "train on built-in data in a few minutes, and show the result"),
    ("train",): ("train", "train a detector on VOC, COCO, YOLO or built-in data"),
    ("eval",): ("eval", "score a detections file against annotations"),
    ("predict",): ("predict", "detect objects in images with a trained run"),
    ("export",): ("export", "write a trained run as ONNX"),
    ("data", "check"): ("data_check", "count a dataset and list every problem in it"),
    ("data", "show"): ("data_show", "draw a contact sheet with the boxes"),
    ("data", "convert"): ("data_convert", "write a dataset in another format"),
    ("compare",): ("compare", "train with several losses over several seeds, and compare"),
    ("reproduce",): ("reproduce", "reproduce a table or figure of the paper"),
    ("theory",): ("theory", "put the paper's theorems to the test, a page each"),
    ("bench",): ("bench", "measure the losses, the data loading and the training step"),
}

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for what the user can put right."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["-V"]):
        print(f"aploss {version('aploss')}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(_overview(()))
        return 0
    command = _find_command(words)
    if command is None:
        return _unknown_command(words)
    try:
        return _run(command, words[len(command) :])
    except AplossError as error:
        print(f"aploss {' '.join(command)}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _find_command(words: list[str]) -> tuple[str, ...] | None:
    for length in (2, 1):
        if tuple(words[:length]) in COMMANDS:
            return tuple(words[:length])
    return None


def _run(command: tuple[str, ...], arguments: list[str]) -> int:
    try:
        from jsonargparse import ArgumentParser, DefaultHelpFormatter
    except ImportError as error:
        raise AplossError(
            f"the command line needs the extra 'detect' ({error.name} is missing): "
            "pip install 'aploss[detect]'"
        ) from None

    class Formatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
        """Keeps the lines of the examples."""

    class Parser(ArgumentParser):
        """Reports a wrong option as any other mistake."""

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            words = [action.dest for action in self._actions if not action.option_strings]
            line = _in_one_line(message, words)
            raise ConfigError(f"{line} ({self.prog} --help lists the options)")

    module_name, line = COMMANDS[command]
    module = import_module(f"aploss.cli.{module_name}")
    examples = module.EXAMPLES.strip("\n")
    parser = Parser(
        prog=f"aploss {' '.join(command)}",
        description=line[0].upper() + line[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=Formatter,
        allow_abbrev=False,  # a misspelt option must not become another one
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)) or 0)


def _in_one_line(message: str, words: Sequence[str] = ()) -> str:
    """What jsonargparse says, shorter.

    Args:
        message: of its parser.
        words: names of arguments that are not options.

    Example:
        >>> _in_one_line('Parser key "a.b": Got value: x')
        '--a.b: Got value: x'
    """
    line = re.sub(r"<class '(\w+)'>", r"\1", " ".join(message.split()))
    line = re.sub(r"(?:typing\.)?Literal\[([^]]+)\]", r"choice of \1", line)
    return re.sub(
        r'Parser key "([^"]+)":',
        lambda match: f"{'' if match[1] in words else '--'}{match[1]}:",
        line,
    )


def _overview(prefix: tuple[str, ...]) -> str:
    rows = {" ".join(k): line for k, (_, line) in COMMANDS.items() if k[: len(prefix)] == prefix}
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {line}" for name, line in rows.items()]
    return "\n".join(
        ["usage: aploss COMMAND [options]", "", *lines, "", "aploss COMMAND --help shows more."]
    )


def _unknown_command(words: list[str]) -> int:
    prefix = tuple(words[:1])
    group = any(command[:1] == prefix for command in COMMANDS)
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print(_overview(prefix))
        return 0 if len(words) > 1 else EXIT_USER_ERROR
    asked = " ".join(words[:2] if group else words[:1])
    print(f"aploss: no command '{asked}'; aploss --help lists them", file=sys.stderr)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
