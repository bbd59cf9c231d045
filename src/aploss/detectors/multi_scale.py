"""Multi-scale testing: an image looked at in several sizes and mirrored, merged by NMS.

The lower half of Table 3. The paper does not say which scales it used; ``MultiScale`` takes any.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from aploss.errors import ConfigError
from aploss.evaluation.calibration import Calibration

__all__ = ["Detections", "MultiScale", "ObjectDetector", "merge_detections"]

DEFAULT_SCALES = (0.75, 1.0, 1.25, 1.5)
Detections = dict[str, Tensor]


class ObjectDetector(Protocol):
    """What finding objects needs of a detector: ours have it, and the exported ones.

    Called with a list of images, float [3, h, w] in [0, 1], it gives for each ``boxes``,
    ``scores`` and ``labels``.
    """

    class_names: tuple[str, ...]
    calibration: Calibration | None
    draw_threshold: float | None
    test_size: tuple[int, int]
    nms_iou: float
    detections_per_image: int
    keeps_aspect_ratio: bool

    def __call__(self, images: list[Tensor]) -> list[Detections]: ...


@dataclass(frozen=True, kw_only=True)
class MultiScale:
    """The sizes an image is looked at, relative to the detector's own ``test_size``.

    Attributes:
        scales: factors on the detector's test size; 1.0 is the size of an ordinary test. By
            default 0.75 to 1.5, for SSD from 1.0 on: its last maps vanish in smaller images.
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
        views: list[list[Detections]] = []
        for scale in self.scales or _default_scales(detector):
            with _test_size_times(detector, scale):
                views.append(detector(images))
                if self.flip:
                    views.append(_detect_mirrored(detector, images))
        return [
            merge_detections(
                list(of_one_image),
                nms_iou=detector.nms_iou,
                detections_per_image=detector.detections_per_image,
            )
            for of_one_image in zip(*views, strict=True)
        ]


def merge_detections(
    views: list[Detections], *, nms_iou: float, detections_per_image: int
) -> Detections:
    """Class-wise NMS over the detections of several views of one image.

    Args:
        views: ``boxes`` [n, 4], ``scores`` [n], ``labels`` [n] in pixels of the same image.
        nms_iou: of two boxes of a class that overlap more than this, the better stays.
        detections_per_image: how many stay at most.

    Returns:
        One dict of the same kind, best score first.
    """
    boxes, scores, labels = (
        torch.cat([view[key] for view in views]) for key in ("boxes", "scores", "labels")
    )
    keep = batched_nms(boxes, scores, labels, nms_iou)[:detections_per_image]
    return {"boxes": boxes[keep], "scores": scores[keep], "labels": labels[keep]}


def _default_scales(detector: ObjectDetector) -> tuple[float, ...]:
    return tuple(scale for scale in DEFAULT_SCALES if detector.keeps_aspect_ratio or scale >= 1)


def _detect_mirrored(detector: ObjectDetector, images: list[Tensor]) -> list[Detections]:
    detections = detector([image.flip(-1) for image in images])
    for image, found in zip(images, detections, strict=True):
        left, top, right, bottom = found["boxes"].unbind(-1)
        width = image.shape[-1]
        found["boxes"] = torch.stack([width - right, top, width - left, bottom], dim=-1)
    return detections


@contextmanager
def _test_size_times(detector: ObjectDetector, scale: float) -> Iterator[None]:
    shorter, longest = detector.test_size
    detector.test_size = (max(1, round(shorter * scale)), max(1, round(longest * scale)))
    try:
        yield
    finally:
        detector.test_size = (shorter, longest)
