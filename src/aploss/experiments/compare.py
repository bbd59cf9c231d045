"""``compare``: trains the runs of a plan that the cache lacks, and writes the page of their differences over seeds.

The cache finds a run by a hash of its settings, so that comparisons share their runs.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from filelock import FileLock

from aploss import training
from aploss.errors import ConfigError, RunError
from aploss.experiments.measures import Run
from aploss.experiments.plan import (
    LOSS_OPTIONS,
    RATE,
    Plan,
    Tuning,
    Variant,
    as_typed,
    changed,
    combinations,
    comparison_plan,
    data_name,
    settings_hash,
    trials_of,
)
from aploss.experiments.results import Results, Trial, write_results
from aploss.files import as_file_name
from aploss.plotting.style import loss_label
from aploss.reports.comparison import Comparison
from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig, nested
from aploss.training.distributed import choose_device, on_main, start_accelerator
from aploss.training.run_folder import Summary, default_folder, describe_environment
from aploss.training.step import DivergedError

__all__ = ["Runner", "cache_folder", "compare", "comparison_plan", "default_out"]

MAX_LISTED = 90  # characters of a title that lists the rows
PAGE_INTERVAL_S = 20.0  # cached runs are read faster than a page is drawn


def compare(
    plan: Plan,
    out: str | Path,
    page_of: Callable[[Results], Comparison] | None = None,
    *,
    cache: str | Path | None = None,
    max_minutes: float | None = None,
    quiet: bool = True,
    command: str | None = None,
) -> Results:
    """Trains the missing runs of a plan and writes ``report.html``, ``table.md`` and ``results.json`` as they finish.

    Args:
        plan: rows, seeds and search, as from :func:`~aploss.experiments.plan.comparison_plan`.
        out: folder of the three files.
        page_of: makes the page of (possibly unfinished) results; by default the page of a plain comparison.
        cache: folder of the runs; by default ``cache`` beside ``out``.
        max_minutes: time limit; the same call resumes later.
        quiet: print nothing.
        command: shown on the page; by default the command of this process.

    Returns:
        The runs and the statistics over them.

    Raises:
        TrainingInterruptedError: Ctrl-C or SIGTERM; the same call resumes later.
    """
    out, results = Path(out), Results(plan)
    # As a user would type it.
    command = command or re.sub(r"^(__main__|aploss)\S*", "aploss", describe_environment()["command"])
    # One process group for all runs: torchrun's rendezvous works only once.
    with start_accelerator(choose_device(plan.variants[0].config.device)) as accelerator:
        written_at = time.monotonic()

        def write() -> None:
            nonlocal written_at
            if accelerator.is_main_process:
                write_results(out, results, replace((page_of or comparison_page)(results), command=command))
            written_at = time.monotonic()

        cache = out.parent / "cache" if cache is None else Path(cache)
        runner = Runner(cache, accelerator, max_minutes=max_minutes, quiet=quiet)
        try:
            for _ in runner.execute(results):
                if time.monotonic() - written_at >= PAGE_INTERVAL_S:
                    write()
        except training.TrainingInterruptedError:
            write()
            raise
        write()
    return results


def comparison_page(results: Results) -> Comparison:
    """The page of a plain comparison."""
    variants = results.plan.variants
    labels = [loss_label(variant.name) for variant in variants]
    listed = ", ".join(labels[:-1]) + f" and {labels[-1]}" if len(labels) > 1 else labels[0]
    rows = listed if len(listed) <= MAX_LISTED else f"{len(labels)} rows"
    varied = any(not key.startswith(LOSS_OPTIONS) for variant in variants for key in variant.settings)
    return results.comparison(
        title=f"{rows} on {data_name(variants[0].config.data)}",
        summary="The same detector, schedule, initial weights and data order for each seed; only "
        f"{'the settings in the row names differ' if varied else 'the loss differs'} (a softmax loss has one more "
        "output per anchor). Measured with the weights at the end of the schedule.",
        reference=variants[0].name if len(variants) > 1 else None,
        notes="The interval of a paired difference is Student's t over seeds, for each difference by itself."
        if len(results.plan.seeds) > 1
        else "One seed shows no spread: a difference may be chance.",
        row_name="row" if varied else "loss",
    )


def default_out(plan: Plan) -> Path:
    """The default folder of a comparison."""
    config = plan.variants[0].config
    rows = as_file_name("-".join(variant.name for variant in plan.variants))
    return Path("runs") / f"compare-{Path(data_name(config.data)).stem}-{config.detector}-{rows}"


class OutOfTimeError(Exception):
    """The time limit of a comparison is reached; all runs are saved."""


def cache_folder(config: TrainConfig, cache: Path, settings: Mapping[str, Any] | None = None) -> Path:
    """The folder of a run: a readable name with the settings of its row, and the hash of all settings.

    Only the hash identifies a run: an existing one keeps the name that another comparison gave it.
    """
    hashed = settings_hash(config)
    found = sorted(cache.glob(f"*-{hashed}"))
    name, _, seed = default_folder(config).name.rpartition("-seed")
    about = "-".join(key.rpartition(".")[2] + as_typed(value) for key, value in (settings or {}).items())
    words = filter(None, [name, as_file_name(about), f"seed{seed}", hashed])
    return found[0] if found else cache / "-".join(words)


class Runner:
    """Trains missing runs, resumes unfinished ones and reads finished ones.

    Args:
        cache: folder of the runs, shared by all comparisons.
        accelerator: the processes that train.
        max_minutes: time limit for all runs together.
        quiet: print nothing.
    """

    def __init__(self, cache: Path, accelerator: Accelerator, *, max_minutes: float | None, quiet: bool) -> None:
        self.cache, self.accelerator, self.quiet = cache, accelerator, quiet
        self._end = None if max_minutes is None else time.monotonic() + 60 * max_minutes

    def say(self, line: str) -> None:
        """Prints a line in the main process, unless quiet."""
        if self.accelerator.is_main_process and not self.quiet:
            print(line, flush=True)

    def execute(self, results: Results) -> Iterator[Run]:
        """Trains all runs of a plan into ``results``, one at a time.

        Learning rates come first, then every row with the first seed, the second, ...: an unfinished comparison has
        whole pairs. The results are not ``complete`` if the time limit was reached.

        Raises:
            TrainingInterruptedError: Ctrl-C or SIGTERM; everything is saved.
        """
        try:
            if results.plan.tuning is not None:
                self._tune(results, results.plan.tuning)
            pairs = product(results.plan.seeds, results.plan.variants)
            for number, (seed, variant) in enumerate(pairs, start=1):
                self.say(f"run {number} of {results.total}: {loss_label(variant.name)}, seed {seed}")
                run = self.run(replace(variant.config, seed=seed), variant)
                results.runs[variant.name, seed] = run
                yield run
        except OutOfTimeError:
            self.say("time limit reached; resume with the same command")

    def _tune(self, results: Results, tuning: Tuning) -> None:
        """Replaces the plan by one whose rows have the settings with the best score on the validation split."""
        plan, chosen = results.plan, []
        total = sum(len(combinations(variant, tuning)) for variant in plan.variants)
        for variant in plan.variants:
            trials = []
            configs = trials_of(variant, tuning, plan.seeds[0])
            for settings, config in zip(combinations(variant, tuning), configs, strict=True):
                rate = settings.pop(RATE)
                words = [f"learning rate {rate:.3g}", *(f"{key} {value}" for key, value in settings.items())]
                number = len(results.trials) + 1
                self.say(f"trial {number} of {total}: {loss_label(variant.name)}, {', '.join(words)}")
                run = self.run(config, replace(variant, settings={**variant.settings, **settings}))
                score = variant.measure.score(run) if run.summary else None
                if score is None and run.summary:
                    raise ConfigError("--tune needs a validation split: set --splits.validation, or leave out --tune")
                trials.append(Trial(row=variant.name, learning_rate=rate, score=score, settings=settings))
                results.trials.append(trials[-1])
            scored = [trial for trial in trials if trial.score is not None]
            if scored:
                best = max(scored, key=attrgetter("score"))  # the first of equal ones
                config = changed(variant.config, nested({RATE: best.learning_rate, **best.settings}))
                variant = replace(variant, config=config, tuned=best.settings)
            chosen.append(variant)
        results.plan = replace(plan, variants=chosen)

    def run(self, config: TrainConfig, variant: Variant) -> Run:
        """Returns a finished run of a row, which is trained if necessary; a diverged run has no summary.

        Raises:
            OutOfTimeError: the time limit is reached.
            TrainingInterruptedError: Ctrl-C or SIGTERM; everything is saved.
            RunError: the run cannot be trained.
        """
        folder = on_main(self.accelerator, lambda: cache_folder(config, self.cache, variant.settings))
        file = folder / "summary.json"
        with self._locked(folder):
            # Several processes must agree, though perhaps only one sees the files: train() takes care of that.
            if self.accelerator.num_processes == 1 and file.is_file():
                summary = Summary.read(file)
                if summary.stopped_by != "minutes":  # stopped by an earlier time limit: not finished
                    return Run(config=config, folder=folder, summary=summary)
            limited = replace(config, out=str(folder), max_minutes=self._limit(folder))
            observer = variant.measure.observer(config, folder)
            try:
                summary = training.train(limited, resume=True, quiet=self.quiet, on_progress=observer)
            except DivergedError as error:
                return Run(config=config, folder=folder, summary=None, failure=str(error))
        if summary.stopped_by == "minutes":
            raise OutOfTimeError
        return Run(config=config, folder=folder, summary=summary)

    def _limit(self, folder: Path) -> float | None:
        """The time limit of a run in minutes, which counts earlier sessions, too."""
        if self._end is None:
            return None
        left = (self._end - time.monotonic()) / 60
        if left <= 0 and self.accelerator.num_processes == 1:
            raise OutOfTimeError
        rows = read_json_lines(folder / "metrics.jsonl")
        spent = rows[-1]["seconds"] / 60 if rows else 0.0
        return spent + max(left, 0.0)

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Waits while another comparison trains the same run."""
        if not self.accelerator.is_main_process:
            yield
            return
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            held = FileLock(folder.with_name(f".{folder.name}.lock")).acquire()
        except OSError as error:
            raise RunError(f"cannot write runs to {folder.parent}: {error.strerror}") from error
        with held:
            yield
