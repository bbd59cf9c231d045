"""RetinaNet (Lin et al., ICCV 2017): a feature pyramid on any backbone, one head for all levels."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.resnet import BasicBlock
from torchvision.ops import FeaturePyramidNetwork, FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelP6P7

from aploss.detectors.detector import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    DetectorConfig,
    Network,
    feature_shapes,
    register_detector,
)
from aploss.errors import ConfigError

PRIOR_LOG_ODDS = math.log(0.01 / 0.99)  # of every score at the start
RATIOS = (0.5, 1.0, 2.0)
OCTAVE_SCALES = {6: (1.0, 2 ** (1 / 2)), 9: (1.0, 2 ** (1 / 3), 2 ** (2 / 3))}  # by anchors per cell
MATCHING = {"positive_iou": 0.5, "negative_iou": 0.4}
NORMS: dict[str, Callable[..., nn.Module]] = {
    "frozen-bn": FrozenBatchNorm2d,
    "group": partial(nn.GroupNorm, 32),
    "batch": nn.BatchNorm2d,
}
STAGES = ("conv1", "layer1", "layer2", "layer3", "layer4")
PROBE = 256  # side of the image that shows the strides of a backbone
AnchorGrid = Literal["exact", "torchvision"]


def retinanet_network(
    body: nn.Module,
    *,
    columns: int,
    softmax: bool,
    channels: int = 256,
    extra_levels: Literal[1, 2] = 2,
    head_convolutions: int = 4,
    head_norm: Callable[[int], nn.Module] | None = None,
    anchors_per_cell: Literal[6, 9] = 6,
    anchor_size: float = 4.0,
    anchor_grid: AnchorGrid = "exact",
    image_mean: Sequence[float] = IMAGENET_MEAN,
    image_std: Sequence[float] = IMAGENET_STD,
) -> Network:
    """A RetinaNet on any backbone: feature pyramid, heads and anchors.

    Args:
        body: gives feature maps for images [B, 3, H, W], each of half the size of the one before, as a dict or a list:
            such as torchvision's ``IntermediateLayerGetter`` or ``create_feature_extractor``, or a model of timm with
            ``features_only=True``. Channels and strides are found from the maps.
        columns: logits of an anchor, as :meth:`DetectorConfig.network` gets it.
        softmax: as :meth:`DetectorConfig.network` gets it.
        channels: of the pyramid and the heads.
        extra_levels: levels of the pyramid above the last map.
        head_convolutions: layers of each head before the last one, at most 4.
        head_norm: makes the norm layers of the heads, from the number of channels.
        anchors_per_cell: 6 as in the paper (2 octave scales x 3 ratios), 9 as in torchvision.
        anchor_size: side of the smallest anchor of a level, in strides.
        anchor_grid: ``"exact"`` lays anchors at multiples of the strides. ``"torchvision"`` divides the padded image by
            the size of the feature map, as torchvision does, which for sizes that are no multiple of the largest stride
            gives a slightly narrower grid; models trained there expect it.
        image_mean: subtracted from images in [0, 1].
        image_std: divides what is left.

    Raises:
        ConfigError: if the feature maps are of another kind, or an option has no such value.
    """
    shapes = feature_shapes(body, PROBE, PROBE)
    strides = [PROBE // shape[-1] for shape in shapes]
    if any(2 * one != other for one, other in pairwise(strides)):
        raise ConfigError(
            "the feature maps of a backbone must each have half the size of the one before, got "
            f"strides {', '.join(map(str, strides))}"
        )
    levels = [*strides, *(strides[-1] * 2**level for level in range(1, extra_levels + 1))]
    anchors = PyramidAnchors(levels, anchors_per_cell, anchor_size, anchor_grid)
    backbone = _PyramidBackbone(body, [shape[1] for shape in shapes], channels, extra_levels)
    head = RetinaNetHead(channels, anchors_per_cell, columns, norm_layer=head_norm)
    for part in (head.classification_head, head.regression_head):
        part.conv = part.conv[:head_convolutions]
        if channels < 256:  # a standard deviation of 0.01 is meant for the channels of a big head
            for layer in part.conv.modules():
                if isinstance(layer, nn.Conv2d):
                    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    last_bias = head.classification_head.cls_logits.bias
    nn.init.constant_(last_bias, 0.0 if softmax else PRIOR_LOG_ODDS)
    return Network(
        backbone=backbone,
        head=head,
        anchors=anchors,
        size_divisor=strides[-1],
        image_mean=image_mean,
        image_std=image_std,
        matching=MATCHING,
    )


class PyramidAnchors:
    """The anchors of each level of a pyramid; see :func:`retinanet_network` for the arguments."""

    def __init__(self, strides: Sequence[int], per_cell: int, size: float, grid: AnchorGrid) -> None:
        if per_cell not in OCTAVE_SCALES:
            raise ConfigError(f"anchors_per_cell must be 6 or 9, got {per_cell!r}")
        if grid not in ("exact", "torchvision"):
            raise ConfigError(f"anchor_grid must be exact or torchvision, got {grid!r}")
        # torchvision cuts the sizes of its nine anchors to integers; its weights expect the same.
        number = int if per_cell == 9 else float
        sizes = tuple(tuple(number(size * stride * scale) for scale in OCTAVE_SCALES[per_cell]) for stride in strides)
        self.strides = tuple(strides)
        self.grid = grid
        self.generator = AnchorGenerator(sizes, (RATIOS,) * len(sizes))

    def __call__(self, height: int, width: int, feature_sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        if self.grid == "exact":
            steps = [(stride, stride) for stride in self.strides]
        else:
            steps = [(height // rows, width // columns) for rows, columns in feature_sizes]
        anchors: list[Tensor] = self.generator.grid_anchors(
            [list(size) for size in feature_sizes], [[torch.tensor(step) for step in pair] for pair in steps]
        )
        return anchors


class _PyramidBackbone(nn.Module):
    """A body and a feature pyramid on its maps, with the names of torchvision's BackboneWithFPN."""

    def __init__(self, body: nn.Module, in_channels: Sequence[int], channels: int, extra_levels: int) -> None:
        super().__init__()
        extra = LastLevelP6P7(channels, channels) if extra_levels == 2 else _LastLevelP6(channels)
        self.body = body
        self.fpn = FeaturePyramidNetwork(list(in_channels), channels, extra_blocks=extra)
        self.out_channels = channels

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.body(images)
        return self.pyramid(features.values() if isinstance(features, Mapping) else features)

    def pyramid(self, features: Iterable[Tensor]) -> dict[str, Tensor]:
        """The levels of the pyramid on the maps of the body."""
        pyramid: dict[str, Tensor] = self.fpn({str(index): feature for index, feature in enumerate(features)})
        return pyramid


