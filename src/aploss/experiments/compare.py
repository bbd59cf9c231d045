"""``compare``: the same training with several losses, and how much they differ over seeds."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from aploss.detectors.criterion import describe_loss, make_loss
from aploss.errors import ConfigError
from aploss.experiments.plan import (
    LOSS_OPTIONS,
    VALIDATIONS,
    Plan,
    Tuning,
    Variant,
    changed,
    check_varied,
    comparison_config,
    data_name,
    loss_settings,
    nested,
    settings_hash,
    written,
)
from aploss.experiments.results import Results, write_results
from aploss.experiments.runner import Runner, execute
from aploss.files import as_file_name
from aploss.plotting.style import loss_label
from aploss.reports.comparison import Comparison
from aploss.training import TrainingInterruptedError
from aploss.training.distributed import start_world
from aploss.training.machine import choose_device, describe_environment
from aploss.training.recipes import merge
from aploss.training.run import make_detector

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
    for variant in plan.variants:
        config = variant.config
        # With the defaults of the loss, so that ap and ap:delta=1 are the same.
        _, described = describe_loss(make_loss(config.loss, **config.criterion.options))
        options = {key: float(value) if type(value) is int else value for key, value in described.items()}
        if any(not key.startswith(LOSS_OPTIONS) for key in variant.settings):
            make_detector(changed(config, {"model": {"weights": None}}), ("object",))
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
        except TrainingInterruptedError:
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
