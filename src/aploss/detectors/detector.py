"""What a detector is made from, and what all share: images in, losses or detections out.

A kind of detector is a frozen config: a subclass of :class:`DetectorConfig` whose fields are the options of the
architecture and whose :meth:`~DetectorConfig.network` makes everything that has weights. Registered under a name, it is
known to ``build_detector``, recipes and the command line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchvision.models.detection._utils import BoxCoder

from aploss.data.features import FeatureMaps
from aploss.detectors.criterion import Criterion, describe_loss
from aploss.detectors.predict import Detections, ObjectDetector, postprocess
from aploss.errors import ConfigError, DataError, RunError
from aploss.losses.traits import traits_of
from aploss.registry import Registry

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
MOST_DETECTIONS = 1_000_000  # of an image
LONGEST_SIDE = 16_384  # pixels at inference
ConfigClass = TypeVar("ConfigClass", bound="type[DetectorConfig]")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Everything in a detector that has weights, and what follows from its shape.

    Attributes:
        backbone: gives a dict of feature maps.
        head: turns the list of feature maps into ``cls_logits`` [B, A, columns] and ``bbox_regression`` [B, A, 4].
        anchors: gives the anchors of each level [A_l, 4] for the height and width of a batch and of its feature maps.
        size_divisor: images are padded at the right and bottom to a multiple of this.
        keeps_aspect_ratio: whether images keep their shape at inference, or are stretched.
        image_mean: subtracted from images in [0, 1].
        image_std: divides what is left.
        matching: ``positive_iou``, ``negative_iou`` and ``smooth_l1_beta`` of the criterion.
    """

    backbone: nn.Module
    head: nn.Module
    anchors: Callable[[int, int, Sequence[tuple[int, int]]], list[Tensor]]
    size_divisor: int = 1
    keeps_aspect_ratio: bool = True
    image_mean: Sequence[float] = IMAGENET_MEAN
    image_std: Sequence[float] = IMAGENET_STD
    matching: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """The settings that all detectors share; subclasses add the options of an architecture.

    Attributes:
        test_size: shorter side and limit of the longer side of images at inference; of stretched ones height and width.
        score_threshold: detections with a lower score are dropped; None keeps all, since ranking losses order scores
            without giving them a scale.
        topk_per_level: scores of a level that go on to NMS.
        nms_iou: of two boxes of a class that overlap more than this, the better stays.
        detections_per_image: detections kept.
        channels_last: memory format of weights and images.
    """

    test_size: tuple[int, int] = (600, 1000)
    score_threshold: float | None = None
    topk_per_level: int = 1000
    nms_iou: float = 0.5
    detections_per_image: int = 100
    channels_last: bool = False

    # What "imagenet" and "coco" mean here, as names of torchvision's weights.
    named_weights: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for option in fields(self):  # files have lists, where a frozen config has tuples
            value = getattr(self, option.name)
            if isinstance(value, list):
                object.__setattr__(self, option.name, tuple(value))
        sides = self.test_size
        numbers = isinstance(sides, tuple) and all(isinstance(side, int | float) for side in sides)
        if not numbers or len(sides) != 2 or not (min(sides) >= 1 and max(sides) <= LONGEST_SIDE):
            raise ConfigError(f"test_size must be two numbers of pixels, at most {LONGEST_SIDE}, got {sides!r}")
        object.__setattr__(self, "test_size", (int(sides[0]), int(sides[1])))
        for name in ("topk_per_level", "detections_per_image"):
            self._require(name, int, 1, MOST_DETECTIONS)
        self._require("nms_iou", int | float, 0, 1)
        if self.score_threshold is not None:
            self._require("score_threshold", int | float, 0, 1)
        self._require("channels_last", bool, False, True)

    def _require(self, name: str, kind: Any, least: float, most: float) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)) or not least <= value <= most:
            wanted = "true or false" if kind is bool else f"a number between {least} and {most}"
            raise ConfigError(f"{name} must be {wanted}, got {value!r}")

    def network(self, *, columns: int, softmax: bool) -> Network:
        """Makes the network, with fresh weights.

        Args:
            columns: logits of an anchor: K classes, and one more for the background with ``softmax``.
            softmax: whether the logits share one distribution, rather than being K sigmoids.
        """
        raise NotImplementedError

    @classmethod
    def options_for_weights(cls, weights: str) -> dict[str, Any]:
        """Options under which weights of torchvision fit, where the user leaves them open."""
        return {}

    def own_weights(self, name: str) -> "dict[str, Tensor] | None":
        """Weights of the backbone that do not come from torchvision, under the backbone's names.

        Args:
            name: ``"imagenet"`` or ``"coco"``; None is returned for what there is not.
        """
        return None

    def backbone_key(self, name: str) -> str:
        """The name in the detector of a tensor of the classifier that the backbone was taken from."""
        return f"backbone.body.{name}"

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """All options, those of the architecture first."""
        own = [option.name for option in fields(cls) if option.name not in SETTINGS]
        return (*own, *SETTINGS)


