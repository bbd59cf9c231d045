"""Every setting of a run: frozen dataclasses that validate their values, and recipes, YAML files of settings.

The command line, YAML files and the Python API all end in one :class:`TrainConfig`. A setting is declared once, with
its type, range, default, help line, and the rules for resuming and comparing runs. Unknown keys and invalid values
raise a ConfigError that names the key.

A recipe, packaged or written by the user, has the same keys. It may extend another one (``extends``: the name of a
packaged recipe, or a file next to it), and may have a section ``losses`` with settings that apply only when that loss
is trained::

    extends: voc-retinanet-r50
    optimizer: {learning_rate: 0.002}
    losses:
      focal: {criterion: {options: {gamma: 1.5}}}

Later layers win: defaults, the extended recipe, the recipe itself, its section for the loss, overrides.
"""

# ruff: noqa: RUF009 - setting() declares a field

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache, reduce
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from aploss.errors import ConfigError, did_you_mean
from aploss.files import load_yaml

NOT_GIVEN = object()
RECIPES = Path(__file__).resolve().parents[1] / "recipes"

Count = Annotated[int, Meta(ge=1)]
AtLeastZero = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Share = Annotated[float, Meta(ge=0, le=1)]
InnerShare = Annotated[float, Meta(gt=0, lt=1)]


def setting(
    default: Any,
    help_text: str,
    *,
    resumable: bool = False,
    default_before: Any = NOT_GIVEN,
    fixed_by_comparison: bool = False,
) -> Any:
    """Declares a setting: a dataclass field with everything the rest of the package needs to know about it.

    Args:
        default: the default value; ``dict`` for an empty mapping.
        help_text: shown by ``aploss train --help``.
        resumable: the setting does not affect what is learned, so it may change when a run is resumed.
        default_before: for a setting added after a release, the value equivalent to its absence in older runs.
        fixed_by_comparison: comparisons choose the value themselves, so their rows cannot differ in it.
    """
    rules = {"resumable": resumable, "default_before": default_before, "fixed_by_comparison": fixed_by_comparison}
    given: dict[str, Any] = {"default_factory": dict} if default is dict else {"default": default}
    return field(**given, metadata={"help": help_text, **rules})


class _Settings:
    """A group of settings, converted and validated by msgspec on construction."""

    _group: ClassVar[str]

    def __init_subclass__(cls, group: str = "") -> None:
        cls._group = group

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            try:
                converted = msgspec.convert(getattr(self, entry.name), entry.type, strict=False)
            except msgspec.ValidationError as error:
                choices = ", ".join(map(str, _choices(entry.type)))
                self._refuse(entry.name, f"{error}; choose one of {choices}" if choices else str(error))
            object.__setattr__(self, entry.name, converted)

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise ConfigError(f"{self._group}{name} = {getattr(self, name)!r}: {reason}")


def _choices(kind: Any) -> list[Any]:
    """The values of a ``Literal``, also inside of a union."""
    inner = get_args(kind)
    return list(inner) if get_origin(kind) is Literal else [one for part in inner for one in _choices(part)]


@dataclass(frozen=True)
class SplitsConfig(_Settings, group="splits."):
    """The splits used for training and validation."""

    format: str = setting("auto", "dataset format: auto, voc, coco or yolo")
    train: str | None = setting(None, "training split; by default train, else trainval")
    validation: str | None = setting(None, "validation split; by default val, else held-out images; 'none' to disable")
    holdout: InnerShare = setting(0.15, "share of training images held out if there is no validation split")
    drop_empty: bool = setting(False, "train without the images that have no objects", default_before=False)
    accept_changed: bool = setting(False, "resume although the data have changed; the report says so", resumable=True)
    ignore_unknown_classes: bool = setting(
        False, "evaluate without the objects of classes that the training split lacks", resumable=True
    )


