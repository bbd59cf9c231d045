"""Every setting of a run: frozen dataclasses that validate their values.

The command line, YAML files and the Python API all end in one :class:`TrainConfig`. A setting is declared once, with
its type, default, help line, range, and the rules for resuming and comparing runs. Unknown keys and invalid values
raise a ConfigError that names the key.
"""

import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache, reduce
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from aploss.errors import ConfigError, did_you_mean
from aploss.files import load_yaml

NOT_GIVEN = object()


class Check(NamedTuple):
    """A condition on a value and its wording in error messages."""

    holds: Callable[[Any], bool]
    expected: str


def at_least(least: float) -> Check:
    """Every number of the value is ``least`` or more."""
    return Check(lambda value: all(number >= least for number in _numbers(value)), f"at least {least}")


def above(bound: float) -> Check:
    """The number is greater than ``bound``."""
    return Check(lambda value: value > bound, f"above {bound}")


def between(low: float, high: float) -> Check:
    """Every number of the value lies in the closed interval."""
    return Check(lambda value: all(low <= number <= high for number in _numbers(value)), f"between {low} and {high}")


INSIDE_0_1 = Check(lambda value: 0 < value < 1, "between 0 and 1, both excluded")


def _numbers(value: Any) -> tuple[float, ...]:
    entries = value if isinstance(value, tuple) else (value,)
    return tuple(entry for entry in entries if isinstance(entry, int | float))


def setting(
    default: Any,
    help_text: str,
    check: Check | None = None,
    *,
    resumable: bool = False,
    default_before: Any = NOT_GIVEN,
    fixed_by_comparison: bool = False,
) -> Any:
    """Declares a setting: a dataclass field with everything the rest of the package needs to know about it.

    Args:
        default: the default value; ``dict`` for an empty mapping.
        help_text: shown by ``aploss train --help``.
        check: range of the value.
        resumable: the setting does not affect what is learned, so it may change when a run is resumed.
        default_before: for a setting added after a release, the value equivalent to its absence in older runs.
        fixed_by_comparison: comparisons choose the value themselves, so their rows cannot differ in it.
    """
    rules = {"resumable": resumable, "default_before": default_before, "fixed_by_comparison": fixed_by_comparison}
    given: dict[str, Any] = {"default_factory": dict} if default is dict else {"default": default}
    return field(**given, metadata={"help": help_text, "check": check, **rules})


class _Settings:
    """A group of settings, converted and validated on construction."""

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
                value = msgspec.convert(value, kind, strict=False)
            except msgspec.ValidationError:
                raise ConfigError(f"{key} must be {_type_name(kind)}, got {value!r}") from None
            self._require(all(map(math.isfinite, _numbers(value))), key, value, "finite")
            check = entry.metadata["check"]
            if check is not None and value is not None:
                or_null = " or null" if type(None) in get_args(kind) else ""
                self._require(check.holds(value), key, value, check.expected + or_null)
            object.__setattr__(self, entry.name, value)

    @staticmethod
    def _require(holds: bool, key: str, value: Any, expected: str) -> None:
        if not holds:
            raise ConfigError(f"{key} must be {expected}, got {value!r}")


@dataclass(frozen=True)
class SplitsConfig(_Settings, group="splits."):
    """The splits used for training and validation."""

    format: str = setting("auto", "dataset format: auto, voc, coco or yolo")
    train: str | None = setting(None, "training split; by default train, else trainval")
    validation: str | None = setting(None, "validation split; by default val, else held-out images; 'none' to disable")
    holdout: float = setting(0.15, "share of training images held out if there is no validation split", INSIDE_0_1)
    accept_changed: bool = setting(False, "resume although the data have changed; the report says so", resumable=True)
    ignore_unknown_classes: bool = setting(
        False, "evaluate without the objects of classes that the training split lacks", resumable=True
    )


