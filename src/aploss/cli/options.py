"""The argument parser of every command, the options for the settings of a run, and shorthands for common ones."""

import json
import textwrap
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter, _ArgumentGroup
from collections.abc import Sequence
from operator import attrgetter
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union, get_args, get_origin

from aploss.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from aploss.training.config import ConfigField, TrainConfig


class HelpFormatter(RawDescriptionHelpFormatter):
    """Keeps the line breaks of the examples and shows defaults that are informative."""

    def _get_help_string(self, action: Action) -> str:
        text, default = action.help or "", action.default
        silent = default is None or default is False or default in (SUPPRESS, []) or not action.option_strings
        return text if silent or "default" in text else f"{text} (default: %(default)s)"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # keeps voc-retinanet-r50 whole


class Parser(ArgumentParser):
    """Accepts underscores for dashes in option names, and raises ConfigError instead of exiting.

    Args:
        arguments: the arguments to parse.
    """

    def __init__(self, *, arguments: Sequence[str] = (), **options: Any) -> None:
        # Without abbreviations, a misspelt option never becomes another one.
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, add_help=False, **options)
        self.arguments = arguments

    def parse(self) -> Namespace:
        """Parses the arguments; ConfigError for an unknown option, with the closest one."""
        words = list(self.arguments)
        end = words.index("--") if "--" in words else len(words)
        return self.parse_args([*map(self._known_option, words[:end]), *words[end:]])

    def _known_option(self, word: str) -> str:
        """The word, an option with dashes for underscores."""
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        if not name.startswith("--"):
            return word
        if dashed not in self._option_string_actions:
            mappings = [one for one in self._option_string_actions if one.endswith(".options")]
            if not any(dashed.startswith(f"{one}.") for one in mappings):
                known = [one.removeprefix("--") for one in self._option_string_actions]
                suggestion = did_you_mean(dashed.removeprefix("--"), known, prefix="--")
                raise ConfigError(f"unknown option {name[:200]}{suggestion} (see {self.prog} --help)")
            # An entry of a mapping, such as --model.options.anchors_per_cell: a Python name, which keeps underscores.
            self.add_argument(dashed, dest=name.removeprefix("--"), default=SUPPRESS, help=SUPPRESS)
        return dashed + equals + value

    def error(self, message: str) -> NoReturn:
        """Raises the message of argparse as ConfigError."""
        raise ConfigError(f"{' '.join(message.split())} (see {self.prog} --help)")


def option_values(option: str, arguments: Sequence[str]) -> list[str]:
    """The values of an option, before a parser exists.

    Example:
        >>> option_values("--plugin", ["train", "--plugin", "a.py", "--plugin=b.py"])
        ['a.py', 'b.py']
    """
    values: list[str] = []
    for place, word in enumerate(arguments):
        if word == option:
            values += arguments[place + 1 : place + 2]
        elif word.startswith(f"{option}="):
            values.append(word.partition("=")[2])
    return values


def add_settings(
    group: "Parser | _ArgumentGroup", fields: "Sequence[ConfigField]", defaults: "TrainConfig | None" = None
) -> None:
    """Adds an option for each setting; only given ones reach the namespace, under their dotted keys.

    Args:
        group: parser or argument group.
        fields: the settings.
        defaults: config whose values the help shows as defaults.
    """
    for field in fields:
        shown = "" if "default" in field.help else _default(defaults, field.key)
        group.add_argument(
            f"--{field.key.replace('_', '-')}", dest=field.key, default=SUPPRESS, metavar=_metavar(field),
            help=(field.help + shown).replace("%", "%%"),
        )  # fmt: skip


def _default(config: "TrainConfig | None", key: str) -> str:
    """The end of a help line: the default of a setting as it is typed, unless it is empty."""
    value = None if config is None else attrgetter(key)(config)
    text = value if isinstance(value, str) else json.dumps(value)
    return "" if value in (None, "", {}, ()) else f" (default: {text})"


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


def add_shorthands(group: "Parser | _ArgumentGroup", defaults: "TrainConfig | None" = None) -> None:
    """Adds ``--epochs``, ``--steps``, ``--lr``, ``--batch-size`` and ``--image-size``; see :func:`add_settings`."""
    lengths = group.add_mutually_exclusive_group()
    for unit in ("epochs", "steps"):
        length = _default(defaults, "schedule.length") if defaults and defaults.schedule.unit == unit else ""
        lengths.add_argument(f"--{unit}", type=int, metavar="N", help=f"length of the training in {unit}{length}")
    for option, metavar, key, text in (
        ("--lr", "X", "optimizer.learning_rate", "peak learning rate"),
        ("--batch-size", "N", "batches.size", "images per forward pass"),
    ):
        shown = text + _default(defaults, key)
        group.add_argument(option, dest=key, default=SUPPRESS, metavar=metavar, help=shown)
    size = f"size of training images: 320, or 240x320 (height x width){_default(defaults, 'batches.image_size')}"
    group.add_argument("--image-size", metavar="SIZE", help=size)


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
    from aploss.detectors.build import DETECTORS

    before, after = ([one] if isinstance(one, int) else [*one] for one in (config.batches.image_size, size))
    factor = min(after) / min(before)
    shorter, longest = config.model.options.get("test_size", DETECTORS.get(config.detector).test_size)
    return [round(factor * shorter), round(factor * max(longest, shorter * max(after) / min(after)))]
