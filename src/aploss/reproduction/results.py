"""The runs of a comparison and what follows from them: rows, differences, verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aploss.reporting.comparison_data import Difference, Entry
from aploss.reporting.style import loss_label
from aploss.reproduction.measure import Run
from aploss.reproduction.plan import Plan, Variant
from aploss.reproduction.statistics import (
    PairedDifference,
    known_values,
    paired_difference,
    spread,
)

__all__ = ["Results", "Trial"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One learning rate that was tried for a row; ``score`` is None where it diverged."""

    name: str
    learning_rate: float
    score: float | None


@dataclass
class Results:
    """What is known of a plan so far.

    Attributes:
        plan: with the learning rates that were chosen.
        runs: (name of the row, seed) → run.
        trials: of the search for learning rates.
    """

    plan: Plan
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all runs are done."""
        return len(self.runs) == len(self.plan.variants) * len(self.plan.seeds)

    def variant(self, name: str) -> Variant:
        """The row of a name."""
        return next(one for one in self.plan.variants if one.name == name)

    def values(self, name: str, metric: str) -> list[float | None]:
        """A metric of a row for each seed of the plan; None where there is none (yet)."""
        measure = self.variant(name).measure
        found: list[float | None] = []
        for seed in self.plan.seeds:
            run = self.runs.get((name, seed))
            done = run is not None and run.summary is not None
            found.append(measure.values(run).get(metric) if run and done else None)
        return found

    def mean(self, name: str, metric: str = "AP") -> float:
        """The mean of a row over its seeds; NaN without any."""
        return spread(self.values(name, metric)).mean

    def finished_runs(self, name: str) -> list[Run]:
        """The runs of a row that have a result, in the order of the seeds."""
        runs = [self.runs.get((name, seed)) for seed in self.plan.seeds]
        return [run for run in runs if run is not None and run.summary is not None]

    def entries(self, metrics: Sequence[str]) -> list[Entry]:
        """The rows as a page shows them."""
        return [self._entry(variant, metrics) for variant in self.plan.variants]

    def _entry(self, variant: Variant, metrics: Sequence[str]) -> Entry:
        runs = self.finished_runs(variant.name)
        curves = [variant.measure.curve(run) for run in runs]
        return Entry(
            name=variant.name,
            values={name: known_values(self.values(variant.name, name)) for name in metrics},
            minutes=[run.summary.minutes for run in runs if run.summary],
            paper=variant.paper,
            curves=[curve for curve in curves if len(curve.steps)],
            note=self._note(variant),
        )

    def _note(self, variant: Variant) -> str:
        failed = [
            str(seed)
            for seed in self.plan.seeds
            if (run := self.runs.get((variant.name, seed))) is not None and run.summary is None
        ]
        return f"diverged: seed {', '.join(failed)}" if failed else ""

    def difference(self, first: str, second: str, metric: str = "AP") -> PairedDifference:
        """``first - second`` over the seeds that both have."""
        return paired_difference(self.values(first, metric), self.values(second, metric))

    def differences(self, reference: str, metric: str = "AP") -> list[Difference]:
        """The reference minus every other row, where at least two seeds give an interval."""
        found = []
        for variant in self.plan.variants:
            one = self.difference(reference, variant.name, metric)
            if variant.name != reference and len(one.values) > 1:
                found.append(
                    Difference(
                        name=reference, baseline=variant.name, values=one.values, mean=one.mean,
                        low=one.low, high=one.high, metric=metric, confidence=one.confidence,
                    )
                )  # fmt: skip
        return found

    def is_ahead(
        self, first: str, second: str, *, by: float = 0.0, metric: str = "AP"
    ) -> bool | None:
        """Whether a row is ahead of another by at least ``by``; None where seeds do not decide.

        It is not where the mean of the differences is smaller than ``by`` or zero. It is where
        their confidence interval is above zero, too.
        """
        one = self.difference(first, second, metric)
        if not self.complete or not one.values:
            return None
        if one.mean < by or one.mean <= 0:
            return False
        return True if one.low > 0 else None

    def verdict(
        self, first: str, second: str, *, by: float = 0.0, metric: str = "AP", lower: bool = False
    ) -> tuple[bool | None, str]:
        """The claim that a row is ahead of another (or below it), with the numbers."""
        names = (second, first) if lower else (first, second)
        one = self.difference(first, second, metric)
        least = f" by at least {100 * by:g}" if by else ""
        claim = (
            f"{loss_label(first)} is {'below' if lower else 'above'} {loss_label(second)}{least}"
        )
        if len(one.values) > 1:
            claim += (
                f": {100 * one.mean:+.1f} {metric} [{100 * one.low:+.1f}, {100 * one.high:+.1f}]"
            )
        elif one.values:
            claim += f": {100 * one.mean:+.1f} {metric}, one seed"
        return self.is_ahead(*names, by=by, metric=metric), claim

    def document(self, metrics: Sequence[str], reference: str | None) -> dict[str, Any]:
        """Everything as plain values for ``results.json``."""
        differences = [] if reference is None else self.differences(reference, metrics[0])
        return {
            "complete": self.complete,
            "seeds": list(self.plan.seeds),
            "rows": [self._row(variant, metrics) for variant in self.plan.variants],
            "differences": [
                {
                    "first": one.name, "second": one.baseline, "metric": one.metric,
                    "values": list(one.values), "mean": one.mean, "low": one.low, "high": one.high,
                    "confidence": one.confidence,
                }
                for one in differences
            ],
            "learning_rates_tried": [
                {"row": one.name, "learning_rate": one.learning_rate, "score": one.score}
                for one in self.trials
            ],
        }  # fmt: skip

    def _row(self, variant: Variant, metrics: Sequence[str]) -> dict[str, Any]:
        entry = self._entry(variant, metrics)
        spreads = {metric: spread(self.values(variant.name, metric)) for metric in metrics}
        return {
            "name": variant.name,
            "loss": variant.config.loss,
            "learning_rate": variant.config.optimizer.learning_rate,
            "values": {metric: self.values(variant.name, metric) for metric in metrics},
            "mean": {name: _number(one.mean) for name, one in spreads.items()},
            "standard_deviation": {name: _number(one.deviation) for name, one in spreads.items()},
            "paper": dict(variant.paper),
            "minutes": list(entry.minutes),
            "curves": [
                {"steps": list(c.steps), "values": list(c.values), "minutes": list(c.minutes)}
                for c in entry.curves
            ],
            "runs": [
                {
                    "seed": seed,
                    "folder": str(run.folder),
                    "failure": run.failure,
                    "commit": run.summary.commit if run.summary else None,
                }
                for seed in self.plan.seeds
                if (run := self.runs.get((variant.name, seed))) is not None
            ],
        }


def _number(value: float) -> float | None:
    return None if value != value else value
