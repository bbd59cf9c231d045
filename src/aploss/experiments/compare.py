"""``compare``: the same training with several losses, and how much they differ over seeds.

Each run of a plan is trained once, whichever comparison asks for it: it is found again by a hash of its settings.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from filelock import FileLock

from aploss import training
from aploss.detectors.criterion import describe_loss, make_loss
from aploss.errors import ConfigError, RunError
from aploss.experiments.measures import Run
from aploss.experiments.plan import (
    LOSS_OPTIONS,
    RATE,
    VALIDATIONS,
    Plan,
    Tuning,
    Variant,
    changed,
    check_varied,
    combinations,
    comparison_config,
    data_name,
    loss_settings,
    settings_hash,
    trials_of,
    written,
)
from aploss.experiments.results import Results, Trial, write_results
from aploss.files import as_file_name
from aploss.plotting.style import loss_label
from aploss.reports.comparison import Comparison
from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig, nested
from aploss.training.distributed import World, start_world
from aploss.training.machine import choose_device, describe_environment
from aploss.training.recipes import merge
from aploss.training.run import make_detector
from aploss.training.run_folder import Summary, default_folder
from aploss.training.step import DivergedError

LONGEST_TITLE = 90  # of a page that lists its rows
SECONDS_BETWEEN_PAGES = 20.0  # runs that are only read are quicker than that


def comparison_plan(
    losses: Sequence[str],
    *,
    recipe: str,
    seeds: Sequence[int],
    vary: Mapping[str, Sequence[Any]] | None = None,
    changes: dict[str, Any] | None = None,
    steps: int | None = None,
    validations: int = VALIDATIONS,
    tuning: Tuning | None = None,
) -> Plan:
    """One row for each loss and each of the values that vary, everything else the same.

    Args:
        losses: names, with options as ``ap:delta=0.5``; the first row is compared with each of the others. None for the
            recipe's loss, where something varies.
        recipe: settings, with those of each loss in its section ``losses``.
        seeds: initial weights, data order and augmentation of a seed are the same for all rows.
        vary: dotted key of a setting → the values that rows differ in.
        changes: nested settings that win over the recipe, for all rows.
        steps: length of the training; the recipe's by default.
        validations: points of the curve of AP.
        tuning: search for learning rates; the recipe's by default.

    Raises:
        ConfigError: an unknown loss, option or setting, a value that it cannot have, or two rows that are the same.

    Example:
        >>> plan = comparison_plan(["ap", "focal"], recipe="demo", seeds=[0, 1])
        >>> [variant.config.loss for variant in plan.variants]
        ['ap', 'focal']
        >>> plan = comparison_plan(["ap:delta=2"], recipe="demo", seeds=[0], vary={"batches.size": [4, 8]})
        >>> [variant.name for variant in plan.variants]
        ['batches.size=4', 'batches.size=8']
    """
    vary, chosen = vary or {}, [loss_settings(loss) for loss in losses]
    _check_together(vary, steps, tuning)
    variants = []
    for (loss, options), values in product(chosen or [("", {})][: len(vary)], product(*vary.values())):
        varied = dict(zip(vary, values, strict=True))
        own = nested({**options, **varied} | ({"loss": loss} if loss else {}))
        config = comparison_config(recipe, merge(changes or {}, own), steps=steps, validations=validations)
        words = [f"{key}={written(value)}" for key, value in varied.items()]
        if len(chosen) > 1 or not words:
            short = {key.removeprefix(f"{LOSS_OPTIONS}."): value for key, value in options.items()}
            words.insert(0, ":".join([loss, *(f"{key}={written(value)}" for key, value in short.items())]))
        variants.append(Variant(name=" ".join(words), config=config, settings={**options, **varied}))
    plan = Plan(variants=variants, seeds=tuple(seeds), tuning=tuning)
    _check_rows(plan)
    return plan


def _check_together(vary: Mapping[str, Any], steps: int | None, tuning: Tuning | None) -> None:
    for key in vary:
        check_varied(key)
    if steps is not None and "schedule.length" in vary:
        raise ConfigError("--steps and --vary schedule.length say the same: leave one out")
    if tuning is not None and "optimizer.learning_rate" in vary:
        raise ConfigError("--tune searches the learning rate that --vary gives: leave one out")


def _check_rows(plan: Plan) -> None:
    """Refuses what could not be trained, and rows that would be the same, before anything is trained."""
    known: dict[str, str] = {}
    tried: list[Any] = []
    for variant in plan.variants:
        config = variant.config
        # With the defaults of the loss, so that ap and ap:delta=1 are the same.
        _, described = describe_loss(make_loss(config.loss, **config.criterion.options))
        options = {key: float(value) if type(value) is int else value for key, value in described.items()}
        parts = config.detector, config.loss, config.criterion, config.model  # all that a detector is made of
        if parts not in tried and any(not key.startswith(LOSS_OPTIONS) for key in variant.settings):
            make_detector(changed(config, {"model": {"weights": None}}), ("object",))
            tried.append(parts)
        hashed = settings_hash(changed(config, {"criterion": {"options": options}}))
        if known.setdefault(hashed, variant.name) != variant.name:
            raise ConfigError(f"the rows {known[hashed]} and {variant.name} have the same settings: leave one out")


def compare(plan: Plan, out: str | Path, **options: Any) -> Results:
    """Trains what the plan of a comparison lacks, and writes its page: :func:`run_plan` with the usual texts."""
    return run_plan(plan, out, comparison_text, **options)


def run_plan(
    plan: Plan,
    out: str | Path,
    page_of: Callable[[Results], Comparison],
    *,
    cache: str | Path | None = None,
    max_minutes: float | None = None,
    quiet: bool = True,
    command: str | None = None,
) -> Results:
    """Trains what a plan lacks, and writes ``report.html``, ``table.md`` and ``results.json``, anew as runs are done.

    Args:
        plan: rows, seeds and search, such as of :func:`comparison_plan`.
        out: folder of the three files.
        page_of: the page of results, also of unfinished ones; see :meth:`Results.comparison`.
        cache: folder of the runs; by default ``cache`` beside ``out``. A run that is there is not trained again,
            whichever comparison made it.
        max_minutes: stop after so many minutes; the same call goes on later.
        quiet: print nothing.
        command: shown on the page; by default that of this process.

    Returns:
        The runs and what follows from them.

    Raises:
        TrainingInterruptedError: Ctrl-C or SIGTERM; the same call goes on later.
    """
    out, results = Path(out), Results(plan)
    # As a user would type it.
    command = command or re.sub(r"^(__main__|aploss)\S*", "aploss", describe_environment()["command"])
    # All runs share one meeting of the processes: torchrun's cannot be held a second time.
    with start_world(choose_device(plan.variants[0].config.device)) as world:
        written_at = time.monotonic()

        def write() -> None:
            nonlocal written_at
            if world.is_main:
                write_results(out, results, replace(page_of(results), command=command))
            written_at = time.monotonic()

        def write_now_and_then() -> None:
            if time.monotonic() - written_at > SECONDS_BETWEEN_PAGES:
                write()

        cache = out.parent / "cache" if cache is None else Path(cache)
        runner = Runner(cache, world, max_minutes=max_minutes, quiet=quiet)
        try:
            execute(results, runner, on_run=write_now_and_then)
        except training.TrainingInterruptedError:
            write()
            raise
        write()
    return results


def comparison_text(results: Results) -> Comparison:
    """The page of a plain comparison."""
    variants = results.plan.variants
    names = [variant.name for variant in variants]
    labels = [loss_label(name) for name in names]
    listed = ", ".join(labels[:-1]) + f" and {labels[-1]}" if len(labels) > 1 else labels[0]
    rows = listed if len(listed) <= LONGEST_TITLE else f"{len(labels)} rows"
    varied = any(not key.startswith(LOSS_OPTIONS) for variant in variants for key in variant.settings)
    what = "what a row names differs" if varied else "the loss differs"
    return results.comparison(
        title=f"{rows} on {data_name(variants[0].config.data)}",
        summary=f"The same detector, schedule, initial weights and order of the data for each seed; only {what} "
        "(a softmax loss has one output more for each anchor). Measured with the weights at the end of the schedule.",
        reference=names[0] if len(names) > 1 else None,
        notes="The interval of a paired difference is that of Student's t over seeds, for each difference by itself."
        if len(results.plan.seeds) > 1
        else "One seed shows no spread: a difference may be chance.",
        row_name="row" if varied else "loss",
    )


def default_out(plan: Plan) -> Path:
    """Where a comparison goes that was given no folder.

    Example:
        >>> plan = comparison_plan(["ap", "focal:gamma=1"], recipe="demo", seeds=[0])
        >>> str(default_out(plan))
        'runs/compare-builtin-retinanet-tiny-ap-focal-gamma1'
    """
    config = plan.variants[0].config
    rows = as_file_name("-".join(variant.name for variant in plan.variants))
    return Path("runs") / f"compare-{Path(data_name(config.data)).stem}-{config.detector}-{rows}"


# --- the runs ---------------------------------------------------------------------------------


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

    All comparisons share the folder ``cache``; ``max_minutes`` is the time for all runs together.
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
