"""``aploss compare``: train several losses, or one with several settings, under the same conditions over seeds.

For each seed all rows share initial weights, data order and schedule; the learning rate of each is searched first. Runs
are cached: adding a loss or a seed later trains only that, and the same command resumes an interrupted comparison.
"""

import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from aploss.cli.command import positive_int
from aploss.cli.options import add_settings, add_shorthands, given_settings, shorthand_changes
from aploss.detectors.detector import DETECTORS
from aploss.errors import ConfigError, require_packages
from aploss.losses.traits import LOSSES
from aploss.training.config import config_fields, load_config, merge, nested, recipe_names

COMPARE_EXAMPLES = """
  aploss compare ap focal --data path/to/photos --steps 500
  aploss compare --losses ap,ap:delta=0.5,focal:gamma=1:alpha=0.5 --seeds 5
  aploss compare --losses ap,focal --tune-over criterion.box_weight=1,3 --tune-over focal:gamma=1,2
  aploss compare --vary batches.size=4,8 --vary criterion.box_loss=smooth-l1,giou --no-tune
  aploss compare ap focal --seeds 3 --seeds-until-decided 10 --workers 4
  aploss compare --runs runs/a runs/b
"""

DEFAULT_LOSSES = "ap,focal,ce-ohem,auc"
# Settings with an option of their own in comparisons: --losses ap:delta=0.5, and --steps.
RATE = "optimizer.learning_rate"
SEPARATE = ("criterion.options", "schedule.length")


def add_compare_arguments(parser: ArgumentParser) -> None:
    """The options of the command, and the settings that all rows share."""
    parser.add_argument("names", nargs="*", metavar="LOSS", help="losses to compare, same as --losses")
    parser.add_argument(
        "--losses",
        help=f"comma-separated losses, with options as in ap:delta=0.5: {', '.join(LOSSES.names())}; by default "
        f"{DEFAULT_LOSSES}, or with --vary the recipe's",
    )
    vary = "setting to vary between rows; may be repeated for all combinations"
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=A,B", help=vary)
    parser.add_argument("--data", help="dataset; the built-in one by default")
    parser.add_argument("--detector", help=f"{', '.join(DETECTORS.names())}; the recipe's by default")
    recipes = ", ".join(recipe_names())
    parser.add_argument("--recipe", help=f"settings to start from: {recipes}, or a .yaml file; chosen by default")
    parser.add_argument("--seeds", default="3", help="number of seeds, or a list: 0,1,2")
    add_shorthands(parser)
    points = "validations during training; by default 10, or 5 in short runs"
    parser.add_argument("--validations", type=positive_int, metavar="N", help=points)
    tune = "search the learning rate of each loss on the validation split; the default unless it is given or varied"
    parser.add_argument("--tune", action=BooleanOptionalAction, help=tune)
    runs = "compare finished runs without training; runs that differ only in the seed share a row"
    parser.add_argument("--runs", nargs="+", metavar="DIR", help=runs)
    searched = (
        "setting to search together with the learning rate, such as criterion.box_weight=1,3, or an option of one "
        "loss, such as focal:gamma=1,2; may be repeated for all combinations"
    )
    parser.add_argument("--tune-over", action="append", default=[], metavar="[LOSS:]KEY=A,B", help=searched)
    add_comparison_options(parser, out="runs/compare-...")
    shared = [
        field
        for field in config_fields()
        if field.key == "precision" or (field.group and not field.fixed_by_comparison and field.key not in SEPARATE)
    ]
    add_settings(parser.add_argument_group("settings of all rows", "By default the recipe's."), shared)


def add_comparison_options(parser: ArgumentParser, *, out: str) -> None:
    """Options of ``compare`` and ``reproduce``: seeds, workers and output."""
    parser.add_argument("--plan", action="store_true", help="print the planned runs with their time, and exit")
    until = "add seeds until every verdict is decided, at most MAX in total; intervals are corrected for it"
    parser.add_argument("--seeds-until-decided", type=positive_int, metavar="MAX", help=until)
    parser.add_argument("--workers", type=positive_int, metavar="N", default=1, help="runs at a time on this machine")
    ray = "train on a Ray cluster: its address, or auto for the one that this machine belongs to"
    parser.add_argument("--ray", metavar="ADDRESS", help=ray)
    parser.add_argument("--cpus-per-run", type=positive_int, metavar="N", help="CPUs and threads of a run")
    parser.add_argument("--gpus-per-run", type=float, metavar="X", help="GPUs of a run; may be a share of one")
    parser.add_argument(
        "--tune-steps", type=positive_int, metavar="N", help="steps per search trial; full length by default"
    )
    parser.add_argument("--out", help=f"folder of the report and tables; by default {out}")
    parser.add_argument("--cache", help="folder of the runs; by default 'cache' next to --out")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ...")


