"""RetinaNet (Lin et al., ICCV 2017) from torchvision's pieces, with any classification loss."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelP6P7

from aploss.detectors.criterion import Criterion
from aploss.detectors.detector import Detector
from aploss.detectors.tiny_backbone import TinyResNet
from aploss.errors import ConfigError

__all__ = ["PRIOR_PROBABILITY", "RetinaNet", "retinanet", "retinanet_tiny"]

PRIOR_PROBABILITY = 0.01  # score of every anchor at the start
RATIOS = (0.5, 1.0, 2.0)
OCTAVE_SCALES = {6: (1.0, 2 ** (1 / 2)), 9: (1.0, 2 ** (1 / 3), 2 ** (2 / 3))}  # by anchors a cell
Norm = Literal["frozen-bn", "group", "batch"]
NORMS: dict[str, Callable[..., nn.Module]] = {
    "frozen-bn": FrozenBatchNorm2d,
    "group": partial(nn.GroupNorm, 32),
    "batch": nn.BatchNorm2d,
}
STAGES = ("conv1", "layer1", "layer2", "layer3", "layer4")


class RetinaNet(Detector):
    """A feature pyramid with the same heads on each level.

    Args:
        strides: of the pyramid's levels.
        anchor_generator: torchvision's.
        anchor_grid: ``"exact"`` lays anchors at multiples of the strides. ``"torchvision"`` divides
            the padded image by the size of the feature map, as torchvision does, which for sizes
            that are no multiple of the largest stride gives a slightly narrower grid; models
            trained there expect it.
        options: see :class:`~aploss.detectors.detector.Detector`.
    """

    def __init__(
        self,
        *,
        strides: Sequence[int],
        anchor_generator: AnchorGenerator,
        anchor_grid: Literal["exact", "torchvision"] = "exact",
        **options: Any,
    ) -> None:
        super().__init__(size_divisor=32, **options)
        self.strides = tuple(strides)
        self.anchor_generator = anchor_generator
        self.anchor_grid = anchor_grid

    def make_anchors(
        self, height: int, width: int, feature_sizes: Sequence[tuple[int, int]]
    ) -> list[Tensor]:
        if self.anchor_grid == "exact":
            steps = [(stride, stride) for stride in self.strides]
        else:
            steps = [(height // rows, width // columns) for rows, columns in feature_sizes]
        anchors: list[Tensor] = self.anchor_generator.grid_anchors(
            [list(size) for size in feature_sizes],
            [[torch.tensor(step) for step in pair] for pair in steps],
        )
        return anchors


def retinanet(
    *,
    depth: Literal[18, 34, 50, 101],
    class_names: Sequence[str],
    make_criterion: Callable[..., Criterion],
    columns: int,
    norm: Norm = "group",
    anchors_per_cell: Literal[6, 9] = 6,
    anchor_grid: Literal["exact", "torchvision"] = "exact",
    trainable_stages: int = 5,
    test_size: tuple[int, int] = (600, 1000),
    **options: Any,
) -> RetinaNet:
    """RetinaNet on ResNet-18, -34, -50 or -101 with P3-P7 of 256 channels.

    Args:
        depth: of the ResNet.
        class_names: K names.
        make_criterion: makes the criterion from matching options.
        columns: logits of an anchor: K, or K + 1 with softmax losses.
        norm: ``"frozen-bn"`` for pretrained backbones as in the paper, ``"group"`` or ``"batch"``
            from scratch. With ``"group"`` the heads have GroupNorm, too.
        anchors_per_cell: 6 as in the paper (2 octave scales x 3 ratios), 9 as in torchvision.
        anchor_grid: see :class:`RetinaNet`.
        trainable_stages: how many of the five stages of the ResNet are trained, from the last on.
        test_size: the paper's shorter side of 600 pixels.
        options: see :class:`~aploss.detectors.detector.Detector`.
    """
    if norm not in NORMS:
        raise ConfigError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    body = getattr(resnet, f"resnet{depth}")(weights=None, norm_layer=NORMS[norm])
    _freeze(body, trainable_stages)
    channels = body.inplanes
    backbone = BackboneWithFPN(
        body,
        return_layers={"layer2": "0", "layer3": "1", "layer4": "2"},
        in_channels_list=[channels // 4, channels // 2, channels],
        out_channels=256,
        extra_blocks=LastLevelP6P7(256, 256),
    )
    strides = (8, 16, 32, 64, 128)
    generator = _anchor_generator([4 * stride for stride in strides], anchors_per_cell)
    head = RetinaNetHead(
        256, anchors_per_cell, columns, norm_layer=NORMS["group"] if norm == "group" else None
    )
    _set_prior(head, softmax=columns != len(class_names))
    return RetinaNet(
        class_names=class_names,
        backbone=backbone,
        head=head,
        strides=strides,
        anchor_generator=generator,
        anchor_grid=anchor_grid,
        criterion=make_criterion(positive_iou=0.5, negative_iou=0.4),
        test_size=test_size,
        **options,
    )


def retinanet_tiny(
    *,
    class_names: Sequence[str],
    make_criterion: Callable[..., Criterion],
    columns: int,
    anchors_per_cell: Literal[6, 9] = 6,
    test_size: tuple[int, int] = (256, 512),
    **options: Any,
) -> RetinaNet:
    """RetinaNet with 1.6 million parameters for CPUs: P3-P6 of 64 channels, GroupNorm throughout.

    Args:
        class_names: K names.
        make_criterion: makes the criterion from matching options.
        columns: logits of an anchor: K, or K + 1 with softmax losses.
        anchors_per_cell: 6 (2 octave scales x 3 ratios) or 9.
        test_size: shorter side and limit of the longer one at inference.
        options: see :class:`~aploss.detectors.detector.Detector`.
    """
    channels, strides = 64, (8, 16, 32, 64)
    backbone = BackboneWithFPN(
        TinyResNet(),
        return_layers={"layer2": "0", "layer3": "1", "layer4": "2"},
        in_channels_list=list(TinyResNet.widths[1:]),
        out_channels=channels,
        extra_blocks=_LastLevelP6(channels),
    )
    generator = _anchor_generator([2 * stride for stride in strides], anchors_per_cell)
    norm = partial(nn.GroupNorm, TinyResNet.groups)
    head = RetinaNetHead(channels, anchors_per_cell, columns, norm_layer=norm)
    for part in (head.classification_head, head.regression_head):
        part.conv = part.conv[:2]
        # A standard deviation of 0.01 is meant for the 256 channels of a big head.
        for layer in part.conv.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    _set_prior(head, softmax=columns != len(class_names))
    return RetinaNet(
        class_names=class_names,
        backbone=backbone,
        head=head,
        strides=strides,
        anchor_generator=generator,
        criterion=make_criterion(positive_iou=0.5, negative_iou=0.4),
        test_size=test_size,
        **options,
    )


class _LastLevelP6(ExtraFPNBlock):  # type: ignore[misc]
    """One level more, from P5."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.p6 = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)

    def forward(
        self, p: list[Tensor], c: list[Tensor], names: list[str]
    ) -> tuple[list[Tensor], list[str]]:
        return [*p, self.p6(p[-1])], [*names, "p6"]