SETTINGS = tuple(option.name for option in fields(DetectorConfig))
DETECTORS: Registry[type[DetectorConfig]] = Registry("detector")


def register_detector(name: str) -> Callable[[ConfigClass], ConfigClass]:
    """Makes a kind of detector known by a name, to ``build_detector`` and to the command line.

    It decorates a subclass of :class:`DetectorConfig`, and makes it a frozen dataclass if it is none of its own.
    :func:`~aploss.detectors.retinanet_network` makes a RetinaNet of any backbone.

    Raises:
        ConfigError: if the name is taken, or the class is of another kind.

    Example:
        >>> from torchvision.models import mobilenet_v3_small
        >>> from torchvision.models._utils import IntermediateLayerGetter
        >>> from aploss.detectors import build_detector, retinanet_network
        >>> @register_detector("doc-mobilenet")
        ... class MobileNet(DetectorConfig):
        ...     width: float = 1.0
        ...     def network(self, *, columns, softmax):
        ...         layers = mobilenet_v3_small(weights=None, width_mult=self.width).features
        ...         body = IntermediateLayerGetter(layers, {"3": "P3", "8": "P4", "12": "P5"})
        ...         return retinanet_network(body, columns=columns, softmax=softmax)
        >>> build_detector("doc-mobilenet", class_names=["cat"], width=0.5).name
        'doc-mobilenet'
    """

    def add(config_class: ConfigClass) -> ConfigClass:
        if not (isinstance(config_class, type) and issubclass(config_class, DetectorConfig)):
            raise ConfigError(
                f"register_detector({name!r}) takes a subclass of DetectorConfig, got "
                f"{getattr(config_class, '__name__', config_class)!r}"
            )
        if "__dataclass_fields__" not in vars(config_class):
            dataclass(frozen=True, kw_only=True)(config_class)
        DETECTORS.register(name)(config_class)
        return config_class

    return add


