"""The search for the learning rate of each row of a comparison."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from aploss.detectors.criterion import make_loss
from aploss.errors import ConfigError
from aploss.experiments.runs import RATE, Variant, changed, check_varied, with_length
from aploss.training.config import TrainConfig, nested
from aploss.training.splits import NO_SPLIT

RATE_FACTORS = (1 / 3, 1.0, 3.0)  # the first grid, as multiples of the row's own learning rate


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial of a search."""

    row: str
    settings: Mapping[str, Any]  # by dotted key
    score: float | None  # None if it diverged, or the settings are invalid


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search for the learning rate of each row on the validation split, never on test.

    A grid is tried first, then the neighbours of the best until none is better: an axis of positive numbers grows by
    its own ratio when the best value is at one of its ends.

    Attributes:
        steps: length of a trial, whose warm-up shrinks with it; None for the length of the real run, whose first
            seed then is a trial.
        over: settings that are searched with the learning rate, as the best rate depends on the weight of the box
            loss: ``KEY``, or ``LOSS:KEY`` for the rows of a loss → values. Those of ``optimizer.learning_rate`` replace
            the multiples of the row's own in ``RATE_FACTORS``.

    Example:
        >>> search, row = Search(), Variant(name="ap", config=TrainConfig())
        >>> [trial[RATE] for trial in search.next_trials(row, [])]
        [0.001, 0.003, 0.009]
        >>> scores = {0.001: 0.5, 0.003: 0.6, 0.009: 0.7}
        >>> trials = [Trial(row="ap", settings={RATE: rate}, score=score) for rate, score in scores.items()]
        >>> search.next_trials(row, trials)
        [{'optimizer.learning_rate': 0.027}]
    """

    steps: int | None = None
    over: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def next_trials(self, row: Variant, trials: Sequence[Trial]) -> list[dict[str, Any]]:
        """The settings to try next after the trials so far; none if the best has been tried between its neighbours."""
        axes: dict[str, Sequence[Any]] = {
            RATE: [_rounded(factor * row.config.optimizer.learning_rate) for factor in RATE_FACTORS]
        }
        for name, values in self.over.items():
            loss, _, key = name.rpartition(":")
            if loss in ("", row.config.loss) and key not in row.settings:  # a row keeps its own value
                axes[key] = values
        tried = [one.settings for one in trials if one.row == row.name]
        if not tried:
            return [dict(zip(axes, point, strict=True)) for point in product(*axes.values())]
        best, found = self.best(row, trials).settings, []
        for key, values in axes.items():
            if _can_grow(values):
                around = _neighbours({*values, *(settings[key] for settings in tried)}, best[key])
                found += [{**best, key: value} for value in around]
        return [settings for settings in found if settings not in tried]

    def best(self, row: Variant, trials: Sequence[Trial]) -> Trial:
        """The best trial, of equal ones the nearest to the row's own rate; if all failed, that of the lowest rate."""

        def rank(trial: Trial) -> tuple[float, float]:
            rate = trial.settings[RATE]
            if trial.score is None:
                return -math.inf, -rate
            return trial.score, -abs(math.log(rate / row.config.optimizer.learning_rate))

        return max((one for one in trials if one.row == row.name), key=rank)

    def chosen(self, row: Variant, trials: Sequence[Trial]) -> Variant:
        """The row with the best settings; with its own if all trials failed."""
        best = self.best(row, trials)
        if best.score is None:
            return row
        return replace(row, config=changed(row.config, nested(best.settings)), tuned=best.settings)

    def trial_config(self, row: Variant, settings: Mapping[str, Any], seed: int) -> TrainConfig:
        """The config of a trial; ConfigError if the settings are invalid."""
        config = replace(row.config, seed=seed)
        if self.steps is not None:
            # A warm-up of at most a tenth: a short trial must train at the rate it has to judge. Only the validation
            # split is measured: the choice must not depend on the evaluation split.
            changes = {"schedule": {"exact_warmup": False}, "evaluation": {"split": NO_SPLIT}}
            config = with_length(changed(config, changes), self.steps, validations=1)
        config = changed(config, nested(dict(settings)))
        make_loss(config.loss, **config.criterion.options)
        return config

    def check(self, rows: Sequence[Variant], seed: int) -> None:
        """Raises a ConfigError for a search that does not fit some row, before anything is trained."""
        for name in self.over:
            loss, _, key = name.rpartition(":")
            check_varied(key, option="--tune-over")
            if not any(loss in ("", row.config.loss) and key not in row.settings for row in rows):
                raise ConfigError(f"--tune-over {name}: no row has this loss, or each has its own value")
        for row in rows:
            for settings in self.next_trials(row, []):
                self.trial_config(row, settings, seed)


def _can_grow(values: Sequence[Any]) -> bool:
    """Whether values are at least two different positive numbers."""
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return are_numbers and len({*values}) > 1 and min(values) > 0


def _neighbours(values: set[float], best: float) -> list[float]:
    """The values below and above the best one; beyond an end the ratio of the last two continues."""
    ordered = sorted(values)
    place = ordered.index(best)
    below = ordered[place - 1] if place else _rounded(best**2 / ordered[1])
    above = ordered[place + 1] if place + 1 < len(ordered) else _rounded(best**2 / ordered[-2])
    return [below, above]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