@dataclass(frozen=True)
class BatchesConfig(_Settings, group="batches."):
    """The input of a forward pass."""

    size: int = setting(8, "images per forward pass, summed over all ranks", at_least(1))
    accumulate: int = setting(1, "forward passes whose gradients are accumulated for one step", at_least(1))
    image_size: int | tuple[int, int] = setting(
        512, "size of training images: side of a square, or [height, width]", between(32, 8192)
    )
    augmentation: Literal["paper", "light", "flip", "none"] = setting("light", "augmentation preset")
    cache_features: bool = setting(False, "train from cached features of a frozen backbone", default_before=False)
    cached_views: int | None = setting(
        None, "cached views of each image; by default about 2000 in total", at_least(1), default_before=None
    )
    workers: int | None = setting(None, "data loader workers; by default automatic", at_least(0), resumable=True)
    max_unreadable: float = setting(0.1, "tolerated share of unreadable images", between(0, 1), resumable=True)


@dataclass(frozen=True)
class ModelConfig(_Settings, group="model."):
    """The detector apart from its name and its loss."""

    weights: str | None = setting(None, "initial weights: imagenet (backbone), coco (detector), a file, or null")
    backbone: str | None = setting(None, "backbone of the detector 'retinanet': any timm model, as convnext_tiny")
    options: dict[str, Any] = setting(dict, "options of the architecture, see build_detector")  # noqa: RUF009
    frozen: tuple[str, ...] = setting((), "parameters to freeze: names or patterns, as backbone.*")
    frozen_backbone: bool = setting(False, "freeze the pretrained backbone of a RetinaNet", default_before=False)
    ema: float | None = setting(None, "decay of the moving average (EMA) of the weights; null to disable", INSIDE_0_1)

    @property
    def architecture(self) -> dict[str, Any]:
        """All options of the architecture."""
        return self.options if self.backbone is None else {**self.options, "backbone": self.backbone}


@dataclass(frozen=True)
class CriterionConfig(_Settings, group="criterion."):
    """The loss apart from its name."""

    options: dict[str, Any] = setting(dict, "options of the classification loss, as delta")  # noqa: RUF009
    rank_over: Literal["batch", "image", "class"] = setting("batch", "rank all anchors together, per image or class")
    rank_over_processes: bool = setting(False, "rank and count positives over the images of all ranks")
    assigner: Literal["iou", "atss"] = setting("iou", "anchor assignment: IoU threshold or ATSS", default_before="iou")
    hard_boxes: Literal["ignore", "drop"] = setting(
        "ignore", "difficult and crowd boxes: ignore their anchors, or drop the boxes", default_before="ignore"
    )
    box_loss: str | None = setting(None, "smooth-l1, paper-smooth-l1 or giou; by default chosen to suit the loss")
    box_weight: float | Literal["balanced"] | None = setting(
        None, "weight of the box loss; by default chosen to suit the loss", at_least(0)
    )


@dataclass(frozen=True)
class OptimizerConfig(_Settings, group="optimizer."):
    """Optimizer and gradient clipping."""

    name: Literal["sgd", "adamw"] = setting("adamw", "sgd (with momentum) or adamw")
    learning_rate: float = setting(3e-3, "peak learning rate of the schedule", above(0))
    momentum: float = setting(0.9, "momentum of sgd", Check(lambda value: 0 <= value < 1, "at least 0 and below 1"))
    weight_decay: float = setting(1e-2, "weight decay", at_least(0))
    decay_norms_and_biases: bool = setting(False, "also apply weight decay to normalization weights and biases")
    clip_norm: float | None = setting(1.0, "maximum gradient norm; null disables clipping", above(0))


