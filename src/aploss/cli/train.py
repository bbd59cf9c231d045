"""Train a detector on VOC, COCO, YOLO or built-in data.

Settings come from a recipe, then a config file, then the command line; each wins over what comes before it.
``--print-config`` shows the result without training.
"""

import shlex
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import SUPPRESS, ArgumentParser, Namespace

from aploss.cli.command import Command, newest_run, run_training
from aploss.cli.options import LONG_FORMS, add_familiar, familiar_changes
from aploss.errors import ConfigError
from aploss.losses.traits import LOSSES
from aploss.training.config import TrainConfig, config_fields, config_from_dict, config_to_dict
from aploss.training.recipes import load_config, merge, read_yaml, recipe_names

EXAMPLES = """
  aploss train --data builtin
  aploss train --data my-photos/ --loss ap --max-minutes 30
  aploss train --data my-photos/ --epochs 20 --lr 1e-3 --batch-size 4 --image-size 320
  aploss train --recipe bccd-cpu --data bccd/ --seed 1 --tracker mlflow
  aploss train --recipe voc-retinanet-r50 --data VOCdevkit --loss focal --out runs/voc-focal
  aploss train --resume --out runs/voc-focal
  aploss train --recipe demo --schedule.kind cosine --optimizer.weight-decay 0.05 --print-config
  torchrun --nproc-per-node 8 -m aploss train --recipe coco-retinanet-r50 --data coco/
"""

OWN_OPTIONS = ("path", "recipe", "config", "resume", "quiet", "print_config", "plugin", "threads", "debug", *LONG_FORMS)


def _add_arguments(parser: ArgumentParser) -> None:
    """One option for each setting of a run, after those of the command."""
    from aploss.detectors.build import DETECTORS

    parser.usage = "aploss train --data PATH [--recipe NAME] [--SETTING VALUE ...]"
    parser.add_argument("path", nargs="?", help="the data, as --data")
    parser.add_argument("--recipe", help=f"settings to start from: {', '.join(recipe_names())}, or a .yaml file")
    parser.add_argument("--config", help="YAML file of settings that win over the recipe")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--print-config", action="store_true", help="show all settings and stop")
    add_familiar(parser)
    choices = {"loss": LOSSES.names(), "detector": DETECTORS.names()}
    for setting in config_fields():
        default = "" if setting.default in (None, "", {}, ()) else f" (default: {setting.default})"
        names = f": {', '.join(choices[setting.key])}" if setting.key in choices else ""
        # Only what was given arrives here: a default must not win over the recipe.
        option, text = f"--{setting.key.replace('_', '-')}", setting.help + names + default
        parser.add_argument(option, type=setting.type, default=SUPPRESS, help=text)


def _run(options: Namespace) -> int:
    """Trains, and prints the numbers and where the page is."""
    from aploss.training.distributed import is_main_process

    config, suggested = _resolve_config(options)
    if changes := familiar_changes(options, config):
        config = config_from_dict(merge(config_to_dict(config), changes))
    if options.print_config:
        print(yaml.safe_dump(config_to_dict(config), sort_keys=False), end="")
        return 0
    if not config.data:
        raise ConfigError(
            "no data: give --data a folder of VOC, COCO or YOLO data, or try it with: aploss train --data builtin"
        )
    if suggested is not None and not options.quiet and is_main_process():
        size = config.batches.image_size
        shape = f"{size}x{size}" if isinstance(size, int) else f"{size[1]}x{size[0]}"
        print(f"recipe    {suggested}, as none was given: {config.detector} on {shape} pixels")
    return run_training(config, options, resume=options.resume, shows_result=not options.quiet)


def _given_data(options: Namespace) -> dict[str, str]:
    """The data given as a bare word: ``aploss train PATH``."""
    path = options.path
    if path is None:
        return {}
    if options.get("data") not in (None, path):
        raise ConfigError(f"two data sets, {path} and --data {options.data}: give one of them")
    for run in (Path(path), *Path(path).parents[1:2]):  # or a checkpoint of it
        if (run / "config.yaml").is_file():
            again = shlex.quote(run.as_posix())
            raise ConfigError(f"{path} is a run, not data; go on with it: aploss train --resume --out {again}")
    if Path(path).suffix in (".yaml", ".yml") and not Path(path).exists():
        raise ConfigError(f"{path}: no such file; name a folder of data, or try it with: aploss train --data builtin")
    if not Path(path).exists() and path in recipe_names():
        data = options.get("data") or ("builtin" if path == "demo" else "PATH")
        raise ConfigError(f"{path} is a recipe, not data: aploss train --recipe {path} --data {data}")
    return {"data": path}


def _resolve_config(options: Namespace) -> tuple[TrainConfig, str | None]:
    """The config of recipe, file and options, or of the run that is resumed; and the recipe, where none was given."""
    from aploss.training.run_folder import RunFolder

    values = {key: value for key, value in options.as_dict().items() if key not in OWN_OPTIONS}
    values |= _given_data(options)
    if options.resume and not {"out", "data"} & {*values}:
        raise ConfigError(f"--resume goes on with a run: aploss train --resume --out {newest_run()}")
    if "loss" in values:
        LOSSES.get(values["loss"])  # before the data are read
    if options.config is not None:
        from_file = read_yaml(Path(options.config))
        config_from_dict(from_file, source=options.config)  # a mistake is reported as the file's
        values = merge(from_file, values)
    if options.recipe is not None:
        return load_config(options.recipe, values), None
    if options.resume and values.get("out") is not None:
        folder = RunFolder(values["out"])
        if folder.exists or "data" not in values:
            return config_from_dict(merge(config_to_dict(folder.read_config()), values)), None
    return _without_recipe(values, sized=options.image_size is not None)


def _without_recipe(values: dict[str, Any], *, sized: bool) -> tuple[TrainConfig, str]:
    """The config with a recipe for machine and data; ``sized`` where the size of images is given."""
    from aploss.training.machine import choose_device
    from aploss.training.splits import suggest_image_sizes, suggest_recipe

    config = config_from_dict(values)
    recipe = suggest_recipe(choose_device(config.device), values.get("detector"))
    suggested: dict[str, Any] = {}
    if config.data and "image_size" not in values.get("batches", {}) and not sized:
        suggested = suggest_image_sizes(recipe, config.data, format=config.splits.format)
    return load_config(recipe, merge(suggested, values)), recipe


TRAIN = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run, quiet="show only what goes wrong")
