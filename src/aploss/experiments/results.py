"""The runs of a comparison and the statistics over them: rows, differences, verdicts, the page."""

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from aploss.environment import describe_environment
from aploss.evaluation import HEADLINE_METRICS, METRICS
from aploss.experiments.plan import CLASS_AP, RATE, Plan, Run, Trial, Variant, as_typed
from aploss.files import write_json, write_text
from aploss.plotting.plots import loss_label
from aploss.reports.comparison import Comparison, Difference, Entry, paired_difference, spread, write_comparison_report
from aploss.reports.page import Cell, Section, Table, Text, Verdict, percent
from aploss.training.config import TrainConfig

MIN_SEEDS = 3  # fewer are reported as too few
NO_INTERVAL = (math.nan, math.nan)  # with which every comparison is false: nothing is decided
TIE = "tie"
TIE_MARGIN = 0.01  # a difference that is certainly smaller is a tie


def is_decided(verdict: Verdict) -> bool:
    """Whether more seeds would not change a verdict."""
    return verdict.holds is not None or verdict.label == TIE


@dataclass
class Results:
    """The finished runs of a plan."""

    plan: Plan  # with the chosen learning rates
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)  # by the name of the row and the seed
    trials: list[Trial] = field(default_factory=list)  # of the search for learning rates
    at_end: Sequence[str] = ()  # rows whose best value is at an end of the grid, though it was widened
    given: bool = False  # whether the runs were not planned, but finished before
    seeds: Sequence[int] = ()  # of the present look

    def __post_init__(self) -> None:
        self.seeds = self.seeds or self.plan.seeds[: self.plan.looks[0]]

    @property
    def complete(self) -> bool:
        """Whether all runs up to the present look are finished."""
        return self.given or len(self.runs) == len(self.plan.variants) * len(self.seeds)

    def values(self, name: str, metric: str) -> list[float | None]:
        """A metric of a row for each seed; None if unknown (yet)."""
        measure = next(one.measure for one in self.plan.variants if one.name == name)
        return [measure.values(run).get(metric) if run and run.summary else None for run in self.runs_of(name)]

    def runs_of(self, name: str) -> list[Run | None]:
        """The run of a row for each seed; None if it has not ended (yet)."""
        return [self.runs.get((name, seed)) for seed in self.seeds]

    def mean(self, name: str, metric: str = "AP") -> float:
        """The mean of a row over its seeds; NaN without any."""
        return spread(self.values(name, metric)).mean

    def finished_runs(self, name: str) -> list[Run]:
        """The runs of a row that did not diverge, in the order of the seeds."""
        return [run for run in self.runs_of(name) if run and run.summary]

    def difference(self, first: str, second: str, metric: str = "AP") -> Difference:
        """``first - second`` over the seeds that both have."""
        values = self.values(first, metric), self.values(second, metric)
        return paired_difference(*values, name=first, baseline=second, metric=metric, confidence=self.plan.confidence)

    def differences(self, reference: str | None, metrics: Sequence[str] = ("AP",)) -> list[Difference]:
        """The reference minus every other row in each metric, where at least two seeds give an interval."""
        others = [variant.name for variant in self.plan.variants if reference not in (None, variant.name)]
        found = [self.difference(str(reference), other, metric) for other in others for metric in metrics]
        return [one for one in found if len(one.values) > 1]

    def is_ahead(self, first: str, second: str, *, by: float = 0.0, metric: str = "AP") -> bool | None:
        """Whether a row is ahead of another by at least ``by``.

        True if the confidence interval of the paired gain lies at or above ``by`` (above zero without it), False if it
        lies below, None if it includes ``by``, or with a single seed or unfinished runs.
        """
        low, high = self.difference(first, second, metric).gain if self.complete else NO_INTERVAL
        return True if low >= by and low > 0 else False if high < by or high <= 0 else None

    def is_between(self, name: str, low: float, high: float, metric: str = "AP") -> bool | None:
        """Whether the mean of a row lies in a range, by its confidence interval, as :meth:`is_ahead`."""
        if not self.complete:
            return None
        values = self.values(name, metric)
        mean = paired_difference(values, [0.0] * len(values), confidence=self.plan.confidence)
        return True if low <= mean.low and mean.high <= high else False if mean.high < low or high < mean.low else None

    def verdict(self, first: str, second: str, *, by: float = 0.0, metric: str = "AP") -> Verdict:
        """The claim that a row is ahead of another, with its numbers; see :meth:`is_ahead`."""
        least = f" by at least {100 * by:g}" if by else ""
        claim = f"{loss_label(first)} is above {loss_label(second)}{least}: {self.difference(first, second, metric)}"
        return Verdict(self.is_ahead(first, second, by=by, metric=metric), claim)

    def pair_verdict(self, first: str, second: str, metric: str = "AP") -> Verdict:
        """How a row compares with another: ahead, behind, tie (closer than 1 point), or too few seeds to say."""
        one, claim = self.difference(first, second, metric), f"{loss_label(first)} against {loss_label(second)}"
        low, high = one.gain if self.complete else NO_INTERVAL
        label = TIE if max(-low, high) < TIE_MARGIN else "too few seeds"
        label = "ahead" if low > 0 else "behind" if high < 0 else label
        return Verdict({"ahead": True, "behind": False}.get(label), f"{claim}: {one}", label)

    def comparison(
        self,
        *,
        summary: str,
        metrics: Sequence[str] = HEADLINE_METRICS,
        reference: str | None = None,
        sections: Sequence[Section] = (),
        **texts: Any,
    ) -> Comparison:
        """The page of these results; ``texts`` are fields of a :class:`Comparison`, such as its title and verdicts.

        The differences are those between the row ``reference`` and every other row in all ``metrics``.
        """
        if not self.complete:
            total = len(self.plan.variants) * len(self.seeds)
            summary += f"\n\nNot finished: {len(self.runs)} of {total} runs are done."
        measured = [(one, run) for one in self.plan.variants for run in self.finished_runs(one.name)[:1]]
        names = dict.fromkeys(name for one, run in measured for name in one.measure.values(run))
        return Comparison(
            entries=[_entry(self, variant, metrics) for variant in self.plan.variants],
            metrics=metrics,
            summary=summary,
            differences=self.differences(reference, metrics),
            class_differences=self.differences(reference, [name for name in names if name.startswith(CLASS_AP)]),
            provenance=_provenance(self),
            sections=[*sections, *([_trials_section(self)] if self.trials else [])],
            confidence=self.plan.confidence,
            **texts,
        )