@dataclass(frozen=True)
class BatchesConfig(_Settings, group="batches."):
    """The input of a forward pass."""

    size: Count = setting(8, "images per forward pass, summed over all ranks")
    accumulate: Count = setting(1, "forward passes whose gradients are accumulated for one step")
    image_size: int | tuple[int, int] = setting(512, "size of training images: side of a square, or [height, width]")
    augmentation: Literal["paper", "light", "flip", "none"] = setting("light", "augmentation preset")
    cache_features: bool = setting(False, "train from cached features of a frozen backbone", default_before=False)
    cached_views: Count | None = setting(
        None, "cached views of each image; by default about 2000 in total", default_before=None
    )
    workers: Annotated[int, Meta(ge=0)] | None = setting(
        None, "data loader workers; by default automatic", resumable=True
    )
    max_unreadable: Share = setting(0.1, "tolerated share of unreadable images", resumable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = self.image_size if isinstance(self.image_size, tuple) else (self.image_size,)
        if not all(32 <= side <= 8192 for side in sides):
            self._refuse("image_size", "Expected sides between 32 and 8192")


@dataclass(frozen=True)
class ModelConfig(_Settings, group="model."):
    """The detector apart from its name and its loss."""

    weights: str | None = setting(None, "initial weights: imagenet (backbone), coco (detector), a file, or null")
    backbone: str | None = setting(None, "backbone of the detector 'retinanet': any timm model, as convnext_tiny")
    options: dict[str, Any] = setting(dict, "options of the architecture, see build_detector")
    frozen: tuple[str, ...] = setting((), "parameters to freeze: names or patterns, as backbone.*")
    frozen_backbone: bool = setting(False, "freeze the pretrained backbone of a RetinaNet", default_before=False)
    ema: InnerShare | None = setting(None, "decay of the moving average (EMA) of the weights; null to disable")

    @property
    def architecture(self) -> dict[str, Any]:
        """All options of the architecture."""
        return self.options if self.backbone is None else {**self.options, "backbone": self.backbone}


@dataclass(frozen=True)
class CriterionConfig(_Settings, group="criterion."):
    """The loss apart from its name."""

    options: dict[str, Any] = setting(dict, "options of the classification loss, as delta")
    rank_over: Literal["batch", "image", "class"] = setting("batch", "rank all anchors together, per image or class")
    rank_over_processes: bool = setting(False, "rank and count positives over the images of all ranks")
    assigner: Literal["iou", "atss"] = setting("iou", "anchor assignment: IoU threshold or ATSS", default_before="iou")
    hard_boxes: Literal["ignore", "drop"] = setting(
        "ignore", "difficult and crowd boxes: ignore their anchors, or drop the boxes", default_before="ignore"
    )
    box_loss: str | None = setting(None, "smooth-l1, paper-smooth-l1 or giou; by default chosen to suit the loss")
    box_weight: AtLeastZero | Literal["balanced"] | None = setting(
        None, "weight of the box loss; by default chosen to suit the loss"
    )


@dataclass(frozen=True)
class OptimizerConfig(_Settings, group="optimizer."):
    """Optimizer and gradient clipping."""

    name: Literal["sgd", "adamw"] = setting("adamw", "sgd (with momentum) or adamw")
    learning_rate: Positive = setting(3e-3, "peak learning rate of the schedule")
    momentum: Annotated[float, Meta(ge=0, lt=1)] = setting(0.9, "momentum of sgd")
    weight_decay: AtLeastZero = setting(1e-2, "weight decay")
    decay_norms_and_biases: bool = setting(False, "also apply weight decay to normalization weights and biases")
    clip_norm: Positive | None = setting(1.0, "maximum gradient norm; null disables clipping")


@dataclass(frozen=True)
class ScheduleConfig(_Settings, group="schedule."):
    """Length of training and the learning-rate schedule."""

    length: Count = setting(1000, "length of training, in units")
    unit: Literal["steps", "epochs"] = setting("steps", "unit of length and milestones", fixed_by_comparison=True)
    kind: Literal["milestones", "cosine"] = setting("cosine", "decay of the learning rate")
    milestones: tuple[AtLeastZero, ...] = setting((), "when the learning rate is multiplied by gamma")
    gamma: Positive = setting(0.1, "learning-rate factor at a milestone")
    final_factor: Share = setting(0.02, "final share of the learning rate with kind cosine")
    warmup_steps: Annotated[int, Meta(ge=0)] = setting(
        50, "steps of linear warmup; at most a tenth of the training if not given"
    )
    exact_warmup: bool = setting(
        False, "keep warmup_steps in a short training; true if warmup_steps is given", default_before=True
    )
    warmup_factor: Annotated[float, Meta(gt=0, le=1)] = setting(0.02, "initial share of the learning rate")

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.milestones) != sorted({*self.milestones}):
            self._refuse("milestones", "Expected rising numbers")
        if self.milestones and self.kind != "milestones":
            self._refuse("milestones", "Expected none with kind cosine")


