"""What is compared: rows, seeds, and the search for learning rates."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

from aploss.data.builtin import VERSION as BUILTIN_VERSION
from aploss.detectors.criterion import make_loss
from aploss.errors import ConfigError, did_you_mean
from aploss.experiments.measures import DETECTION, Measure
from aploss.losses.traits import LOSSES
from aploss.training.config import (
    DEFAULTS_BEFORE_ADDED,
    FIXED_BY_COMPARISON,
    RESUMABLE_KEYS,
    TrainConfig,
    config_fields,
    config_from_dict,
    config_to_dict,
    nested,
    parse_value,
)
from aploss.training.recipes import load_config, merge
from aploss.training.splits import NO_SPLIT

VALIDATIONS = 10  # points of the curve of AP while training
MAX_SEEDS = 1000
MAX_SEED = 2**32 - 1  # as numpy takes them
WARMUP_SHARE = 0.1  # of a trial, at most, where the length of the real run in steps is not known
LOSS_OPTIONS = "criterion.options"
RATE = "optimizer.learning_rate"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of a comparison."""

    name: str  # of a loss, or any text such as "ap:delta=0.5"
    config: TrainConfig  # how it is trained, whatever its seed
    settings: Mapping[str, Any] = field(default_factory=dict)  # dotted key → value, of what sets it apart but the loss
    tuned: Mapping[str, Any] = field(default_factory=dict)  # dotted key → value, of what was found for it by search
    paper: Mapping[str, float] = field(default_factory=dict)  # metric → the paper's number, between 0 and 1
    measure: Measure = DETECTION  # what is looked at in its runs


@dataclass(frozen=True)
class Searched:
    """A setting that is searched together with the learning rate."""

    key: str  # dotted
    values: Sequence[Any]
    loss: str | None = None  # whose rows it is searched for; None for all


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The search for the learning rate of each row, on the validation split: never on test.

    Attributes:
        factors: of the row's own learning rate; every row gets the same number of trials.
        steps: length of a trial, whose warm-up shrinks with it; None for that of the real run, with whose first
            seed a trial is then shared.
        over: settings that are searched with it, in all combinations: the best learning rate depends on the weight of
            the box loss. With ``optimizer.learning_rate`` among them its values take the place of the factors.
    """

    factors: tuple[float, ...] = (1 / 9, 1 / 3, 1.0, 3.0)
    steps: int | None = None
    over: tuple[Searched, ...] = ()


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
        if self.tuning is not None:
            for searched in self.tuning.over:
                self._check_searched(searched, self.tuning)

    def _check_searched(self, searched: Searched, tuning: Tuning) -> None:
        """Refuses a search that some row cannot be part of, before anything is trained."""
        rows = [variant for variant in self.variants if searched.loss in (None, variant.config.loss)]
        if not rows:
            raise ConfigError(f"--tune-over {searched.loss}: no row has the loss {searched.loss}")
        for variant in rows:
            if searched.key in variant.settings:
                raise ConfigError(f"--tune-over {searched.key}: the row {variant.name} has a value of its own")
            for config in trials_of(variant, tuning, self.seeds[0]):
                make_loss(config.loss, **config.criterion.options)


def comparison_config(
    recipe: str | None, changes: dict[str, Any], *, steps: int | None = None, validations: int = VALIDATIONS
) -> TrainConfig:
    """A config under which runs can be compared.

    The weights at the end of the schedule are measured, on the test split where there is one, so that nothing is
    chosen by a run; the validation split is looked at ``validations`` times on the way, for the curve and for learning
    rates. Recipe and changes are those of :func:`~aploss.training.recipes.load_config`; with another length (``steps``)
    milestones keep their share of it.
    """
    config = with_length(load_config(recipe, changes), steps, validations=validations)
    split = config.evaluation.split
    if split == (config.splits.validation or "val"):
        split = None
    return changed(config, {"evaluation": {"checkpoint": "last", "split": split}})


def with_length(config: TrainConfig, steps: int | None, *, validations: int) -> TrainConfig:
    """The config with another length, evenly spaced validations, and none that could end it.

    Example:
        >>> short = with_length(TrainConfig(), 500, validations=5)
        >>> short.schedule.length, short.validation.every
        (500, 100.0)
    """
    schedule = config.schedule
    if steps is not None:
        milestones = tuple(round(steps / schedule.length * one) for one in schedule.milestones)
        schedule = replace(schedule, length=steps, unit="steps", milestones=milestones)
    every = schedule.length / validations
    if schedule.unit == "steps":
        every = float(max(1, round(every)))
    validation = replace(config.validation, every=every, unit=schedule.unit, patience=None)
    return replace(config, schedule=schedule, validation=validation)


def loss_settings(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a loss that is written with them, the options as settings; ConfigError for anything else.

    Example:
        >>> loss_settings("focal:gamma=1:alpha=0.25")
        ('focal', {'criterion.options.gamma': 1, 'criterion.options.alpha': 0.25})
    """
    name, *options = text.split(":")
    example = "write the options of a loss as focal:gamma=1:alpha=0.25"
    if "=" in name:
        raise ConfigError(f"{text!r} is no loss: {example}")
    LOSSES.get(name)
    if not all(re.fullmatch(r"\w+=.+", option) for option in options):
        raise ConfigError(f"{text!r}: {example}")
    pairs = (one.split("=", 1) for one in options)
    return name, {f"{LOSS_OPTIONS}.{key}": parse_value(value) for key, value in pairs}


