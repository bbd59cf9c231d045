"""Weights with other names, classes or box codes, as a detector expects them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from aploss.detectors.detector import Detector

__all__ = ["BACKGROUND", "WeightsSource", "has_class_rows", "merge_class_rows", "tensors_for"]

BACKGROUND = "__background__"  # torchvision's name of column 0
_CLASS_LAYER = re.compile(
    r"head\.classification_head\.(cls_logits|module_list\.\d+(\.1)?)\.(weight|bias)"
)
# Before torchvision 0.12 the convolutions of RetinaNet's heads had their ReLUs beside them.
_OLD_HEAD = re.compile(r"(head\.(?:classification|regression)_head\.conv)\.(\d+)\.(weight|bias)")
_VGG_FIRST_EXTRA = 23  # pool4 of VGG-16: from here on layers belong to SSD's first extra block
_MOBILENET_C4 = 13  # MobileNetV3-Large: SSDlite cuts this block in two


@dataclass(frozen=True, kw_only=True)
class WeightsSource:
    """Weights as they were found.

    Attributes:
        name: for messages.
        state: tensors by the names they have there.
        from_torchvision: whether a model of torchvision, rather than one of ours.
        columns: what each logit of an anchor stands for, with :data:`BACKGROUND` for none of the
            classes; None where unknown.
        softmax: whether these share one distribution.
    """

    name: str
    state: Mapping[str, Tensor]
    from_torchvision: bool
    columns: tuple[str, ...] | None = None
    softmax: bool = False


def tensors_for(detector: Detector, source: WeightsSource) -> dict[str, Tensor]:
    """The tensors of a source under the detector's names; unknown ones keep theirs."""
    is_detector = any(name.startswith("backbone.") for name in source.state)
    rename = _rename_head if is_detector else _backbone_rename(detector)
    tensors = {rename(name): tensor for name, tensor in source.state.items()}
    if source.from_torchvision and detector.name.startswith("retinanet"):
        for name in ("weight", "bias"):
            key = f"head.regression_head.bbox_reg.{name}"
            if key in tensors:
                tensors[key] = _in_our_box_code(detector, tensors[key])
    return tensors


def has_class_rows(name: str) -> bool:
    """Whether a tensor belongs to the layer that gives the class logits.

    Example:
        >>> has_class_rows("head.classification_head.cls_logits.weight")
        True
    """
    return _CLASS_LAYER.fullmatch(name) is not None


def merge_class_rows(
    own: Tensor, theirs: Tensor, detector: Detector, source: WeightsSource
) -> tuple[Tensor, tuple[str, ...]]:
    """The detector's tensor with the rows of the classes that the source knows by name.

    Args:
        own: [anchors x columns, ...] of the detector.
        theirs: the same of the source.
        detector: whose classes are looked for.
        source: with ``columns``.

    Returns:
        The tensor and the classes that were found. Where none is, or anchors or scores are of
        another kind, an empty tensor, which fits nowhere.
    """
    assert source.columns is not None
    background = (BACKGROUND,) * detector.uses_softmax
    columns = background + detector.class_names
    anchors = own.shape[0] // len(columns)
    classes = tuple(name for name in detector.class_names if name in source.columns)
    comparable = (
        source.softmax == detector.uses_softmax
        and theirs.shape[0] == anchors * len(source.columns)
        and theirs.shape[1:] == own.shape[1:]
    )
    if not comparable or not classes:
        return own.new_empty(0), ()
    merged = own.clone().view(anchors, len(columns), *own.shape[1:])
    rows = theirs.to(own).view(anchors, len(source.columns), *own.shape[1:])
    found = background + classes
    merged[:, [columns.index(name) for name in found]] = rows[
        :, [source.columns.index(name) for name in found]
    ]
    return merged.view_as(own), classes


def _in_our_box_code(detector: Detector, tensor: Tensor) -> Tensor:
    """torchvision's RetinaNet regresses plain offsets, ours are divided by .1, .1, .2, .2."""
    factors = tensor.new_tensor(detector.box_coder.weights)
    per_anchor = tensor.view(-1, 4, *tensor.shape[1:])  # [A, 4, ...]
    return (per_anchor * factors.view(4, *[1] * (tensor.ndim - 1))).view_as(tensor)


def _rename_head(name: str) -> str:
    return _OLD_HEAD.sub(lambda m: f"{m[1]}.{int(m[2]) // 2}.0.{m[3]}", name)


def _backbone_rename(detector: Detector) -> Callable[[str], str]:
    if detector.name == "ssdlite":
        return _rename_mobilenet
    if detector.name.startswith("ssd"):
        return _rename_vgg
    return lambda name: f"backbone.body.{name}"


def _rename_vgg(name: str) -> str:
    """``features.28.weight`` → ``backbone.extra.0.5.weight``."""
    layer = re.fullmatch(r"features\.(\d+)\.(\w+)", name)
    if layer is None:
        return name
    index = int(layer[1])
    if index < _VGG_FIRST_EXTRA:
        return f"backbone.{name}"
    return f"backbone.extra.0.{index - _VGG_FIRST_EXTRA}.{layer[2]}"


def _rename_mobilenet(name: str) -> str:
    """``features.14.block.0.0.weight`` → ``backbone.features.1.1.block.0.0.weight``."""
    layer = re.fullmatch(r"features\.(\d+)\.(.+)", name)
    if layer is None:
        return name
    index, rest = int(layer[1]), layer[2]
    if index < _MOBILENET_C4:
        return f"backbone.features.0.{index}.{rest}"
    if index > _MOBILENET_C4:
        return f"backbone.features.1.{index - _MOBILENET_C4}.{rest}"
    rest = rest.removeprefix("block.")
    if rest.startswith("0."):  # the expansion, SSDlite's first map
        return f"backbone.features.0.{_MOBILENET_C4}.{rest.removeprefix('0.')}"
    return f"backbone.features.1.0.{rest}"
