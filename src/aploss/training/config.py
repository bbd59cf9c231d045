"""Every setting of a run: frozen dataclasses, and the checks of their values.

The command line, the YAML files and the Python API all end in one :class:`TrainConfig`. Each setting is declared once,
with its type, default, help line and range; a key that does not exist, or a value that a key cannot have, is an error
that names the key.
"""

import math
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from aploss.errors import ConfigError, did_you_mean


class Check(NamedTuple):
    """What a value must fulfil, and how a message says it."""

    holds: Callable[[Any], bool]
    expected: str


def at_least(least: float) -> Check:
    """Each number of the value is ``least`` or more."""
    return Check(lambda value: min(_numbers(value)) >= least, f"at least {least}")


def above(bound: float) -> Check:
    """The number is larger than ``bound``."""
    return Check(lambda value: value > bound, f"above {bound}")


def between(low: float, high: float) -> Check:
    """Each number of the value is in the closed interval."""
    return Check(lambda value: all(low <= number <= high for number in _numbers(value)), f"between {low} and {high}")


INSIDE_0_1 = Check(lambda value: 0 < value < 1, "between 0 and 1, both excluded")


def _numbers(value: Any) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def setting(default: Any, help_text: str, check: Check | None = None) -> Any:
    """A dataclass field with the line that ``aploss train --help`` shows for it, and its range."""
    return field(default=default, metadata={"help": help_text, "check": check})


class _Settings:
    """A group of settings, checked when it is made: the one place where this happens."""

    _group: ClassVar[str]

    def __init_subclass__(cls, group: str = "") -> None:
        cls._group = group

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            kind = _hints(type(self))[entry.name]  # type: ignore[arg-type]
            if is_dataclass(kind):
                continue
            key, value = self._group + entry.name, getattr(self, entry.name)
            try:
                value = _converted(kind, value)
            except ValueError:
                raise ConfigError(f"{key} must be {_type_name(kind)}, got {value!r}") from None
            check = entry.metadata.get("check")
            if check is not None and isinstance(value, int | float | tuple):
                or_null = " or null" if type(None) in get_args(kind) else ""
                self._require(check.holds(value), key, value, check.expected + or_null)
            object.__setattr__(self, entry.name, value)

    @staticmethod
    def _require(holds: bool, key: str, value: Any, expected: str) -> None:
        if not holds:
            raise ConfigError(f"{key} must be {expected}, got {value!r}")


@dataclass(frozen=True)
class SplitsConfig(_Settings, group="splits."):
    """Which images are trained on and which are looked at while training."""

    format: str = setting("auto", "format of the data: auto, voc, coco or yolo")
    train: str | None = setting(None, "split to train on; by default train, else trainval")
    validation: str | None = setting(
        None, "split for every choice; by default val, else a held-out part; 'none' for no split"
    )
    holdout: float = setting(0.15, "share of the training images held out without a validation split", INSIDE_0_1)


@dataclass(frozen=True)
class BatchesConfig(_Settings, group="batches."):
    """What one forward pass sees."""

    size: int = setting(8, "images per forward pass, of all ranks together", at_least(1))
    accumulate: int = setting(1, "forward passes whose gradients make one step", at_least(1))
    image_size: int | tuple[int, int] = setting(
        512, "training images are resized to this: side of a square, or [height, width]", between(32, 8192)
    )
    augmentation: Literal["paper", "light", "flip", "none"] = setting("light", "augmentation preset")
    cache_features: bool = setting(
        False, "compute the maps of a frozen backbone once for some views of each image, and train from them"
    )
    cached_views: int | None = setting(
        None, "views of each image that augmentation draws for that; by default some thousand in all", at_least(1)
    )
    workers: int | None = setting(None, "data loader workers; by default chosen for the hardware", at_least(0))
    max_unreadable: float = setting(0.1, "stop when more than this share of the images cannot be read", between(0, 1))


@dataclass(frozen=True)
class ModelConfig(_Settings, group="model."):
    """The detector apart from its name and its loss."""

    weights: str | None = setting(None, "start from: 'imagenet' (backbone), 'coco' (detector), a file, or nothing")
    backbone: str | None = setting(None, "backbone of the detector 'retinanet': any model of timm, as convnext_tiny")
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "options of the architecture, of build_detector"}
    )
    frozen: tuple[str, ...] = setting((), "parameters not trained: names or patterns as backbone.*")
    frozen_backbone: bool = setting(
        False, "keep the pretrained backbone of a RetinaNet as it is, train what follows it"
    )
    ema: float | None = setting(
        None, "decay of the exponential moving average (EMA) of the weights; null for no EMA", INSIDE_0_1
    )

    @property
    def architecture(self) -> dict[str, Any]:
        """All options of the architecture."""
        return self.options if self.backbone is None else {**self.options, "backbone": self.backbone}