def parse_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Settings with the values that rows differ in; ConfigError for one that does not exist or in which they cannot.

    Example:
        >>> parse_vary(["optimizer.learning_rate=0.001,3e-3", "batches.image_size=[64,96],128"])
        {'optimizer.learning_rate': [0.001, 0.003], 'batches.image_size': [[64, 96], 128]}
    """
    varied: dict[str, list[Any]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        check_varied(key := key.strip())
        if not parse_list(values):
            raise ConfigError(f"--vary {text}: give the values, as --vary {key or 'batches.size'}=4,8")
        varied.setdefault(key, []).extend(map(parse_value, parse_list(values)))
    return varied


def parse_searched(texts: Sequence[str]) -> tuple[Searched, ...]:
    """Settings to be searched with the learning rate, and options of one loss; ConfigError as of :func:`parse_vary`.

    Example:
        >>> box_weight, gamma = parse_searched(["criterion.box_weight=1,3", "focal:gamma=1,2"])
        >>> box_weight.key, gamma.key, gamma.loss
        ('criterion.box_weight', 'criterion.options.gamma', 'focal')
    """
    searched = []
    for text in texts:
        name, _, values = text.partition("=")
        loss, _, key = name.strip().rpartition(":")
        if loss:
            LOSSES.get(loss)
            key = key if "." in key else f"{LOSS_OPTIONS}.{key}"
        check_varied(key, option="--tune-over")
        if not parse_list(values):
            raise ConfigError(f"--tune-over {text}: give the values, as --tune-over criterion.box_weight=1,3")
        searched.append(Searched(key, tuple(map(parse_value, parse_list(values))), loss or None))
    return tuple(searched)


def check_varied(key: str, *, option: str = "--vary") -> None:
    """Refuses a setting that does not exist, or in which rows cannot differ."""
    known = {setting.key: setting.default for setting in config_fields()}
    inside = any(key.startswith(f"{one}.") for one, default in known.items() if isinstance(default, dict))
    if key not in known and not inside:
        by_ending = [one for one in known if one.endswith(f".{key}")]
        meant = did_you_mean(key, by_ending or known) or "; aploss train --help lists them"
        raise ConfigError(f"{option}: there is no setting {key!r}{meant}")
    if key in ("loss", "seed"):
        raise ConfigError(f"{option} {key}: give --{key.replace('loss', 'losse')}s")
    if key in (*FIXED_BY_COMPARISON, *RESUMABLE_KEYS):
        raise ConfigError(
            f"{option} {key}: rows cannot differ in what the comparison decides or what changes no result"
        )


def written(value: Any) -> str:
    """A value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)


def parse_list(text: str) -> list[str]:
    """The parts of a list with commas; brackets hold together.

    Example:
        >>> parse_list("ap,focal:gamma=1, [64,96],")
        ['ap', 'focal:gamma=1', '[64,96]']
    """
    return [part for part in map(str.strip, re.split(r",(?![^\[{]*[\]}])", text)) if part]


