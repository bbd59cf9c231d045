"""The plan of a comparison: its rows and seeds, the search for learning rates, and the time it takes."""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import yaml

from aploss.data.builtin import VERSION as BUILTIN_VERSION
from aploss.detectors.criterion import make_loss
from aploss.errors import ConfigError
from aploss.evaluation import METRICS
from aploss.losses.traits import LOSSES
from aploss.progress import describe_seconds
from aploss.reports.comparison import TrainingCurve
from aploss.reports.run_files import read_json_lines
from aploss.training.config import (
    DEFAULTS_BEFORE_ADDED,
    FIXED_BY_COMPARISON,
    RESUMABLE_KEYS,
    TrainConfig,
    config_from_dict,
    config_to_dict,
    differing_keys,
    load_config,
    merge,
    nested,
    parse_value,
)
from aploss.training.distributed import choose_device, seeded
from aploss.training.run import make_detector
from aploss.training.run_folder import Summary
from aploss.training.splits import NO_SPLIT, load_run_data

LEVEL = 0.05  # of significance
MAX_SEEDS = 1000
LOSS_OPTIONS = "criterion.options"
MEASURED_PIXELS = 512 * 512  # of a training step whose time is measured
WITHOUT_WEIGHTS: dict[str, Any] = {"model": {"weights": None}}  # and without a download
RATE_FACTORS = (1 / 3, 1.0, 3.0)  # the first grid, as multiples of the row's own learning rate
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
        rows = [row for row in read_json_lines(run.folder / "metrics.jsonl") if row.get("AP") is not None]
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All runs of a comparison; rows have different names.

    Attributes:
        seeds: all seeds that may be trained.
        first: number of seeds of the first look; more follow until every verdict is decided. None for all seeds.
    """

    variants: Sequence[Variant]
    seeds: Sequence[int]
    search: Search | None = None
    first: int | None = None

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a comparison needs rows of different names, got {names}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"a comparison needs different seeds, got {list(self.seeds)}")
        if self.search is not None:
            self.search.check(self.variants, self.seeds[0])

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of seeds after which verdicts are looked at, half as many again each time."""
        counts = [self.first or len(self.seeds)]
        while counts[-1] < len(self.seeds):
            counts.append(min(len(self.seeds), counts[-1] + (counts[-1] + 1) // 2))
        return tuple(counts)

    @property
    def confidence(self) -> float:
        """The confidence of intervals, corrected for the number of looks (Bonferroni).

        With it, a difference that does not exist is found in at most 5 % of comparisons, whichever look ends them.
        """
        return 1 - LEVEL / len(self.looks)

    @property
    def trainings(self) -> tuple[int, int]:
        """The numbers of runs, and of trials before grids widen; what rows share is counted once."""
        rows = {settings_hash(variant.config): variant for variant in self.variants}.values()
        search = self.search
        # A trial of the real length is the run of the first seed, if it wins.
        trials = [len(search.next_trials(row, [])) - (search.steps is None) for row in rows] if search else []
        return len(rows) * len(self.seeds), sum(trials)


def comparison_plan(
    losses: Sequence[str],
    *,
    recipe: str,
    seeds: Sequence[int],
    vary: Mapping[str, Sequence[Any]] | None = None,
    changes: dict[str, Any] | None = None,
    steps: int | None = None,
    validations: int = VALIDATIONS,
    search: Search | None = None,
    first: int | None = None,
) -> Plan:
    """One row for each loss and each combination of varied values, everything else being equal.

    Args:
        losses: names, with options as in ``ap:delta=0.5``; the first row is compared with each of the others. Empty for
            the recipe's loss, if something varies.
        recipe: settings, including a section ``losses`` with the settings of each loss.
        seeds: a seed fixes initial weights, data order and augmentation for all rows.
        vary: dotted key of a setting → the values of the rows.
        changes: nested settings that override the recipe, for all rows.
        steps: length of the training; the recipe's by default.
        validations: points of the curve of AP.
        search: search for learning rates; the recipe's learning rates by default.
        first: seeds of the first look, see :class:`Plan`.

    Raises:
        ConfigError: an unknown loss, option or setting, or an invalid value.

    Example:
        >>> plan = comparison_plan(["ap:delta=2"], recipe="demo", seeds=[0], vary={"batches.size": [4, 8]})
        >>> [variant.name for variant in plan.variants]
        ['batches.size=4', 'batches.size=8']
    """
    vary, chosen = vary or {}, [_loss_settings(loss) for loss in losses]
    for key in vary:
        check_varied(key)
    if search is not None and RATE in vary:
        raise ConfigError(f"--tune searches the learning rate that --vary {RATE} sets: leave one out")
    variants = []
    for (loss, options), values in product(chosen or [("", {})][: len(vary)], product(*vary.values())):
        varied = dict(zip(vary, values, strict=True))
        own = nested({**options, **varied} | ({"loss": loss} if loss else {}))
        config = comparison_config(recipe, merge(changes or {}, own), steps=steps, validations=validations)
        make_loss(config.loss, **config.criterion.options)  # options that cannot be trained are refused now, not later
        if varied:
            make_detector(changed(config, WITHOUT_WEIGHTS), ("object",))
        words = [f"{key}={as_typed(value)}" for key, value in varied.items()]
        if len(chosen) > 1 or not words:
            short = {key.removeprefix(f"{LOSS_OPTIONS}."): value for key, value in options.items()}
            words.insert(0, ":".join([loss, *(f"{key}={as_typed(value)}" for key, value in short.items())]))
        variants.append(Variant(name=" ".join(words), config=config, settings={**options, **varied}))
    return Plan(variants=variants, seeds=tuple(seeds), search=search, first=first)


def describe_plan(plan: Plan, *, images: int | None = None, workers: int = 1) -> str:
    """The runs of a plan with their settings and the time of ``workers`` runs at a time, without training any.

    A run has as many ``images`` as the schedule of the first row by default.
    """
    config, (runs, trials) = plan.variants[0].config, plan.trainings
    step_images = config.batches.size * config.batches.accumulate
    if images is None:
        unit = step_images if config.schedule.unit == "steps" else len(load_run_data(config).train)
        images = config.schedule.length * unit
    trial_images = plan.search.steps * step_images if plan.search is not None and plan.search.steps else images
    at_a_time = min(workers, runs + trials)
    per_image, gigabytes = measure_step(config)
    seconds = (runs * images + trials * trial_images) * per_image / at_a_time
    memory = f"; about {gigabytes:.0f} GB for a step" if gigabytes else ""
    looks = "all of them" if len(plan.looks) == 1 else f"until decided after {', '.join(map(str, plan.looks))} of them"
    lines = [
        f"{runs + trials} trainings of {config.detector}, about {describe_seconds(seconds)} on this "
        f"{choose_device(config.device).type} with {at_a_time} at a time, without validation and data loading{memory}",
        f"seeds: {', '.join(map(str, plan.seeds))}, {looks}",
    ]
    if plan.search is not None:
        factors = [round(factor, 2) for factor in RATE_FACTORS]
        searched = {f"{RATE} as multiples of the row's own": factors, **plan.search.over}
        lines += [f"searched: {name} {', '.join(map(as_typed, values))}" for name, values in searched.items()]
    lines.append("rows, and how they differ from the settings of the first:")
    for variant in plan.variants:
        keys = differing_keys(config, variant.config)
        differing = [f"{key} = {attrgetter(key)(variant.config)}" for key in keys]
        lines.append(f"  {variant.name}: {'; '.join(differing) or 'the settings below'}")
    return "\n".join([*lines, "", yaml.safe_dump(config_to_dict(config), sort_keys=False).rstrip()])


def measure_step(config: TrainConfig) -> tuple[float, float]:
    """Seconds per image of a forward and backward pass on random pixels, and on a GPU its gigabytes for a batch."""
    device, size = choose_device(config.device), config.batches.image_size
    height, width = (size, size) if isinstance(size, int) else size
    count = max(1, min(config.batches.size, MEASURED_PIXELS // (height * width)))
    with seeded(config.seed, deterministic=False):
        detector = make_detector(changed(config, WITHOUT_WEIGHTS), ("object",)).to(device)
        images: Any = torch.rand(count, 3, height, width, device=device)
        if config.batches.cache_features:
            images = detector.features(images)
        box = torch.tensor([[1.0, 1.0, 3.0, 3.0]], device=device) * min(height, width) / 4
        targets = [{"boxes": box, "labels": torch.tensor([0], device=device)}] * count
        for _ in range(2):  # the first step also compiles and allocates
            start = time.perf_counter()
            torch.stack(list(detector(images, targets).values())).sum().backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return (time.perf_counter() - start) / count, peak * config.batches.size / count / 1e9


def _loss_settings(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a loss such as ``focal:gamma=1:alpha=0.25``, the options by dotted key."""
    name, *options = text.split(":")
    if "=" in name or not all(re.fullmatch(r"\w+=.+", option) for option in options):
        raise ConfigError(f"{text!r}: write the options of a loss as focal:gamma=1:alpha=0.25")
    LOSSES.get(name)
    pairs = (one.split("=", 1) for one in options)
    return name, {f"{LOSS_OPTIONS}.{key}": parse_value(value) for key, value in pairs}


def parse_settings(texts: Sequence[str], option: str) -> dict[str, list[Any]]:
    """The values of ``--vary KEY=A,B`` or ``--tune-over [LOSS:]KEY=A,B``, by key; the plan checks the keys.

    Example:
        >>> parse_settings(["batches.image_size=[64,96],128", "focal:gamma=1,2"], "--tune-over")
        {'batches.image_size': [[64, 96], 128], 'focal:criterion.options.gamma': [1, 2]}
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        loss, colon, key = name.strip().rpartition(":")
        if not parse_list(values):
            raise ConfigError(f"{option} {text}: add the values, as in {option} criterion.box_weight=1,3")
        if loss:
            LOSSES.get(loss)
            key = key if "." in key else f"{LOSS_OPTIONS}.{key}"
        found.setdefault(f"{loss}{colon}{key}", []).extend(map(parse_value, parse_list(values)))
    return found


def parse_list(text: str) -> list[str]:
    """The parts of a comma-separated list; commas inside brackets do not separate."""
    return [part for part in map(str.strip, re.split(r",(?![^\[{]*[\]}])", text)) if part]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from ``"3"`` (how many, starting at 0) or ``"4,5"`` (which); ConfigError for anything else."""
    words = parse_list(text)
    seeds = tuple(int(word) for word in words if re.fullmatch("[0-9]{1,10}", word))
    if not seeds or len(seeds) < len(words) or ("," not in text and not 1 <= seeds[0] <= MAX_SEEDS):
        expected = f"a number of seeds from 1 to {MAX_SEEDS}, or a list such as 0,1,2 (a single seed: 7,)"
        raise ConfigError(f"--seeds must be {expected}, got {text:.60}")
    return seeds if "," in text else tuple(range(seeds[0]))


def more_seeds(seeds: Sequence[int], most: int | None) -> tuple[int, ...]:
    """The seeds, and further ones up to ``most`` in all; None for no more."""
    if most is not None and most <= len(seeds):
        raise ConfigError(f"--seeds-until-decided {most}: more than the {len(seeds)} of --seeds are needed")
    return (*seeds, *range(max(seeds) + 1, max(seeds) + 1 + (most or len(seeds)) - len(seeds)))