@dataclass(frozen=True)
class CriterionConfig(_Settings, group="criterion."):
    """The loss apart from its name."""

    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "options of the classification loss, as delta"}
    )
    rank_over: Literal["batch", "image", "class"] = setting(
        "batch", "rank the anchors of all images and classes together, or of each image or class alone"
    )
    rank_over_processes: bool = setting(False, "rank and count the positives over the images of all ranks (processes)")
    assigner: Literal["iou", "atss"] = setting("iou", "how anchors become positive: by a least overlap, or ATSS")
    box_loss: str | None = setting(None, "smooth-l1 or giou; by default what suits the loss")
    box_weight: float | Literal["balanced"] | None = setting(
        None, "weight of the box loss; by default what suits the loss", at_least(0)
    )


@dataclass(frozen=True)
class OptimizerConfig(_Settings, group="optimizer."):
    """How a gradient becomes a step."""

    name: Literal["sgd", "adamw"] = setting("adamw", "sgd (with momentum) or adamw")
    learning_rate: float = setting(3e-3, "the highest learning rate of the schedule", above(0))
    momentum: float = setting(0.9, "momentum of sgd", Check(lambda value: 0 <= value < 1, "at least 0 and below 1"))
    weight_decay: float = setting(1e-2, "weight decay", at_least(0))
    decay_norms_and_biases: bool = setting(False, "also decay normalisation weights and biases")
    clip_norm: float | None = setting(1.0, "maximum gradient norm; null disables clipping", above(0))


