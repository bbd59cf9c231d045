"""The plan of a comparison: its rows and seeds, from the texts of the command line, and the time it takes."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

import torch
import yaml

from aploss.detectors.criterion import make_loss
from aploss.errors import ConfigError
from aploss.experiments.runs import (
    RATE,
    VALIDATIONS,
    Variant,
    as_typed,
    changed,
    check_varied,
    comparison_config,
    settings_hash,
)
from aploss.experiments.search import RATE_FACTORS, Search
from aploss.losses.traits import LOSSES
from aploss.progress import describe_seconds
from aploss.training.config import TrainConfig, config_to_dict, differing_keys, merge, nested, parse_value
from aploss.training.distributed import choose_device, seeded
from aploss.training.run import make_detector
from aploss.training.splits import load_run_data

LEVEL = 0.05  # of significance
MAX_SEEDS = 1000
LOSS_OPTIONS = "criterion.options"
MEASURED_PIXELS = 512 * 512  # of a training step whose time is measured
WITHOUT_WEIGHTS: dict[str, Any] = {"model": {"weights": None}}  # and without a download


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
        trials = 0
        if (search := self.search) is not None:
            # A trial of the real length is the run of the first seed, if it wins.
            trials = sum(len(search.next_trials(row, [])) - (search.steps is None) for row in rows)
        return len(rows) * len(self.seeds), trials


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
    """The runs of a plan with their settings and estimated time, without training any.

    Args:
        plan: the rows, seeds and search.
        images: images of a run; by default of the first row's schedule.
        workers: runs at a time.
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
