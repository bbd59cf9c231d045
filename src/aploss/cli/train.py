"""``aploss train``: train a detector on VOC, COCO, YOLO or built-in data.

Settings come from a recipe, then from the command line, which wins.
"""

import shlex
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import yaml

from aploss.cli.options import Parser, add_settings, add_shorthands, given_settings, shorthand_changes, show_values
from aploss.errors import AplossError, ConfigError
from aploss.losses.traits import LOSSES
from aploss.training.config import (
    TrainConfig,
    config_fields,
    config_from_dict,
    config_to_dict,
    load_config,
    merge,
    nested,
    recipe_names,
)

if TYPE_CHECKING:
    from aploss.data.formats import DataFormat

TRAIN_EXAMPLES = """
  aploss train --data my-photos/ --loss ap --max-minutes 30
  aploss train --recipe voc-retinanet-r50 --data VOCdevkit --epochs 20 --lr 1e-3 --out runs/voc
  aploss train --resume --out runs/voc
  aploss train --recipe demo --schedule.kind cosine --optimizer.weight-decay 0.05 --print-config
  torchrun --nproc-per-node 8 -m aploss train --recipe coco-retinanet-r50 --data coco/
"""

COMMON = ("data", "out", "loss", "detector")


def add_train_arguments(parser: Parser) -> None:
    """Ten common options first, then one option for each setting of a run, in groups."""
    from aploss.detectors.detector import DETECTORS

    def show_recipe(options: Namespace) -> None:
        values = _given(options)
        recipe = options.recipe or suggest_settings({"device": "auto"}, sized=True)[0]
        show_values(parser, _with_shorthands(options, load_config(recipe, values)))
        parser.epilog = f"Values in brackets come from the recipe {recipe} and your options.\n\n{parser.epilog}"

    parser.before_help = show_recipe
    fields = {field.key: field for field in config_fields()}
    for key, names in (("loss", LOSSES.names()), ("detector", DETECTORS.names())):
        fields[key] = fields[key]._replace(help=f"{fields[key].help}: {', '.join(names)}")
    parser.usage = "aploss train --data PATH [--recipe NAME] [--SETTING VALUE ...]"
    common = parser.add_argument_group("common options")
    add_settings(common, [fields.pop(key) for key in COMMON])
    common.add_argument("--recipe", help=f"settings to start from: {', '.join(recipe_names())}, or a .yaml file")
    add_shorthands(common)
    run = parser.add_argument_group("run")
    run.add_argument("--resume", action="store_true", help="resume the run in --out; a larger --steps extends it")
    run.add_argument("--print-config", action="store_true", help="print all settings and exit")
    for name in dict.fromkeys(field.group for field in fields.values()):
        group = parser.add_argument_group(name, type(getattr(TrainConfig(), name)).__doc__) if name else run
        add_settings(group, [field for field in fields.values() if field.group == name])


def run_train(options: Namespace) -> int:
    """Trains, and prints the metrics and the path of the report."""
    from aploss.training.distributed import is_main_process

    config, suggested, source = _resolve_config(options)
    config = _with_shorthands(options, config)
    if options.print_config:
        print(yaml.safe_dump(config_to_dict(config), sort_keys=False), end="")
        return 0
    if suggested and not options.quiet and is_main_process():
        print(f"recipe    {suggested} (chosen for this machine): {config.detector}")
    return run_training(config, options, resume=options.resume, source=source)


def _given(options: Namespace) -> dict[str, Any]:
    return nested(given_settings(options, *(field.key for field in config_fields())))


def _with_shorthands(options: Namespace, config: TrainConfig) -> TrainConfig:
    changes = shorthand_changes(options, config)
    return config_from_dict(merge(config_to_dict(config), changes)) if changes else config


def _resolve_config(options: Namespace) -> "tuple[TrainConfig, str, DataFormat | None]":
    """The config from recipe and options, or of the run to resume; the recipe and data source if found here."""
    from aploss.training.run_folder import RunFolder

    values = _given(options)
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


def suggest_settings(values: dict[str, Any], *, sized: bool) -> "tuple[str, dict[str, Any], DataFormat | None]":
    """Chooses a recipe for the machine, and image sizes for the data unless they are given (``sized``).

    Returns:
        The recipe, the nested values with image sizes, and the source of the data if it was opened.
    """
    from aploss.data import find_source
    from aploss.training.distributed import choose_device
    from aploss.training.splits import suggest_image_sizes, suggest_recipe

    config = config_from_dict(values)
    recipe = suggest_recipe(choose_device(config.device), values.get("detector"))
    if not config.data or sized or "image_size" in values.get("batches", {}):
        return recipe, values, None
    source = find_source(config.data, format=config.splits.format)
    return recipe, merge(suggest_image_sizes(recipe, source), values), source


def run_training(config: TrainConfig, options: Namespace, *, resume: bool, source: "DataFormat | None" = None) -> int:
    """Trains with progress, then prints the table of AP and the path of the report."""
    from aploss import training
    from aploss.training.distributed import FailedRankError, is_main_process

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
