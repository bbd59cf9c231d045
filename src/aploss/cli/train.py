"""``aploss train``: train a detector on VOC, COCO, YOLO or built-in data.

Settings come from a recipe, then a config file, then the command line; later ones override earlier ones.
"""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
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
    read_yaml,
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


def add_train_arguments(parser: ArgumentParser) -> None:
    """Ten common options first, then one option for each setting of a run, in groups."""
    from aploss.detectors.detector import DETECTORS

    assert isinstance(parser, Parser)

    def show_recipe(options: Namespace) -> None:
        recipe = options.recipe or _suggest_recipe("auto", None)
        given = given_settings(options, *(field.key for field in config_fields()))
        config = load_config(recipe, nested(given))
        changes = shorthand_changes(options, config)
        show_values(parser, config_from_dict(merge(config_to_dict(config), changes)))
        parser.epilog = f"Values in brackets come from the recipe {recipe} and your options.\n\n{parser.epilog}"

    parser.before_help = show_recipe
    fields = {field.key: field for field in config_fields()}
    for key, names in (("loss", LOSSES.names()), ("detector", DETECTORS.names())):
        fields[key] = fields[key]._replace(help=f"{fields[key].help}: {', '.join(names)}")
    parser.usage = "aploss train --data PATH [--recipe NAME] [--SETTING VALUE ...]"
    common = parser.add_argument_group("common options")
    common.add_argument("path", nargs="?", metavar="PATH", help="the dataset, same as --data")
    add_settings(common, [fields.pop(key) for key in COMMON])
    common.add_argument("--recipe", help=f"settings to start from: {', '.join(recipe_names())}, or a .yaml file")
    add_shorthands(common)
    run = parser.add_argument_group("run")
    run.add_argument("--resume", action="store_true", help="resume the run in --out; a larger --steps extends it")
    run.add_argument("--config", metavar="FILE", help="YAML file of settings that override the recipe")
    run.add_argument("--print-config", action="store_true", help="print all settings and exit")
    for name in dict.fromkeys(field.group for field in fields.values()):
        group = parser.add_argument_group(name, type(getattr(TrainConfig(), name)).__doc__) if name else run
        add_settings(group, [field for field in fields.values() if field.group == name])


def run_train(options: Namespace) -> int:
    """Trains, and prints the metrics and the path of the report."""
    from aploss.training.distributed import is_main_process

    config, suggested, source = _resolve_config(options)
    if changes := shorthand_changes(options, config):
        config = config_from_dict(merge(config_to_dict(config), changes))
    if options.print_config:
        print(yaml.safe_dump(config_to_dict(config), sort_keys=False), end="")
        return 0
    if suggested is not None and not options.quiet and is_main_process():
        print(f"recipe    {suggested} (chosen for this machine): {config.detector}")
    return run_training(config, options, resume=options.resume, source=source)


def _resolve_config(options: Namespace) -> "tuple[TrainConfig, str | None, DataFormat | None]":
    """The config from recipe, file and options, or of the run to resume; the recipe and data source if found here."""
    from aploss.training.run_folder import RunFolder

    given = given_settings(options, *(field.key for field in config_fields()))
    if options.path is not None and given.setdefault("data", options.path) != options.path:
        raise ConfigError(f"two datasets given: {options.path} and --data {given['data']}")
    values = nested(given)
    if options.resume and not {"out", "data"} & {*values}:
        raise ConfigError("--resume needs the run folder: aploss train --resume --out RUN")
    if "loss" in values:
        LOSSES.get(values["loss"])  # before the data are read
    if options.config is not None:
        from_file = read_yaml(Path(options.config))
        config_from_dict(from_file, source=options.config)  # names the file in an error
        values = merge(from_file, values)
    if options.recipe is not None:
        return load_config(options.recipe, values), None, None
    if options.resume and values.get("out") is not None:
        folder = RunFolder(values["out"])
        if folder.exists or "data" not in values:
            return config_from_dict(merge(config_to_dict(folder.read_config()), values)), None, None
    return _without_recipe(values, sized=options.image_size is not None)


def _without_recipe(values: dict[str, Any], *, sized: bool) -> "tuple[TrainConfig, str, DataFormat | None]":
    """The config from a recipe chosen for machine and data; ``sized`` if the image size is given."""
    from aploss.data import find_source
    from aploss.training.splits import suggest_image_sizes

    config = config_from_dict(values)
    recipe = _suggest_recipe(config.device, values.get("detector"))
    suggested: dict[str, Any] = {}
    source = None
    if config.data and "image_size" not in values.get("batches", {}) and not sized:
        source = find_source(config.data, format=config.splits.format)
        suggested = suggest_image_sizes(recipe, source)
    return load_config(recipe, merge(suggested, values)), recipe, source


def _suggest_recipe(device: str, detector: str | None) -> str:
    from aploss.training.distributed import choose_device
    from aploss.training.splits import suggest_recipe

    return suggest_recipe(choose_device(device), detector)


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