def run_compare(options: Namespace) -> int:
    """Trains missing runs, and prints the table and the path of the report."""
    from aploss.experiments.compare import compare, compare_runs, comparison_plan, default_out
    from aploss.experiments.plan import Search, describe_plan, more_seeds, parse_list, parse_seeds, parse_settings

    if options.runs:
        require_packages("scipy")
        out = Path(options.out or "runs/compare-runs")
        compare_runs(options.runs, out)
        _show(out)
        return 0
    vary, losses = parse_settings(options.vary, "--vary"), ",".join(options.names) or options.losses
    changed = {"schedule.length": options.steps or options.epochs, "batches.image_size": options.image_size}
    for key in vary:
        if changed.get(key) or key in vars(options):
            raise ConfigError(f"--vary {key} conflicts with another option for this setting")
    tunes = _tunes(options, vary)
    recipe, changes = _recipe_and_changes(options)
    first = parse_seeds(options.seeds)
    seeds, over = more_seeds(first, options.seeds_until_decided), parse_settings(options.tune_over, "--tune-over")
    plan = comparison_plan(
        parse_list(("" if vary else DEFAULT_LOSSES) if losses is None else losses),
        vary=vary,
        recipe=recipe,
        seeds=seeds,
        first=len(first),
        changes=changes,
        validations=options.validations,
        search=Search(steps=options.tune_steps, over=over) if tunes else None,
    )
    if options.plan:
        print(describe_plan(plan, workers=options.workers))
        return 0
    if len(seeds) < 3:
        print("fewer than three seeds rarely decide anything: use --seeds 3 or more", file=sys.stderr)
    return run_comparison(options, default_out(plan), partial(compare, plan))


def _tunes(options: Namespace, vary: Mapping[str, Any]) -> bool:
    """Whether learning rates are searched; ConfigError for options that exclude each other."""
    if options.names and options.losses is not None:
        raise ConfigError(f"losses are given twice: {' '.join(options.names)} and --losses {options.losses}")
    is_given = RATE in vars(options)
    if options.tune and is_given:
        raise ConfigError("--tune searches the learning rate: leave out --lr")
    tunes: bool = not is_given and RATE not in vary if options.tune is None else options.tune
    if (options.tune_steps or options.tune_over) and not tunes:
        raise ConfigError(f"--tune-{'steps' if options.tune_steps else 'over'} requires the search for learning rates")
    return tunes


def _recipe_and_changes(options: Namespace) -> tuple[str, dict[str, Any]]:
    """The recipe, given or chosen for data and machine, and the settings that override it."""
    from aploss.data import find_source
    from aploss.training.distributed import choose_device
    from aploss.training.splits import suggest_image_sizes, suggest_recipe

    changes = nested(given_settings(options, "precision"))
    changes |= {key: value for key in ("data", "detector", "device") if (value := getattr(options, key)) is not None}
    recipe = options.recipe or ("demo" if options.data in (None, "builtin") else None)
    if recipe is None:
        recipe = suggest_recipe(choose_device(options.device), options.detector)
        if options.image_size is None:
            changes = merge(suggest_image_sizes(recipe, find_source(options.data)), changes)
    return recipe, merge(changes, shorthand_changes(options, load_config(recipe, changes)))


def run_comparison(options: Namespace, default_out: Path, work: Callable[..., Any]) -> int:
    """Trains the runs of a comparison and prints its table; after Ctrl-C, says how to resume."""
    from aploss.experiments.workers import Workers
    from aploss.training.distributed import TrainingInterruptedError, is_main_process

    require_packages("scipy")  # for the intervals at the end: report it before hours of training
    workers = Workers(
        count=options.workers,
        ray=options.ray,
        cpus=options.cpus_per_run,
        gpus=options.gpus_per_run,
        plugins=tuple(str(Path(file).resolve()) for file in options.plugin),
    )
    out = Path(options.out or default_out)
    try:
        results = work(out, cache=options.cache, workers=workers, quiet=options.quiet)
    except TrainingInterruptedError as interruption:
        if is_main_process():
            print("interrupted; all runs are saved, the same command resumes", file=sys.stderr)
        return interruption.exit_code
    if is_main_process():
        _show(out)
        if not results.complete:
            print("not finished: the same command resumes", file=sys.stderr)
    return 0


def _show(out: Path) -> None:
    """Prints the table and the path of the report."""
    print(f"{(out / 'table.md').read_text(encoding='utf-8')}\nreport: {out / 'report.html'}", flush=True)
