"""``aploss train`` and ``aploss demo``, and the settings of a run as options of a command.

Settings come from a recipe, then from the command line, which wins.
"""

import json
import shlex
import sys
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from aploss import training
from aploss.cli.commands import Parser, positive_int
from aploss.data import find_source
from aploss.data.formats import DataFormat
from aploss.detectors.detector import DETECTORS
from aploss.errors import AplossError, ConfigError
from aploss.losses.traits import LOSSES
from aploss.training.config import (
    ConfigField,
    TrainConfig,
    config_fields,
    config_from_dict,
    config_to_dict,
    load_config,
    merge,
    nested,
    recipe_names,
)
from aploss.training.distributed import FailedRankError, choose_device, is_main_process
from aploss.training.run_folder import RunFolder
from aploss.training.splits import suggest_image_sizes, suggest_recipe


def run_demo(options: Namespace) -> int:
    """Trains the demo recipe in a new folder."""
    LOSSES.get(options.loss)
    folder = options.out or free_folder("demo", lambda path: not path.exists())
    settings = {"data": "builtin", "loss": options.loss, "seed": options.seed, "out": str(folder)}
    return run_training(load_config("demo", settings), options, resume=False)


def run_train(options: Namespace) -> int:
    """Trains, and prints the metrics and the path of the report."""
    config, suggested, source = _resolve_config(options)
    config = _with_shorthands(options, config)
    if options.print_config:
        print(yaml.safe_dump(config_to_dict(config), sort_keys=False), end="")
        return 0
    if suggested and config.data and not options.quiet and is_main_process():
        print(f"recipe    {suggested} (chosen for this machine): {config.detector}")
    return run_training(config, options, resume=options.resume, source=source)


def _with_shorthands(options: Namespace, config: TrainConfig) -> TrainConfig:
    changes = shorthand_changes(options, config)
    return config_from_dict(merge(config_to_dict(config), changes)) if changes else config


def _resolve_config(options: Namespace) -> tuple[TrainConfig, str, DataFormat | None]:
    """The config from recipe and options, or of the run to resume; the recipe and data source if found here."""
    values = given_settings(options)
    if "loss" in values:
        LOSSES.get(values["loss"])  # before the data are read
    if options.recipe is not None:
        return load_config(options.recipe, values), "", None
    if options.resume:
        if not {"out", "data"} & {*values}:
            raise ConfigError("--resume needs the run folder: aploss train --resume --out RUN")
        folder = RunFolder(values["out"]) if values.get("out") else None
        if folder is not None and (folder.exists or "data" not in values):
            return config_from_dict(merge(config_to_dict(folder.read_config()), values)), "", None
    recipe, values, source = suggest_settings(values, sized=options.image_size is not None)
    return load_config(recipe, values), recipe, source


def suggest_settings(values: dict[str, Any], *, sized: bool) -> tuple[str, dict[str, Any], DataFormat | None]:
    """Chooses a recipe for the machine, and image sizes for the data unless they are given (``sized``).

    Returns:
        The recipe, the nested values with image sizes, and the source of the data if it was opened.
    """
    config = config_from_dict(values)
    recipe = suggest_recipe(choose_device(config.device), values.get("detector"))
    if not config.data or sized or "image_size" in values.get("batches", {}):
        return recipe, values, None
    source = find_source(config.data, format=config.splits.format)
    return recipe, merge(suggest_image_sizes(recipe, source), values), source


def run_training(config: TrainConfig, options: Namespace, *, resume: bool, source: DataFormat | None = None) -> int:
    """Trains with progress, then prints the table of AP and the path of the report."""
    try:
        summary = training.train(config, resume=resume, quiet=options.quiet, source=source)
    except training.TrainingInterruptedError as interruption:
        if is_main_process():  # the message ends in the command that resumes the run
            print(interruption, *(f"--plugin {shlex.quote(file)}" for file in options.plugin), file=sys.stderr)
        return interruption.exit_code
    except AplossError as error:
        if is_main_process() or isinstance(error, FailedRankError):
            raise
        return error.exit_code  # the main process reports it
    if is_main_process() and not options.quiet:
        print(f"{summary.table()}\nreport: {summary.folder}/report.html", flush=True)
    return 0


# --- settings as options ---


def add_train_options(parser: Parser) -> None:
    """Adds ten common options first, then one option for each setting of a run, in groups."""

    def show_recipe(options: Namespace) -> None:
        recipe = options.recipe or suggest_settings({"device": "auto"}, sized=True)[0]  # without reading data
        _show_values(parser, _with_shorthands(options, load_config(recipe, given_settings(options))))
        parser.epilog = f"Values in brackets come from the recipe {recipe} and your options.\n\n{parser.epilog}"

    parser.before_help = show_recipe
    parser.usage = "aploss train --data PATH [--recipe NAME] [--SETTING VALUE ...]"
    fields = {field.key: field for field in config_fields()}
    for key, names in (("loss", LOSSES.names()), ("detector", DETECTORS.names())):
        fields[key] = fields[key]._replace(help=f"{fields[key].help}: {', '.join(names)}")
    common = parser.add_argument_group("common options")
    _add_settings(common, [fields.pop(key) for key in ("data", "out", "loss", "detector")])
    common.add_argument("--recipe", help=f"settings to start from: {', '.join(recipe_names())}, or a .yaml file")
    _add_shorthands(common)
    run = parser.add_argument_group("run")
    run.add_argument("--resume", action="store_true", help="resume the run in --out; a larger --steps extends it")
    run.add_argument("--print-config", action="store_true", help="print all settings and exit")
    for name in dict.fromkeys(field.group for field in fields.values()):
        group = parser.add_argument_group(name, type(getattr(TrainConfig(), name)).__doc__) if name else run
        _add_settings(group, [field for field in fields.values() if field.group == name])


