"""Train several losses, or one with several settings, under the same conditions and compare them over seeds.

For each seed all rows have the same initial weights, order of the data and schedule. Runs are kept in a cache: adding
a loss or a seed later costs only that, and an interrupted comparison goes on where it was when the same command is
given again.
"""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from aploss.cli.command import Command, add_comparison_options, require_at_least, run_comparison, shared_settings
from aploss.cli.options import LONG_FORMS, add_familiar, familiar_changes
from aploss.detectors.build import DETECTORS
from aploss.errors import ConfigError
from aploss.losses.traits import LOSSES
from aploss.training.recipes import load_config, merge, recipe_names

EXAMPLES = """
  aploss compare ap focal
  aploss compare --losses ap,focal,ce-ohem,auc --seeds 3 --tune
  aploss compare --losses ap,focal --tune --tune-over criterion.box_weight=1,3 --tune-over focal:gamma=1,2
  aploss compare --losses ap,focal --data path/to/bccd --recipe bccd-cpu --steps 500
  aploss compare --losses ap,focal --seeds 5 --max-minutes 60     goes on when given again
  aploss compare --losses ap,rank-sort --batches.size 4 --optimizer.weight-decay 0.05
  aploss compare --losses ap,ap:delta=0.5,focal:gamma=1:alpha=0.5
  aploss compare --losses ap,focal --vary optimizer.learning_rate=0.001,0.003
  aploss compare --vary batches.size=4,8 --vary criterion.box_loss=smooth-l1,giou
"""

DEFAULT = "ap,focal,ce-ohem,auc"
OWN = ("data", "detector", "device")


def _add_arguments(parser: ArgumentParser) -> None:
    """The options of the command, and the settings of a run that rows share."""
    parser.add_argument("names", nargs="*", metavar="LOSS", help="losses to compare, as --losses")
    parser.add_argument(
        "--losses",
        help=f"separated by commas, with options as ap:delta=0.5, of: {', '.join(LOSSES.names())}; by default "
        f"{DEFAULT}, or the recipe's with --vary",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="a row for each value of a setting, such as batches.size=4,8; may be repeated: all combinations",
    )
    parser.add_argument("--data", help="folder of the data set; built-in data by default")
    parser.add_argument("--detector", help=f"{', '.join(DETECTORS.names())}; the recipe's by default")
    parser.add_argument(
        "--recipe",
        help=f"settings to start from: {', '.join(recipe_names())}, or a .yaml file; by default "
        "demo for built-in data, else one for the hardware",
    )
    parser.add_argument("--seeds", default="3", help="how many, or which: 0,1,2")
    add_familiar(parser, steps="length of each training; the recipe's by default")
    parser.add_argument("--validations", type=int, default=10, help="points of the curve of AP")
    parser.add_argument("--tune", action="store_true", help="search the learning rate of each loss on validation")
    add_comparison_options(parser, trial="; --steps by default", out="runs/compare-...")


def _run(options: Namespace) -> int:
    """Trains what is missing, and prints the table and where the page is."""
    from aploss.experiments.compare import compare, comparison_plan, default_out
    from aploss.experiments.plan import Tuning, parse_list, parse_searched, parse_seeds, parse_vary

    require_at_least(1, options, "steps", "epochs", "tune_steps", "validations")
    for option in ("tune_steps", "tune_over"):
        if options[option] and not options.tune:
            raise ConfigError(f"--{option.replace('_', '-')} goes with --tune")
    if options.tune and options.lr is not None:
        raise ConfigError("--tune searches the learning rate: leave out --lr")
    if options.names and options.losses is not None:
        raise ConfigError(f"the losses are given twice: {' '.join(options.names)} and --losses {options.losses}")
    if any((Path(name) / "config.yaml").is_file() for name in options.names):
        runs = shlex.join(options.names[:2])
        raise ConfigError(f"losses are compared, not runs; two runs side by side: aploss app {runs}")
    vary, losses = parse_vary(options.vary), ",".join(options.names) or options.losses
    for key in vary:
        names = [name for name, keys in LONG_FORMS.items() if key in keys] + [key]
        if given := [f"--{name.replace('_', '-')}" for name in names if options.get(name) is not None]:
            raise ConfigError(f"{given[0]} and --vary {key} say different things: leave one out")
    recipe, changes = _recipe_and_changes(options)
    plan = comparison_plan(
        parse_list(("" if vary else DEFAULT) if losses is None else losses),
        vary=vary,
        recipe=recipe,
        seeds=parse_seeds(options.seeds),
        changes=changes,
        validations=options.validations,
        tuning=Tuning(steps=options.tune_steps, over=parse_searched(options.tune_over)) if options.tune else None,
    )
    return run_comparison(options, default_out(plan), partial(compare, plan))


def _recipe_and_changes(options: Namespace) -> tuple[str, dict[str, Any]]:
    """The recipe, given or suggested for data and machine, and what wins over it."""
    from aploss.training.machine import choose_device
    from aploss.training.splits import suggest_image_sizes, suggest_recipe

    changes = {**shared_settings(options), **{key: options[key] for key in OWN if options[key] is not None}}
    recipe = options.recipe or ("demo" if options.data in (None, "builtin") else None)
    if recipe is None:
        recipe = suggest_recipe(choose_device(options.device), options.detector)
        if options.image_size is None:
            changes = merge(suggest_image_sizes(recipe, options.data), changes)
    return recipe, merge(changes, familiar_changes(options, load_config(recipe, changes)))


COMPARE = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