def _entry(results: Results, variant: Variant, metrics: Sequence[str]) -> Entry:
    """A row as the page shows it."""
    name, runs = variant.name, results.finished_runs(variant.name)
    curves = [variant.measure.curve(run) for run in runs]
    diverged = [str(run.config.seed) for run in results.runs_of(name) if run and not run.summary]
    return Entry(
        name=name,
        values={metric: results.values(name, metric) for metric in metrics},
        minutes=[run.summary.minutes for run in runs if run.summary],
        paper=variant.paper,
        curves=[curve for curve in curves if len(curve.steps)],
        note=f"diverged: seed {', '.join(diverged)}" if diverged else "",
    )


def write_results(out: Path, results: Results, comparison: Comparison) -> None:
    """Writes the page, the tables in Markdown and LaTeX, and all numbers as JSON and CSV into a folder."""
    environment = describe_environment()
    command = re.sub(r"^(__main__|aploss)\S*", "aploss", str(environment["command"]))  # as a user would type it
    write_comparison_report(replace(comparison, command=command), out)
    write_text(out / "results.csv", _csv(results))
    document = {
        "title": comparison.title,
        "command": command,
        "complete": results.complete,
        "seeds": list(results.seeds),
        "confidence": results.plan.confidence,
        "rows": [_row(results, *pair) for pair in zip(results.plan.variants, comparison.entries, strict=True)],
        "differences": [asdict(one) for one in (*comparison.differences, *comparison.class_differences)],
        "trials": [asdict(trial) for trial in results.trials],
        "verdicts": [{"holds": one.holds, "verdict": one.word, "claim": one.claim} for one in comparison.verdicts],
        "environment": environment,
    }
    write_json(out / "results.json", document)


def _row(results: Results, variant: Variant, entry: Entry) -> dict[str, Any]:
    spreads = {metric: spread(values) for metric, values in entry.values.items()}
    return {
        **asdict(entry),
        "loss": variant.config.loss,
        "settings": variant.settings,
        "learning_rate": variant.config.optimizer.learning_rate,
        "tuned": variant.tuned,
        # JSON does not have NaN.
        "mean": {metric: one.mean if one.count else None for metric, one in spreads.items()},
        "standard_deviation": {metric: one.deviation if one.count > 1 else None for metric, one in spreads.items()},
        "runs": [
            {"seed": run.config.seed, "folder": str(run.folder), "failure": run.failure}
            for run in results.runs_of(variant.name)
            if run
        ],
    }


