"""Trains the runs of a plan, each once: a run is found again by a hash of its settings."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from filelock import FileLock

from aploss import training
from aploss.errors import ConfigError, RunError
from aploss.experiments.measures import Run
from aploss.experiments.plan import (
    RATE,
    Tuning,
    Variant,
    changed,
    combinations,
    nested,
    settings_hash,
    trials_of,
    written,
)
from aploss.experiments.results import Results, Trial
from aploss.files import as_file_name
from aploss.plotting.style import loss_label
from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig
from aploss.training.distributed import World
from aploss.training.run_folder import Summary, default_folder
from aploss.training.step import DivergedError


class OutOfTimeError(Exception):
    """The time limit of a comparison is reached; what was trained is saved."""


def cache_folder(config: TrainConfig, cache: Path, settings: Mapping[str, Any] | None = None) -> Path:
    """Where a run is kept: a readable name, with the settings that its row is about, and the hash of them all.

    The hash alone finds a run again: one that is there keeps the name that another comparison gave it.
    """
    hashed = settings_hash(config)
    found = sorted(cache.glob(f"*-{hashed}"))
    name, _, seed = default_folder(config).name.rpartition("-seed")
    about = "-".join(key.rpartition(".")[2] + written(value) for key, value in (settings or {}).items())
    words = filter(None, [name, as_file_name(about), f"seed{seed}", hashed])
    return found[0] if found else cache / "-".join(words)


class Runner:
    """Trains what is not there yet, goes on with what is unfinished, reads what is done.

    Args:
        cache: folder of all runs, shared by all comparisons.
        world: the processes that train together.
        max_minutes: time for all runs together.
        quiet: print nothing.
    """

    def __init__(self, cache: Path, world: World, *, max_minutes: float | None, quiet: bool) -> None:
        self.cache, self.world, self.quiet = cache, world, quiet
        self._end = None if max_minutes is None else time.monotonic() + 60 * max_minutes

    def say(self, line: str) -> None:
        """Prints what is going on."""
        if self.world.is_main and not self.quiet:
            print(line, flush=True)

    def run(self, config: TrainConfig, variant: Variant) -> Run:
        """A finished run of a row, trained if need be, in a folder that is chosen here; its measure watches it.

        Raises:
            OutOfTimeError: the time limit is reached.
            TrainingInterruptedError: Ctrl-C or SIGTERM; everything is saved.
            RunError: it cannot be trained. A run that diverged is no error: it has no summary.
        """
        folder = self.world.on_main(lambda: cache_folder(config, self.cache, variant.settings))
        file = folder / "summary.json"
        with self._one_at_a_time(folder):
            # Several processes must agree, though perhaps only one sees the files: train() does.
            if self.world.size == 1 and file.is_file():
                summary = Summary.read(file)
                if summary.stopped_by != "minutes":  # by an earlier time limit: not finished
                    return Run(config=config, folder=folder, summary=summary)
            limited = replace(config, out=str(folder), max_minutes=self._limit(folder))
            observer = variant.measure.observer(config, folder)
            try:
                summary = training.train(limited, resume=True, quiet=self.quiet, on_progress=observer)
            except DivergedError as error:  # too high a learning rate, perhaps
                return Run(config=config, folder=folder, summary=None, failure=str(error))
        if summary.stopped_by == "minutes":
            raise OutOfTimeError
        return Run(config=config, folder=folder, summary=summary)

    def _limit(self, folder: Path) -> float | None:
        """The minutes of training, earlier ones included, after which a run has to stop."""
        if self._end is None:
            return None
        left = (self._end - time.monotonic()) / 60
        if left <= 0 and self.world.size == 1:
            raise OutOfTimeError
        rows = read_json_lines(folder / "metrics.jsonl")
        spent = rows[-1]["seconds"] / 60 if rows else 0.0
        return spent + max(left, 0.0)

    @contextmanager
    def _one_at_a_time(self, folder: Path) -> Iterator[None]:
        """Waits while another comparison trains the same run."""
        if not self.world.is_main:
            yield
            return
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            held = FileLock(folder.with_name(f".{folder.name}.lock")).acquire()
        except OSError as error:
            raise RunError(f"runs cannot be kept in {folder.parent}: {error.strerror}") from error
        with held:
            yield


def execute(results: Results, runner: Runner, *, on_run: Callable[[], Any]) -> None:
    """Trains all runs of a plan that the cache does not have, into ``results``, and calls ``on_run`` after each.

    Learning rates come first, then every row with the first seed, the second, ...: an unfinished comparison has whole
    pairs. The results are not ``complete`` where the runner ran out of time.

    Raises:
        TrainingInterruptedError: Ctrl-C or SIGTERM; everything is saved.
    """
    try:
        if results.plan.tuning is not None:
            _tune(results, runner, results.plan.tuning)
        pairs = product(results.plan.seeds, results.plan.variants)
        for number, (seed, variant) in enumerate(pairs, start=1):
            runner.say(f"run {number} of {results.total}: {loss_label(variant.name)}, seed {seed}")
            results.runs[variant.name, seed] = runner.run(replace(variant.config, seed=seed), variant)
            on_run()
    except OutOfTimeError:
        runner.say("the time is over; the same command goes on from here")


def _tune(results: Results, runner: Runner, tuning: Tuning) -> None:
    """Gives every row of the plan the settings that did best on its validation split."""
    plan, chosen = results.plan, []
    total = sum(len(combinations(variant, tuning)) for variant in plan.variants)
    for variant in plan.variants:
        best = Trial(row=variant.name, learning_rate=variant.config.optimizer.learning_rate, score=None)
        trials = zip(combinations(variant, tuning), trials_of(variant, tuning, plan.seeds[0]), strict=True)
        for settings, config in trials:
            rate = settings.pop(RATE)
            words = [f"learning rate {rate:.3g}", *(f"{key} {value}" for key, value in settings.items())]
            runner.say(f"trial {len(results.trials) + 1} of {total}: {loss_label(variant.name)}, {', '.join(words)}")
            run = runner.run(config, replace(variant, settings={**variant.settings, **settings}))
            score = variant.measure.score(run) if run.summary else None
            if score is None and run.summary:
                raise ConfigError(
                    "learning rates can only be searched with a validation split: name one with "
                    "--splits.validation, or leave out --tune"
                )
            trial = Trial(row=variant.name, learning_rate=rate, score=score, settings=settings)
            results.trials.append(trial)
            if score is not None and (best.score is None or score > best.score):
                best = trial
        config = changed(variant.config, nested({RATE: best.learning_rate, **best.settings}))
        chosen.append(replace(variant, config=config, tuned=best.settings))
    results.plan = replace(plan, variants=chosen)
