"""``aploss compare`` and ``aploss reproduce``: losses, settings or a table of the paper, compared over seeds.

For each seed all rows share initial weights, data order and schedule; the learning rate of each is searched first. Runs
are cached: adding a loss or a seed later trains only that, and the same command resumes an interrupted comparison.

``reproduce`` shows the effect of the paper on the built-in data (or --data) in minutes; the paper's own scale uses
every setting of the paper and is for GPUs.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aploss.cli.options import add_settings, add_shorthands, given_settings, positive_int, shorthand_changes
from aploss.detectors.detector import DETECTORS
from aploss.errors import ConfigError, require_packages
from aploss.experiments.paper import EPOCH_IMAGES, REPRODUCTIONS
from aploss.losses.traits import LOSSES
from aploss.training.config import config_fields, load_config, merge, nested, recipe_names

COMPARE_EXAMPLES = """
  aploss compare ap focal --data path/to/photos --steps 500
  aploss compare ap ap:delta=0.5 focal:gamma=1:alpha=0.5 --seeds 5
  aploss compare ap focal --tune-over criterion.box_weight=1,3 --tune-over focal:gamma=1,2
  aploss compare --vary batches.size=4,8 --vary criterion.box_loss=smooth-l1,giou --no-tune
  aploss compare ap focal --seeds 3 --seeds-until-decided 10 --workers 4
  aploss compare --runs runs/a runs/b
"""
REPRODUCE_EXAMPLES = """
  aploss reproduce table2
  aploss reproduce table2 --data path/to/bccd --steps 1000 --seeds 5
  aploss reproduce table3 --scale paper --benchmark coco --data coco/ --plan
  aploss reproduce table2 --seeds-until-decided 10 --workers 2
  aploss reproduce table2 --scale paper --data VOCdevkit --workers 4 --gpus-per-run 1