@dataclass(frozen=True)
class ScheduleConfig(_Settings, group="schedule."):
    """Length of training and the learning-rate schedule."""

    length: int = setting(1000, "length of training, in units", at_least(1))
    unit: Literal["steps", "epochs"] = setting("steps", "unit of length and milestones", fixed_by_comparison=True)
    kind: Literal["milestones", "cosine"] = setting("cosine", "decay of the learning rate")
    milestones: tuple[float, ...] = setting((), "when the learning rate is multiplied by gamma")
    gamma: float = setting(0.1, "learning-rate factor at a milestone", above(0))
    final_factor: float = setting(0.02, "final share of the learning rate with kind cosine", between(0, 1))
    warmup_steps: int = setting(50, "steps of linear warmup; at most a tenth of the training if not given", at_least(0))
    exact_warmup: bool = setting(
        False, "keep warmup_steps in a short training; true if warmup_steps is given", default_before=True
    )
    warmup_factor: float = setting(
        0.02, "initial share of the learning rate", Check(lambda value: 0 < value <= 1, "above 0 and at most 1")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = all(a < b for a, b in zip(self.milestones, self.milestones[1:], strict=False))
        self._require(rising, "schedule.milestones", self.milestones, "in rising order")
        used = not self.milestones or self.kind == "milestones"
        self._require(used, "schedule.milestones", self.milestones, "empty with kind cosine")


@dataclass(frozen=True)
class ValidationConfig(_Settings, group="validation."):
    """Validation while training, and model selection."""

    every: float = setting(1.0, "validation interval, in units", above(0), fixed_by_comparison=True)
    unit: Literal["steps", "epochs"] = setting("epochs", "unit of every", fixed_by_comparison=True)
    metric: str = setting("AP", "metric that selects the best checkpoint")
    patience: int | None = setting(
        None, "early stopping: validations without improvement", at_least(1), fixed_by_comparison=True
    )
    batch_size: int = setting(8, "images per forward pass of validation", at_least(1), resumable=True)

    def __post_init__(self) -> None:
        from aploss.evaluation import HEADLINE_METRICS  # imports torch, which the help of a command need not wait for

        super().__post_init__()
        known = self.metric in HEADLINE_METRICS
        self._require(known, "validation.metric", self.metric, f"one of {', '.join(HEADLINE_METRICS)}")


@dataclass(frozen=True)
class EvaluationConfig(_Settings, group="evaluation."):
    """The evaluation at the end of a run."""

    split: str | None = setting(None, "split of the final evaluation; by default test, else val; 'none' to disable")
    checkpoint: Literal["best", "last"] = setting("best", "checkpoint to evaluate", fixed_by_comparison=True)
    voc_year: Literal[2007, 2012] | None = setting(None, "also report VOC's AP50: 2007 (11 points) or 2012 (area)")


@dataclass(frozen=True)
class TrainConfig(_Settings):
    """All settings of a run. ``TrainConfig(data="builtin")`` is a minimal config that works."""

    data: str = setting("", "folder or file of the dataset, or 'builtin'", resumable=True)
    out: str | None = setting(None, "run folder; by default runs/DATA-DETECTOR-LOSS-seedN", resumable=True)
    detector: str = setting("retinanet-tiny", "name of the detector")
    loss: str = setting("ap", "classification loss")
    seed: int = setting(
        0,
        "seed of initial weights, data order and augmentation",
        Check(lambda value: 0 <= value < 2**63, "at least 0 and below 2^63"),
    )
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps ...", resumable=True)
    precision: Literal["float32", "bfloat16", "float16"] = setting("float32", "dtype of the forward pass")
    deterministic: bool | None = setting(None, "bit-identical results in every run; by default only on the CPU")
    max_minutes: float | None = setting(None, "time limit of training in minutes", at_least(0), resumable=True)
    checkpoint_minutes: float | None = setting(10.0, "minutes between checkpoints", at_least(0), resumable=True)
    checkpoint_steps: int | None = setting(None, "steps between checkpoints", at_least(1), resumable=True)
    log_steps: int = setting(10, "steps between rows of the metrics files, which hold means", at_least(1))
    bad_steps: int = setting(3, "stop after this many consecutive steps with NaN or Inf", at_least(1), resumable=True)
    splits: SplitsConfig = field(default_factory=SplitsConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    criterion: CriterionConfig = field(default_factory=CriterionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracker: Literal[
        "auto", "none", "tensorboard", "wandb", "mlflow", "aim", "clearml", "comet_ml", "dvclive", "swanlab", "trackio"
    ] = setting("auto", "experiment tracker; auto is tensorboard if installed", resumable=True)


@cache
def _hints(config_type: type) -> dict[str, Any]:
    return get_type_hints(config_type)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_type_name(part) for part in get_args(kind))
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    names |= {dict: "a mapping", tuple: "a list", type(None): "null"}
    return names[get_origin(kind) or kind]


# --- fields by dotted key ---


class ConfigField(NamedTuple):
    """One setting of :class:`TrainConfig`, groups flattened."""

    key: str  # dotted, as "batches.size"
    type: Any
    default: Any
    help: str
    group: str  # "batches"; empty at the top level
    resumable: bool
    default_before: Any
    fixed_by_comparison: bool


@cache
def config_fields() -> tuple[ConfigField, ...]:
    """All settings of a run in order of declaration: the options of the command line."""
    return tuple(_flat_fields(TrainConfig, ""))


def _flat_fields(config_type: Any, group: str) -> Iterator[ConfigField]:
    for entry in fields(config_type):
        kind, meta = _hints(config_type)[entry.name], entry.metadata
        if is_dataclass(kind):
            yield from _flat_fields(kind, entry.name)
        else:
            key = f"{group}.{entry.name}" if group else entry.name
            default = entry.default if entry.default is not MISSING else {}
            rules = meta["resumable"], meta["default_before"], meta["fixed_by_comparison"]
            yield ConfigField(key, kind, default, meta["help"], group, *rules)


RESUMABLE_KEYS = tuple(entry.key for entry in config_fields() if entry.resumable)
DEFAULTS_BEFORE_ADDED = {
    entry.key: entry.default_before for entry in config_fields() if entry.default_before is not NOT_GIVEN
}
FIXED_BY_COMPARISON = tuple(entry.key for entry in config_fields() if entry.fixed_by_comparison)


def parse_value(text: str) -> Any:
    """Parses a value typed on the command line as a YAML scalar, list or mapping.

    Example:
        >>> parse_value("[240, 320]"), parse_value("1e-3"), parse_value("null"), parse_value("giou")
        ([240, 320], 0.001, None, 'giou')
    """
    try:
        value = load_yaml(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a valid value") from None
    if isinstance(value, str):
        with suppress(ValueError):  # YAML 1.1 reads 1e-3 as text
            return float(value)
    return value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Groups values by dotted key into nested mappings; strings for settings that are not text are parsed.

    Keys may reach into mappings, as ``model.options.norm``.

    Example:
        >>> nested({"seed": "1", "out": "7", "model.frozen": "[head]", "criterion.options.delta": "0.5"})
        {'seed': 1, 'out': '7', 'model': {'frozen': ['head']}, 'criterion': {'options': {'delta': 0.5}}}
    """
    kinds = {entry.key: entry.type for entry in config_fields()}
    result: dict[str, Any] = {}
    for key, value in values.items():
        is_text = (kind := kinds.get(key)) in (str, str | None)
        if isinstance(value, str) and (not is_text or (value == "null" and kind is not str)):
            value = parse_value(value)
        *groups, name = key.split(".")
        inner = reduce(lambda outer, group: outer.setdefault(group, {}), groups, result)
        if not isinstance(inner, dict):
            raise ConfigError(f"{key} conflicts with {'.'.join(groups)}, which is not a mapping")
        inner[name] = value
    return result


# --- configs and plain values ---


def config_from_dict(values: dict[str, Any], *, source: str = "") -> TrainConfig:
    """Builds a config from nested plain values as read from YAML; missing keys take their defaults.

    Args:
        values: nested mappings of keys to values.
        source: the file the values come from, named in error messages.

    Raises:
        ConfigError: for an unknown key or an invalid value.

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
                raise ConfigError(f"{name!r} is only valid in a recipe: pass the file with --recipe")
            key, known = f"{prefix}{name}", [prefix + one for one in kinds]
            hint = did_you_mean(key, known) or f"; known keys: {', '.join(known)}"
            raise ConfigError(f"unknown key {key!r}{hint}")
    return config_type(
        **{
            name: _from_mapping(kinds[name], value, f"{name}.") if is_dataclass(kinds[name]) else value
            for name, value in values.items()
        }
    )


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """Converts a config to nested plain values, the content of ``config.yaml``."""
    return _plain(asdict(config))  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value


def differing_keys(first: TrainConfig, second: TrainConfig) -> list[str]:
    """Returns the dotted keys whose values differ.

    Example:
        >>> differing_keys(TrainConfig(seed=1), TrainConfig(seed=2, log_steps=1))
        ['seed', 'log_steps']
    """
    keys = (entry.key for entry in config_fields())
    return [key for key in keys if attrgetter(key)(first) != attrgetter(key)(second)]