@dataclass(frozen=True)
class ValidationConfig(_Settings, group="validation."):
    """Validation while training, and model selection."""

    every: Positive = setting(1.0, "validation interval, in units", fixed_by_comparison=True)
    unit: Literal["steps", "epochs"] = setting("epochs", "unit of every", fixed_by_comparison=True)
    metric: Literal["AP", "AP50", "AP75"] = setting("AP", "metric that selects the best checkpoint")
    patience: Count | None = setting(None, "early stopping: validations without improvement", fixed_by_comparison=True)
    batch_size: Count = setting(8, "images per forward pass of validation", resumable=True)


@dataclass(frozen=True)
class EvaluationConfig(_Settings, group="evaluation."):
    """The evaluation at the end of a run."""

    split: str | None = setting(None, "split of the final evaluation; by default test, else val; 'none' to disable")
    checkpoint: Literal["best", "last"] = setting("best", "checkpoint to evaluate", fixed_by_comparison=True)
    voc_year: Literal[2007, 2012] | None = setting(None, "also report VOC's AP50: 2007 (11 points) or 2012 (area)")


@dataclass(frozen=True)
class TrainConfig(_Settings):
    """All settings of a run, each with a default.

    Example:
        >>> config = TrainConfig(data="builtin", loss="focal")
        >>> config.loss, config.schedule.length, config.optimizer.learning_rate
        ('focal', 1000, 0.003)
    """

    data: str = setting("", "folder or file of the dataset, or 'builtin'", resumable=True)
    out: str | None = setting(None, "run folder; by default runs/DATA-DETECTOR-LOSS-seedN", resumable=True)
    detector: str = setting("retinanet-tiny", "name of the detector")
    loss: str = setting("ap", "classification loss")
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = setting(0, "seed of initial weights, data order and augmentation")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps ...", resumable=True)
    precision: Literal["float32", "bfloat16", "float16"] = setting("float32", "dtype of the forward pass")
    deterministic: bool | None = setting(None, "bit-identical results in every run; by default only on the CPU")
    max_minutes: AtLeastZero | None = setting(None, "time limit of training in minutes", resumable=True)
    checkpoint_minutes: AtLeastZero | None = setting(10.0, "minutes between checkpoints", resumable=True)
    checkpoint_steps: Count | None = setting(None, "steps between checkpoints", resumable=True)
    log_steps: Count = setting(10, "steps between rows of the metrics files, which hold means")
    bad_steps: Count = setting(3, "stop after this many consecutive steps with NaN or Inf", resumable=True)
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


# --- fields by dotted key ---


class ConfigField(NamedTuple):
    """One setting of :class:`TrainConfig`, groups flattened."""

    key: str  # dotted, as "batches.size"
    type: Any
    default: Any
    group: str  # "batches"; empty at the top level
    help: str
    resumable: bool
    default_before: Any
    fixed_by_comparison: bool


@cache
def config_fields() -> tuple[ConfigField, ...]:
    """All settings of a run in order of declaration: the options of the command line."""
    return tuple(_flat_fields(TrainConfig, ""))


def _flat_fields(config_type: Any, group: str) -> Iterator[ConfigField]:
    kinds = get_type_hints(config_type)  # without the ranges
    for entry in fields(config_type):
        if is_dataclass(entry.type):
            yield from _flat_fields(entry.type, entry.name)
        else:
            key = f"{group}.{entry.name}" if group else entry.name
            default = {} if entry.default is MISSING else entry.default
            yield ConfigField(key, kinds[entry.name], default, group, **entry.metadata)