"""

DEFAULT_LOSSES = ("ap", "focal", "ce-ohem", "auc")
RATE = "optimizer.learning_rate"
# Settings with an option of their own in comparisons: ap:delta=0.5, and --steps.
SEPARATE = ("criterion.options", "schedule.length")


def add_compare_arguments(parser: ArgumentParser) -> None:
    """The options of the command, and the settings that all rows share."""
    add = parser.add_argument
    losses = (
        f"losses to compare, with options as in ap:delta=0.5: {', '.join(LOSSES.names())}; by default "
        f"{' '.join(DEFAULT_LOSSES)}, or with --vary the recipe's"
    )
    add("losses", nargs="*", metavar="LOSS", help=losses)
    vary = "setting to vary between rows; may be repeated for all combinations"
    add("--vary", action="append", default=[], metavar="KEY=A,B", help=vary)
    add("--data", help="dataset; the built-in one by default")
    add("--detector", help=f"{', '.join(DETECTORS.names())}; the recipe's by default")
    add("--recipe", help=f"settings to start from: {', '.join(recipe_names())}, or a .yaml file; chosen by default")
    add("--seeds", default="3", help="number of seeds, or a list: 0,1,2")
    add_shorthands(parser)
    add("--validations", type=positive_int, metavar="N", default=5, help="points of the curve of AP")
    runs = "compare finished runs without training; runs that differ only in the seed share a row"
    add("--runs", nargs="+", metavar="DIR", help=runs)
    searched = (
        "setting to search together with the learning rate, such as criterion.box_weight=1,3, or an option of one "
        "loss, such as focal:gamma=1,2; may be repeated for all combinations"
    )
    add("--tune-over", action="append", default=[], metavar="[LOSS:]KEY=A,B", help=searched)
    _add_shared_options(parser, out="runs/compare-...")
    shared = [
        field
        for field in config_fields()
        if field.key == "precision" or (field.group and not field.fixed_by_comparison and field.key not in SEPARATE)
    ]
    add_settings(parser.add_argument_group("settings of all rows", "By default the recipe's."), shared)


def add_reproduce_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("name", choices=list(REPRODUCTIONS), help="table or figure")
    add("--scale", choices=["small", "paper"], default="small", help="minutes on a CPU, or the paper's")
    benchmark = "dataset of the paper; voc12 is VOC 2012 test, trained on 07++12"
    add("--benchmark", choices=list(EPOCH_IMAGES), default="voc", help=benchmark)
    add("--data", help="dataset; built-in by default at small scale")
    add("--recipe", help="settings at small scale; by default demo for built-in data, else bccd-cpu")
    add("--seeds", help="number of seeds, or a list: 0,1,2; by default 3 at small scale, else 1")
    add("--steps", type=positive_int, metavar="N", help="length of each training at small scale")
    add("--yes", action="store_true", help="start the paper's scale even on a CPU")
    _add_shared_options(parser, out="runs/NAME-SCALE-DATA")


def _add_shared_options(parser: ArgumentParser, *, out: str) -> None:
    """Seeds, workers, search and output."""
    add = parser.add_argument
    add("--plan", action="store_true", help="print the planned runs with their time, and exit")
    until = "add seeds until every verdict is decided, at most MAX in total; intervals are corrected for it"
    add("--seeds-until-decided", type=positive_int, metavar="MAX", help=until)
    add("--workers", type=positive_int, metavar="N", default=1, help="runs at a time on this machine")
    ray = "train on a Ray cluster: its address, or auto for the one that this machine belongs to"
    add("--ray", metavar="ADDRESS", help=ray)
    add("--cpus-per-run", type=positive_int, metavar="N", help="CPUs and threads of a run")
    add("--gpus-per-run", type=float, metavar="X", help="GPUs of a run; may be a share of one")
    tune = "use the recipe's learning rate instead of searching one for each row; implied if it is given or varied"
    add("--no-tune", action="store_true", help=tune)
    add("--tune-steps", type=positive_int, metavar="N", help="steps per search trial")
    add("--out", help=f"folder of the report and tables; by default {out}")
    add("--cache", help="folder of the runs; by default 'cache' next to --out")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps ...")


def run_compare(options: Namespace) -> int:
    """Trains missing runs, and prints the table and the path of the report."""
    from aploss.experiments.compare import compare, compare_runs, comparison_plan, default_out
    from aploss.experiments.plan import Search, describe_plan, more_seeds, parse_seeds, parse_settings

    if options.runs:
        require_packages("scipy")
        out = Path(options.out or "runs/compare-runs")
        compare_runs(options.runs, out)
        _show(out)
        return 0
    vary = parse_settings(options.vary, "--vary")
    changed = {"schedule.length": options.steps or options.epochs, "batches.image_size": options.image_size}
    for key in vary:
        if changed.get(key) or key in vars(options):
            raise ConfigError(f"--vary {key} conflicts with another option for this setting")
    tunes = not options.no_tune and RATE not in {*vary, *vars(options)}
    if (options.tune_steps or options.tune_over) and not tunes:
        raise ConfigError(f"--tune-{'steps' if options.tune_steps else 'over'} requires the search for learning rates")
    recipe, changes = _recipe_and_changes(options)
    first = parse_seeds(options.seeds)
    seeds, over = more_seeds(first, options.seeds_until_decided), parse_settings(options.tune_over, "--tune-over")
    plan = comparison_plan(
        options.losses or ([] if vary else DEFAULT_LOSSES),
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
    return _run_comparison(options, default_out(plan), partial(compare, plan))


def _recipe_and_changes(options: Namespace) -> tuple[str, dict[str, Any]]:
    """The recipe, given or chosen for data and machine, and the settings that override it."""
    from aploss.cli.train import suggest_settings

    changes = nested(given_settings(options, "precision"))
    changes |= {key: value for key in ("data", "detector", "device") if (value := getattr(options, key)) is not None}
    recipe = options.recipe or ("demo" if options.data in (None, "builtin") else None)
    if recipe is None:
        recipe, changes, _ = suggest_settings(changes, sized=options.image_size is not None)
    return recipe, merge(changes, shorthand_changes(options, load_config(recipe, changes)))


def run_reproduce(options: Namespace) -> int:
    """Trains missing runs, and prints the table and the path of the report."""
    from aploss.experiments.plan import parse_seeds
    from aploss.experiments.reproduce import Request, check_start, default_out, describe_reproduction, reproduce

    names = ("scale", "benchmark", "data", "recipe", "steps", "tune_steps", "device")
    request = Request(
        **{name: getattr(options, name) for name in names},
        seeds=None if options.seeds is None else parse_seeds(options.seeds),
        max_seeds=options.seeds_until_decided,
        tune=not options.no_tune,
    )
    if options.plan:
        print(describe_reproduction(options.name, request, workers=options.workers))
        return 0
    check_start(request, start_anyway=options.yes)
    return _run_comparison(options, default_out(options.name, request), partial(reproduce, options.name, request))


def _run_comparison(options: Namespace, default_out: Path, work: Callable[..., Any]) -> int:
    """Trains the runs of a comparison and prints its table; after Ctrl-C, says how to resume."""
    from aploss.experiments.workers import Workers
    from aploss.training.distributed import TrainingInterruptedError

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
        print("interrupted; all runs are saved, the same command resumes", file=sys.stderr)
        return interruption.exit_code
    _show(out)
    if not results.complete:
        print("not finished: the same command resumes", file=sys.stderr)
    return 0


def _show(out: Path) -> None:
    """Prints the table and the path of the report."""
    print(f"{(out / 'table.md').read_text(encoding='utf-8')}\nreport: {out / 'report.html'}", flush=True)