@dataclass(frozen=True)
class ScheduleConfig(_Settings, group="schedule."):
    """How long training lasts and how the learning rate moves."""

    length: int = setting(1000, "how long to train, in units", at_least(1))
    unit: Literal["steps", "epochs"] = setting("steps", "unit of length and milestones")
    kind: Literal["milestones", "cosine"] = setting("cosine", "how the learning rate falls")
    milestones: tuple[float, ...] = setting((), "when the learning rate is multiplied by gamma")
    gamma: float = setting(0.1, "factor at a milestone", above(0))
    final_factor: float = setting(0.02, "share of the learning rate at the end of the cosine", between(0, 1))
    warmup_steps: int = setting(50, "steps over which the learning rate rises to its full value", at_least(0))
    warmup_factor: float = setting(
        0.02,
        "share of the learning rate at the start of the warm-up",
        Check(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = all(a < b for a, b in zip(self.milestones, self.milestones[1:], strict=False))
        self._require(rising, "schedule.milestones", self.milestones, "in rising order")
        used = not self.milestones or self.kind == "milestones"
        self._require(used, "schedule.milestones", self.milestones, "empty with kind cosine")


@dataclass(frozen=True)
class ValidationConfig(_Settings, group="validation."):
    """How often the validation split is measured, and what follows from it."""

    every: float = setting(1.0, "how often to validate, in units", above(0))
    unit: Literal["steps", "epochs"] = setting("epochs", "unit of every")
    metric: Literal["AP", "AP50", "AP75"] = setting("AP", "metric the best checkpoint is chosen by")
    patience: int | None = setting(None, "early stopping after so many validations without a better one", at_least(1))
    batch_size: int = setting(8, "images per forward pass of validation", at_least(1))


@dataclass(frozen=True)
class EvaluationConfig(_Settings, group="evaluation."):
    """The numbers at the end: on which split, of which weights."""

    split: str | None = setting(None, "split of the final numbers; by default test, else val; 'none' for no numbers")
    checkpoint: Literal["best", "last"] = setting("best", "which weights are evaluated")
    voc_year: Literal[2007, 2012] | None = setting(None, "also Pascal VOC's AP50: 2007 (11 points) or 2012 (area)")


@dataclass(frozen=True)
class TrainConfig(_Settings):
    """A whole run. ``TrainConfig(data="builtin")`` is one that works."""

    data: str = setting("", "folder or file of the data set, or 'builtin'")
    out: str | None = setting(None, "run folder; by default runs/DATA-DETECTOR-LOSS-seedN")
    detector: str = setting("retinanet-tiny", "name of the detector")
    loss: str = setting("ap", "classification loss")
    seed: int = setting(
        0,
        "initial weights, data order and augmentation follow from it",
        Check(lambda value: 0 <= value < 2**63, "at least 0 and below 2^63"),
    )
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps ...")
    precision: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", "number type of the forward pass; weights stay float32"
    )
    deterministic: bool | None = setting(
        None, "bit-identical numbers in every run; by default on the CPU, where it costs little"
    )
    max_minutes: float | None = setting(None, "stop training after so many minutes in all", at_least(0))
    checkpoint_minutes: float | None = setting(10.0, "minutes between checkpoints", at_least(0))
    checkpoint_steps: int | None = setting(None, "steps between checkpoints", at_least(1))
    log_steps: int = setting(10, "steps between rows of the metrics files (means over them)", at_least(1))
    bad_steps: int = setting(
        3, "stop after so many steps in a row with NaN or Inf in scores, losses or gradients", at_least(1)
    )
    splits: SplitsConfig = field(default_factory=SplitsConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    criterion: CriterionConfig = field(default_factory=CriterionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracker: Literal["auto", "tensorboard", "wandb", "mlflow", "none"] = setting(
        "auto", "where curves go beside the run folder's files; auto is tensorboard where it is installed"
    )


# --- types ---


@cache
def _hints(config_type: type) -> dict[str, Any]:
    return get_type_hints(config_type)


def _converted(kind: Any, value: Any) -> Any:
    """The value as its declared type: lists become tuples, ``1e-3`` (text in YAML 1.1) a number.

    Raises:
        ValueError: it is of another type.
    """
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, types.UnionType):
        if type(None) in parts and value in (None, "null"):
            return None
        for part in parts:
            try:
                return _converted(part, value)
            except ValueError:
                continue
    elif origin is Literal:
        matching = [choice for choice in parts if choice in (value, _whole(value))]
        if matching and not isinstance(value, bool):
            return matching[0]
    elif kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(OverflowError):  # a whole number of hundreds of digits
            if math.isfinite(number := float(value)):
                return number
    elif kind is int:
        if (whole := _whole(value)) is not None:
            return whole
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(kinds) == len(value):
            return tuple(_converted(part, entry) for part, entry in zip(kinds, value, strict=True))
    elif origin in (str, bool, dict) and isinstance(value, origin):
        return value
    raise ValueError(value)


def _whole(value: Any) -> int | None:
    """A whole number, also written as text; None for anything else."""
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() and len(value) < 30:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_type_name(part) for part in get_args(kind))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    names |= {dict: "a mapping", tuple: "a list", type(None): "null"}
    return names[get_origin(kind) or kind]


class Setting(NamedTuple):
    """One leaf of a config: dotted key, type, default and help line."""

    key: str
    type: Any
    default: Any
    help: str


@cache
def settings_of(config_type: type) -> tuple[Setting, ...]:
    """The leaves of a config dataclass in order, groups opened: the options of the command line."""
    return tuple(_leaves(config_type, ""))


def _leaves(config_type: Any, prefix: str) -> Iterator[Setting]:
    for entry in fields(config_type):
        kind = _hints(config_type)[entry.name]
        if is_dataclass(kind):
            yield from _leaves(kind, f"{entry.name}.")
        else:
            factory = entry.default_factory
            default = entry.default if factory is MISSING else factory()
            yield Setting(prefix + entry.name, kind, default, entry.metadata["help"])


# --- configs and plain values ---


def config_from_dict(values: dict[str, Any], *, source: str = "") -> TrainConfig:
    """A config from nested plain values as read from YAML, missing keys taking their defaults.

    A key that does not exist or a value it cannot have is a ConfigError that names it, and the ``source`` file.

    Example:
        >>> config_from_dict({"data": "builtin", "batches": {"size": 4}}).batches.size
        4
        >>> config_from_dict({"batches": {"sise": 4}})
        Traceback (most recent call last):
        ...
        aploss.errors.ConfigError: unknown key 'batches.sise'; did you mean 'batches.size'?
    """
    try:
        return _from_mapping(TrainConfig, values, "")  # type: ignore[no-any-return]
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}" if source else str(error)) from None


def _from_mapping(config_type: Any, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        where = f"{prefix[:-1]} must be" if prefix else "a config must be"
        raise ConfigError(f"{where} a mapping of keys to values, got {values!r}")
    kinds = {entry.name: _hints(config_type)[entry.name] for entry in fields(config_type)}
    for name in values:
        if name not in kinds:
            if not prefix and name in ("extends", "losses"):
                raise ConfigError(f"{name!r} is for recipes: give the file with --recipe")
            key, known = f"{prefix}{name}", [prefix + one for one in kinds]
            raise ConfigError(f"unknown key {key!r}" + (did_you_mean(key, known) or f"; known are {', '.join(known)}"))
    return config_type(
        **{
            name: _from_mapping(kinds[name], value, f"{name}.") if is_dataclass(kinds[name]) else value
            for name, value in values.items()
        }
    )


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """The nested plain values of a config: what config.yaml holds."""
    return _plain(asdict(config))  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value


def differing_keys(first: TrainConfig, second: TrainConfig) -> list[str]:
    """The dotted keys whose values differ.

    Example:
        >>> differing_keys(TrainConfig(seed=1), TrainConfig(seed=2, log_steps=1))
        ['seed', 'log_steps']
    """
    keys = (entry.key for entry in settings_of(TrainConfig))
    return [key for key in keys if attrgetter(key)(first) != attrgetter(key)(second)]
