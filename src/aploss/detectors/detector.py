"""One-stage detectors: from images to losses or detections.

An architecture is a frozen config: a subclass of :class:`DetectorConfig` whose fields are its options and whose
:meth:`~DetectorConfig.network` creates the trainable modules. Once it is registered under a name,
:func:`build_detector`, recipes and the command line know it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

import msgspec
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from aploss.data.features import FeatureMaps
from aploss.detectors.criterion import Criterion, check_options, describe_loss, make_loss
from aploss.detectors.postprocess import Detections, postprocess
from aploss.detectors.predict import ImageLike, MultiScale, Prediction, evaluation_mode, predict_batch
from aploss.errors import ConfigError, DataError, RunError
from aploss.evaluation import Calibration
from aploss.losses.traits import traits_of
from aploss.registry import Registry

MAX_CACHED_SIZES = 64  # of images whose anchors are kept
Side = Annotated[int, msgspec.Meta(ge=1, le=16_384)]  # pixels
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Stages = Annotated[int, msgspec.Meta(ge=0, le=5)]  # of a ResNet or VGG
ConfigClass = TypeVar("ConfigClass", bound="type[DetectorConfig]")


@dataclass(frozen=True, kw_only=True)
class Network:
    """The trainable modules of a detector, and settings that depend on them.

    Attributes:
        backbone: returns a dict of feature maps.
        head: computes ``cls_logits`` [B, A, columns] and ``bbox_regression`` [B, A, 4] from a list of feature maps.
        anchors: returns the anchors of each level [A_l, 4] for the height and width of a batch and of its feature maps.
        size_divisor: images are padded at the right and bottom to a multiple of this.
        keeps_aspect_ratio: whether images keep their aspect ratio at inference or are stretched.
        image_mean, image_std: mean and standard deviation of images in [0, 1] for normalisation.
        matching: ``positive_iou``, ``negative_iou`` and ``smooth_l1_beta`` of the criterion.

    Example:
        >>> build_detector("retinanet-tiny", class_names=["cat"]).network.size_divisor
        32
    """

    backbone: nn.Module
    head: nn.Module
    anchors: Callable[[int, int, Sequence[tuple[int, int]]], list[Tensor]]
    size_divisor: int = 1
    keeps_aspect_ratio: bool = True
    image_mean: Sequence[float] = (0.485, 0.456, 0.406)  # of ImageNet
    image_std: Sequence[float] = (0.229, 0.224, 0.225)
    matching: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """The settings that all detectors share; subclasses add the options of an architecture.

    Attributes:
        test_size: shorter side and limit of the longer side of images at inference; height and width if stretched.
        score_threshold: minimum score of a detection. None by default, since ranking losses determine the order of
            scores, not their scale.
        topk_per_level: number of scores per level that enter NMS.
        nms_iou: of two boxes of a class that overlap more than this, NMS keeps the one with the higher score.
        detections_per_image: maximum number of detections.
        channels_last: memory format of weights and images.

    Example:
        >>> from aploss.detectors.ssd import SSD300
        >>> SSD300(nms_iou=0.45).test_size
        (300, 300)
    """

    test_size: tuple[Side, Side] = (600, 1000)
    score_threshold: Fraction | None = None
    topk_per_level: Count = 1000
    nms_iou: Fraction = 0.5
    detections_per_image: Count = 100
    channels_last: bool = False

    # torchvision's names of the weights "imagenet" and "coco"
    named_weights: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        # Subclasses may override the defaults of the shared settings, but not their limits.
        kinds = get_type_hints(type(self), include_extras=True) | get_type_hints(DetectorConfig, include_extras=True)
        for option in fields(self):
            value = getattr(self, option.name)
            try:  # files contain lists instead of tuples
                object.__setattr__(self, option.name, msgspec.convert(value, kinds[option.name]))
            except msgspec.ValidationError as error:
                raise ConfigError(f"{option.name}={value!r}: {error}") from error

    def network(self, *, columns: int, softmax: bool) -> Network:
        """Creates the network with new weights.

        Args:
            columns: number of logits per anchor: K classes, plus the background if ``softmax``.
            softmax: whether the logits share a softmax instead of having one sigmoid each.
        """
        raise NotImplementedError

    @classmethod
    def options_for_weights(cls, weights: str) -> dict[str, Any]:
        """Default options for use with the named weights ``"imagenet"`` or ``"coco"``, or with a file."""
        return {}

    def own_weights(self, name: str) -> "dict[str, Tensor] | None":
        """Weights by name from an installed package, in place of torchvision's; None if there are none."""
        return None

    def backbone_key(self, name: str) -> str:
        """Maps a name in the classifier's ``state_dict`` to the name in the detector's."""
        return f"backbone.body.{name}"

    def classifier_weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a classifier under the detector's names."""
        return {self.backbone_key(name): tensor for name, tensor in state.items()}

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The names of all options, the architecture's own ones first."""
        own = [option.name for option in fields(cls) if option.name not in SETTINGS]
        return (*own, *SETTINGS)


