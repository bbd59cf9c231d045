"""The plan of a comparison: rows, seeds, and the search for learning rates."""

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import yaml

from aploss.data.builtin import VERSION as BUILTIN_VERSION
from aploss.detectors.criterion import describe_loss, make_loss
from aploss.errors import ConfigError, did_you_mean
from aploss.experiments.measures import DETECTION, Measure
from aploss.files import as_file_name
from aploss.losses.traits import LOSSES
from aploss.training.callbacks import describe_seconds
from aploss.training.config import (
    DEFAULTS_BEFORE_ADDED,
    FIXED_BY_COMPARISON,
    RESUMABLE_KEYS,
    TrainConfig,
    config_fields,
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
from aploss.training.run_folder import default_folder
from aploss.training.splits import NO_SPLIT, load_run_data

VALIDATIONS = 10  # points of the curve of AP while training
SHORT_STEPS, SHORT_VALIDATIONS = 2000, 5  # each validation would take longer than the steps between two
LEVEL = 0.05  # of significance
MAX_SEEDS = 1000
WARMUP_SHARE = 0.1  # of a trial, at most, if the length of the real run in steps is not known
LOSS_OPTIONS = "criterion.options"
RATE = "optimizer.learning_rate"
RATE_FACTORS = (1 / 3, 1.0, 3.0)  # the first grid of a search, as multiples of the row's own learning rate
MAX_PIXELS = 512 * 512  # of a measured training step
MEASURED_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of a comparison; settings are keyed by their dotted names."""

    name: str  # name of a loss, or any text such as "ap:delta=0.5"
    config: TrainConfig  # for every seed
    settings: Mapping[str, Any] = field(default_factory=dict)  # the settings that distinguish it, besides the loss
    tuned: Mapping[str, Any] = field(default_factory=dict)  # the settings that a search has chosen
    paper: Mapping[str, float] = field(default_factory=dict)  # metric → the paper's number, between 0 and 1
    measure: Measure = DETECTION  # how numbers are taken from its runs


@dataclass(frozen=True)
class Searched:
    """A setting that is searched together with the learning rate."""

    key: str  # dotted
    values: Sequence[Any]
    loss: str | None = None  # only for rows of this loss; None for all


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The search for the learning rate of each row on the validation split, never on test; see :class:`Search`.

    Attributes:
        steps: length of a trial, whose warm-up shrinks with it; None for the length of the real run, whose first
            seed then is a trial.
        over: settings that are searched with it: the best learning rate depends on the weight of the box loss. Values
            of ``optimizer.learning_rate`` replace the multiples of the row's own in ``RATE_FACTORS``.
    """

    steps: int | None = None
    over: tuple[Searched, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All runs of a comparison; rows have different names.

    Attributes:
        seeds: all seeds that may be trained.
        first: number of seeds of the first look; more follow until every verdict is decided. None for all seeds.
    """

    variants: Sequence[Variant]
    seeds: Sequence[int]
    tuning: Tuning | None = None
    first: int | None = None

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
        """Raises a ConfigError for a search that does not fit some row, before anything is trained."""
        rows = [variant for variant in self.variants if searched.loss in (None, variant.config.loss)]
        if not rows:
            raise ConfigError(f"--tune-over {searched.loss}: no row has the loss {searched.loss}")
        for variant in rows:
            if searched.key in variant.settings:
                raise ConfigError(f"--tune-over {searched.key}: the row {variant.name} has its own value")
            for settings in Search(variant, tuning).next_trials():
                trial_config(variant, settings, tuning, self.seeds[0])

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of seeds after which verdicts are looked at, half as many again each time.

        Example:
            >>> variant = Variant(name="ap", config=TrainConfig())
            >>> Plan(variants=[variant], seeds=range(10), first=3).looks
            (3, 5, 8, 10)
        """
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
    def trainings(self) -> int:
        """The number of trainings before grids widen; runs that rows and trials share are counted once."""
        rows = {settings_hash(variant.config): variant for variant in self.variants}.values()
        runs = len(rows) * len(self.seeds)
        if (tuning := self.tuning) is not None:
            # A trial of the real length is the run of the first seed, if it wins.
            runs += sum(len(Search(variant, tuning).next_trials()) - (tuning.steps is None) for variant in rows)
        return runs


class Search:
    """The search for the best settings of a row: a grid, then the neighbours of the best until none is better.

    An axis of positive numbers grows by its own ratio when the best value is at one of its ends.

    Example:
        >>> search = Search(Variant(name="ap", config=TrainConfig()), Tuning())
        >>> [trial[RATE] for trial in search.next_trials()]
        [0.001, 0.003, 0.009]
        >>> for rate, score in ((0.001, 0.5), (0.003, 0.6), (0.009, 0.7)):
        ...     search.add({RATE: rate}, score)
        >>> search.next_trials()
        [{'optimizer.learning_rate': 0.027}]
    """

    def __init__(self, variant: Variant, tuning: Tuning) -> None:
        self.variant, self.tuning = variant, tuning
        self._rate = variant.config.optimizer.learning_rate
        values: dict[str, Sequence[Any]] = {RATE: [_rounded(factor * self._rate) for factor in RATE_FACTORS]}
        values |= {one.key: one.values for one in tuning.over if one.loss in (None, variant.config.loss)}
        self._axes = {key: sorted(found) if _is_widened(found) else list(found) for key, found in values.items()}
        self._scores: dict[tuple[Any, ...], float] = {}

    def add(self, settings: Mapping[str, Any], score: float | None) -> None:
        """Records the score of a trial; None if it diverged."""
        self._scores[tuple(settings[key] for key in self._axes)] = -math.inf if score is None else score

    @property
    def chosen(self) -> Variant:
        """The row with the best settings; with its own if all trials diverged."""
        if max(self._scores.values()) == -math.inf:
            return self.variant
        best = self._named(self._best())
        tuned = {key: value for key, value in best.items() if key != RATE}
        return replace(self.variant, config=changed(self.variant.config, nested(best)), tuned=tuned)

    def next_trials(self) -> list[dict[str, Any]]:
        """The settings to try next; none if the best has been tried between its neighbours."""
        if not self._scores:
            return [self._named(point) for point in product(*self._axes.values())]
        best, points = self._best(), []
        for place, values in enumerate(self._axes.values()):
            if _is_widened(values):
                _widen(values, best[place])
                index = values.index(best[place])
                points += [(*best[:place], value, *best[place + 1 :]) for value in values[index - 1 : index + 2 : 2]]
        return [self._named(point) for point in points if point not in self._scores]

    def _best(self) -> tuple[Any, ...]:
        """The best point, of equal ones the nearest to the row's own rate; if all diverged, that of the lowest rate."""
        place = list(self._axes).index(RATE)

        def rank(point: tuple[Any, ...]) -> tuple[float, float]:
            score, rate = self._scores[point], point[place]
            return score, -rate if score == -math.inf else -abs(math.log(rate / self._rate))

        return max(self._scores, key=rank)

    def _named(self, point: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self._axes, point, strict=True))


def _is_widened(values: Sequence[Any]) -> bool:
    """Whether an axis can grow: at least two different positive numbers."""
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return are_numbers and len({*values}) > 1 and min(values) > 0


def _widen(values: list[float], best: float) -> None:
    """Adds a value beyond the end of an axis that the best is at."""
    if best == values[0]:
        values.insert(0, _rounded(values[0] ** 2 / values[1]))
    if best == values[-1]:
        values.append(_rounded(values[-1] ** 2 / values[-2]))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def comparison_plan(
    losses: Sequence[str],
    *,
    recipe: str,
    seeds: Sequence[int],
    vary: Mapping[str, Sequence[Any]] | None = None,
    changes: dict[str, Any] | None = None,
    steps: int | None = None,
    validations: int | None = None,
    tuning: Tuning | None = None,
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
        validations: points of the curve of AP; 10 by default, 5 in short runs.
        tuning: search for learning rates; the recipe's learning rates by default.
        first: seeds of the first look, see :class:`Plan`.

    Raises:
        ConfigError: an unknown loss, option or setting, an invalid value, or two equal rows.

    Example:
        >>> plan = comparison_plan(["ap:delta=2"], recipe="demo", seeds=[0], vary={"batches.size": [4, 8]})
        >>> [variant.name for variant in plan.variants]
        ['batches.size=4', 'batches.size=8']
    """
    vary, chosen = vary or {}, [loss_settings(loss) for loss in losses]
    for key in vary:
        check_varied(key)
    if tuning is not None and RATE in vary:
        raise ConfigError(f"--tune searches the learning rate that --vary {RATE} sets: leave one out")
    variants = []
    for (loss, options), values in product(chosen or [("", {})][: len(vary)], product(*vary.values())):
        varied = dict(zip(vary, values, strict=True))
        own = nested({**options, **varied} | ({"loss": loss} if loss else {}))
        config = comparison_config(recipe, merge(changes or {}, own), steps=steps, validations=validations)
        words = [f"{key}={as_typed(value)}" for key, value in varied.items()]
        if len(chosen) > 1 or not words:
            short = {key.removeprefix(f"{LOSS_OPTIONS}."): value for key, value in options.items()}
            words.insert(0, ":".join([loss, *(f"{key}={as_typed(value)}" for key, value in short.items())]))
        variants.append(Variant(name=" ".join(words), config=config, settings={**options, **varied}))
    plan = Plan(variants=variants, seeds=tuple(seeds), tuning=tuning, first=first)
    _check_rows(plan)
    return plan


def _check_rows(plan: Plan) -> None:
    """Raises a ConfigError for rows that cannot be trained, or that are equal, before anything is trained."""
    known: dict[str, str] = {}
    tried: list[Any] = []
    for variant in plan.variants:
        config = variant.config
        # With the defaults of the loss, so that ap and ap:delta=1 are equal.
        _, described = describe_loss(make_loss(config.loss, **config.criterion.options))
        options = {key: float(value) if type(value) is int else value for key, value in described.items()}
        parts = config.detector, config.loss, config.criterion, config.model  # all that a detector is built from
        if parts not in tried and any(not key.startswith(LOSS_OPTIONS) for key in variant.settings):
            make_detector(changed(config, {"model": {"weights": None}}), ("object",))
            tried.append(parts)
        hashed = settings_hash(changed(config, {"criterion": {"options": options}}))
        if known.setdefault(hashed, variant.name) != variant.name:
            raise ConfigError(f"the rows {known[hashed]} and {variant.name} have the same settings: leave one out")


def comparison_config(
    recipe: str | None, changes: dict[str, Any], *, steps: int | None = None, validations: int | None = VALIDATIONS
) -> TrainConfig:
    """A config for runs that can be compared.

    The weights at the end of the schedule are measured, on the test split if there is one, so that no run chooses its
    checkpoint; the validation split is measured ``validations`` times on the way, for the curve and for learning rates.
    See :func:`~aploss.training.config.load_config` for recipe and changes; with another length (``steps``) milestones
    keep their share of it.
    """
    config = with_length(load_config(recipe, changes), steps, validations=validations)
    split = config.evaluation.split
    if split == (config.splits.validation or "val"):
        split = None
    return changed(config, {"evaluation": {"checkpoint": "last", "split": split}})


def with_length(config: TrainConfig, steps: int | None, *, validations: int | None) -> TrainConfig:
    """The config with another length and evenly spaced validations (None: few in short runs) that cannot stop it.

    Example:
        >>> short = with_length(TrainConfig(), 500, validations=5)
        >>> short.schedule.length, short.validation.every
        (500, 100.0)
    """
    schedule = config.schedule
    if steps is not None:
        milestones = tuple(sorted({round(steps / schedule.length * one) for one in schedule.milestones}))
        schedule = replace(schedule, length=steps, unit="steps", milestones=milestones)
    if validations is None:
        is_short = schedule.unit == "steps" and schedule.length <= SHORT_STEPS
        validations = SHORT_VALIDATIONS if is_short else VALIDATIONS
    every = schedule.length / validations
    if schedule.unit == "steps":
        every = float(max(1, round(every)))
    validation = replace(config.validation, every=every, unit=schedule.unit, patience=None)
    return replace(config, schedule=schedule, validation=validation)


def trial_config(variant: Variant, settings: Mapping[str, Any], tuning: Tuning, seed: int) -> TrainConfig:
    """The config of a trial of a row, with searched settings by dotted key; ConfigError if its loss rejects them."""
    config = replace(variant.config, seed=seed)
    if tuning.steps is not None:
        # The warm-up takes the same share of the trial as of the real run: with all of it a short trial would hardly
        # train at the rate it has to judge, and too high a rate would win.
        schedule = config.schedule
        share = schedule.warmup_steps / schedule.length if schedule.unit == "steps" else WARMUP_SHARE
        warmup = min(schedule.warmup_steps, round(share * tuning.steps))
        # Only the validation split is measured: the choice must not depend on the evaluation split.
        changes = {"schedule": {"warmup_steps": warmup}, "evaluation": {"split": NO_SPLIT}}
        config = with_length(changed(config, changes), tuning.steps, validations=1)
    config = changed(config, nested(dict(settings)))
    make_loss(config.loss, **config.criterion.options)
    return config


def changed(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """The config with nested values replaced."""
    return config_from_dict(merge(config_to_dict(config), changes))


def settings_hash(config: TrainConfig) -> str:
    """Ten hexadecimal digits of all settings that affect the result of a run.

    The folder, the time limit and the checkpoint interval are left out; data counts by its absolute path.

    Example:
        >>> one, other = TrainConfig(data="builtin"), TrainConfig(data="builtin", max_minutes=5)
        >>> settings_hash(one) == settings_hash(other) != settings_hash(TrainConfig(data="a"))
        True
    """
    values = config_to_dict(config)
    unchanged = (key for key, value in DEFAULTS_BEFORE_ADDED.items() if attrgetter(key)(config) == value)
    for key in {*RESUMABLE_KEYS, *unchanged}:
        group, _, name = key.rpartition(".")
        del (values[group] if group else values)[name]
    values["device"] = config.device  # minutes on two devices must not be compared
    values["data"] = BUILTIN_VERSION if config.data == "builtin" else str(Path(config.data).resolve())
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]


def cache_folder(config: TrainConfig, cache: Path, settings: Mapping[str, Any] | None = None) -> Path:
    """The folder of a run: a readable name with the settings of its row, and the hash of all settings.

    Only the hash identifies a run: an existing one keeps the name that another comparison gave it.
    """
    hashed = settings_hash(config)
    found = sorted(cache.glob(f"*-{hashed}"))
    name, _, seed = default_folder(config).name.rpartition("-seed")
    about = "-".join(key.rpartition(".")[2] + as_typed(value) for key, value in (settings or {}).items())
    words = filter(None, [name, as_file_name(about), f"seed{seed}", hashed])
    return found[0] if found else cache / "-".join(words)


def data_name(data: str) -> str:
    """A short name for the data of a config: ``builtin``, or its folder or file."""
    return data if data == "builtin" else Path(data).resolve().name


# --- the time and memory of a plan ------------------------------------------------------------


def describe_plan(plan: Plan, *, images: int | None = None, processes: int = 1, workers: int = 1) -> str:
    """The runs of a plan with their time, memory and settings, without training any.

    Args:
        plan: the rows, seeds and search.
        images: images of a run; by default of the first row's schedule.
        processes: processes of a run.
        workers: runs at a time.
    """
    first = plan.variants[0].config
    lines = [describe_work(plan, images=images, processes=processes, workers=workers)]
    counts = ", ".join(map(str, plan.looks))
    looks = f", until decided after {counts} of them" if len(plan.looks) > 1 else ", all of them"
    lines.append(f"seeds: {', '.join(map(str, plan.seeds))}{looks}")
    if plan.tuning is not None:
        factors = ", ".join(f"{factor:.3g}" for factor in RATE_FACTORS)
        lines.append(
            f"learning rates tried for each row: {factors} times the row's own, more while the best is at an end"
        )
        for one in plan.tuning.over:
            rows = f"rows of {one.loss}" if one.loss else "each row"
            lines.append(f"  with {one.key} of {', '.join(map(as_typed, one.values))} for {rows}")
    lines.append("rows, and how they differ from the settings of the first:")
    for variant in plan.variants:
        keys = differing_keys(first, variant.config)
        differing = [f"{key} = {attrgetter(key)(variant.config)}" for key in keys]
        lines.append(f"  {variant.name}: {'; '.join(differing) or 'the settings below'}")
    return "\n".join([*lines, "", yaml.safe_dump(config_to_dict(first), sort_keys=False).rstrip()])


def describe_work(plan: Plan, *, images: int | None = None, processes: int = 1, workers: int = 1) -> str:
    """The number of trainings of a plan, and an estimate of their time and memory on this machine.

    Validation and data loading are not counted; all rows have the first one's detector, image size and schedule.
    """
    config = plan.variants[0].config
    step_images = config.batches.size * config.batches.accumulate
    if images is None:
        per_unit = step_images if config.schedule.unit == "steps" else len(load_run_data(config).train)
        images = config.schedule.length * per_unit
    trials = plan.trainings - len({settings_hash(one.config) for one in plan.variants}) * len(plan.seeds)
    is_short = plan.tuning is not None and plan.tuning.steps is not None
    trial_images = plan.tuning.steps * step_images if is_short else images  # type: ignore[union-attr, operator]
    seconds, gigabytes = measure_step(config, config.batches.size // processes)
    total = ((plan.trainings - trials) * images + trials * trial_images) * seconds / processes
    at_a_time = min(workers, plan.trainings)
    return (
        f"{plan.trainings} trainings of {config.detector}, about {describe_seconds(total / at_a_time)} on this "
        f"{choose_device(config.device).type} with {at_a_time} at a time; about {gigabytes:.1f} GB for a step"
    )


def measure_step(config: TrainConfig, batch: int) -> tuple[float, float]:
    """Seconds per image of forward and backward pass, and gigabytes of a step with ``batch`` images in float32.

    The time is measured on random pixels in batches of limited size. The memory is counted: the tensors that autograd
    keeps for the backward pass, weights, gradients and the state of the optimizer, without workspaces.
    """
    device, size = choose_device(config.device), config.batches.image_size
    height, width = (size, size) if isinstance(size, int) else size
    count = max(1, min(batch, MAX_PIXELS // (height * width)))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    fresh = replace(config, model=replace(config.model, weights=None))  # without a download
    with seeded(config.seed, deterministic=False):
        detector = make_detector(fresh, tuple(f"class {k}" for k in range(20))).to(device)
        images: Any = torch.rand(count, 3, height, width, device=device)
        if config.batches.cache_features:
            images = detector.features(images)
        box = torch.tensor([[1.0, 1.0, 3.0, 3.0]], device=device) * min(height, width) / 4
        targets = [{"boxes": box, "labels": torch.tensor([0], device=device)}] * count
        times = []
        for _ in range(MEASURED_STEPS):
            start = time.perf_counter()
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = torch.stack(list(detector(images, targets).values())).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
    weights = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in detector.parameters()}
    copies = 3 if config.optimizer.name == "sgd" else 4  # weights, gradients, one moment or two
    activations = sum(kept.values()) - sum(size for key, size in weights.items() if key in kept)
    # The first step also compiles and allocates.
    return min(times[1:]) / count, (activations * batch / count + copies * sum(weights.values())) / 1e9


# --- values typed on the command line ---------------------------------------------------------


def loss_settings(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a loss, the options by dotted key; ConfigError for anything else.

    Example:
        >>> loss_settings("focal:gamma=1:alpha=0.25")
        ('focal', {'criterion.options.gamma': 1, 'criterion.options.alpha': 0.25})
    """
    name, *options = text.split(":")
    if "=" in name or not all(re.fullmatch(r"\w+=.+", option) for option in options):
        raise ConfigError(f"{text!r}: write the options of a loss as focal:gamma=1:alpha=0.25")
    LOSSES.get(name)
    pairs = (one.split("=", 1) for one in options)
    return name, {f"{LOSS_OPTIONS}.{key}": parse_value(value) for key, value in pairs}


def parse_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values of ``--vary KEY=A,B``, by dotted key; :func:`comparison_plan` checks the keys.

    Example:
        >>> parse_vary(["optimizer.learning_rate=0.001,3e-3", "batches.image_size=[64,96],128"])
        {'optimizer.learning_rate': [0.001, 0.003], 'batches.image_size': [[64, 96], 128]}
    """
    varied: dict[str, list[Any]] = {}
    for text in texts:
        key, values = _key_and_values(text, "--vary batches.size=4,8")
        varied.setdefault(key, []).extend(values)
    return varied


def parse_searched(texts: Sequence[str]) -> tuple[Searched, ...]:
    """The settings of ``--tune-over [LOSS:]KEY=A,B``; ConfigError for a key that cannot vary.

    Example:
        >>> box_weight, gamma = parse_searched(["criterion.box_weight=1,3", "focal:gamma=1,2"])
        >>> box_weight.key, gamma.key, gamma.loss
        ('criterion.box_weight', 'criterion.options.gamma', 'focal')
    """
    searched = []
    for text in texts:
        name, values = _key_and_values(text, "--tune-over criterion.box_weight=1,3")
        loss, _, key = name.rpartition(":")
        if loss:
            LOSSES.get(loss)
            key = key if "." in key else f"{LOSS_OPTIONS}.{key}"
        check_varied(key, option="--tune-over")
        searched.append(Searched(key, tuple(values), loss or None))
    return tuple(searched)


def _key_and_values(text: str, example: str) -> tuple[str, list[Any]]:
    key, _, values = text.partition("=")
    if not parse_list(values):
        raise ConfigError(f"{example.split()[0]} {text}: add the values, as in {example}")
    return key.strip(), list(map(parse_value, parse_list(values)))


def check_varied(key: str, *, option: str = "--vary") -> None:
    """Raises a ConfigError for an unknown setting, or one in which rows cannot differ."""
    known = {setting.key: setting.default for setting in config_fields()}
    inside = any(key.startswith(f"{one}.") for one, default in known.items() if isinstance(default, dict))
    if key not in known and not inside:
        by_ending = [one for one in known if one.endswith(f".{key}")]
        hint = did_you_mean(key, by_ending or known) or "; aploss train --help lists them"
        raise ConfigError(f"{option}: there is no setting {key!r}{hint}")
    if key in ("loss", "seed"):
        raise ConfigError(f"{option} {key}: use --{key.replace('loss', 'losse')}s")
    if key in (*FIXED_BY_COMPARISON, *RESUMABLE_KEYS):
        raise ConfigError(f"{option} {key}: the comparison fixes this setting, or it does not affect the result")


def as_typed(value: Any) -> str:
    """A value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)


def parse_list(text: str) -> list[str]:
    """The parts of a comma-separated list; commas inside brackets do not separate.

    Example:
        >>> parse_list("ap,focal:gamma=1, [64,96],")
        ['ap', 'focal:gamma=1', '[64,96]']
    """
    return [part for part in map(str.strip, re.split(r",(?![^\[{]*[\]}])", text)) if part]


def more_seeds(seeds: Sequence[int], most: int) -> tuple[int, ...]:
    """The seeds, and further ones up to ``most`` in all.

    Example:
        >>> more_seeds([4, 5], 4)
        (4, 5, 6, 7)
    """
    if most <= len(seeds):
        raise ConfigError(f"--seeds-until-decided {most}: more than the {len(seeds)} of --seeds are needed")
    return (*seeds, *range(max(seeds) + 1, max(seeds) + 1 + most - len(seeds)))


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from ``"3"`` (how many, starting at 0) or ``"4,5"`` (which); ConfigError for anything else.

    Example:
        >>> parse_seeds("3"), parse_seeds("4,5"), parse_seeds("7,")
        ((0, 1, 2), (4, 5), (7,))
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    seeds = tuple(int(word) for word in words if re.fullmatch("[0-9]{1,10}", word))
    if not seeds or len(seeds) < len(words) or ("," not in text and not 1 <= seeds[0] <= MAX_SEEDS):
        expected = f"a number of seeds from 1 to {MAX_SEEDS}, or a list such as 0,1,2 (a single seed: 7,)"
        raise ConfigError(f"--seeds must be {expected}, got {text:.60}")
    return seeds if "," in text else tuple(range(seeds[0]))
