"""Experiments: ``aploss compare``, ``reproduce``, ``theory`` and ``bench``.

``compare`` trains with losses or settings over seeds. For each seed all rows share initial weights, data order and
schedule; the learning rate of each is searched first. Runs are cached: adding a loss or a seed later trains only that,
and the same command resumes an interrupted comparison. ``reproduce`` shows the effect of the paper on the built-in data
(or --data) in minutes; the paper's own scale uses every setting of the paper and is for GPUs.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aploss.cli.train import recipe_and_changes
from aploss.errors import ConfigError, require_packages
from aploss.experiments import compare, reproduce
from aploss.experiments.plan import RATE, Search, describe_plan, more_seeds, parse_seeds, parse_settings
from aploss.experiments.results import MIN_SEEDS
from aploss.experiments.workers import Workers
from aploss.files import write_json
from aploss.training.distributed import TrainingInterruptedError


def run_compare(options: Namespace) -> int:
    """Trains missing runs, and prints the table and the path of the report."""
    if options.runs:
        out = Path("runs/compare-runs")
        return _run_comparison(options, out, lambda out, **_: compare.compare_runs(options.runs, out))
    if not (options.losses or options.vary):
        raise ConfigError("name the losses, as in: aploss compare ap focal (--plan prints how long it takes)")
    vary, over = parse_settings(options.vary, "--vary"), parse_settings(options.tune_over, "--tune-over")
    changed = {"schedule.length": options.steps or options.epochs, "batches.image_size": options.image_size}
    for key in vary:
        if changed.get(key) or key in vars(options):
            raise ConfigError(f"--vary {key} conflicts with another option for this setting")
    tunes = not options.no_tune and RATE not in {*vary, *vars(options)}
    if (options.tune_steps or over) and not tunes:
        raise ConfigError(f"--tune-{'steps' if options.tune_steps else 'over'} requires the search for learning rates")
    recipe, changes, _ = recipe_and_changes(options, "demo" if options.data in (None, "builtin") else None)
    first = parse_seeds(options.seeds)
    plan = compare.comparison_plan(
        options.losses,
        vary=vary,
        recipe=recipe,
        seeds=more_seeds(first, options.seeds_until_decided),
        first=len(first),
        changes=changes,
        validations=options.validations,
        search=Search(steps=options.tune_steps, over=over) if tunes else None,
    )
    if options.plan:
        print(describe_plan(plan, workers=options.workers))
        return 0
    if len(plan.seeds) < MIN_SEEDS:
        print(f"fewer than {MIN_SEEDS} seeds rarely decide anything: use --seeds {MIN_SEEDS} or more", file=sys.stderr)
    return _run_comparison(options, compare.default_out(plan), partial(compare.compare, plan))


def run_reproduce(options: Namespace) -> int:
    """Trains missing runs, and prints the table and the path of the report."""
    names = ("scale", "benchmark", "data", "recipe", "steps", "tune_steps", "device")
    request = reproduce.Request(
        **{name: getattr(options, name) for name in names},
        seeds=None if options.seeds is None else parse_seeds(options.seeds),
        max_seeds=options.seeds_until_decided,
        tune=not options.no_tune,
    )
    if options.plan:
        print(reproduce.describe_reproduction(options.name, request, workers=options.workers))
        return 0
    reproduce.check_start(request, start_anyway=options.yes)
    out = reproduce.default_out(options.name, request)
    return _run_comparison(options, out, partial(reproduce.reproduce, options.name, request))


def _run_comparison(options: Namespace, default_out: Path, work: Callable[..., Any]) -> int:
    """Carries a comparison out and prints its table and the path of its report; after Ctrl-C, says how to resume."""
    require_packages("scipy")  # for the intervals at the end: report it before hours of training
    plugins = tuple(str(Path(file).resolve()) for file in options.plugin)
    limits = {"cpus": options.cpus_per_run, "gpus": options.gpus_per_run}
    workers = Workers(count=options.workers, ray=options.ray, plugins=plugins, **limits)
    out = options.folder or default_out
    try:
        results = work(out, cache=options.cache, workers=workers, quiet=options.quiet)
    except TrainingInterruptedError as interruption:
        print("interrupted; all runs are saved, the same command resumes", file=sys.stderr)
        return interruption.exit_code
    print(f"{(out / 'table.md').read_text(encoding='utf-8')}\nreport: {out / 'report.html'}", flush=True)
    if not results.complete:
        print("not finished: the same command resumes", file=sys.stderr)
    return int(not results.complete)


def run_theory(options: Namespace) -> int:
    """Runs the studies, prints their verdicts and writes their page."""
    from aploss import theory

    studies = []
    for name in theory.STUDIES if options.name == "all" else [options.name]:
        start = time.perf_counter()
        study = theory.STUDIES[name](options.seed)
        studies.append(study)
        print(f"{study.title} ({study.place}), {time.perf_counter() - start:.0f} s")
        for verdict in study.verdicts:
            print(f"  {verdict.word}: {verdict.claim}", flush=True)
    print(f"report: {theory.write_studies(studies, options.out)}", flush=True)
    return int(not all(study.holds for study in studies))


def run_bench(options: Namespace) -> int:
    """Runs the benchmarks, prints their tables and writes their results as JSON."""
    from aploss.benchmarks import BENCHMARKS

    for name in BENCHMARKS if options.what == "all" else (options.what,):
        measure, table = BENCHMARKS[name]
        show = (lambda step: None) if options.quiet else (lambda step: print(step, file=sys.stderr))
        result = measure(show, quick=options.quick)
        print(f"\n{name}\n{table(result)}", flush=True)
        write_json(options.out / f"{name}.json", result)
    if not options.quiet:
        print(f"\nresults: {options.out}", flush=True)
    return 0
