"""SSD300 and SSD512 on VGG-16 (Liu et al., ECCV 2016; Appendix 5) from torchvision's pieces."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssd import SSDFeatureExtractorVGG, SSDHead
from torchvision.models.vgg import cfgs, make_layers

from aploss.detectors.criterion import Criterion
from aploss.detectors.detector import IMAGENET_STD, Detector, feature_shapes
from aploss.detectors.retinanet import PRIOR_PROBABILITY
from aploss.errors import ConfigError

__all__ = ["SSD", "set_prior", "ssd300", "ssd512"]

# The network of the original, which was trained on pixels of 0..255 minus their mean.
CAFFE_MEAN = (0.48235, 0.45882, 0.40784)
CAFFE_STD = (1 / 255, 1 / 255, 1 / 255)
MATCHING = {"positive_iou": 0.5, "negative_iou": 0.5, "smooth_l1_beta": 1.0}  # SSD's own
SCALES_300 = (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05)  # torchvision's, of its COCO weights
SCALES_512 = (0.07, 0.15, 0.30, 0.45, 0.60, 0.75, 0.90, 1.05)  # the original's for VOC


class SSD(Detector):
    """Feature maps of falling size, each with its own heads and default boxes.

    At inference images are stretched to the square ``test_size``. Training images are taken as
    they are, and should have that size.

    Args:
        anchor_generator: torchvision's default boxes.
        options: see :class:`~aploss.detectors.detector.Detector`.
    """

    keeps_aspect_ratio = False

    def __init__(self, *, anchor_generator: DefaultBoxGenerator, **options: Any) -> None:
        super().__init__(**options)
        self.anchor_generator = anchor_generator

    def make_anchors(
        self, height: int, width: int, feature_sizes: Sequence[tuple[int, int]]
    ) -> list[Tensor]:
        # The generator reads nothing but shapes from images and feature maps.
        images = torch.empty(1, 3, height, width, device="meta")
        features = [torch.empty(1, 1, *size) for size in feature_sizes]
        (boxes,) = self.anchor_generator(ImageList(images, [(height, width)]), features)
        counts = self.anchor_generator.num_anchors_per_location()
        cells = [rows * columns for rows, columns in feature_sizes]
        return list(boxes.split([a * b for a, b in zip(cells, counts, strict=True)]))


def ssd300(
    *, anchor_scales: Sequence[float] = SCALES_300, trainable_stages: int = 5, **options: Any
) -> SSD:
    """SSD300: six feature maps of 38, 19, 10, 5, 3 and 1 pixels.

    Args:
        anchor_scales: sizes of the default boxes of each map relative to the image, and one more.
            By default those of torchvision's COCO weights; the original has (0.1, 0.2, 0.37, 0.54,
            0.71, 0.88, 1.05) for VOC.
        trainable_stages: how many of VGG's five stages are trained, from the last on.
        options: as of :func:`~aploss.detectors.build.build_detector`.
    """
    return _vgg_ssd(
        size=300,
        ratios=[[2], [2, 3], [2, 3], [2, 3], [2], [2]],
        steps=[8, 16, 32, 64, 100, 300],
        anchor_scales=anchor_scales,
        backbone=SSDFeatureExtractorVGG(_vgg_features(trainable_stages), highres=False),
        **options,
    )


def ssd512(
    *, anchor_scales: Sequence[float] = SCALES_512, trainable_stages: int = 5, **options: Any
) -> SSD:
    """SSD512: conv4_3 (scaled), conv7, conv8_2 ... conv12_2 of 64, 32, 16, 8, 4, 2 and 1 pixels.

    Args:
        anchor_scales: sizes of the default boxes of each map relative to the image, and one more;
            by default the original's for VOC.
        trainable_stages: how many of VGG's five stages are trained, from the last on.
        options: as of :func:`~aploss.detectors.build.build_detector`.
    """
    backbone = SSDFeatureExtractorVGG(_vgg_features(trainable_stages), highres=True)
    # torchvision's large variant has maps of 6, 4 and 1 pixels at the end; the original's halve.
    for block in backbone.extra[3:5]:  # conv10_2, conv11_2
        block[2].stride, block[2].padding = (2, 2), (1, 1)
    backbone.extra[5][2].padding = (1, 1)  # conv12_2
    return _vgg_ssd(
        size=512,
        ratios=[[2], [2, 3], [2, 3], [2, 3], [2, 3], [2], [2]],
        steps=[8, 16, 32, 64, 128, 256, 512],
        anchor_scales=anchor_scales,
        backbone=backbone,
        **options,
    )


def _vgg_ssd(
    *,
    size: int,
    ratios: list[list[int]],
    steps: list[int],
    anchor_scales: Sequence[float],
    backbone: nn.Module,
    class_names: Sequence[str],
    make_criterion: Callable[..., Criterion],
    columns: int,
    **options: Any,
) -> SSD:
    if len(anchor_scales) != len(steps) + 1:
        raise ConfigError(f"anchor_scales needs {len(steps) + 1} numbers, got {anchor_scales!r}")
    generator = DefaultBoxGenerator(ratios, scales=list(anchor_scales), steps=steps)
    channels = [shape[1] for shape in feature_shapes(backbone, size, size)]
    head = SSDHead(channels, generator.num_anchors_per_location(), columns)
    set_prior(list(head.classification_head.module_list), softmax=columns != len(class_names))
    return SSD(
        class_names=class_names,
        backbone=backbone,
        head=head,
        anchor_generator=generator,
        criterion=make_criterion(**MATCHING),
        image_mean=CAFFE_MEAN,
        image_std=CAFFE_STD,
        **{"test_size": (size, size), **options},
    )


def set_prior(last_layers: Sequence[nn.Conv2d], *, softmax: bool) -> None:
    """Starts sigmoid scores near the prior of 0.01; a softmax head stays as torchvision's."""
    if softmax:
        return
    for layer in last_layers:
        nn.init.normal_(layer.weight, std=0.01)
        nn.init.constant_(
            cast(Tensor, layer.bias), math.log(PRIOR_PROBABILITY / (1 - PRIOR_PROBABILITY))
        )


def _vgg_features(trainable_stages: int) -> nn.Sequential:
    layers: nn.Sequential = make_layers(cfgs["D"], batch_norm=False)
    starts = [0, *(i for i, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d))][:5]
    if not 0 <= trainable_stages <= len(starts):
        raise ConfigError(f"trainable_stages must be 0..{len(starts)}, got {trainable_stages}")
    first_trained = [*starts, len(layers)][len(starts) - trainable_stages]
    for index, layer in enumerate(layers):
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(cast(Tensor, layer.bias))
            layer.requires_grad_(index >= first_trained)
    # Pretrained weights expect pixels of 0..255; fresh ones are scaled to inputs of that size.
    cast(Tensor, layers[0].weight).data.mul_(CAFFE_STD[0] / IMAGENET_STD[0])
    return layers
