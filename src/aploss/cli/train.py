"""``aploss train`` and ``aploss demo``, and the settings of a run as options of a command.

Settings come from a recipe, then from the command line, which wins.
"""

import json
import shlex
import sys
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
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

SHORT_NAMES = {"optimizer.learning_rate": ["--lr"], "batches.size": ["--batch-size"]}


def run_demo(options: Namespace) -> int:
    """Trains the demo recipe in a new folder."""
    LOSSES.get(options.loss)
    folder = options.out or free_folder("demo", lambda path: not path.exists())
    settings = {"data": "builtin", "loss": options.loss, "seed": options.seed, "out": str(folder)}
    return run_training(load_config("demo", settings), options, resume=False)


def run_train(options: Namespace) -> int:
    """Trains, and prints the metrics and the path of the report."""
    config, source = _resumed_config(options), None
    if config is None:
        recipe, changes, source = recipe_and_changes(options)
        config = load_config(recipe, changes)
        if options.recipe is None and config.data and is_main_process() and not (options.quiet or options.print_config):
            print(f"recipe    {recipe} (chosen for this machine): {config.detector}")
    if options.print_config:
        print(yaml.safe_dump(config_to_dict(config), sort_keys=False), end="")
        return 0
    return run_training(config, options, resume=options.resume, source=source)


def _resumed_config(options: Namespace) -> TrainConfig | None:
    """The config of the run to resume, with the options given now; None if the options describe a whole run."""
    given = given_settings(options)
    if not options.resume or options.recipe is not None:
        return None
    if not {"out", "data"} & {*given}:
        raise ConfigError("--resume needs the run folder: aploss train --resume --out RUN")
    folder = RunFolder(given["out"]) if given.get("out") else None
    if folder is None or ("data" in given and not folder.exists):
        return None
    values = merge(config_to_dict(folder.read_config()), given)
    return config_from_dict(merge(values, shorthand_changes(options, config_from_dict(values))))


def recipe_and_changes(
    options: Namespace, default_recipe: str | None = None
) -> tuple[str, dict[str, Any], DataFormat | None]:
    """Resolves the options of a new run; without a recipe, chooses one for the machine and image sizes for the data.

    Returns:
        The recipe, the nested values that override it, and the source of the data if it was opened.
    """
    changes, source = given_settings(options), None
    if "loss" in changes:
        LOSSES.get(changes["loss"])  # before the data are read
    recipe = options.recipe or default_recipe
    if recipe is None:
        config = config_from_dict(changes)
        recipe = suggest_recipe(choose_device(config.device), changes.get("detector"))
        if config.data and options.image_size is None and "image_size" not in changes.get("batches", {}):
            source = find_source(config.data, format=config.splits.format)
            changes = merge(suggest_image_sizes(recipe, source), changes)
    return recipe, merge(changes, shorthand_changes(options, load_config(recipe, changes))), source


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
    """Adds the common options first, then one option for each setting of a run, in groups."""
    parser.before_help = partial(_show_recipe, parser)
    parser.usage = "aploss train --data PATH [--recipe NAME] [--SETTING VALUE ...]"
    fields = {field.key: field for field in config_fields()}
    for key, names in (("loss", LOSSES.names()), ("detector", DETECTORS.names())):
        fields[key] = fields[key]._replace(help=f"{fields[key].help}: {', '.join(names)}")
    common = parser.add_argument_group("common options")
    _add_settings(common, [fields.pop(key) for key in ("data", "out", "loss", "detector", *SHORT_NAMES)])
    common.add_argument("--recipe", help=f"settings to start from: {', '.join(recipe_names())}, or a .yaml file")
    _add_shorthands(common)
    run = parser.add_argument_group("run")
    run.add_argument("--resume", action="store_true", help="resume the run in --out; a larger --steps extends it")
    run.add_argument("--print-config", action="store_true", help="print all settings and exit")
    for name in dict.fromkeys(field.group for field in fields.values()):
        group = parser.add_argument_group(name, type(getattr(TrainConfig(), name)).__doc__) if name else run
        _add_settings(group, [field for field in fields.values() if field.group == name])


def add_compare_options(parser: Parser) -> None:
    """Adds the settings that all rows of a comparison share; the help shows only those with a short name."""
    text = "All other settings of aploss train are accepted as well: --batches.size 4 ..."
    group = parser.add_argument_group("settings of all rows", text)
    _add_shorthands(group)
    separate = ("criterion.options", "schedule.length")  # as in ap:delta=0.5, and --steps
    fields = [field for field in config_fields() if not field.fixed_by_comparison and field.key not in separate]
    _add_settings(group, [one for one in fields if one.group or one.key == "precision"], hidden=True)


def _add_settings(group: Any, fields: Sequence[ConfigField], *, hidden: bool = False) -> None:
    """Adds an option for each setting; only given ones reach the namespace, under their dotted keys."""
    for field in fields:
        names = [*SHORT_NAMES.get(field.key, ()), f"--{field.key.replace('_', '-')}"]
        text = SUPPRESS if hidden and len(names) == 1 else field.help.replace("%", "%%")
        group.add_argument(*names, dest=field.key, default=SUPPRESS, metavar=_metavar(field), help=text)


def _metavar(field: ConfigField) -> str:
    is_union = get_origin(field.type) in (Union, UnionType)
    kind = get_args(field.type)[0] if is_union else field.type
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    names = {int: "N", float: "X", bool: "{true,false}", dict: "MAPPING", tuple: "LIST"}
    return names.get(get_origin(kind) or kind, field.key.rpartition(".")[2].upper())


def _add_shorthands(group: Any) -> None:
    """Adds the options that change several settings; see :func:`shorthand_changes`."""
    lengths = group.add_mutually_exclusive_group()
    for unit in ("epochs", "steps"):
        lengths.add_argument(f"--{unit}", type=positive_int, metavar="N", help=f"length of the training in {unit}")
    size = "size of training images: 320, or 240x320 (height x width)"
    group.add_argument("--image-size", type=_image_size, metavar="SIZE", help=size)


def _image_size(text: str) -> int | list[int]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ArgumentTypeError(f"expected a size such as 320, or 240x320 for height x width, got {text!r}")
    return int(sides[0]) if len(sides) == 1 else [int(side) for side in sides]


def _show_recipe(parser: Parser, options: Namespace) -> None:
    """Adds the value of each setting that is not empty to its help, as it is typed, and names the recipe."""
    vars(options).pop("data", None)  # help reads no data
    recipe, changes, _ = recipe_and_changes(options)
    config = load_config(recipe, changes)
    values = {field.key: attrgetter(field.key)(config) for field in config_fields()}
    values |= {config.schedule.unit: config.schedule.length, "image_size": config.batches.image_size}
    for action in parser._actions:
        if (value := values.get(action.dest)) not in (None, "", {}, ()):
            text = value if isinstance(value, str) else json.dumps(value)
            action.help = f"{action.help} [{text.replace('%', '%%')}]"
    parser.epilog = f"Values in brackets come from the recipe {recipe} and your options.\n\n{parser.epilog}"


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
