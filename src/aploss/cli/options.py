"""The parser of every command: one spelling, readable help, and a word on what was perhaps meant.

And the names that other tools have for the settings people change first: ``--epochs``, ``--steps``, ``--lr`` ...
"""

import re
import shlex
import textwrap
from argparse import SUPPRESS, Action, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from aploss.cli.command import data_of, newest_run, shortened
from aploss.cli.corrections import as_option, corrected, is_option, our_name
from aploss.errors import ConfigError

if TYPE_CHECKING:
    from aploss.training.config import TrainConfig

WORDS = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false", "NoneType": "null"}
# Familiar option → the settings it is short for.
LONG_FORMS = {
    "epochs": ("schedule.length", "schedule.unit"),
    "steps": ("schedule.length", "schedule.unit"),
    "lr": ("optimizer.learning_rate",),
    "batch_size": ("batches.size",),
    "image_size": ("batches.image_size",),
}


class HelpFormatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the examples; shows defaults that say something, and no types of Python."""

    def _get_help_string(self, action: Action) -> str:
        text, default = action.help or "", action.default
        silent = default is None or default is False or default in (SUPPRESS, []) or not action.option_strings
        return text if silent or "default" in text else f"{text} (default: %(default)s)"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # voc-retinanet-r50 stays whole


class Parser(ArgumentParser):
    """Takes underscores for dashes, and reports a wrong word as any other mistake."""

    needs: Mapping[str, str] = MappingProxyType({})  # of the command, see Command
    otherwise = ""

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:  # type: ignore[override]
        """As of jsonargparse; ConfigError for options that do not exist or are missing."""
        words = list(self._spelled(args or ()))
        if not {"-h", "--help"} & {*words}:
            self._require(words)
        return super().parse_args(words, *others, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ConfigError(f"{in_one_line(message, self._dests)} ({self.prog} --help lists the options)") from ex

    @property
    def _names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    @property
    def _dests(self) -> list[str]:
        return [action.dest for action in self._actions if not action.option_strings]

    def _spelled(self, arguments: Sequence[str]) -> Iterator[str]:
        """The arguments, options with dashes; an option that does not exist is an error with the nearest one."""
        known = self._names
        mappings = [action for action in self._actions if "dict" in str(getattr(action, "_typehint", ""))]
        groups = {name for action in mappings for name in action.option_strings}
        for word in self._places(arguments):
            if is_option(word) and word not in known and not word.startswith("--"):
                self._refuse(word, arguments)
            name = as_option(word).partition("=")[0]
            if name != word and our_name(name, known, self._dests) is not None:
                self._refuse(word, arguments)
        for place, word in enumerate(arguments):
            if word == "--":
                yield from arguments[place:]
                return
            option, equals, value = word.partition("=")
            name, plus = option.removesuffix("+"), option[len(option.removesuffix("+")) :]
            group = next((one for one in groups if name.replace("_", "-").startswith(f"{one}.")), None)
            if not name.startswith("--"):
                yield word
            elif group is not None:  # --model.options.norm: the names below are those of Python
                yield group + word[len(group) :]
            elif (dashed := name.replace("_", "-")) in known:
                yield dashed + plus + equals + value
            else:
                self._refuse(name, arguments)

    def corrected(self, arguments: Sequence[str]) -> str | None:
        """The arguments as they were perhaps meant, see :func:`aploss.cli.corrections.corrected`."""
        return corrected(self._actions, arguments, self.needs)

    def _refuse(self, word: str, arguments: Sequence[str]) -> NoReturn:
        """Says what was perhaps meant by a word that is no option, and the whole command."""
        name, equals, _ = word.partition("=")
        right = self.corrected(arguments)
        command = self.prog if right is None else f"{self.prog} {right}".strip()
        meant = our_name(name if is_option(name) else f"--{name}", self._names, self._dests)
        wrong = f"there is no option {shortened(name)}"
        if equals and not is_option(name):
            wrong, guess = f"{shortened(word)}: options are written with dashes", f": {command}"
        elif name in ("--eval-only", "--test-only"):
            run = newest_run()
            guess = f"; that is: aploss eval {run} --data {data_of(run) or 'PATH'}"
        elif meant is None and self.otherwise:
            given = self.otherwise.removesuffix(" --data builtin") if name == "--data" else self.otherwise
            guess = f"; there is with: {given} {shlex.join(arguments)}"
        elif meant is None or right is None:
            guess = f"; did you mean {meant}?" if meant else ""
            guess += f" ({self.prog} --help lists them)"
        elif meant in self._dests:
            guess = f"; {meant.upper()} is given without one: {command}"
        else:
            guess = f"; did you mean {meant.split()[0]}? {command}" if meant else f"; leave it out: {command}"
        raise ConfigError(f"{wrong}{guess}")

    def _require(self, words: Sequence[str]) -> None:
        """Completes a command in which something is missing."""
        places = len(list(self._places(words)))
        taken = [one.nargs for one in self._actions if not one.option_strings]
        right = self.corrected(words) if places > len(taken) and "*" not in taken else None
        if right is not None:
            raise ConfigError(f"there are words without an option; did you mean: {self.prog} {right}")
        noted = getattr(self, "required_args", ())  # where an older jsonargparse keeps what is required
        required = [one for one in self._actions if one.required or one.dest in noted]
        required = [one for one in required if one.nargs not in ("*", "?")]
        missing = [one for one in required if not one.option_strings][places:]
        given = {word.partition("=")[0] for word in words}
        missing += [one for one in required if one.option_strings and not given & {*one.option_strings}]
        if missing:
            names = [one.option_strings[0] if one.option_strings else one.dest.upper() for one in missing]
            rest = [f"{name} {one.metavar}" if one.metavar else name for name, one in zip(names, missing, strict=True)]
            verb = "is" if len(names) == 1 else "are"
            raise ConfigError(f"{' and '.join(names)} {verb} missing: {' '.join([self.prog, *words, *rest])}")

    def _places(self, words: Sequence[str]) -> Iterator[str]:
        """The words that are neither options nor their values."""
        takes_value = {name: one.nargs != 0 for one in self._actions for name in one.option_strings}
        value_follows = False
        for word in words:
            if not word.startswith("--") and not value_follows:
                yield word
            value_follows = word.startswith("--") and takes_value.get(word, "=" not in word)


def in_one_line(message: str, words: Sequence[str] = ()) -> str:
    """What jsonargparse says, shorter; ``words`` are the arguments that are no options.

    Example:
        >>> in_one_line('Parser key "a.b_c": Expected a <class \\'int\\'>. Got value: x')
        '--a.b-c: expected a whole number, got x'
    """
    line = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", " ".join(message.split()))
    line = re.sub(r"(?:typing\.)?Literal\[([^]]+)\]", r"choice of \1", line)
    union = r"Does not validate against any of the Union subtypes Subtypes: \[(.*)\] Errors: .* Given value: "
    line = re.sub(union, r"Expected a \1. Got value: ", line)
    line = re.sub(r"Expected an? (.*?)\. Got value: ", lambda found: f"expected {_in_words(found[1])}, got ", line)
    return re.sub(r'Parser key "([^"]+)":', lambda found: f"{_as_typed(found[1], words)}:", line)


def _in_words(kinds: str) -> str:
    if kinds.startswith("choice of"):
        return f"one of{kinds.removeprefix('choice of')}"
    names = [WORDS.get(kind, kind) for kind in re.split(r", (?![^\[]*\])", kinds)]
    return f"a {' or '.join(names)}".replace("a true", "true").replace("a text", "text")


def _as_typed(key: str, words: Sequence[str]) -> str:
    return key if key in words else f"--{key.replace('_', '-')}"


def add_familiar(parser: ArgumentParser, *, steps: str = "length of the training in steps") -> None:
    """Adds the options; ``steps`` is the help line of ``--steps``."""
    parser.add_argument("--epochs", type=int, metavar="N", help="length of the training in passes over its images")
    parser.add_argument("--steps", type=int, metavar="N", help=steps)
    parser.add_argument("--lr", type=float, help="highest learning rate; short for --optimizer.learning-rate")
    parser.add_argument("--batch-size", type=int, metavar="N", help="images per step; short for --batches.size")
    parser.add_argument(
        "--image-size", metavar="SIZE", help="of training images, as 320 or 240x320 (height x width); testing follows"
    )


def familiar_changes(options: Namespace, config: "TrainConfig") -> dict[str, Any]:
    """What the options change in a config, as nested values.

    Milestones keep their share of the length, and images are tested as much larger or smaller as they are trained.
    ConfigError for an option that is given together with the setting that it is short for.
    """
    given = {name: options[name] for name in LONG_FORMS if options[name] is not None}
    if {"epochs", "steps"} <= given.keys():
        raise ConfigError("give --epochs or --steps, not both")
    for name, key in ((one, key) for one in given for key in LONG_FORMS[one]):
        if options.get(key) is not None:
            short, long = (f"--{one.replace('_', '-')}" for one in (name, key))
            raise ConfigError(f"{short} and {long} are the same setting: give one of them")
    changes: dict[str, Any] = {}
    for unit in given.keys() & {"epochs", "steps"}:
        schedule, length = config.schedule, given[unit]
        milestones = [length / schedule.length * one for one in schedule.milestones]
        if unit == "steps":
            milestones = [float(round(one)) for one in milestones]
        changes["schedule"] = {"length": length, "unit": unit, "milestones": milestones}
    if "lr" in given:
        changes["optimizer"] = {"learning_rate": given["lr"]}
    if "batch_size" in given:
        changes["batches"] = {"size": given["batch_size"]}
    if "image_size" in given:
        size = parse_size(given["image_size"], "--image-size")
        changes.setdefault("batches", {})["image_size"] = size
        if "test_size" not in (options.get("model.options") or {}):
            changes["model"] = {"options": {"test_size": _test_size(size, config)}}
    return changes


def parse_size(text: str, option: str, example: int = 320) -> int | list[int]:
    """The side of a square, or [height, width], as typed for an option."""
    sides = text.strip("[]() ").lower().replace(",", "x").split("x")
    if len(sides) > 2 or not all(side.strip().isdecimal() for side in sides):
        raise ConfigError(f"{option} {text}: write {example}, or 240x320 for height x width")
    return int(sides[0]) if len(sides) == 1 else [int(side) for side in sides]


def _test_size(size: int | list[int], config: "TrainConfig") -> list[int]:
    from aploss.detectors.build import DETECTORS

    before = config.batches.image_size
    factor = min(_sides(size)) / min(_sides(before))
    shorter, longest = config.model.options.get("test_size", DETECTORS.get(config.detector).test_size)
    shape = max(_sides(size)) / min(_sides(size))  # of the training images, which the limit must let through
    return [round(factor * shorter), max(round(factor * longest), round(factor * shorter * shape))]


def _sides(size: int | list[int] | tuple[int, int]) -> list[int]:
    return [size] if isinstance(size, int) else [*size]
