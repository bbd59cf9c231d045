"""``compare``: trains the runs of a plan that the cache lacks, and writes the page of their differences over seeds.

The cache finds a run by a hash of its settings, so that comparisons share their runs.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from operator import attrgetter
from pathlib import Path

from aploss.errors import ConfigError
from aploss.evaluation import HEADLINE_METRICS, LOWER_IS_BETTER
from aploss.experiments.plan import LOSS_OPTIONS, Plan, Run, Search, Trial, Variant, as_typed, comparison_plan
from aploss.experiments.results import MIN_SEEDS, Results, is_decided, write_results
from aploss.experiments.workers import Job, Pool, Workers, open_pool
from aploss.files import as_file_name
from aploss.losses.traits import traits_of
from aploss.plotting.plots import loss_label
from aploss.reports.comparison import Comparison
from aploss.training.config import RESUMABLE_KEYS, differing_keys
from aploss.training.run_folder import RunFolder, Summary

__all__ = ["Workers", "compare", "compare_runs", "comparison_plan", "default_out"]

MAX_PAIRED_ROWS = 4  # with more rows only the first is compared with the others
MAX_WIDENINGS = 4  # of the grid of a search
PAGE_INTERVAL_S = 20.0  # cached runs are read faster than a page is drawn


def compare(
    plan: Plan,
    out: str | Path,
    page_of: Callable[[Results], Comparison] | None = None,
    *,
    cache: str | Path | None = None,
    workers: Workers | None = None,
    quiet: bool = True,
) -> Results:
    """Trains the missing runs of a plan, and writes the page, the tables and all numbers as they finish.

    Args:
        plan: rows, seeds and search, as from :func:`~aploss.experiments.plan.comparison_plan`.
        out: folder of ``report.html``, ``table.md``, ``table.tex``, ``results.csv`` and ``results.json``.
        page_of: makes the page of (possibly unfinished) results; by default the page of a plain comparison.
        cache: folder of the runs; by default ``cache`` beside ``out``.
        workers: runs at a time and their resources; by default one at a time in this process.
        quiet: print nothing.

    Returns:
        The runs and the statistics over them; not ``complete`` if a run failed too often on Ray.

    Raises:
        TrainingInterruptedError: Ctrl-C or SIGTERM; the same call resumes later.
    """
    out, results, page_of = Path(out), Results(plan), page_of or comparison_page
    cache = out.parent / "cache" if cache is None else Path(cache)
    with open_pool(workers or Workers(), cache, plan.variants[0].config.device, quiet=quiet) as pool:
        written_at = time.monotonic()
        try:
            for _ in _train(results, pool, page_of):
                if time.monotonic() - written_at >= PAGE_INTERVAL_S:
                    write_results(out, results, page_of(results))
                    written_at = time.monotonic()
        finally:  # also after Ctrl-C
            write_results(out, results, page_of(results))
    return results


def _train(results: Results, pool: Pool, page_of: Callable[[Results], Comparison]) -> Iterator[Run]:
    """Trains a plan into ``results`` and yields each run as it finishes.

    Learning rates come first, then every row with the first seed, the second, ...: an unfinished comparison has whole
    pairs. With several looks, more seeds follow until every verdict is decided.
    """
    if results.plan.search is not None and not (yield from _tune(results, results.plan.search, pool)):
        return
    for look in results.plan.looks:
        results.seeds = results.plan.seeds[:look]
        jobs = [
            Job(variant=one, config=replace(one.config, seed=seed), label=f"{loss_label(one.name)}, seed {seed}")
            for seed in results.seeds
            for one in results.plan.variants
            if (one.name, seed) not in results.runs
        ]
        for job, run in pool(jobs):
            results.runs[job.variant.name, job.config.seed] = run
            yield run
        if not results.complete or all(map(is_decided, page_of(results).verdicts)):
            return


def _tune(results: Results, search: Search, pool: Pool) -> Generator[Run, None, bool]:
    """Tries all rows at the same time, widens grids whose best value is at an end, and takes the best settings.

    Returns whether all trials are finished.
    """
    rows, trials = results.plan.variants, results.trials
    for _ in range(1 + MAX_WIDENINGS):
        jobs = [job for row in rows for job in _trial_jobs(search, row, results)]
        missing = len(jobs)
        for job, run in pool(jobs):
            score = job.variant.measure.score(run) if run.summary else None
            if score is None and run.summary:
                raise ConfigError("the search needs a validation split: set --splits.validation, or add --no-tune")
            trials.append(Trial(row=job.variant.name, settings=job.settings, score=score))
            missing -= 1
            yield run
        if missing:
            return False
        if not jobs:
            break
    results.at_end = [row.name for row in rows if search.next_trials(row, trials)]
    results.plan = replace(results.plan, variants=[search.chosen(row, trials) for row in rows])
    return True


def _trial_jobs(search: Search, row: Variant, results: Results) -> list[Job]:
    """The next trials of a row; settings with which it cannot be trained end its grid."""
    jobs = []
    for settings in search.next_trials(row, results.trials):
        try:
            config = search.trial_config(row, settings, results.plan.seeds[0])
        except ConfigError:
            results.trials.append(Trial(row=row.name, settings=settings, score=None))
            continue
        words = [f"{key.rpartition('.')[2].replace('_', ' ')} {as_typed(one)}" for key, one in settings.items()]
        label = f"{loss_label(row.name)}, trial of {', '.join(words)}"
        jobs.append(Job(variant=row, config=config, label=label, settings=settings))
    return jobs


def comparison_page(results: Results) -> Comparison:
    """The page of a plain comparison."""
    variants, names = results.plan.variants, [variant.name for variant in results.plan.variants]
    varied = any(not key.startswith(LOSS_OPTIONS) for variant in variants for key in variant.settings)
    more_outputs = any(traits_of(variant.config.loss).softmax for variant in variants)
    pairs = [*combinations(names, 2)] if len(names) <= MAX_PAIRED_ROWS else [(names[0], one) for one in names[1:]]
    notes = ["Intervals are Student's t over paired seeds, for each difference by itself."]
    if results.plan.search is None:
        notes.append("Learning rates were not searched: every row has its own from the recipe or the command.")
    if len(results.seeds) < MIN_SEEDS:
        notes.append(f"Fewer than {MIN_SEEDS} seeds decide little: a difference may be chance.")
    return results.comparison(
        title=f"{', '.join(map(loss_label, names))} on {Path(variants[0].config.data).resolve().name}",
        summary="The same detector, schedule, initial weights and data order for each seed; only "
        f"{'the settings in the row names differ' if varied else 'the loss differs'}"
        f"{' (a softmax loss has one more output per anchor)' if more_outputs else ''}. "
        "Measured with the weights at the end of the schedule.",
        metrics=(*HEADLINE_METRICS, *LOWER_IS_BETTER),
        verdicts=[results.pair_verdict(*pair) for pair in pairs],
        reference=names[0] if len(variants) > 1 else None,
        notes="\n\n".join(notes),
        row_name="row" if varied else "loss",
        curve_label="AP on validation",
    )


def default_out(plan: Plan) -> Path:
    """The default folder of a comparison."""
    config = plan.variants[0].config
    rows = as_file_name("-".join(variant.name for variant in plan.variants))
    return Path("runs") / f"compare-{Path(config.data).resolve().stem}-{config.detector}-{rows}"


def compare_runs(folders: Sequence[str | Path], out: str | Path) -> Results:
    """Puts finished runs on a page without training; runs that differ in the seed alone are a row.

    Args:
        folders: run folders with the same data.
        out: folder of the page, as for :func:`compare`.

    Raises:
        RunError: a folder is not a finished run.
        ConfigError: the runs were measured on different data, or two have the same settings and seed.
    """
    runs = []
    for path in map(Path, folders):
        config = RunFolder(path).read_config()
        runs.append(Run(config=config, folder=path, summary=Summary.read(path / "summary.json")))
    measured = {(str(Path(run.config.data).resolve()), run.summary.split) for run in runs if run.summary}
    if len(measured) != 1:
        raise ConfigError(f"--runs: compare runs on the same data and split, got {sorted(map(str, measured))}")
    keys = {key for run in runs for key in differing_keys(runs[0].config, run.config)}
    keys -= {"seed", "loss", *RESUMABLE_KEYS}
    rows: dict[str, Variant] = {}
    found: dict[tuple[str, int], Run] = {}
    for run in runs:
        settings = {key: attrgetter(key)(run.config) for key in sorted(keys)}
        name = " ".join([run.config.loss, *(f"{key}={as_typed(value)}" for key, value in settings.items())])
        rows.setdefault(name, Variant(name=name, config=run.config, settings=settings))
        if (other := found.setdefault((name, run.config.seed), run)) is not run:
            raise ConfigError(f"--runs: {other.folder} and {run.folder} have the same settings and seed: leave one out")
    plan = Plan(variants=[*rows.values()], seeds=sorted({run.config.seed for run in runs}))
    results = Results(plan, runs=found, given=True)
    page = replace(comparison_page(results), summary="Finished runs, each measured with its own choice of checkpoint.")
    write_results(Path(out), results, page)
    return results