def add_compare_options(parser: Parser) -> None:
    """Adds the settings that all rows of a comparison share; only their shorthands are in the help."""
    text = "All other settings of aploss train are accepted as well: --batches.size 4 ..."
    group = parser.add_argument_group("settings of all rows", text)
    _add_shorthands(group)
    separate = ("criterion.options", "schedule.length")  # as in ap:delta=0.5, and --steps
    fields = [field for field in config_fields() if not field.fixed_by_comparison and field.key not in separate]
    _add_settings(group, [one for one in fields if one.group or one.key == "precision"], hidden=True)


def _add_settings(group: Any, fields: Sequence[ConfigField], *, hidden: bool = False) -> None:
    """Adds an option for each setting; only given ones reach the namespace, under their dotted keys."""
    for field in fields:
        text = SUPPRESS if hidden else field.help.replace("%", "%%")
        name = f"--{field.key.replace('_', '-')}"
        group.add_argument(name, dest=field.key, default=SUPPRESS, metavar=_metavar(field), help=text)


def _metavar(field: ConfigField) -> str:
    is_union = get_origin(field.type) in (Union, UnionType)
    kind = get_args(field.type)[0] if is_union else field.type
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    names = {int: "N", float: "X", bool: "{true,false}", dict: "MAPPING", tuple: "LIST"}
    return names.get(get_origin(kind) or kind, field.key.rpartition(".")[2].upper())


def _add_shorthands(group: Any) -> None:
    """Adds ``--epochs``, ``--steps``, ``--lr``, ``--batch-size`` and ``--image-size``."""
    lengths = group.add_mutually_exclusive_group()
    for unit in ("epochs", "steps"):
        lengths.add_argument(f"--{unit}", type=positive_int, metavar="N", help=f"length of the training in {unit}")
    add = partial(group.add_argument, default=SUPPRESS)
    add("--lr", dest="optimizer.learning_rate", metavar="X", help="peak learning rate")
    add("--batch-size", dest="batches.size", metavar="N", help="images per forward pass")
    size = "size of training images: 320, or 240x320 (height x width)"
    group.add_argument("--image-size", type=_image_size, metavar="SIZE", help=size)


def _image_size(text: str) -> int | list[int]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ArgumentTypeError(f"expected a size such as 320, or 240x320 for height x width, got {text!r}")
    return int(sides[0]) if len(sides) == 1 else [int(side) for side in sides]


def _show_values(parser: Parser, config: TrainConfig) -> None:
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


def given_settings(options: Namespace) -> dict[str, Any]:
    """The settings given as options, except shorthands that depend on others, as nested values."""
    keys = {field.key for field in config_fields()}
    given = {key: value for key, value in vars(options).items() if "." in key or key in keys}
    return nested({key: value for key, value in given.items() if value is not None})


def shorthand_changes(options: Namespace, config: TrainConfig) -> dict[str, Any]:
    """The settings that ``--epochs``, ``--steps`` and ``--image-size`` change in a config, as nested values.

    Milestones keep their share of the length, and the test size scales with the training size; its limit lets the shape
    of the training images through.
    """
    changes: dict[str, Any] = {}
    for unit in ("epochs", "steps"):
        if (length := getattr(options, unit)) is not None:
            milestones = [length / config.schedule.length * one for one in config.schedule.milestones]
            changes["schedule"] = {"length": length, "unit": unit, "milestones": milestones}
    if (size := options.image_size) is not None:
        changes["batches"] = {"image_size": size}
        if not {"model.options", "model.options.test_size"} & vars(options).keys():
            before, after = ([one] if isinstance(one, int) else [*one] for one in (config.batches.image_size, size))
            factor, stretch = min(after) / min(before), max(after) / min(after)
            shorter, longest = config.model.options.get("test_size", DETECTORS.get(config.detector).test_size)
            test_size = [round(factor * shorter), round(factor * max(longest, shorter * stretch))]
            changes["model"] = {"options": {"test_size": test_size}}
    return changes


def run_folder_of(path: str) -> RunFolder | None:
    """The run folder that a path names or, for a checkpoint, lies in; None for a file without a run."""
    candidates = (RunFolder(path), RunFolder(Path(path).parent.parent))
    return next((folder for folder in candidates if folder.exists), None)


def free_folder(name: str, is_free: Callable[[Path], bool]) -> Path:
    """The first free one of ``runs/NAME``, ``runs/NAME-2``, ..."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(folder for one in names if is_free(folder := Path("runs") / one))
