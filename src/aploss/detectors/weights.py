"""Initial weights from torchvision, from other packages by name, or from a file, with a report of what was loaded."""

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

NAMED_WEIGHTS = ("imagenet", "coco")
BACKGROUND = "__background__"  # torchvision's name of column 0
CLASS_LAYER = re.compile(r"head\.classification_head\.(cls_logits|module_list\.\d+(\.1)?)\.(weight|bias)")
# torchvision's RetinaNet weights are from before version 0.12, when ReLUs were layers of the heads.
OLD_HEAD = re.compile(r"(head\.(?:classification|regression)_head\.conv)\.(\d+)\.(weight|bias)")


@dataclass(frozen=True)
class LoadedWeights:
    """A report of which weights were loaded into a detector, with names as in its ``state_dict()``."""

    source: str  # where the weights came from
    loaded: tuple[str, ...]  # tensors that were loaded
    by_class: tuple[str, ...]  # last layers of the class head, loaded for the classes in ``classes`` only
    classes: tuple[str, ...]  # names of the classes that both sides know; empty if the source has no names
    mismatched: tuple[str, ...]  # newly initialised, because the tensors of this name differ in shape or kind
    missing: tuple[str, ...]  # newly initialised, because the source has no tensor of this name
    unused: tuple[str, ...]  # tensors of the source that the detector does not have

    @property
    def complete(self) -> bool:
        """Whether every tensor of the detector was loaded in full."""
        return not (self.mismatched or self.missing or self.by_class)

    def __str__(self) -> str:
        total = sum(map(len, (self.loaded, self.by_class, self.mismatched, self.missing)))
        lines = [f"weights from {self.source}: loaded {len(self.loaded)} of {total} tensors"]
        if self.by_class:
            lines.append(f"  class head: loaded the classes {', '.join(self.classes)}; others newly initialised")
        for title, names in (
            ("newly initialised (different shape or kind)", self.mismatched),
            ("newly initialised (not in the checkpoint)", self.missing),
            ("not used", self.unused),
        ):
            if names:  # by their first two parts, as "backbone.fpn (16)"
                groups = Counter(".".join(name.split(".")[:2]) for name in names)
                lines.append(f"  {title}: {', '.join(f'{group} ({count})' for group, count in groups.items())}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Weights as they were found."""

    name: str
    state: Mapping[str, Tensor]
    from_torchvision: bool = False
    columns: tuple[str, ...] | None = None  # class name or BACKGROUND of each logit of an anchor, if known
    softmax: bool = False


def load_weights(detector: Detector, weights: str | Path | None) -> LoadedWeights | None:
    """Loads pretrained weights into a detector; tensors that do not fit stay newly initialised.

    The last layer of the class head is loaded class by class if the source names its classes (torchvision's COCO
    weights, checkpoints of aploss), otherwise if it has the same shape. The report is also logged.

    Args:
        detector: changed in place.
        weights: ``"imagenet"`` (the backbone), ``"coco"`` (everything except new classes), a file (checkpoint of
            aploss, state dict of aploss or torchvision), a run folder, or None.

    Returns:
        The report; None without weights.

    Raises:
        ConfigError: if the weights do not exist, or none of them fit.
        RunError: if a file cannot be downloaded or read.
    """
    if weights is None or str(weights) == "none":
        return None
    source = _find(detector, str(weights))
    report = _load_fitting(detector, source)
    if not report.loaded:
        raise ConfigError(f"none of the weights in {source.name} fit {detector.name}")
    logger.log(logging.INFO if report.complete else logging.WARNING, "%s", report)
    return report


def _find(detector: Detector, weights: str) -> _Source:
    if weights not in NAMED_WEIGHTS:
        if not Path(weights).exists():
            raise ConfigError(
                f"weights {weights!r} do not exist: use {', '.join(NAMED_WEIGHTS)}, or the path of a file or run folder"
            )
        return _from_file(checkpoint_file(Path(weights)))
    if (state := detector.architecture.own_weights(weights)) is not None:
        return _Source(name=f"{weights} for {detector.name}", state=state)
    named = detector.architecture.named_weights
    if weights not in named:
        others = [name for name, one in DETECTORS.items() if weights in one.named_weights]
        raise ConfigError(
            f"there are no {weights!r} weights for {detector.name}, only for {', '.join(others)}: omit weights, "
            "or use a file"
        )
    return _from_torchvision(get_weight(named[weights]))


def _from_torchvision(entry: WeightsEnum) -> _Source:
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(entry.url).name
    try:
        if not file.is_file():  # torch.hub checks the hash in the name after a download
            entry.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as error:  # no network, or another hash
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RunError(
            f"cannot download the weights {entry} ({reason}): download {entry.url} on another machine and save it as "
            f"{file}"
        ) from None
    categories = tuple(entry.meta.get("categories") or ())
    return _Source(
        name=f"{entry} ({file.name})",
        state=_tensors(read_torch_file(file), file),
        from_torchvision=True,
        columns=categories if categories[:1] == (BACKGROUND,) else None,  # a classifier's categories are not columns
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
        return _Source(name=str(file), state=state, columns=columns, softmax=softmax)
    for key in ("model", "state_dict"):  # checkpoints of torchvision's reference scripts and of Lightning
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    # torch.save keeps the names of modules beside a state dict; only detectors of aploss have a criterion.
    is_ours = "criterion" in (getattr(content, "_metadata", None) or {})
    return _Source(name=str(file), state=_tensors(content, file), from_torchvision=not is_ours)


def _tensors(content: Any, file: Path) -> dict[str, Tensor]:
    if not (isinstance(content, Mapping) and content and all(isinstance(one, Tensor) for one in content.values())):
        raise RunError(f"{file} does not contain weights: expected a state dict, names with tensors")
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
        # Without running statistics the parameters belong to a group norm, whose scale differs from a batch norm's.
        statistics = f"{name.rpartition('.')[0]}.running_mean"
        if (statistics in own) == (statistics in theirs) and tensor.shape == own[name].shape:
            fitting[name] = tensor
    detector.load_state_dict({**own, **fitting})
    return LoadedWeights(
        source=source.name,
        loaded=tuple(name for name in shared if name in fitting and name not in by_class),
        by_class=tuple(by_class),
        classes=classes,
        mismatched=tuple(name for name in shared if name not in fitting),
        missing=tuple(name for name in own if name not in theirs),
        unused=tuple(  # frozen batch norms have no counters
            name for name in theirs if name not in own and not name.endswith("num_batches_tracked")
        ),
    )


def _tensors_for(detector: Detector, source: _Source) -> dict[str, Tensor]:
    """The tensors of a source under the detector's names; unknown names stay."""
    of_detector = any(name.startswith("backbone.") for name in source.state)
    tensors = {}
    for name, tensor in source.state.items():
        key = OLD_HEAD.sub(lambda m: f"{m[1]}.{int(m[2]) // 2}.0.{m[3]}", name)
        key = key if of_detector else detector.architecture.backbone_key(name)
        if source.from_torchvision and key.startswith("head.regression_head.bbox_reg."):
            # torchvision's RetinaNet regresses plain offsets, ours divides them by .1, .1, .2, .2.
            factors = tensor.new_tensor(detector.box_coder.weights).repeat(len(tensor) // 4)  # [anchors x 4]
            tensor = tensor * factors.view(-1, *[1] * (tensor.ndim - 1))
        tensors[key] = tensor
    return tensors


def _merge_class_rows(
    own: Tensor, theirs: Tensor, detector: Detector, source: _Source, their_columns: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...]]:
    """The detector's tensor [anchors x columns, ...] with the rows of the classes that the source knows, and these.

    If there are none, or anchors or scores differ in kind, the tensor is empty and therefore does not fit.
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
