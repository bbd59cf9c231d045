"""What all detectors share: images in, losses or detections out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder

from aploss.detectors.criterion import Criterion
from aploss.detectors.image_batch import pad_images, resize_image
from aploss.detectors.losses_by_name import describe_loss, takes_background_column
from aploss.detectors.postprocess import postprocess
from aploss.errors import ConfigError, DataError

if TYPE_CHECKING:
    from aploss.detectors.multi_scale import MultiScale
    from aploss.detectors.prediction import ImageLike, Prediction
    from aploss.evaluation.calibration import Calibration

__all__ = ["Detector"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SETTINGS = (
    "test_size",
    "score_threshold",
    "topk_per_level",
    "nms_iou",
    "detections_per_image",
    "channels_last",
)


class Detector(nn.Module):
    """A one-stage detector: backbone, heads, anchors and a criterion.

    In training mode a call returns ``{"classification": loss, "box": loss}``, in evaluation mode
    the detections of each image. The modules ``backbone`` and ``head`` are torchvision's, under
    torchvision's names, so that its weights load.

    Args:
        class_names: K names; label k is the k-th.
        backbone: gives a dict of feature maps.
        head: turns the list of feature maps into ``cls_logits`` [B, A, columns] and
            ``bbox_regression`` [B, A, 4].
        criterion: the training loss.
        config: the options that make this detector again, see :attr:`config`.
        image_mean: subtracted from images in [0, 1].
        image_std: divides what is left.
        test_size: shorter side and limit of the longer side of images at inference.
        size_divisor: images are padded at the right and bottom to a multiple of this.
        score_threshold: see :func:`~aploss.detectors.postprocess.postprocess`, as the next three.
        topk_per_level: scores of a level that go on to NMS.
        nms_iou: overlap from which on NMS drops a box.
        detections_per_image: detections kept.
        channels_last: memory format of weights and images.

    Attributes:
        calibration: monotone map from scores to precision, fitted after training; only
            :meth:`predict` applies it.
        draw_threshold: the calibrated score with the best F1 on validation.
    """

    name: str
    image_mean: Tensor
    image_std: Tensor
    test_size: tuple[int, int]
    keeps_aspect_ratio = True

    def __init__(
        self,
        *,
        class_names: Sequence[str],
        backbone: nn.Module,
        head: nn.Module,
        criterion: Criterion,
        config: Mapping[str, Any],
        image_mean: Sequence[float] = IMAGENET_MEAN,
        image_std: Sequence[float] = IMAGENET_STD,
        test_size: tuple[int, int],
        size_divisor: int = 1,
        score_threshold: float | None = None,
        topk_per_level: int = 1000,
        nms_iou: float = 0.5,
        detections_per_image: int = 100,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.name = config["name"]
        self.class_names = tuple(class_names)
        self.backbone = backbone
        self.head = head
        self.criterion = criterion
        self.test_size = (int(test_size[0]), int(test_size[1]))
        self.size_divisor = size_divisor
        self.score_threshold = score_threshold
        self.topk_per_level = topk_per_level
        self.nms_iou = nms_iou
        self.detections_per_image = detections_per_image
        self.channels_last = channels_last
        self.calibration: Calibration | None = None
        self.draw_threshold: float | None = None
        self._config = dict(config)
        self._anchor_cache: dict[tuple[int, int, torch.device], list[Tensor]] = {}
        for buffer, values in (("image_mean", image_mean), ("image_std", image_std)):
            self.register_buffer(buffer, torch.tensor(values).view(3, 1, 1), persistent=False)
        if channels_last:
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
        return takes_background_column(self.criterion.loss)

    @property
    def box_coder(self) -> BoxCoder:
        """Turns box regressions into boxes; its weights divide the regressions."""
        return self.criterion.box_coder

    @property
    def config(self) -> dict[str, Any]:
        """Plain values with which ``build_detector(**config)`` makes this detector again."""
        loss, loss_options = describe_loss(self.criterion.loss)
        return {
            **self._config,
            "class_names": list(self.class_names),
            "loss": loss,
            "loss_options": loss_options,
            "rank_over": self.criterion.rank_over,
            "box_loss": self.criterion.box_loss,
            "box_weight": self.criterion.box_weight,
            **{setting: getattr(self, setting) for setting in SETTINGS},
        }

    def forward(
        self,
        images: Tensor | Sequence[Tensor],
        targets: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> Any:
        """Losses in training mode, detections in evaluation mode.

        Args:
            images: floats in [0, 1], [B, 3, H, W] or a list of [3, h, w].
            targets: for each image ``boxes`` [n, 4] in its pixels and ``labels`` [n] of 0..K-1,
                optionally ``crowd`` and ``difficult`` bool [n]; needed in training mode.

        Returns:
            In training mode, where images are not resized: ``{"classification": ..., "box": ...}``.
            In evaluation mode: for each image a dict of ``boxes`` [n, 4] in its own pixels,
            ``scores`` [n] descending and ``labels`` [n].
        """
        if not self.training:
            return self.detect(images)
        if targets is None:
            raise DataError("a detector in training mode needs targets; call detector.eval() first")
        batch, _ = self.pad(images)
        height, width = batch.shape[-2:]
        anchors = torch.cat(self.anchors_for(height, width, batch.device))
        logits, deltas = self.heads(batch)
        return self.criterion(logits, deltas, anchors, targets)

    def detect(self, images: Tensor | Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Detections of each image, see :meth:`forward`."""
        batch, sizes = self.pad([self.resize(image) for image in images])
        self.anchors_for(batch.shape[-2], batch.shape[-1], batch.device)  # refuses impossible sizes
        logits, deltas = self.heads(batch)
        detections = self.postprocess(logits, deltas, batch.shape[-2:], sizes)
        for image, (height, width), found in zip(images, sizes, detections, strict=True):
            scale = found["boxes"].new_tensor([image.shape[-1] / width, image.shape[-2] / height])
            found["boxes"] = found["boxes"] * scale.repeat(2)
        return detections

    def heads(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The network alone: everything that has weights, nothing else.

        Args:
            images: [B, 3, H, W] in [0, 1], resized and padded.

        Returns:
            Logits [B, A, K] (softmax losses: [B, A, K + 1]) and box regressions [B, A, 4].
        """
        images = (images - self.image_mean) / self.image_std
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        outputs = self.head(list(self.backbone(images).values()))
        return outputs["cls_logits"], outputs["bbox_regression"]

    def postprocess(
        self,
        logits: Tensor,
        deltas: Tensor,
        batch_size: Sequence[int],
        image_sizes: Sequence[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        """Detections in pixels of the batch, from what :meth:`heads` gives.

        Args:
            logits: [B, A, columns].
            deltas: [B, A, 4].
            batch_size: height and width of the batch that went through :meth:`heads`.
            image_sizes: height and width of each image inside its padding.
        """
        height, width = batch_size
        return postprocess(
            logits,
            deltas,
            self.anchors_for(height, width, logits.device),
            image_sizes,
            box_coder=self.box_coder,
            softmax=self.uses_softmax,
            score_threshold=self.score_threshold,
            topk_per_level=self.topk_per_level,
            nms_iou=self.nms_iou,
            detections_per_image=self.detections_per_image,
        )

    def anchors_for(
        self, height: int, width: int, device: torch.device | str = "cpu"
    ) -> list[Tensor]:
        """The anchors of a batch of this size, for each level [A_l, 4] in pixels of the batch."""
        key = (height, width, torch.device(device))
        if key not in self._anchor_cache:
            if len(self._anchor_cache) >= 64:  # many image sizes: forget, rather than grow
                self._anchor_cache.clear()
            # Made under inference mode, they could not be used for a training step later.
            with torch.inference_mode(False), torch.no_grad():
                anchors = self.make_anchors(height, width, self.feature_sizes(height, width))
                self._anchor_cache[key] = [level.float().to(device) for level in anchors]
        return self._anchor_cache[key]

    def make_anchors(
        self, height: int, width: int, feature_sizes: Sequence[tuple[int, int]]
    ) -> list[Tensor]:
        """Anchors of each level from the height and width of its feature map."""
        raise NotImplementedError

    def feature_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Height and width of each feature map for images of a size."""
        return [(shape[-2], shape[-1]) for shape in feature_shapes(self.backbone, height, width)]

    def resize(self, image: Tensor) -> Tensor:
        """An image [3, h, w] in the size for inference, see ``test_size``."""
        return resize_image(image, self.test_size, keeps_aspect_ratio=self.keeps_aspect_ratio)

    def pad(self, images: Tensor | Sequence[Tensor]) -> tuple[Tensor, list[tuple[int, int]]]:
        """One batch of images of any size, and the height and width of each inside it.

        The padding has the mean colour, which is 0 for the network.
        """
        return pad_images(images, colour=self.image_mean, size_divisor=self.size_divisor)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compiles what has weights with ``torch.compile``; labels and NMS stay as they are."""
        self.backbone.compile(*arguments, **options)
        self.head.compile(*arguments, **options)

    def predict(
        self,
        images: "ImageLike | Sequence[ImageLike]",
        *,
        threshold: float | None = None,
        batch_size: int = 8,
        multi_scale: "MultiScale | None" = None,
    ) -> "list[Prediction]":
        """Objects in images of any kind, see :func:`~aploss.detectors.prediction.predict`."""
        from aploss.detectors.prediction import predict

        return predict(
            self, images, threshold=threshold, batch_size=batch_size, multi_scale=multi_scale
        )


def feature_shapes(backbone: nn.Module, height: int, width: int) -> list[torch.Size]:
    """Shapes of the feature maps of one image, found without computing them.

    Raises:
        ConfigError: if the backbone cannot take images of this size.
    """
    tensors = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    without_data = {
        name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()
    }
    images = torch.empty(2, 3, height, width, device="meta")  # batch norm cannot train on one value
    try:
        with torch.compiler.set_stance("force_eager"):
            features = torch.func.functional_call(backbone, without_data, (images,))
    except RuntimeError as error:
        raise ConfigError(
            f"the detector cannot take images of {width}x{height} pixels: {error}"
        ) from error
    return [feature.shape for feature in features.values()]