def _csv(results: Results) -> str:
    """One line for each finished run."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["row", "loss", "seed", "learning_rate", *METRICS, "minutes", "steps", "folder"])
    for (row, seed), run in sorted(results.runs.items()):
        if run.summary is not None:
            values = [getattr(run.summary, metric) for metric in METRICS]
            about = [row, run.config.loss, seed, run.config.optimizer.learning_rate]
            lines.writerow([*about, *values, run.summary.minutes, run.summary.steps, run.folder])
    return text.getvalue()


def _provenance(results: Results) -> dict[str, Any]:
    environment, plan = describe_environment(), results.plan
    finished = {run.folder: run.summary for run in results.runs.values() if run.summary}  # rows may share a run
    rates = {loss_label(one.name): f"{one.config.optimizer.learning_rate:.3g}" for one in plan.variants}
    shown = rates.values() if len({*rates.values()}) == 1 else [f"{name} {rate}" for name, rate in rates.items()]
    devices = environment["devices"] or [f"{environment['cpu']}, {environment['cores']} cores"]
    seeds = ", ".join(map(str, results.seeds))
    if len(plan.looks) > 1:
        counts = ", ".join(map(str, plan.looks))
        seeds += f"; looked at after {counts} seeds until decided, with {plan.confidence:.1%} intervals"
    elif not results.given:
        seeds += "; their number was fixed in advance"
    return {
        "detector": _of_rows(plan, lambda one: one.detector),
        "data": Path(plan.variants[0].config.data).resolve().name,
        "length": _of_rows(plan, lambda one: f"{one.schedule.length} {one.schedule.unit}"),
        "minutes of training": sum(one.minutes for one in finished.values()),
        "commit": _listed(one.commit or "unknown" for one in finished.values()) or environment["commit"] or "unknown",
        "seeds": seeds,
        "batch": _of_rows(plan, lambda one: f"{one.batches.size} images x {one.batches.accumulate}"),
        "image size": _of_rows(plan, lambda one: one.batches.image_size),
        "optimizer": _of_rows(plan, lambda one: f"{one.optimizer.name}, {one.schedule.kind}"),
        "learning rate": ", ".join(dict.fromkeys(shown)),
        "measured on": _listed(one.split for one in finished.values() if one.split),
        "hardware": ", ".join(devices) + f", threads: {environment['torch_threads']}",
        "software": ", ".join(f"{name} {environment['packages'][name]}" for name in ("aploss", "torch", "numba")),
        "runs": _listed(run.folder.parent for run in results.runs.values()),
    }


def _of_rows(plan: Plan, value: Callable[[TrainConfig], Any]) -> str:
    """The value of a setting, or all values if rows differ."""
    return "; ".join(dict.fromkeys(str(value(variant.config)) for variant in plan.variants))


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(sorted({*map(str, values)}))


def _trials_section(results: Results) -> Section:
    """The trials of each row by learning rate; the chosen ones are bold."""
    chosen = {variant.name: variant.tuned for variant in results.plan.variants}
    keys = dict.fromkeys(key for trial in results.trials for key in trial.settings)
    place, rows = list(chosen).index, []
    for trial in sorted(results.trials, key=lambda one: (place(one.row), one.settings[RATE])):
        settings = [as_typed(trial.settings[key]) if key in trial.settings else None for key in keys]
        score = "failed" if trial.score is None else percent(trial.score)
        rows.append([loss_label(trial.row), *settings, Cell(score, strong=trial.settings == chosen[trial.row])])
    text = (
        "Every row was tried on the first seed with a grid that was widened while the best value was at one of its "
        "ends, and took the settings with the best score (bold), in percent: AP on the validation split, or, if the "
        "optimisation itself is measured, the AP of the ranking of training images."
    )
    if results.at_end:
        text += f" The best value is still at an end of the grid for {', '.join(map(loss_label, results.at_end))}."
    columns = ["row", *(key.rpartition(".")[2].replace("_", " ") for key in keys), "score"]
    return Section("Search for learning rates", [Text(text), Table(columns=columns, rows=rows)])