RESUMABLE_KEYS = tuple(entry.key for entry in config_fields() if entry.resumable)
DEFAULTS_BEFORE_ADDED = {
    entry.key: entry.default_before for entry in config_fields() if entry.default_before is not NOT_GIVEN
}
FIXED_BY_COMPARISON = tuple(entry.key for entry in config_fields() if entry.fixed_by_comparison)
TrainConfig.__doc__ = f"{inspect.getdoc(TrainConfig)}\n\nAttributes:\n" + "\n".join(
    f"    {one.key} ({inspect.formatannotation(one.type)}): {one.help}. Default: {one.default!r}."
    for one in config_fields()
)


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
    kinds, given = {entry.name: entry.type for entry in fields(config_type)}, dict(values)
    for name, value in values.items():
        if not prefix and name in ("extends", "losses"):
            raise ConfigError(f"{name!r} is only valid in a recipe: pass the file with --recipe")
        if name not in kinds:
            key, known = f"{prefix}{name}", [prefix + one for one in kinds]
            hint = did_you_mean(key, known) or f"; known keys: {', '.join(known)}"
            raise ConfigError(f"unknown key {key!r}{hint}")
        if is_dataclass(kinds[name]):
            given[name] = _from_mapping(kinds[name], value, f"{name}.")
    return config_type(**given)


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """Converts a config to nested plain values, the content of ``config.yaml``."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, tuple | list) else value

    return plain(asdict(config))  # type: ignore[no-any-return]


def differing_keys(first: TrainConfig, second: TrainConfig) -> list[str]:
    """Returns the dotted keys whose values differ.

    Example:
        >>> differing_keys(TrainConfig(seed=1), TrainConfig(seed=2, log_steps=1))
        ['seed', 'log_steps']
    """
    keys = (entry.key for entry in config_fields())
    return [key for key in keys if attrgetter(key)(first) != attrgetter(key)(second)]


# --- recipes ---


def recipe_names() -> tuple[str, ...]:
    """Returns the names of the packaged recipes; files that only serve as a base start with an underscore.

    Example:
        >>> "demo" in recipe_names()
        True
    """
    return tuple(sorted(path.stem for path in RECIPES.glob("[!_]*.yaml")))


def load_config(recipe: str | None = None, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """Returns the config of a recipe with overrides.

    Args:
        recipe: name of a packaged recipe or path of a YAML file; None for the defaults alone.
        overrides: nested values that win over the recipe; ``loss`` selects the recipe's section for that loss.

    Raises:
        ConfigError: for an unknown recipe or key, or an invalid value.

    Example:
        >>> load_config("voc-ssd512", {"loss": "focal"}).criterion.options
        {'alpha': 0.25, 'gamma': 1.0}
    """
    overrides = overrides or {}
    if "warmup_steps" in (overrides.get("schedule") or {}):  # the user's own is not shortened
        overrides = merge({"schedule": {"exact_warmup": True}}, overrides)
    if recipe is None:
        return config_from_dict(overrides)
    values = read_recipe(recipe)
    sections = values.pop("losses", None) or {}
    loss = overrides.get("loss", values.get("loss", TrainConfig.loss))
    section = (sections.get(loss) or {}) if isinstance(sections, dict) else sections
    if not isinstance(section, dict):
        raise ConfigError(f"recipe {recipe}: losses must be a mapping of losses to settings, got {sections!r}")
    values = merge(values, section)
    # Validated on its own first, so that a mistake in the recipe is reported as such.
    config_from_dict(values, source=f"recipe {recipe}")
    return config_from_dict(merge(values, overrides))


def read_recipe(name: str) -> dict[str, Any]:
    """Reads a recipe by name or path and merges it over the recipes it extends."""
    chain: list[Path] = []
    values: dict[str, Any] = {"extends": name}
    while (base := values.pop("extends", None)) is not None:
        where = f"{chain[-1]} extends {base!r}: " if chain else ""
        candidates = (RECIPES / f"{base}.yaml", (chain[-1].parent if chain else Path()) / str(base))
        path = next((path.resolve() for path in candidates if path.exists()), None)
        if path is None or path in chain:
            problem = f"no recipe {base!r}" if path is None else "the recipe extends itself"
            raise ConfigError(f"{where}{problem}; choose from {', '.join(recipe_names())}, or a .yaml file")
        chain.append(path)
        values = merge(read_yaml(path), values)
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a mapping from a YAML file; raises ConfigError for anything else."""
    if path.exists() and not path.is_file():  # reading a pipe or device may never end
        raise ConfigError(f"config file {path} is a folder, pipe or device, not a file")
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} must be a mapping of keys to values, got {values!r}")
    return values


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merges ``changes`` over ``base``, nested mappings key by key; returns a new mapping.

    Example:
        >>> merge({"a": 1, "group": {"b": 2, "c": 3}}, {"group": {"c": 4}})
        {'a': 1, 'group': {'b': 2, 'c': 4}}
    """
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged
