"""Every setting of a training run, as frozen dataclasses with a help text per setting.

The command line, the YAML files and the Python API all end in one :class:`TrainConfig`. A key that
does not exist, or a value that a key cannot have, is an error that names the key.
"""

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from aploss.errors import ConfigError

__all__ = [
    "BatchesConfig",
    "CriterionConfig",
    "EvaluationConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "SplitsConfig",
    "TrainConfig",
    "ValidationConfig",
    "config_from_dict",
    "config_to_dict",
    "differing_keys",
]


def setting(default: Any, help_text: str) -> Any:
    """A dataclass field with the line that ``aploss train --help`` shows for it."""
    return field(default=default, metadata={"help": help_text})


def _require(holds: bool, key: str, value: Any, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{key} must be {expected}, got {value!r}")


@dataclass(frozen=True)
class SplitsConfig:
    """Which images are trained on and which are looked at while training."""

    format: str = setting("auto", "format of the data: auto, voc, coco or yolo")
    train: str | None = setting(None, "split to train on; by default train, else trainval")
    validation: str | None = setting(
        None, "split for every choice; by default val, else a held-out part; 'none' for no split"
    )
    holdout: float = setting(
        0.15, "share of the training images held out where the data has no validation split"
    )

    def __post_init__(self) -> None:
        _require(0 < self.holdout < 1, "splits.holdout", self.holdout, "between 0 and 1")


@dataclass(frozen=True)
class BatchesConfig:
    """What one forward pass sees."""

    size: int = setting(8, "images of all processes together in one forward pass")
    accumulate: int = setting(1, "forward passes whose gradients make one step")
    image_size: int | tuple[int, int] = setting(
        512, "training images are resized to this: side of a square, or [height, width]"
    )
    augmentation: Literal["paper", "light", "none"] = setting("light", "augmentation preset")
    workers: int | None = setting(None, "loader processes; by default chosen for the hardware")

    def __post_init__(self) -> None:
        _require(self.size >= 1, "batches.size", self.size, "at least 1")
        _require(self.accumulate >= 1, "batches.accumulate", self.accumulate, "at least 1")
        sides = (self.image_size,) if isinstance(self.image_size, int) else self.image_size
        _require(min(sides) >= 32, "batches.image_size", self.image_size, "at least 32")
        _require((self.workers or 0) >= 0, "batches.workers", self.workers, "0 or more")


@dataclass(frozen=True)
class ModelConfig:
    """The detector apart from its name and its loss."""

    weights: str | None = setting(
        None, "start from: 'imagenet' (backbone), 'coco' (detector), a file, or nothing"
    )
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "options of the architecture, of build_detector"}
    )
    frozen: tuple[str, ...] = setting((), "parameters not trained: names or patterns as backbone.*")
    ema: float | None = setting(None, "decay of the moving average of the weights; none without")

    def __post_init__(self) -> None:
        _require(self.ema is None or 0 < self.ema < 1, "model.ema", self.ema, "between 0 and 1")


@dataclass(frozen=True)
class CriterionConfig:
    """The loss apart from its name."""

    options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "options of the classification loss, as delta"}
    )
    rank_over: Literal["batch", "image"] = setting(
        "batch", "rank the anchors of all images together, or of each image alone"
    )
    rank_over_processes: bool = setting(
        False, "rank, and count the positives, over the images of all processes"
    )
    box_loss: str | None = setting(None, "smooth-l1 or giou; by default what suits the loss")
    box_weight: float | Literal["balanced"] | None = setting(
        None, "weight of the box loss; by default what suits the loss"
    )

    def __post_init__(self) -> None:
        weight = self.box_weight
        positive = not isinstance(weight, float) or weight >= 0
        _require(positive, "criterion.box_weight", weight, "0 or more, or balanced")


@dataclass(frozen=True)
class OptimizerConfig:
    """How a gradient becomes a step."""

    name: Literal["sgd", "adamw"] = setting("adamw", "sgd (with momentum) or adamw")
    learning_rate: float = setting(3e-3, "the highest learning rate of the schedule")
    momentum: float = setting(0.9, "momentum of sgd")
    weight_decay: float = setting(1e-2, "weight decay")
    decay_norms_and_biases: bool = setting(False, "also decay normalisation weights and biases")
    clip_norm: float | None = setting(1.0, "longest gradient allowed; none for any")

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "optimizer.learning_rate", self.learning_rate, "above 0")
        _require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "in [0, 1)")
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "0 or more")
        clips = self.clip_norm is None or self.clip_norm > 0
        _require(clips, "optimizer.clip_norm", self.clip_norm, "above 0 or null")


