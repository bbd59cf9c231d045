"""From logits to detections, of an image in one size or in several."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import batched_nms, clip_boxes_to_image

from aploss.errors import ConfigError

if TYPE_CHECKING:
    from aploss.detectors.predict import ImageLike, Prediction
    from aploss.evaluation import Calibration

DEFAULT_SCALES = (0.75, 1.0, 1.25, 1.5)
Detections = dict[str, Tensor]


def postprocess(
    logits: Tensor,
    deltas: Tensor,
    anchors: Sequence[Tensor],
    image_sizes: Sequence[tuple[int, int]],
    *,
    box_coder: BoxCoder,
    softmax: bool,
    score_threshold: float | None,
    topk_per_level: int,
    nms_iou: float,
    detections_per_image: int,
) -> list[Detections]:
    """Detections of a batch, in pixels of the batch.

    Args:
        logits: [B, A, K], or [B, A, K + 1] if ``softmax``.
        deltas: [B, A, 4].
        anchors: for each level [A_l, 4], together A.
        image_sizes: height and width of each image inside the batch; boxes are clipped to it, and boxes that lie
            outside it (in the padding) are dropped.
        box_coder: turns deltas into boxes.
        softmax: whether classes and background (column 0) share one distribution.
        score_threshold, topk_per_level, nms_iou, detections_per_image: as of
            :class:`~aploss.detectors.detector.DetectorConfig`.

    Returns:
        For each image ``boxes`` [n, 4], ``scores`` [n] descending, ``labels`` [n] of 0..K-1.
    """
    level_sizes = [len(level) for level in anchors]
    detections = []
    for image_logits, image_deltas, size in zip(logits, deltas, image_sizes, strict=True):
        levels = zip(
            image_logits.float().split(level_sizes), image_deltas.float().split(level_sizes), anchors, strict=True
        )
        found = [_best_of_level(*level, box_coder=box_coder, softmax=softmax, topk=topk_per_level) for level in levels]
        boxes, scores, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        boxes = clip_boxes_to_image(boxes, size)
        keep = (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
        if score_threshold is not None:
            keep &= scores > score_threshold
        best = {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}
        detections.append(merge_detections([best], nms_iou=nms_iou, detections_per_image=detections_per_image))
    return detections


def _best_of_level(
    logits: Tensor, deltas: Tensor, anchors: Tensor, *, box_coder: BoxCoder, softmax: bool, topk: int
) -> tuple[Tensor, Tensor, Tensor]:
    # The sigmoid is monotone: taken after the top-k, it is computed for the few instead of for all.
    rankable = logits.softmax(dim=-1)[..., 1:] if softmax else logits
    num_classes = rankable.shape[-1]
    values, positions = rankable.flatten().topk(min(topk, rankable.numel()))
    chosen = positions // num_classes
    boxes = box_coder.decode_single(deltas[chosen], anchors[chosen])
    return boxes, values if softmax else values.sigmoid(), positions % num_classes


class ObjectDetector:
    """What finding objects needs of a detector: ours have it, and the exported ones."""

    class_names: tuple[str, ...]
    calibration: "Calibration | None"
    draw_threshold: float | None
    test_size: tuple[int, int]
    nms_iou: float
    detections_per_image: int
    keeps_aspect_ratio: bool

    def detect(self, images: Tensor | Sequence[Tensor], *, size: tuple[int, int] | None = None) -> list[Detections]:
        """``boxes``, ``scores`` and ``labels`` of images [3, h, w] in [0, 1]."""
        raise NotImplementedError

    def predict(
        self,
        images: "ImageLike | Iterable[ImageLike]",
        *,
        threshold: float | None = None,
        batch_size: int = 8,
        multi_scale: "MultiScale | None" = None,
    ) -> "list[Prediction]":
        """Objects in images of any kind, see :func:`~aploss.detectors.predict.predict`."""
        from aploss.detectors.predict import predict

        return predict(self, images, threshold=threshold, batch_size=batch_size, multi_scale=multi_scale)


@dataclass(frozen=True, kw_only=True)
class MultiScale:
    """Multi-scale testing: an image looked at in several sizes and mirrored, merged by NMS.

    The lower half of Table 3; the paper does not say which scales it used.

    Attributes:
        scales: factors on the detector's ``test_size``; 1.0 is an ordinary test. By default 0.75 to 1.5, for SSD from
            1.0 on: its last maps vanish in smaller images.
        flip: look at the mirrored image of every scale, too.

    Example:
        >>> both_directions = MultiScale(scales=(1.0,), flip=True)
        >>> merged = both_directions(detector, images)  # doctest: +SKIP
    """

    scales: tuple[float, ...] | None = None
    flip: bool = True

    def __post_init__(self) -> None:
        if self.scales is not None and not (self.scales and min(self.scales) > 0):
            raise ConfigError(f"multi-scale testing needs scales above 0, got {self.scales}")

    def __call__(self, detector: ObjectDetector, images: list[Tensor]) -> list[Detections]:
        """Detections of every view of the images, merged by the detector's class-wise NMS.

        Args:
            detector: a detector in evaluation mode.
            images: float [3, h, w] in [0, 1], each of its own size.

        Returns:
            For each image the same dict as the detector gives: ``boxes`` [n, 4] in its pixels,
            ``scores`` [n] descending and uncalibrated, ``labels`` [n].
        """
        smallest = 0.0 if detector.keeps_aspect_ratio else 1.0
        shorter, longest = detector.test_size
        views: list[list[Detections]] = []
        for scale in self.scales or [one for one in DEFAULT_SCALES if one >= smallest]:
            size = (max(1, round(shorter * scale)), max(1, round(longest * scale)))
            views.append(detector.detect(images, size=size))
            if self.flip:
                views.append(_detect_mirrored(detector, images, size))
        nms_iou, limit = detector.nms_iou, detector.detections_per_image
        by_image = zip(*views, strict=True)
        return [merge_detections(one, nms_iou=nms_iou, detections_per_image=limit) for one in by_image]


def merge_detections(views: Sequence[Detections], *, nms_iou: float, detections_per_image: int) -> Detections:
    """Class-wise NMS over the detections of several views of one image, in its pixels; the best, best score first."""
    boxes, scores, labels = (torch.cat([view[key] for view in views]) for key in ("boxes", "scores", "labels"))
    keep = batched_nms(boxes, scores, labels, nms_iou)[:detections_per_image]
    return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}


def _detect_mirrored(detector: ObjectDetector, images: list[Tensor], size: tuple[int, int]) -> list[Detections]:
    detections = detector.detect([image.flip(-1) for image in images], size=size)
    for image, found in zip(images, detections, strict=True):
        left, top, right, bottom = found["boxes"].unbind(-1)
        width = image.shape[-1]
        found["boxes"] = torch.stack([width - right, top, width - left, bottom], dim=-1)
    return detections