SETTINGS = tuple(option.name for option in fields(DetectorConfig))
CRITERION_OPTIONS = ("rank_over", "box_loss", "box_weight", "assigner", "hard_boxes")
DETECTORS: Registry[type[DetectorConfig]] = Registry("detector")


def register_detector(name: str) -> Callable[[ConfigClass], ConfigClass]:
    """Returns a class decorator that registers an architecture, for :func:`build_detector` and the command line.

    It decorates a subclass of :class:`DetectorConfig`, and turns it into a frozen dataclass unless it is one.
    :func:`~aploss.detectors.retinanet_network` builds a RetinaNet on any backbone (example: ``docs/plugins.md``).

    Args:
        name: such as "my-detector", for ``--detector my-detector``.

    Raises:
        ConfigError: if the name is taken, or the class is not a subclass of :class:`DetectorConfig`.

    Example:
        >>> from aploss.detectors.ssd import SSD300
        >>> register_detector("ssd300")(SSD300) is SSD300  # a class may be registered again under its own name
        True
    """

    def add(config_class: ConfigClass) -> ConfigClass:
        if not (isinstance(config_class, type) and issubclass(config_class, DetectorConfig)):
            raise ConfigError(f"register_detector({name!r}) takes a subclass of DetectorConfig, got {config_class!r}")
        if "__dataclass_fields__" not in vars(config_class):
            dataclass(frozen=True, kw_only=True)(config_class)
        DETECTORS.register(name)(config_class)
        return config_class

    return add


