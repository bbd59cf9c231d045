"""A run of a comparison: its settings, how numbers are taken from it, and its folder in the cache."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from aploss.data.builtin import VERSION as BUILTIN_VERSION
from aploss.errors import ConfigError
from aploss.evaluation import METRICS
from aploss.files import as_file_name
from aploss.reports.comparison import TrainingCurve
from aploss.reports.run_files import read_json_lines
from aploss.training.config import (
    DEFAULTS_BEFORE_ADDED,
    FIXED_BY_COMPARISON,
    RESUMABLE_KEYS,
    TrainConfig,
    config_from_dict,
    config_to_dict,
    load_config,
    merge,
)
from aploss.training.run_folder import Summary, default_folder
from aploss.training.splits import NO_SPLIT

VALIDATIONS = 5  # during training: in short runs each takes longer than the steps between two
RATE = "optimizer.learning_rate"
CLASS_AP = "AP of "  # followed by the name of a class


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a comparison."""

    config: TrainConfig  # with its seed
    folder: Path
    summary: Summary | None  # None if it diverged
    failure: str = ""  # why it has no summary, in one line


class Measure:
    """How numbers are taken from a run: the final metrics on the evaluation split, and AP on validation on the way.

    Subclasses override its methods. All but :meth:`observer` are called with finished runs.
    """

    def observer(self, config: TrainConfig, folder: Path) -> Callable[[dict[str, Any]], Any] | None:
        """A callback for every row of the metrics while a run trains; None for no callback."""
        return None

    def values(self, run: Run) -> Mapping[str, float | None]:
        """The final numbers by metric, between 0 and 1; those of a class are called ``AP of NAME``."""
        assert run.summary is not None
        classes = {f"{CLASS_AP}{name}": found.get("AP") for name, found in run.summary.per_class.items()}
        return {name: getattr(run.summary, name) for name in METRICS} | classes

    def curve(self, run: Run) -> TrainingCurve:
        """The numbers during training."""
        rows = [row for row in read_json_lines(run.folder / "metrics.jsonl") if row["kind"] == "validation"]
        rows = [row for row in rows if row["AP"] is not None]
        steps, values, seconds = ([row[key] for row in rows] for key in ("step", "AP", "seconds"))
        return TrainingCurve(steps=steps, values=values, minutes=[one / 60 for one in seconds])

    def score(self, run: Run) -> float | None:
        """The score that chooses learning rates, larger being better; None if unknown."""
        values = self.curve(run).values
        return values[-1] if values else None


DETECTION = Measure()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of a comparison; settings are keyed by their dotted names."""

    name: str  # name of a loss, or any text such as "ap:delta=0.5"
    config: TrainConfig  # for every seed
    settings: Mapping[str, Any] = field(default_factory=dict)  # the settings that distinguish it, besides the loss
    tuned: Mapping[str, Any] = field(default_factory=dict)  # the settings that a search has chosen
    paper: Mapping[str, float] = field(default_factory=dict)  # metric → the paper's number, between 0 and 1
    measure: Measure = DETECTION  # how numbers are taken from its runs


def comparison_config(
    recipe: str | None, changes: dict[str, Any], *, steps: int | None = None, validations: int = VALIDATIONS
) -> TrainConfig:
    """A config for runs that can be compared.

    The weights at the end of the schedule are measured, on the test split if there is one, so that no run chooses its
    checkpoint; the validation split is measured ``validations`` times on the way, for the curve and for learning rates.
    See :func:`~aploss.training.config.load_config` for recipe and changes; with another length (``steps``) milestones
    keep their share of it.
    """
    config = with_length(load_config(recipe, changes), steps, validations=validations)
    split = config.evaluation.split
    if split != NO_SPLIT and split == (config.splits.validation or "val"):
        split = None
    return changed(config, {"evaluation": {"checkpoint": "last", "split": split}})


def with_length(config: TrainConfig, steps: int | None, *, validations: int) -> TrainConfig:
    """The config with another length and evenly spaced validations that cannot stop it."""
    schedule = config.schedule
    if steps is not None:
        milestones = tuple(sorted({round(steps / schedule.length * one) for one in schedule.milestones}))
        schedule = replace(schedule, length=steps, unit="steps", milestones=milestones)
    every = schedule.length / validations
    if schedule.unit == "steps":
        every = float(max(1, round(every)))
    validation = replace(config.validation, every=every, unit=schedule.unit, patience=None)
    return replace(config, schedule=schedule, validation=validation)


def changed(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """The config with nested values replaced."""
    return config_from_dict(merge(config_to_dict(config), changes))


def check_varied(key: str, *, option: str = "--vary") -> None:
    """Raises a ConfigError for a setting in which rows cannot differ."""
    if key in ("loss", "seed", *FIXED_BY_COMPARISON, *RESUMABLE_KEYS):
        reason = "the comparison fixes this setting, or it does not affect the result"
        raise ConfigError(f"{option} {key}: {reason}; losses are named as arguments, seeds with --seeds")


def as_typed(value: Any) -> str:
    """A value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)


def settings_hash(config: TrainConfig) -> str:
    """Ten hexadecimal digits of all settings that affect the result of a run.

    The folder, the time limit and the checkpoint interval are left out; data counts by its absolute path.
    """
    values = config_to_dict(config)
    unchanged = (key for key, value in DEFAULTS_BEFORE_ADDED.items() if attrgetter(key)(config) == value)
    for key in {*RESUMABLE_KEYS, *unchanged}:
        group, _, name = key.rpartition(".")
        del (values[group] if group else values)[name]
    values["device"] = config.device  # minutes on two devices must not be compared
    values["data"] = BUILTIN_VERSION if config.data == "builtin" else str(Path(config.data).resolve())
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]


def cache_folder(config: TrainConfig, cache: Path, settings: Mapping[str, Any]) -> Path:
    """The folder of a run: a readable name with the settings of its row, and the hash of all settings.

    Only the hash identifies a run: an existing one keeps the name that another comparison gave it.
    """
    hashed = settings_hash(config)
    found = sorted(cache.glob(f"*-{hashed}"))
    name, _, seed = default_folder(config).name.rpartition("-seed")
    about = "-".join(key.rpartition(".")[2] + as_typed(value) for key, value in settings.items() if key != RATE)
    words = filter(None, [name, as_file_name(about), f"seed{seed}", hashed])
    return found[0] if found else cache / "-".join(words)
