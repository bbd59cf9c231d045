"""``compare``: the same training with several losses, and how much they differ over seeds."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aploss.experiments.plan import VALIDATIONS, Plan, Tuning, Variant, comparison_config, data_name
from aploss.experiments.results import Results, write_results
from aploss.experiments.runner import Runner, execute
from aploss.losses.traits import LOSSES
from aploss.plotting.style import loss_label
from aploss.reports.comparison import Comparison
from aploss.training import TrainingInterruptedError
from aploss.training.distributed import start_world
from aploss.training.machine import choose_device, describe_environment

SECONDS_BETWEEN_PAGES = 20.0  # runs that are only read are quicker than that


def comparison_plan(
    losses: Sequence[str],
    *,
    recipe: str,
    seeds: Sequence[int],
    changes: dict[str, Any] | None = None,
    steps: int | None = None,
    validations: int = VALIDATIONS,
    tuning: Tuning | None = None,
) -> Plan:
    """One row for each loss, everything else the same.

    Args:
        losses: names; the first is compared with each of the others.
        recipe: settings, with those of each loss in its section ``losses``.
        seeds: initial weights, data order and augmentation of a seed are the same for all losses.
        changes: nested settings that win over the recipe, for all losses.
        steps: length of the training; the recipe's by default.
        validations: points of the curve of AP.
        tuning: search for learning rates; the recipe's by default.

    Raises:
        ConfigError: an unknown loss, or one named twice.

    Example:
        >>> plan = comparison_plan(["ap", "focal"], recipe="demo", seeds=[0, 1])
        >>> [variant.config.loss for variant in plan.variants]
        ['ap', 'focal']
    """
    variants = []
    for loss in losses:
        LOSSES.get(loss)
        config = comparison_config(recipe, {**(changes or {}), "loss": loss}, steps=steps, validations=validations)
        variants.append(Variant(name=loss, config=config))
    return Plan(variants=variants, seeds=tuple(seeds), tuning=tuning)


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
    names = [variant.name for variant in results.plan.variants]
    labels = [loss_label(name) for name in names]
    listed = ", ".join(labels[:-1]) + f" and {labels[-1]}" if len(labels) > 1 else labels[0]
    return results.comparison(
        title=f"{listed} on {data_name(results.plan.variants[0].config.data)}",
        summary="The same detector, schedule, initial weights and order of the data for each seed; only the loss "
        "differs (a softmax loss has one output more for each anchor). Measured with the weights at the end of the "
        "schedule.",
        reference=names[0] if len(names) > 1 else None,
        notes="The interval of a paired difference is that of Student's t over seeds, for each difference by itself."
        if len(results.plan.seeds) > 1
        else "One seed shows no spread: a difference may be chance.",
    )


def default_out(plan: Plan) -> Path:
    """Where a comparison goes that was given no folder.

    Example:
        >>> plan = comparison_plan(["ap", "focal"], recipe="demo", seeds=[0])
        >>> str(default_out(plan))
        'runs/compare-builtin-retinanet-tiny-ap-focal'
    """
    config = plan.variants[0].config
    losses = "-".join(variant.name for variant in plan.variants)
    return Path("runs") / f"compare-{Path(data_name(config.data)).stem}-{config.detector}-{losses}"