def trials_of(variant: Variant, tuning: Tuning, seed: int) -> list[TrainConfig]:
    """The configs of the trials of a row, in the order of :func:`combinations`."""
    config = replace(variant.config, seed=seed)
    if tuning.steps is not None:
        # The warm-up takes the share of the trial that it takes of the real run: with all of it a short trial would
        # hardly train at the rate it is to judge, and too high a rate would win.
        schedule = config.schedule
        share = schedule.warmup_steps / schedule.length if schedule.unit == "steps" else WARMUP_SHARE
        warmup = min(schedule.warmup_steps, round(share * tuning.steps))
        # Only the validation counts: a trial that also measured the evaluation split would show what it must not tell.
        changes = {"schedule": {"warmup_steps": warmup}, "evaluation": {"split": NO_SPLIT}}
        config = with_length(changed(config, changes), tuning.steps, validations=1)
    return [changed(config, nested(settings)) for settings in combinations(variant, tuning)]


def combinations(variant: Variant, tuning: Tuning) -> list[dict[str, Any]]:
    """What the trials of a row differ in: dotted key → value, for each of them."""
    rate = variant.config.optimizer.learning_rate
    values: dict[str, Sequence[Any]] = {RATE: [float(f"{factor * rate:.3g}") for factor in tuning.factors]}
    values |= {one.key: one.values for one in tuning.over if one.loss in (None, variant.config.loss)}
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def changed(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """The config with nested values replaced."""
    return config_from_dict(merge(config_to_dict(config), changes))


def settings_hash(config: TrainConfig) -> str:
    """Ten hexadecimal digits of everything that decides what a run learns.

    Its folder, its time limit and how often it saves are no part of it; a data folder counts by where it is, not by how
    it is written.

    Example:
        >>> one, other = TrainConfig(data="builtin"), TrainConfig(data="builtin", max_minutes=5)
        >>> settings_hash(one) == settings_hash(other) != settings_hash(TrainConfig(data="a"))
        True
    """
    values = config_to_dict(config)
    unchanged = (key for key, value in DEFAULTS_BEFORE_ADDED.items() if attrgetter(key)(config) == value)
    for key in (*RESUMABLE_KEYS, *unchanged):
        group, _, name = key.rpartition(".")
        del (values[group] if group else values)[name]
    values["device"] = config.device  # minutes of two devices must not be compared
    values["data"] = BUILTIN_VERSION if config.data == "builtin" else str(Path(config.data).resolve())
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]


def runs_of(plan: Plan) -> int:
    """How many trainings a plan has, those that rows and trials share counted once."""
    rows = {settings_hash(variant.config): variant for variant in plan.variants}.values()
    runs = len(rows) * len(plan.seeds)
    if (tuning := plan.tuning) is not None:
        # A trial of the real length is the run of the first seed, if it wins.
        runs += sum(len(combinations(variant, tuning)) - (tuning.steps is None) for variant in rows)
    return runs


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from ``"3"`` (as many, from 0 on) or ``"4,5"`` (these); ConfigError for others, too many or too large.

    Example:
        >>> parse_seeds("3"), parse_seeds("4,5"), parse_seeds("7,")
        ((0, 1, 2), (4, 5), (7,))
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdecimal() for word in words):
        raise ConfigError(f"--seeds must be a number of seeds or a list such as 0,1,2, got {text!r}")
    largest = max(words, key=float)  # int() refuses thousands of digits
    if "," not in text and float(largest) > MAX_SEEDS:
        raise ConfigError(
            f"--seeds must be at most {MAX_SEEDS} seeds, got {largest:.30}; one seed alone is "
            f"written with a comma: --seeds {largest:.30},"
        )
    if float(largest) > MAX_SEED:
        raise ConfigError(f"--seeds: a seed is at most {MAX_SEED}, got {largest:.30}")
    seeds = tuple(map(int, words)) if "," in text else tuple(range(int(largest)))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds must name at least one seed, each once, got {text!r}")
    return seeds


def data_name(data: str) -> str:
    """What the data of a config is called: ``builtin``, or its folder or file.

    Example:
        >>> data_name("builtin"), data_name("data/bccd")
        ('builtin', 'bccd')
    """
    return data if data == "builtin" else Path(data).resolve().name
