"""Weights to start from: torchvision's by name, or a file; and a report of what fitted."""

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.models import get_weight
from torchvision.models._api import WeightsEnum

from aploss.detectors.checkpoint import Checkpoint, checkpoint_file, read_torch_file, refuse_non_finite, wrap_untrusted
from aploss.detectors.criterion import make_loss
from aploss.detectors.detector import DETECTORS, Detector
from aploss.errors import ConfigError, RunError
from aploss.losses.traits import traits_of

logger = logging.getLogger(__name__)

NAMED_WEIGHTS = ("imagenet", "coco")  # what they mean for a detector, its config says
BACKGROUND = "__background__"  # torchvision's name of column 0
CLASS_LAYER = re.compile(r"head\.classification_head\.(cls_logits|module_list\.\d+(\.1)?)\.(weight|bias)")
# Before torchvision 0.12 the convolutions of RetinaNet's heads had their ReLUs beside them.
OLD_HEAD = re.compile(r"(head\.(?:classification|regression)_head\.conv)\.(\d+)\.(weight|bias)")


@dataclass(frozen=True)
class LoadedWeights:
    """What of some weights went into a detector. Names are those of ``state_dict()``."""

    source: str  # where the weights came from
    loaded: tuple[str, ...]  # tensors that were loaded
    by_class: tuple[str, ...]  # last layers of the class head, of which the classes in ``classes`` were loaded
    classes: tuple[str, ...]  # names of the classes that both sides know; empty where the source names none
    new: tuple[str, ...]  # tensors in the file under the same name that do not fit: they stay as initialised
    missing: tuple[str, ...]  # tensors that are not in the file: they stay as initialised
    unused: tuple[str, ...]  # tensors of the file that the detector does not have

    @property
    def complete(self) -> bool:
        """Whether every tensor of the detector was loaded in full."""
        return not (self.new or self.missing or self.by_class)

    def __str__(self) -> str:
        total = sum(map(len, (self.loaded, self.by_class, self.new, self.missing)))
        lines = [f"weights from {self.source}: loaded {len(self.loaded)} of {total} tensors"]
        if self.by_class:
            lines.append(f"  class head: loaded the classes {', '.join(self.classes)}; others new")
        for title, names in (
            ("of another shape or kind, made anew", self.new),
            ("not in the weights, made anew", self.missing),
            ("in the weights only, not used", self.unused),
        ):
            if names:
                lines.append(f"  {title}: {_in_groups(names)}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Weights as they were found."""

    name: str
    state: Mapping[str, Tensor]
    from_torchvision: bool
    columns: tuple[str, ...] | None = None  # the class of each logit of an anchor or BACKGROUND, where it is known
    softmax: bool = False


def load_weights(detector: Detector, weights: str | Path | None) -> LoadedWeights | None:
    """Starts a detector from weights trained elsewhere; what does not fit stays as initialised.

    The last layer of the class head is loaded class by class where the weights say which classes they know
    (torchvision's COCO weights, our checkpoints), and otherwise if it has the same shape. What was and was not loaded
    is logged, too.

    Args:
        detector: changed in place.
        weights: ``"imagenet"`` (the backbone) or ``"coco"`` (everything but new classes), the name of torchvision
            weights such as ``"ResNet50_Weights.IMAGENET1K_V2"``, a file of weights (ours, a state dict, torchvision's),
            a run folder, or None for nothing.

    Returns:
        What was loaded; None for no weights.

    Raises:
        ConfigError: if there are no such weights, or nothing of them fits.
        RunError: if a file cannot be downloaded or read.
    """
    if weights is None or str(weights) == "none":
        return None
    source = _find(detector, str(weights))
    report = _load_fitting(detector, source)
    if not report.loaded:
        raise ConfigError(f"nothing in the weights {source.name} fits {detector.name}")
    logger.log(logging.INFO if report.complete else logging.WARNING, "%s", report)
    return report


def _find(detector: Detector, weights: str) -> _Source:
    if weights in NAMED_WEIGHTS:
        if (state := detector.architecture.own_weights(weights)) is not None:
            return _Source(name=f"{weights} for {detector.name}", state=state, from_torchvision=False)
        named = detector.architecture.named_weights
        if weights not in named:
            others = [name for name, one in DETECTORS.items() if weights in one.named_weights]
            raise ConfigError(
                f"there are no {weights!r} weights for {detector.name}, only for "
                f"{', '.join(others)}; leave weights away or name a file"
            )
        return _from_torchvision(get_weight(named[weights]))
    if Path(weights).exists():
        return _from_file(checkpoint_file(Path(weights)))
    try:
        return _from_torchvision(get_weight(weights))
    except (ValueError, KeyError):
        raise ConfigError(
            f"weights {weights!r} are neither a file nor a name: use {', '.join(NAMED_WEIGHTS)}, "
            "a name of torchvision such as ResNet50_Weights.IMAGENET1K_V2, or a path"
        ) from None


def _from_torchvision(entry: WeightsEnum) -> _Source:
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(entry.url).name
    try:
        # The hash in the file name is checked after a download, by torch.hub.
        if not file.is_file():
            entry.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as error:  # no network; a download of other content
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RunError(
            f"cannot download the weights {entry} ({reason}): on a machine without network, "
            f"fetch {entry.url} elsewhere and place it at {file}"
        ) from None
    categories = tuple(entry.meta.get("categories") or ())
    return _Source(
        name=f"{entry} ({file.name})",
        state=_tensors(read_torch_file(file), file),
        from_torchvision=True,
        columns=categories if categories[:1] == (BACKGROUND,) else None,  # of a classifier they are no logits
        softmax=file.name.startswith("ssd"),
    )


def _from_file(file: Path) -> _Source:
    content = read_torch_file(file)
    if (checkpoint := Checkpoint.from_content(content, file)) is not None:
        with wrap_untrusted(file):
            config = checkpoint.config
            softmax = traits_of(make_loss(config["loss"], **config["loss_options"])).softmax
            columns = (BACKGROUND,) * softmax + tuple(map(str, config["class_names"]))
        state = _tensors(checkpoint.weights, file)
        return _Source(name=str(file), state=state, from_torchvision=False, columns=columns, softmax=softmax)
    for key in ("state_dict", "model_state_dict", "model"):  # where other tools keep the weights
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    # torch.save keeps the modules' names beside a state dict; only our detectors have a criterion.
    ours = "criterion" in (getattr(content, "_metadata", None) or {})
    return _Source(name=str(file), state=_tensors(content, file), from_torchvision=not ours)


def _tensors(content: Any, file: Path) -> dict[str, Tensor]:
    tensors = isinstance(content, Mapping) and all(isinstance(v, Tensor) for v in content.values())
    if not tensors or not content:
        raise RunError(f"{file} holds no weights: expected a state dict of names and tensors")
    with wrap_untrusted(file):
        refuse_non_finite((str(name), bool(tensor.isfinite().all())) for name, tensor in content.items())
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def _load_fitting(detector: Detector, source: _Source) -> LoadedWeights:
    own, theirs = detector.state_dict(), _tensors_for(detector, source)
    fitting: dict[str, Tensor] = {}
    by_class: list[str] = []
    classes: tuple[str, ...] = ()
    shared = [name for name in own if name in theirs]
    for name in shared:
        tensor = theirs[name]
        if CLASS_LAYER.fullmatch(name) and source.columns is not None:
            tensor, found = _merge_class_rows(own[name], tensor, detector, source, source.columns)
            classes = found or classes
            if 0 < len(found) < detector.num_classes:
                by_class.append(name)
        # The scale of a batch norm means something else without its statistics: in a group norm.
        statistics = f"{name.rpartition('.')[0]}.running_mean"
        if (statistics in own) == (statistics in theirs) and tensor.shape == own[name].shape:
            fitting[name] = tensor
    detector.load_state_dict({**own, **fitting})
    return LoadedWeights(
        source=source.name,
        loaded=tuple(name for name in shared if name in fitting and name not in by_class),
        by_class=tuple(by_class),
        classes=classes,
        new=tuple(name for name in shared if name not in fitting),
        missing=tuple(name for name in own if name not in theirs),
        unused=tuple(  # frozen batch norm has no counter
            name for name in theirs if name not in own and not name.endswith("num_batches_tracked")
        ),
    )


def _tensors_for(detector: Detector, source: _Source) -> dict[str, Tensor]:
    """The tensors of a source under the detector's names; unknown ones keep theirs."""
    of_detector = any(name.startswith("backbone.") for name in source.state)
    tensors = {}
    for name, tensor in source.state.items():
        key = OLD_HEAD.sub(lambda m: f"{m[1]}.{int(m[2]) // 2}.0.{m[3]}", name)
        key = key if of_detector else detector.architecture.backbone_key(name)
        if source.from_torchvision and key.startswith("head.regression_head.bbox_reg."):
            # torchvision's RetinaNet regresses plain offsets, ours are divided by .1, .1, .2, .2.
            factors = tensor.new_tensor(detector.box_coder.weights).repeat(len(tensor) // 4)  # [anchors x 4]
            tensor = tensor * factors.view(-1, *[1] * (tensor.ndim - 1))
        tensors[key] = tensor
    return tensors


def _merge_class_rows(
    own: Tensor, theirs: Tensor, detector: Detector, source: _Source, their_columns: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...]]:
    """The detector's tensor [anchors x columns, ...] with the rows of classes the source knows; and these classes.

    Where there are none, or anchors or scores are of another kind, the tensor is empty, which fits nowhere.
    """
    background = (BACKGROUND,) * detector.uses_softmax
    columns = background + detector.class_names
    anchors = own.shape[0] // len(columns)
    classes = tuple(name for name in detector.class_names if name in their_columns)
    same_shape = theirs.shape == (anchors * len(their_columns), *own.shape[1:])
    if not (same_shape and source.softmax == detector.uses_softmax and classes):
        return own.new_empty(0), ()
    merged = own.clone().view(anchors, len(columns), *own.shape[1:])
    rows = theirs.to(own).view(anchors, len(their_columns), *own.shape[1:])
    found = background + classes
    merged[:, [columns.index(name) for name in found]] = rows[:, [their_columns.index(name) for name in found]]
    return merged.view_as(own), classes


def _in_groups(names: tuple[str, ...]) -> str:
    """Names by their first two parts, as ``backbone.fpn (16 tensors)``."""
    groups = Counter(".".join(name.split(".")[:2]) for name in names)
    return ", ".join(f"{group} ({count})" for group, count in groups.items())
