"""SSDlite on MobileNetV3, the SSD for CPUs, from torchvision's pieces."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import nn
from torchvision.models import mobilenet_v3_large
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssdlite import SSDLiteFeatureExtractorMobileNet, SSDLiteHead
from torchvision.models.mobilenetv3 import InvertedResidual
from torchvision.ops import FrozenBatchNorm2d

from aploss.detectors.criterion import Criterion
from aploss.detectors.detector import feature_shapes
from aploss.detectors.ssd import MATCHING, SSD, set_prior
from aploss.errors import ConfigError

__all__ = ["ssdlite"]

NORMS: dict[str, Callable[..., nn.Module]] = {
    "group": partial(nn.GroupNorm, 8),  # every width of the network is a multiple of 8
    "batch": partial(nn.BatchNorm2d, eps=0.001, momentum=0.03),
    "frozen-bn": partial(FrozenBatchNorm2d, eps=0.001),
}


def ssdlite(
    *,
    class_names: Sequence[str],
    make_criterion: Callable[..., Criterion],
    columns: int,
    norm: Literal["group", "batch", "frozen-bn"] = "group",
    width: float = 1.0,
    reduced_tail: bool = True,
    test_size: tuple[int, int] = (320, 320),
    **options: Any,
) -> SSD:
    """SSDlite with MobileNetV3-Large: six maps from stride 16 on, 3.4 million parameters.

    Args:
        class_names: K names.
        make_criterion: makes the criterion from matching options.
        columns: logits of an anchor: K, or K + 1 with softmax losses.
        norm: ``"group"`` trains from scratch with any batch size, ``"batch"`` is torchvision's,
            ``"frozen-bn"`` keeps the statistics of loaded weights.
        width: factor on the channels of the backbone.
        reduced_tail: halve the channels of the backbone's end, as torchvision's COCO weights do;
            its ImageNet weights need False.
        test_size: height and width of images; default boxes are relative to it.
        options: see :class:`~aploss.detectors.detector.Detector`.
    """
    if norm not in NORMS:
        raise ConfigError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    norm_layer = NORMS[norm]
    layers = mobilenet_v3_large(
        weights=None, norm_layer=norm_layer, reduced_tail=reduced_tail, width_mult=width
    ).features
    backbone = SSDLiteFeatureExtractorMobileNet(layers, _last_stride(layers), norm_layer)
    generator = DefaultBoxGenerator([[2, 3]] * 6, min_ratio=0.2, max_ratio=0.95)
    channels = [shape[1] for shape in feature_shapes(backbone, *test_size)]
    head = SSDLiteHead(channels, generator.num_anchors_per_location(), columns, norm_layer)
    last_layers = [block[-1] for block in head.classification_head.module_list]
    set_prior(last_layers, softmax=columns != len(class_names))
    return SSD(
        class_names=class_names,
        backbone=backbone,
        head=head,
        anchor_generator=generator,
        criterion=make_criterion(**MATCHING),
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
        test_size=test_size,
        **options,
    )


def _last_stride(layers: nn.Sequential) -> int:
    """Index of the last block that halves the map: its expansion is the first map of SSDlite."""
    halving = [
        index
        for index, layer in enumerate(layers)
        if isinstance(layer, InvertedResidual)
        and any(isinstance(part, nn.Conv2d) and part.stride == (2, 2) for part in layer.modules())
    ]
    return halving[-1]