class Detector(nn.Module):
    """A one-stage detector: backbone, heads, anchors and a criterion.

    A call returns ``{"classification": loss, "box": loss}`` in training mode and the detections of each image in
    evaluation mode. The parameters have torchvision's names, so that its weights can be loaded.

    Args:
        name: the name under which the config is registered.
        class_names: K names; label k is the k-th.
        config: the config that created the network; its settings become attributes of the detector.
        network: the trainable modules.
        criterion: the training loss.

    Attributes:
        calibration: monotone map from scores to precision, fitted after training and applied by :meth:`predict`.
        draw_threshold: the calibrated score with the best F1 on validation.

    Example:
        >>> detector = build_detector("retinanet-tiny", class_names=["cat", "dog"], test_size=(64, 64)).eval()
        >>> found = detector(torch.zeros(2, 3, 64, 64))
        >>> len(found), sorted(found[0])
        (2, ['boxes', 'labels', 'scores'])
    """

    image_mean: Tensor
    image_std: Tensor

    def __init__(
        self, *, name: str, class_names: Sequence[str], config: DetectorConfig, network: Network, criterion: Criterion
    ) -> None:
        super().__init__()
        self.name = name
        self.class_names = tuple(class_names)
        self.architecture = config
        self.test_size = config.test_size
        self.score_threshold = config.score_threshold
        self.topk_per_level = config.topk_per_level
        self.nms_iou = config.nms_iou
        self.detections_per_image = config.detections_per_image
        self.channels_last = config.channels_last
        self.network = network
        self.backbone = network.backbone
        self.head = network.head
        self.criterion = criterion
        self.size_divisor = network.size_divisor
        self.keeps_aspect_ratio = network.keeps_aspect_ratio
        self.calibration: Calibration | None = None
        self.draw_threshold: float | None = None
        self._anchor_cache: dict[tuple[int, int, torch.device], list[Tensor]] = {}
        for buffer, values in (("image_mean", network.image_mean), ("image_std", network.image_std)):
            self.register_buffer(buffer, torch.tensor(values).view(3, 1, 1), persistent=False)
        if self.channels_last:
            self.to(memory_format=torch.channels_last)

    @property
    def loss_name(self) -> str:
        """The name of the classification loss; ``"custom"`` for a loss object that is not registered."""
        return describe_loss(self.criterion.loss)[0]

    @property
    def uses_softmax(self) -> bool:
        """Whether the logits share a softmax, with the background in column 0."""
        return traits_of(self.criterion.loss).softmax

    @property
    def config(self) -> dict[str, Any]:
        """Plain values from which ``build_detector(**config)`` builds an equal detector, except for its weights."""
        loss, loss_options = describe_loss(self.criterion.loss)
        options = self.architecture.option_names()
        return {
            "name": self.name,
            **{option: getattr(self if option in SETTINGS else self.architecture, option) for option in options},
            "class_names": list(self.class_names),
            "loss": loss,
            "loss_options": loss_options,
            **{option: getattr(self.criterion, option) for option in CRITERION_OPTIONS},
        }

    def forward(
        self, images: Tensor | Sequence[Tensor] | FeatureMaps, targets: Sequence[Mapping[str, Tensor]] | None = None
    ) -> Any:
        """Computes losses in training mode, detections in evaluation mode.

        Args:
            images: floats in [0, 1], [B, 3, H, W] or a list of [3, h, w]; in training mode also their :meth:`features`.
            targets: for each image ``boxes`` [n, 4] in its pixels and ``labels`` [n] in 0..K-1, optionally ``crowd``
                and ``difficult`` bool [n]; required in training mode.

        Returns:
            In training mode, without resizing images, ``{"classification": ..., "box": ...}``; in evaluation mode see
            :meth:`detect`.
        """
        if not self.training:
            if isinstance(images, FeatureMaps):
                raise DataError("a detector in evaluation mode takes images, not features")
            return self.detect(images)
        if targets is None:
            raise DataError("a detector in training mode needs targets; call detector.eval() for detections")
        batch = images if isinstance(images, FeatureMaps) else self.pad(images)[0]
        height, width = batch.image_size if isinstance(batch, FeatureMaps) else batch.shape[-2:]
        anchors = self.anchors_for(height, width, self.image_mean.device)
        return self.criterion(*self.heads(batch), anchors, targets)

    def detect(self, images: Tensor | Sequence[Tensor], *, size: tuple[int, int] | None = None) -> list[Detections]:
        """Detects objects in images.

        Args:
            images: floats in [0, 1], [B, 3, H, W] or a list of [3, h, w].
            size: overrides ``test_size``.

        Returns:
            For each image a dict of ``boxes`` [n, 4] in its own pixels, ``scores`` [n] descending and ``labels`` [n].
        """
        batch, sizes = self.pad([self.resize(image, size) for image in images])
        anchors = self.anchors_for(batch.shape[-2], batch.shape[-1], batch.device)
        logits, deltas = self.heads(batch)
        if logits.isnan().any() or deltas.isnan().any():  # NMS would silently drop them
            raise RunError(
                f"{self.name} computes NaN: training diverged or the weights are damaged; use another checkpoint"
            )
        detections = postprocess(logits, deltas, anchors, sizes, self, softmax=self.uses_softmax)
        for image, (height, width), found in zip(images, sizes, detections, strict=True):
            scale = found["boxes"].new_tensor([image.shape[-1] / width, image.shape[-2] / height])
            found["boxes"] = found["boxes"] * scale.repeat(2)
        return detections

    def predict(
        self,
        images: ImageLike | Iterable[ImageLike],
        *,
        threshold: float | Literal["lrp"] | None = None,
        batch_size: int = 8,
        multi_scale: MultiScale | None = None,
    ) -> list[Prediction]:
        """Finds objects in images of any kind, with calibrated scores and class names.

        The result for an image does not depend on the other images: only images of the same size share a forward pass,
        so that none is padded because of another.

        Args:
            images: file paths, PIL images, uint8 arrays [H, W, 3], or tensors [3, H, W] of uint8 or of floats in
                [0, 1]; one or many.
            threshold: minimum score, after calibration; ``"lrp"`` for the LRP-optimal threshold of each class on
                validation. Default: the detector's ``draw_threshold`` (best F1 on validation) if it has one, otherwise
                no threshold.
            batch_size: number of images read and passed at a time.
            multi_scale: scales and flips to merge; by default a single scale.

        Returns:
            A prediction for each image, in order.

        Raises:
            DataError: if an image cannot be read, or has an unsupported shape or type.
            ConfigError: if the threshold is invalid, or the detector has none per class.
        """
        least: Any = self.draw_threshold if threshold is None else threshold
        if least == "lrp":
            if self.calibration is None or not self.calibration.class_thresholds:
                raise ConfigError("this detector has no threshold per class; runs with a validation split have")
            least = torch.tensor(self.calibration.class_thresholds)
        elif isinstance(least, str):
            raise ConfigError(f"threshold must be a number or 'lrp', got {least!r}")
        if isinstance(images, str | Path | Image.Image) or getattr(images, "ndim", 4) < 4:
            images = [images]  # type: ignore[list-item]
        remaining, predictions = iter(images), []
        with evaluation_mode(self):
            while chunk := list(islice(remaining, batch_size)):
                predictions += predict_batch(self, chunk, least, multi_scale)
        return predictions

    def heads(self, images: Tensor | FeatureMaps) -> tuple[Tensor, Tensor]:
        """Runs the trainable modules only.

        Args:
            images: [B, 3, H, W] in [0, 1], resized and padded, or their :meth:`features`.

        Returns:
            Logits [B, A, K] (softmax losses: [B, A, K + 1]) and box regressions [B, A, 4].
        """
        if isinstance(images, FeatureMaps):
            maps = images.maps
            if self.channels_last:
                maps = tuple(one.contiguous(memory_format=torch.channels_last) for one in maps)
            levels = self.backbone.pyramid(maps)  # type: ignore[operator]
        else:
            levels = self.backbone(self._normalised(images))
        outputs = self.head(list(levels.values()))
        return outputs["cls_logits"], outputs["bbox_regression"]

    def _normalised(self, images: Tensor) -> Tensor:
        normalised = (images - self.image_mean) / self.image_std
        return normalised.contiguous(memory_format=torch.channels_last) if self.channels_last else normalised

    def body(self) -> nn.Module:
        """The part of the backbone below the feature pyramid, for SSD up to conv4_3; ConfigError if there is none."""
        body = getattr(self.backbone, "body", None)
        if not isinstance(body, nn.Module) or not hasattr(self.backbone, "pyramid"):
            raise ConfigError(f"the backbone of {self.name} cannot be frozen as a whole, only RetinaNet's and VGG's")
        return body

    @torch.no_grad()
    def features(self, images: Tensor | Sequence[Tensor]) -> FeatureMaps:
        """The feature maps of :meth:`body` without gradients, for training with a frozen body."""
        batch, _ = self.pad(images)
        maps = self.body()(self._normalised(batch))
        maps = maps.values() if isinstance(maps, Mapping) else [maps] if isinstance(maps, Tensor) else maps
        return FeatureMaps(tuple(maps), (batch.shape[-2], batch.shape[-1]))

    def anchors_for(self, height: int, width: int, device: torch.device | str = "cpu") -> list[Tensor]:
        """The anchors of each level [A_l, 4] for a batch of this size, in its pixels.

        Raises ConfigError if the detector cannot process images of this size.
        """
        key = (height, width, torch.device(device))
        if key not in self._anchor_cache:
            if len(self._anchor_cache) >= MAX_CACHED_SIZES:
                self._anchor_cache.clear()
            # Tensors created in inference mode could not be used in a training step later.
            with torch.inference_mode(False), torch.no_grad():
                sizes = [(shape[-2], shape[-1]) for shape in feature_shapes(self.backbone, height, width)]
                anchors = self.network.anchors(height, width, sizes)
                self._anchor_cache[key] = [level.float().to(device) for level in anchors]
        return self._anchor_cache[key]

    def resize(self, image: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Resizes an image [3, h, w] for inference, by default to ``test_size``."""
        height, width = image.shape[-2:]
        wanted = size or self.test_size
        if self.keeps_aspect_ratio:
            shorter, longest = wanted
            scale = min(shorter / min(height, width), longest / max(height, width))
            wanted = (max(1, round(height * scale)), max(1, round(width * scale)))
        if wanted == (height, width):
            return image
        # Training images are also downscaled with antialiasing; MPS lacks the operator.
        antialias = image.device.type != "mps" and (wanted[0] < height or wanted[1] < width)
        return F.interpolate(image[None], size=wanted, mode="bilinear", align_corners=False, antialias=antialias)[0]

    def pad(self, images: Tensor | Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        """Pads images of any sizes to one batch; also returns the height and width of each image.

        Padding at the right and the bottom has the mean colour, which becomes 0 by normalisation.

        Raises:
            DataError: if there are no images, or they are not floats.
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
        """Compiles the trainable modules with ``torch.compile``; labelling and NMS stay eager."""
        self.backbone.compile(*arguments, **options)
        self.head.compile(*arguments, **options)


def build_detector(
    name: str,
    *,
    class_names: Sequence[str],
    loss: str | nn.Module = "ap",
    loss_options: dict[str, Any] | None = None,
    weights: str | Path | None = None,
    **options: Any,
) -> Detector:
    """Builds a detector by name, with any classification loss.

    Args:
        name: one of ``DETECTOR_NAMES``.
        class_names: names of the K classes; label k is the k-th.
        loss: one of ``LOSS_NAMES``, or a loss object.
        loss_options: keyword arguments of a loss given by name.
        weights: initial weights, see :func:`~aploss.detectors.weights.load_weights`. They change the defaults of
            ``options`` to the architecture that the weights were trained with; ResNets get frozen batch norm and two
            frozen stages as in the paper.
        options: ``rank_over``, ``box_loss``, ``box_weight``, ``assigner`` and ``hard_boxes`` of the
            :class:`~aploss.detectors.criterion.Criterion`; options of the architecture, see
            ``DETECTORS.get(name).option_names()``; settings of :class:`DetectorConfig`.

    Returns:
        The detector in training mode.

    Raises:
        ConfigError: if the detector, the loss or an option does not exist.

    Example:
        >>> detector = build_detector("retinanet-tiny", class_names=["cat", "dog"])
        >>> round(sum(weight.numel() for weight in detector.parameters()) / 1e6, 1)
        1.6
    """
    config_class = DETECTORS.get(name)
    listed = isinstance(class_names, Sequence) and not isinstance(class_names, str)
    if not listed or not class_names or not all(isinstance(one, str) for one in class_names):
        raise ConfigError(f"class_names must be a list of at least one name, got {class_names!r}")
    if isinstance(loss, str):
        # The initial weights must not depend on the loss, which needs real values also in a detector on meta.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            loss = make_loss(loss, **(loss_options or {}))
    elif loss_options:
        raise ConfigError("loss_options are for a loss given by name; pass them to the loss object instead")
    if weights == "none":
        weights = None
    if weights is not None:
        from aploss.detectors.weights import load_weights, options_for_weights

        options = {**options_for_weights(config_class, str(weights)), **options}
    of_criterion = {key: options.pop(key) for key in CRITERION_OPTIONS if key in options}
    check_options(name, options, config_class.option_names())
    config, softmax = config_class(**options), traits_of(loss).softmax
    network = config.network(columns=len(class_names) + softmax, softmax=softmax)
    criterion = Criterion(loss=loss, num_classes=len(class_names), **{**of_criterion, **network.matching})
    detector = Detector(name=name, class_names=class_names, config=config, network=network, criterion=criterion)
    if weights is not None:
        load_weights(detector, weights)
    return detector


def installed_file(package: str, pattern: str) -> Path | None:
    """A file of an installed package, found without importing the package; None if there is none."""
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((file for folder in folders for file in sorted(Path(folder).glob(pattern))), None)


def feature_shapes(backbone: nn.Module, height: int, width: int) -> list[torch.Size]:
    """Shapes of a backbone's feature maps for images of a size, found on the meta device.

    Raises ConfigError if the backbone cannot process images of this size.
    """
    tensors = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    without_data = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    images = torch.empty(2, 3, height, width, device="meta")  # batch norm in training mode needs two values
    try:
        with torch.compiler.set_stance("force_eager"):
            features = torch.func.functional_call(backbone, without_data, (images,))
    except RuntimeError as error:
        raise ConfigError(f"the detector cannot process images of {width}x{height} pixels: {error}") from error
    return [one.shape for one in (features.values() if isinstance(features, Mapping) else features)]
