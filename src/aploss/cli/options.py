"""What commands share: the parser, the settings of a run as options with shorthands, run folders, a progress bar."""

import json
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter, _ArgumentGroup
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union, get_args, get_origin

from aploss.errors import ConfigError, did_you_mean
from aploss.terminal import printable, terminal

if TYPE_CHECKING:
    from aploss.training.config import ConfigField, TrainConfig
    from aploss.training.run_folder import RunFolder

Group = ArgumentParser | _ArgumentGroup
EXIT_PROBLEMS = 1  # the command finished, but some input was unusable or a claim does not hold


class Parser(ArgumentParser):
    """Accepts underscores for dashes in option names, and raises ConfigError instead of exiting."""

    def __init__(self, **options: Any) -> None:
        # Without abbreviations, a misspelt option never becomes another one.
        super().__init__(formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self.before_help: Callable[[Namespace], None] | None = None  # completes the help for the other options given

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """Parses the arguments of a command; an unknown option raises ConfigError with the closest one."""
        end = list(arguments).index("--") if "--" in arguments else len(arguments)
        words = [self._known_option(word) if word.startswith("--") else word for word in arguments[:end]]
        others = [word for word in words if word not in ("-h", "--help")]
        if len(others) < len(words) and self.before_help is not None:
            self.before_help(self.parse_args(others))
        return self.parse_args([*words, *arguments[end:]])

    def _known_option(self, word: str) -> str:
        name, equals, value = word.partition("=")
        option, known = name.replace("_", "-"), self._option_string_actions
        mapping = option.rpartition(".")[0]
        if option not in known and mapping in known and mapping.endswith(".options"):  # an entry of a mapping
            self.add_argument(option, dest=name.removeprefix("--").replace("-", "_"), default=SUPPRESS)
        elif option not in known:
            suggestion = did_you_mean(option.removeprefix("--"), [one.removeprefix("--") for one in known], prefix="--")
            raise ConfigError(f"unknown option {name[:200]}{suggestion} (see {self.prog} --help)")
        return option + equals + value

    def error(self, message: str) -> NoReturn:
        """Raises the message of argparse as ConfigError."""
        raise ConfigError(f"{' '.join(message.split())} (see {self.prog} --help)")


def add_general_options(parser: Parser) -> None:
    """Adds the options of all commands."""
    add = parser.add_argument_group("general").add_argument
    add("--threads", type=positive_int, metavar="N", help="number of CPU threads; all cores by default")
    add("--quiet", action="store_true", help="print only results, warnings and errors; training prints no results")
    plugin = "Python file that registers losses, detectors or data formats; may be repeated"
    add("--plugin", action="append", default=[], metavar="FILE.py", help=plugin)
    add("--debug", action="store_true", help="print the traceback of errors")


def positive_int(text: str) -> int:
    """The argparse type of counts and sizes."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def add_settings(group: Group, fields: "Sequence[ConfigField]") -> None:
    """Adds an option for each setting; only given ones reach the namespace, under their dotted keys."""
    for field in fields:
        group.add_argument(
            f"--{field.key.replace('_', '-')}", dest=field.key, default=SUPPRESS, metavar=_metavar(field),
            help=field.help.replace("%", "%%"),
        )  # fmt: skip


def _metavar(field: "ConfigField") -> str:
    is_union = get_origin(field.type) in (Union, UnionType)
    kind = get_args(field.type)[0] if is_union else field.type
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    names = {int: "N", float: "X", bool: "{true,false}", dict: "MAPPING", tuple: "LIST"}
    return names.get(get_origin(kind) or kind, field.key.rpartition(".")[2].upper())


def given_settings(options: Namespace, *keys: str) -> dict[str, str]:
    """The settings given as options, by dotted key; ``keys`` are the top-level ones to include."""
    return {key: value for key, value in vars(options).items() if "." in key or key in keys}


def show_values(parser: ArgumentParser, config: "TrainConfig") -> None:
    """Adds the value in a config to the help of each option of a setting, as it is typed, unless it is empty."""
    shorthands = {config.schedule.unit: "schedule.length", "image_size": "batches.image_size"}
    for action in parser._actions:
        try:
            value = attrgetter(shorthands.get(action.dest, action.dest))(config)
        except AttributeError:  # not a setting
            continue
        if value not in (None, "", {}, ()) and not is_dataclass(value):
            text = value if isinstance(value, str) else json.dumps(value)
            action.help = f"{action.help} [{text.replace('%', '%%')}]"


def add_shorthands(group: Group) -> None:
    """Adds ``--epochs``, ``--steps``, ``--lr``, ``--batch-size`` and ``--image-size``."""
    lengths = group.add_mutually_exclusive_group()
    for unit in ("epochs", "steps"):
        lengths.add_argument(f"--{unit}", type=positive_int, metavar="N", help=f"length of the training in {unit}")
    for option, key, text in (
        ("--lr", "optimizer.learning_rate", "peak learning rate"),
        ("--batch-size", "batches.size", "images per forward pass"),
    ):
        group.add_argument(option, dest=key, default=SUPPRESS, metavar="X", help=text)
    group.add_argument("--image-size", metavar="SIZE", help="size of training images: 320, or 240x320 (height x width)")


def shorthand_changes(options: Namespace, config: "TrainConfig") -> dict[str, Any]:
    """The settings that ``--epochs``, ``--steps`` and ``--image-size`` change in a config, as nested values.

    Milestones keep their share of the length, and the test size scales with the training size.
    """
    changes: dict[str, Any] = {}
    for unit in ("epochs", "steps"):
        if (length := getattr(options, unit)) is not None:
            milestones = [length / config.schedule.length * one for one in config.schedule.milestones]
            if unit == "steps":
                milestones = [float(round(one)) for one in milestones]
            changes["schedule"] = {"length": length, "unit": unit, "milestones": milestones}
    if options.image_size is not None:
        size = parse_size(options.image_size, "--image-size")
        changes["batches"] = {"image_size": size}
        if not {"model.options", "model.options.test_size"} & vars(options).keys():
            changes["model"] = {"options": {"test_size": _test_size(size, config)}}
    return changes


def parse_size(text: str, option: str) -> int | list[int]:
    """Parses the side of a square, or height x width, as typed for an option."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ConfigError(f"{option} {text}: expected a size such as 320, or 240x320 for height x width")
    return int(sides[0]) if len(sides) == 1 else [int(side) for side in sides]


def _test_size(size: int | list[int], config: "TrainConfig") -> list[int]:
    """The test size, scaled as the training size is; its limit lets the shape of the training images through."""
    from aploss.detectors.detector import DETECTORS

    before, after = ([one] if isinstance(one, int) else [*one] for one in (config.batches.image_size, size))
    factor = min(after) / min(before)
    shorter, longest = config.model.options.get("test_size", DETECTORS.get(config.detector).test_size)
    return [round(factor * shorter), round(factor * max(longest, shorter * max(after) / min(after)))]


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
