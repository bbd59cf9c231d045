"""What is compared: rows, seeds, and the search for learning rates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, TypeVar

from aploss.errors import ConfigError
from aploss.reproduction.measure import DETECTION, Measure
from aploss.training.config import TrainConfig
from aploss.training.recipes import load_config

__all__ = [
    "Plan",
    "Tuning",
    "Variant",
    "changed",
    "comparison_config",
    "parse_seeds",
    "with_length",
]

Config = TypeVar("Config")
VALIDATIONS = 10  # points of the curve of AP while training


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of a comparison.

    Attributes:
        name: name of a loss, or any text such as ``"delta 0.5"``.
        config: how it is trained, whatever its seed.
        paper: metric → the paper's number, between 0 and 1.
        measure: what is looked at in its runs.
    """

    name: str
    config: TrainConfig
    paper: Mapping[str, float] = field(default_factory=dict)
    measure: Measure = DETECTION


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The search for the learning rate of each row, on what it may look at: never the test split.

    Attributes:
        factors: of the row's own learning rate; every row gets the same number of trials.
        steps: length of a trial; None for the length of the real run, with whose first seed a
            trial is then shared.
    """

    factors: tuple[float, ...] = (1 / 9, 1 / 3, 1.0, 3.0)
    steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All runs of a comparison; rows have different names."""

    variants: Sequence[Variant]
    seeds: Sequence[int]
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a comparison needs rows of different names, got {names}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"a comparison needs different seeds, got {list(self.seeds)}")


def comparison_config(
    recipe: str | None,
    changes: dict[str, Any],
    *,
    steps: int | None = None,
    validations: int = VALIDATIONS,
) -> TrainConfig:
    """A config under which runs can be compared.

    The weights at the end of the schedule are measured, on the test split where there is one, so
    that nothing is chosen by a run; the validation split is looked at ``validations`` times on the
    way, for the curve and for learning rates.

    Args:
        recipe: name or file, as of :func:`~aploss.training.recipes.load_config`.
        changes: nested values that win over the recipe.
        steps: another length of the schedule, in steps; milestones keep their share of it.
        validations: how often to validate.
    """
    config = load_config(recipe, changes)
    config = with_length(config, steps, validations=validations)
    chosen_by = config.splits.validation or "val"
    measured_on = config.evaluation.split
    split = None if measured_on == chosen_by else measured_on
    return changed(config, {"evaluation": {"checkpoint": "last", "split": split}})


def with_length(config: TrainConfig, steps: int | None, *, validations: int) -> TrainConfig:
    """The config with another length, evenly spaced validations, and none that could end it.

    Example:
        >>> short = with_length(TrainConfig(), 500, validations=5)
        >>> short.schedule.length, short.validation.every
        (500, 100.0)
    """
    schedule: dict[str, Any] = {}
    length: float = config.schedule.length
    unit: str = config.schedule.unit
    if steps is not None:
        milestones = tuple(round(steps / length * one) for one in config.schedule.milestones)
        length, unit = steps, "steps"
        schedule = {"length": steps, "unit": unit, "milestones": milestones}
    every = length / validations
    if unit == "steps":
        every = float(max(1, round(every)))
    validation = {"every": every, "unit": unit, "patience": None}
    return changed(config, {"schedule": schedule, "validation": validation})


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """The config with nested values replaced.

    Example:
        >>> changed(TrainConfig(), {"optimizer": {"learning_rate": 0.1}}).optimizer.learning_rate
        0.1
    """
    values = {
        name: changed(getattr(config, name), value)
        if is_dataclass(getattr(config, name))
        else value
        for name, value in changes.items()
    }
    return replace(config, **values)  # type: ignore[type-var]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from ``"3"`` (as many, from 0 on) or ``"4,5"`` (these).

    Raises:
        ConfigError: neither of the two.

    Example:
        >>> parse_seeds("3"), parse_seeds("4,5"), parse_seeds("7,")
        ((0, 1, 2), (4, 5), (7,))
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise ConfigError(
            f"--seeds must be a number of seeds or a list such as 0,1,2, got {text!r}"
        )
    seeds = tuple(int(word) for word in words)
    if "," not in text:
        seeds = tuple(range(seeds[0]))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds must name at least one seed, each once, got {text!r}")
    return seeds