def _anchor_generator(base_sizes: Sequence[int], anchors_per_cell: int) -> AnchorGenerator:
    if anchors_per_cell not in OCTAVE_SCALES:
        raise ConfigError(f"anchors_per_cell must be 6 or 9, got {anchors_per_cell!r}")
    # torchvision cuts the sizes of its nine anchors to integers; its weights expect the same.
    number = int if anchors_per_cell == 9 else float
    sizes = tuple(
        tuple(number(size * scale) for scale in OCTAVE_SCALES[anchors_per_cell])
        for size in base_sizes
    )
    return AnchorGenerator(sizes, (RATIOS,) * len(sizes))


def _set_prior(head: RetinaNetHead, *, softmax: bool) -> None:
    log_odds = 0.0 if softmax else math.log(PRIOR_PROBABILITY / (1 - PRIOR_PROBABILITY))
    nn.init.constant_(head.classification_head.cls_logits.bias, log_odds)


def _freeze(body: nn.Module, trainable_stages: int) -> None:
    if not 0 <= trainable_stages <= len(STAGES):
        raise ConfigError(f"trainable_stages must be 0..{len(STAGES)}, got {trainable_stages}")
    frozen = STAGES[: len(STAGES) - trainable_stages]
    for name, parameter in body.named_parameters():
        stage = "conv1" if name.startswith("bn1") else name.split(".")[0]
        if stage in frozen:
            parameter.requires_grad_(False)
