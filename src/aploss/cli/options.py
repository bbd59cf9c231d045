"""The argument parser, the settings of a run as options, and shorthands for the most common ones."""

import json
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter, _ArgumentGroup
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from operator import attrgetter
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union, get_args, get_origin

from aploss.cli.command import positive_int
from aploss.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from aploss.training.config import ConfigField, TrainConfig

Group = ArgumentParser | _ArgumentGroup


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
    group = parser.add_argument_group("general")
    group.add_argument("--threads", type=positive_int, metavar="N", help="number of CPU threads; all cores by default")
    group.add_argument(
        "--quiet", action="store_true", help="print only results, warnings and errors; training prints no results"
    )
    plugin = "Python file that registers losses, detectors or data formats; may be repeated"
    group.add_argument("--plugin", action="append", default=[], metavar="FILE.py", help=plugin)
    group.add_argument("--debug", action="store_true", help="print the traceback of errors")


def add_settings(group: Group, fields: "Sequence[ConfigField]") -> None:
    """Adds an option for each setting; only given ones reach the namespace, under their dotted keys."""
    for field in fields:
        group.add_argument(
            f"--{field.key.replace('_', '-')}", dest=field.key, default=SUPPRESS, metavar=_metavar(field),
            help=field.help.replace("%", "%%"),
        )  # fmt: skip


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


def add_shorthands(group: Group) -> None:
    """Adds ``--epochs``, ``--steps``, ``--lr``, ``--batch-size`` and ``--image-size``."""
    lengths = group.add_mutually_exclusive_group()
    for unit in ("epochs", "steps"):
        lengths.add_argument(f"--{unit}", type=positive_int, metavar="N", help=f"length of the training in {unit}")
    group.add_argument("--lr", dest="optimizer.learning_rate", default=SUPPRESS, metavar="X", help="peak learning rate")
    group.add_argument(
        "--batch-size", dest="batches.size", default=SUPPRESS, metavar="N", help="images per forward pass"
    )
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