class _LastLevelP6(ExtraFPNBlock):  # type: ignore[misc]
    """One level more, from P5."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.p6 = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)

    def forward(self, p: list[Tensor], c: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        return [*p, self.p6(p[-1])], [*names, "p6"]


@dataclass(frozen=True, kw_only=True)
class ResNetRetinaNet(DetectorConfig):
    """RetinaNet on a ResNet with P3-P7 of 256 channels, tested at the paper's size.

    Attributes:
        norm: ``"frozen-bn"`` for pretrained backbones as in the paper, ``"group"`` or ``"batch"``
            from scratch. With ``"group"`` the heads have GroupNorm, too.
        anchors_per_cell: see :func:`retinanet_network`.
        anchor_grid: see :func:`retinanet_network`.
        trainable_stages: how many of the five stages of the ResNet are trained, from the last on.
    """

    norm: Literal["frozen-bn", "group", "batch"] = "group"
    anchors_per_cell: Literal[6, 9] = 6
    anchor_grid: AnchorGrid = "exact"
    trainable_stages: int = 5

    depth: ClassVar[int]

    def network(self, *, columns: int, softmax: bool) -> Network:
        if self.norm not in NORMS:
            raise ConfigError(f"norm must be one of {', '.join(NORMS)}, got {self.norm!r}")
        body = getattr(resnet, f"resnet{self.depth}")(weights=None, norm_layer=NORMS[self.norm])
        _freeze(body, self.trainable_stages)
        return retinanet_network(
            _last_three_stages(body),
            columns=columns,
            softmax=softmax,
            head_norm=NORMS["group"] if self.norm == "group" else None,
            anchors_per_cell=self.anchors_per_cell,
            anchor_grid=self.anchor_grid,
        )

    @classmethod
    def options_for_weights(cls, weights: str) -> dict[str, Any]:
        """The paper's frozen batch norm, and torchvision's anchors for its detectors."""
        frozen = {"norm": "frozen-bn", "trainable_stages": 3}
        of_heads = {"anchors_per_cell": 9, "anchor_grid": "torchvision"}
        return {**frozen, **of_heads} if weights.startswith(("coco", "RetinaNet_")) else frozen


@register_detector("retinanet-tiny")
@dataclass(frozen=True, kw_only=True)
class TinyRetinaNet(DetectorConfig):
    """RetinaNet with 1.6 million parameters for CPUs: P3-P6 of 64 channels, GroupNorm throughout."""

    test_size: tuple[int, int] = (256, 512)
    anchors_per_cell: Literal[6, 9] = 6  # 6 (2 octave scales x 3 ratios) or 9

    def network(self, *, columns: int, softmax: bool) -> Network:
        return retinanet_network(
            _last_three_stages(TinyResNet()),
            columns=columns,
            softmax=softmax,
            channels=64,
            extra_levels=1,
            head_convolutions=2,
            head_norm=partial(nn.GroupNorm, TinyResNet.groups),
            anchors_per_cell=self.anchors_per_cell,
            anchor_size=2.0,
        )


@register_detector("retinanet-r18")
class RetinaNetR18(ResNetRetinaNet):
    depth = 18
    named_weights: ClassVar[Mapping[str, str]] = {"imagenet": "ResNet18_Weights.IMAGENET1K_V1"}


@register_detector("retinanet-r34")
class RetinaNetR34(ResNetRetinaNet):
    depth = 34
    named_weights: ClassVar[Mapping[str, str]] = {"imagenet": "ResNet34_Weights.IMAGENET1K_V1"}


@register_detector("retinanet-r50")
class RetinaNetR50(ResNetRetinaNet):
    depth = 50
    named_weights: ClassVar[Mapping[str, str]] = {
        "imagenet": "ResNet50_Weights.IMAGENET1K_V1",
        "coco": "RetinaNet_ResNet50_FPN_Weights.COCO_V1",
    }


@register_detector("retinanet-r101")
class RetinaNetR101(ResNetRetinaNet):
    depth = 101
    named_weights: ClassVar[Mapping[str, str]] = {"imagenet": "ResNet101_Weights.IMAGENET1K_V1"}


class TinyResNet(nn.Module):
    """A ResNet small enough to train from scratch on a CPU, named as in torchvision's ResNet.

    Four stages of one basic block each with GroupNorm; they have strides 4, 8, 16, 32 and the channels of ``widths``.
    """

    widths = (32, 64, 128, 256)
    groups = 8

    def __init__(self) -> None:
        super().__init__()
        norm = partial(nn.GroupNorm, self.groups)
        stem = self.widths[0]
        self.conv1 = nn.Conv2d(3, stem, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = norm(stem)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        inputs = stem
        for stage, width in enumerate(self.widths, start=1):
            stride = 1 if stage == 1 else 2
            shortcut = None
            if stride != 1 or inputs != width:
                shortcut = nn.Sequential(
                    nn.Conv2d(inputs, width, kernel_size=1, stride=stride, bias=False), norm(width)
                )
            block = BasicBlock(inputs, width, stride, shortcut, norm_layer=norm)
            self.add_module(f"layer{stage}", nn.Sequential(block))
            inputs = width
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Features of the last stage, [B, 256, H / 32, W / 32]."""
        features = images
        for module in self.children():
            features = module(features)
        return features


def _last_three_stages(body: nn.Module) -> nn.Module:
    stages: nn.Module = IntermediateLayerGetter(body, {"layer2": "0", "layer3": "1", "layer4": "2"})
    return stages


def _freeze(body: nn.Module, trainable_stages: int) -> None:
    if not 0 <= trainable_stages <= len(STAGES):
        raise ConfigError(f"trainable_stages must be 0..{len(STAGES)}, got {trainable_stages}")
    frozen = STAGES[: len(STAGES) - trainable_stages]
    for name, parameter in body.named_parameters():
        stage = "conv1" if name.startswith("bn1") else name.split(".")[0]
        if stage in frozen:
            parameter.requires_grad_(False)