@dataclass(frozen=True)
class ScheduleConfig:
    """How long training lasts and how the learning rate moves."""

    length: int = setting(1000, "how long to train, in units")
    unit: Literal["steps", "epochs"] = setting("steps", "unit of length and milestones")
    kind: Literal["milestones", "cosine"] = setting("cosine", "how the learning rate falls")
    milestones: tuple[float, ...] = setting((), "when the learning rate is multiplied by gamma")
    gamma: float = setting(0.1, "factor at a milestone")
    final_factor: float = setting(0.02, "share of the learning rate where the cosine ends")
    warmup_steps: int = setting(50, "steps over which the learning rate rises to its full value")
    warmup_factor: float = setting(0.02, "share of the learning rate where the warm-up starts")

    def __post_init__(self) -> None:
        _require(self.length >= 1, "schedule.length", self.length, "at least 1")
        _require(self.gamma > 0, "schedule.gamma", self.gamma, "above 0")
        _require(0 <= self.final_factor <= 1, "schedule.final_factor", self.final_factor, "in 0..1")
        _require(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "0 or more")
        in_range = 0 < self.warmup_factor <= 1
        _require(in_range, "schedule.warmup_factor", self.warmup_factor, "above 0, at most 1")
        rising = all(a < b for a, b in zip(self.milestones, self.milestones[1:], strict=False))
        _require(rising, "schedule.milestones", self.milestones, "in rising order")
        used = not self.milestones or self.kind == "milestones"
        _require(used, "schedule.milestones", self.milestones, "empty with kind cosine")


@dataclass(frozen=True)
class ValidationConfig:
    """How often the validation split is detected, and what follows from it."""

    every: float = setting(1.0, "how often to validate, in units")
    unit: Literal["steps", "epochs"] = setting("epochs", "unit of every")
    metric: Literal["AP", "AP50", "AP75"] = setting("AP", "metric the best checkpoint is chosen by")
    patience: int | None = setting(None, "stop after so many validations without a better one")
    batch_size: int = setting(8, "images detected at a time")

    def __post_init__(self) -> None:
        _require(self.every > 0, "validation.every", self.every, "above 0")
        patient = self.patience is None or self.patience >= 1
        _require(patient, "validation.patience", self.patience, "at least 1 or null")
        _require(self.batch_size >= 1, "validation.batch_size", self.batch_size, "at least 1")


@dataclass(frozen=True)
class EvaluationConfig:
    """The numbers at the end: on which split, of which weights."""

    split: str | None = setting(None, "split of the final numbers; by default test, else val")
    checkpoint: Literal["best", "last"] = setting("best", "which weights are evaluated")
    voc_year: Literal[2007, 2012] | None = setting(
        None, "also measure Pascal VOC's AP50: 2007 (11 points) or 2012 (area)"
    )


@dataclass(frozen=True)
class TrainConfig:
    """A whole run. ``TrainConfig(data="builtin")`` is one that works."""

    data: str = setting("", "folder or file of the data set, or 'builtin'")
    out: str | None = setting(None, "folder of the run; by default runs/DATA-DETECTOR-LOSS-seedN")
    detector: str = setting("retinanet-tiny", "name of the detector")
    loss: str = setting("ap", "classification loss")
    seed: int = setting(0, "initial weights, data order and augmentation follow from it")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps ...")
    precision: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", "number type of the forward pass; weights stay float32"
    )
    deterministic: bool | None = setting(
        None, "the same numbers in every run; by default on the CPU, where it costs little"
    )
    max_minutes: float | None = setting(None, "stop training after so many minutes in all")
    checkpoint_minutes: float | None = setting(10.0, "minutes between checkpoints")
    checkpoint_steps: int | None = setting(None, "steps between checkpoints")
    log_steps: int = setting(10, "steps between rows of the metrics files (means over them)")
    bad_steps: int = setting(3, "stop after so many steps in a row with numbers not finite")
    splits: SplitsConfig = field(default_factory=SplitsConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    criterion: CriterionConfig = field(default_factory=CriterionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        for key in ("max_minutes", "checkpoint_minutes"):
            value = getattr(self, key)
            _require(value is None or value >= 0, key, value, "0 or more, or null")
        often = self.checkpoint_steps is None or self.checkpoint_steps >= 1
        _require(often, "checkpoint_steps", self.checkpoint_steps, "at least 1 or null")
        _require(self.seed >= 0, "seed", self.seed, "0 or more")
        _require(self.log_steps >= 1, "log_steps", self.log_steps, "at least 1")
        _require(self.bad_steps >= 1, "bad_steps", self.bad_steps, "at least 1")


def config_from_dict(values: dict[str, Any], *, source: str = "") -> TrainConfig:
    """A config from nested plain values, missing keys taking their defaults.

    Args:
        values: as read from YAML; groups are dicts.
        source: file the values come from, named in errors.

    Raises:
        ConfigError: for a key that does not exist or a value of the wrong type, by name.

    Example:
        >>> config_from_dict({"data": "builtin", "batches": {"size": 4}}).batches.size
        4
        >>> config_from_dict({"batches": {"sise": 4}})
        Traceback (most recent call last):
        ...
        aploss.errors.ConfigError: unknown key 'batches.sise'; did you mean 'batches.size'?
    """
    from aploss.training.config_types import check_types

    try:
        config: TrainConfig = check_types(TrainConfig, values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}" if source else str(error)) from None
    return config


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """The nested plain values of a config: what config.yaml holds."""
    plain: dict[str, Any] = _plain(asdict(config))
    return plain


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
    return _differences(first, second, "")


def _differences(first: Any, second: Any, prefix: str) -> list[str]:
    found = []
    for entry in fields(first):
        one, other = getattr(first, entry.name), getattr(second, entry.name)
        if is_dataclass(one):
            found += _differences(one, other, f"{prefix}{entry.name}.")
        elif one != other:
            found.append(prefix + entry.name)
    return found