class Detector(nn.Module, ObjectDetector):
    """A one-stage detector: backbone, heads, anchors and a criterion.

    In training mode a call returns ``{"classification": loss, "box": loss}``, in evaluation mode the detections of each
    image. The modules ``backbone`` and ``head`` have torchvision's names, so that its weights load.

    Args:
        name: under which the config is registered.
        class_names: K names; label k is the k-th.
        config: what the network was made from; its settings become attributes, which may be set.
        network: what has weights.
        criterion: the training loss.

    Attributes:
        calibration: monotone map from scores to precision, fitted after training; only :meth:`predict` applies it.
        draw_threshold: the calibrated score with the best F1 on validation.
    """

    image_mean: Tensor
    image_std: Tensor
    score_threshold: float | None
    topk_per_level: int
    channels_last: bool

    def __init__(
        self, *, name: str, class_names: Sequence[str], config: DetectorConfig, network: Network, criterion: Criterion
    ) -> None:
        super().__init__()
        self.name = name
        self.class_names = tuple(class_names)
        self.architecture = config
        for setting in SETTINGS:
            setattr(self, setting, getattr(config, setting))
        self.backbone = network.backbone
        self.head = network.head
        self.criterion = criterion
        self.size_divisor = network.size_divisor
        self.keeps_aspect_ratio = network.keeps_aspect_ratio
        self.calibration = None
        self.draw_threshold = None
        self._make_anchors = network.anchors
        self._anchor_cache: dict[tuple[int, int, torch.device], list[Tensor]] = {}
        for buffer, values in (("image_mean", network.image_mean), ("image_std", network.image_std)):
            self.register_buffer(buffer, torch.tensor(values).view(3, 1, 1), persistent=False)
        if self.channels_last:
            self.to(memory_format=torch.channels_last)

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.class_names)

    @property
    def loss_name(self) -> str:
        """Name of the classification loss; ``"custom"`` for a loss object of the user's own."""
        return describe_loss(self.criterion.loss)[0]

    @property
    def uses_softmax(self) -> bool:
        """Whether the logits have a background column 0 and share one softmax."""
        return traits_of(self.criterion.loss).softmax

    @property
    def box_coder(self) -> BoxCoder:
        """Turns box regressions into boxes; its weights divide the regressions."""
        return self.criterion.box_coder

    @property
    def config(self) -> dict[str, Any]:
        """Plain values with which ``build_detector(**config)`` makes this detector again."""
        loss, loss_options = describe_loss(self.criterion.loss)
        options = self.architecture.option_names()
        return {
            "name": self.name,
            **{option: getattr(self if option in SETTINGS else self.architecture, option) for option in options},
            "class_names": list(self.class_names),
            "loss": loss,
            "loss_options": loss_options,
            "rank_over": self.criterion.rank_over,
            "box_loss": self.criterion.box_loss,
            "box_weight": self.criterion.box_weight,
            "assigner": self.criterion.assigner,
        }

    def forward(
        self, images: Tensor | Sequence[Tensor] | FeatureMaps, targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> Any:
        """Losses in training mode, detections in evaluation mode.

        Args:
            images: floats in [0, 1], [B, 3, H, W] or a list of [3, h, w]; in training mode also their :meth:`features`.
            targets: for each image ``boxes`` [n, 4] in its pixels and ``labels`` [n] of 0..K-1, optionally ``crowd``
                and ``difficult`` bool [n]; needed in training mode.

        Returns:
            In training mode, where images are not resized: ``{"classification": ..., "box": ...}``.
            In evaluation mode: see :meth:`detect`.
        """
        if not self.training:
            if isinstance(images, FeatureMaps):
                raise DataError("features are for training mode: a detector in evaluation mode takes images")
            return self.detect(images)
        if targets is None:
            raise DataError("a detector in training mode needs targets; call detector.eval() first")
        batch = images if isinstance(images, FeatureMaps) else self.pad(images)[0]
        height, width = batch.image_size if isinstance(batch, FeatureMaps) else batch.shape[-2:]
        anchors = self.anchors_for(height, width, self.image_mean.device)
        return self.criterion(*self.heads(batch), anchors, targets)

    def detect(
        self,
        images: Tensor | Sequence[Tensor],
        *,
        size: tuple[int, int] | None = None,
        heads: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> list[Detections]:
        """Detections of each image.

        Args:
            images: floats in [0, 1], [B, 3, H, W] or a list of [3, h, w].
            size: in place of ``test_size``.
            heads: computes what :meth:`heads` does, in another runtime.

        Returns:
            For each image a dict of ``boxes`` [n, 4] in its own pixels, ``scores`` [n] descending and ``labels`` [n].
        """
        batch, sizes = self.pad([self.resize(image, size) for image in images])
        self.anchors_for(batch.shape[-2], batch.shape[-1], batch.device)  # refuses impossible sizes
        logits, deltas = (heads or self.heads)(batch)
        if logits.isnan().any() or deltas.isnan().any():  # they would end as "no objects"
            raise RunError(f"{self.name} gives NaN: its weights diverged or are damaged; use another checkpoint")
        detections = self.postprocess(logits, deltas, batch.shape[-2:], sizes)
        for image, (height, width), found in zip(images, sizes, detections, strict=True):
            scale = found["boxes"].new_tensor([image.shape[-1] / width, image.shape[-2] / height])
            found["boxes"] = found["boxes"] * scale.repeat(2)
        return detections

    def heads(self, images: Tensor | FeatureMaps) -> tuple[Tensor, Tensor]:
        """The network alone: everything that has weights, nothing else.

        Args:
            images: [B, 3, H, W] in [0, 1], resized and padded; or their :meth:`features`.

        Returns:
            Logits [B, A, K] (softmax losses: [B, A, K + 1]) and box regressions [B, A, 4].
        """
        if isinstance(images, FeatureMaps):
            levels = self.backbone.pyramid(map(self._in_memory_format, images.maps))  # type: ignore[operator]
        else:
            levels = self.backbone(self._normalised(images))
        outputs = self.head(list(levels.values()))
        return outputs["cls_logits"], outputs["bbox_regression"]

    def _normalised(self, images: Tensor) -> Tensor:
        return self._in_memory_format((images - self.image_mean) / self.image_std)

    def _in_memory_format(self, maps: Tensor) -> Tensor:
        return maps.contiguous(memory_format=torch.channels_last) if self.channels_last else maps

    def body(self) -> nn.Module:
        """The part of the backbone below the feature pyramid, whose weights are pretrained.

        Raises:
            ConfigError: a detector without a feature pyramid.
        """
        body = getattr(self.backbone, "body", None)
        if not isinstance(body, nn.Module) or not hasattr(self.backbone, "pyramid"):
            raise ConfigError(f"only the backbone of a RetinaNet can be frozen as a whole, not that of {self.name}")
        return body

    @torch.no_grad()
    def features(self, images: Tensor | Sequence[Tensor]) -> FeatureMaps:
        """The maps of the backbone's :meth:`body`, for training of what follows it; without gradients."""
        batch, _ = self.pad(images)
        maps = self.body()(self._normalised(batch))
        maps = maps.values() if isinstance(maps, Mapping) else maps
        return FeatureMaps(tuple(maps), (batch.shape[-2], batch.shape[-1]))

    def postprocess(
        self, logits: Tensor, deltas: Tensor, batch_size: Sequence[int], image_sizes: Sequence[tuple[int, int]]
    ) -> list[Detections]:
        """Detections in pixels of the batch, from :meth:`heads`; sizes are heights and widths of batch and images."""
        return postprocess(
            logits,
            deltas,
            self.anchors_for(batch_size[0], batch_size[1], logits.device),
            image_sizes,
            box_coder=self.box_coder,
            softmax=self.uses_softmax,
            score_threshold=self.score_threshold,
            topk_per_level=self.topk_per_level,
            nms_iou=self.nms_iou,
            detections_per_image=self.detections_per_image,
        )

    def anchors_for(self, height: int, width: int, device: torch.device | str = "cpu") -> list[Tensor]:
        """The anchors of a batch of this size, for each level [A_l, 4] in pixels of the batch."""
        key = (height, width, torch.device(device))
        if key not in self._anchor_cache:
            if len(self._anchor_cache) >= 64:  # forget, rather than grow
                self._anchor_cache.clear()
            # Made under inference mode, they could not be used for a training step later.
            with torch.inference_mode(False), torch.no_grad():
                anchors = self._make_anchors(height, width, self.feature_sizes(height, width))
                self._anchor_cache[key] = [level.float().to(device) for level in anchors]
        return self._anchor_cache[key]

    def feature_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Height and width of each feature map for images of a size."""
        return [(shape[-2], shape[-1]) for shape in feature_shapes(self.backbone, height, width)]

    def resize(self, image: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """An image [3, h, w] in the size for inference, ``test_size`` unless another is given."""
        height, width = image.shape[-2:]
        wanted = size or self.test_size
        if self.keeps_aspect_ratio:
            shorter, longest = wanted
            scale = min(shorter / min(height, width), longest / max(height, width))
            wanted = (max(1, round(height * scale)), max(1, round(width * scale)))
        if wanted == (height, width):
            return image
        # Training images are shrunk with antialiasing, too; MPS lacks the operator.
        antialias = image.device.type != "mps" and (wanted[0] < height or wanted[1] < width)
        return F.interpolate(image[None], size=wanted, mode="bilinear", align_corners=False, antialias=antialias)[0]

    def pad(self, images: Tensor | Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        """One batch of images of any size, and the height and width of each inside it.

        The padding at the right and the bottom has the mean colour, which is 0 for the network.

        Raises:
            DataError: if there is no image, or they are not floats.
        """
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        if not sizes:
            raise DataError("a detector needs at least one image")
        if not images[0].is_floating_point():
            raise DataError(f"images must be floats in [0, 1], got {images[0].dtype}: divide by 255")
        divisor = self.size_divisor
        height, width = (-(-max(size[axis] for size in sizes) // divisor) * divisor for axis in (0, 1))
        if isinstance(images, Tensor) and images.shape[-2:] == (height, width):
            return images.to(self.image_mean.device), sizes
        batch = self.image_mean.expand(len(sizes), 3, height, width).clone()
        for row, image in zip(batch, images, strict=True):
            row[:, : image.shape[-2], : image.shape[-1]].copy_(image)
        return batch, sizes

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compiles what has weights with ``torch.compile``; labels and NMS stay as they are."""
        self.backbone.compile(*arguments, **options)
        self.head.compile(*arguments, **options)


def feature_shapes(backbone: nn.Module, height: int, width: int) -> list[torch.Size]:
    """Shapes of the dict or list of feature maps of images of a size, found without computing them.

    ConfigError where the backbone cannot take images of this size.
    """
    tensors = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    without_data = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    images = torch.empty(2, 3, height, width, device="meta")  # batch norm cannot train on one value
    try:
        with torch.compiler.set_stance("force_eager"), _ShapesAlone():
            features = torch.func.functional_call(backbone, without_data, (images,))
    except RuntimeError as error:
        raise ConfigError(f"the detector cannot take images of {width}x{height} pixels: {error}") from error
    return [one.shape for one in (features.values() if isinstance(features, Mapping) else features)]


class _ShapesAlone(TorchFunctionMode):
    """Leaves out what keeps shapes and what torch, without data, would do in Python, slower than with data."""

    left_out = (F.group_norm, F.hardswish, F.hardsigmoid, F.hardtanh, F.relu6)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        if function in self.left_out and arguments:
            return arguments[0]
        return function(*arguments, **(options or {}))
