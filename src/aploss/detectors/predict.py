"""From logits to detections, of an image in one size or in several; and from pictures of any kind to boxes with
calibrated scores and class names."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import batched_nms, clip_boxes_to_image

from aploss.data.augment import mirrored
from aploss.data.images import read_image, to_rgb
from aploss.errors import ConfigError, DataError
from aploss.evaluation import Calibration

DEFAULT_SCALES = (0.75, 1.0, 1.25, 1.5)
TOLERANCE = 0.01  # resizing may leave [0, 1] by a little
Detections = dict[str, Tensor]
ImageLike = str | Path | Image.Image | np.ndarray | Tensor


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
    calibration: Calibration | None
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
        images: ImageLike | Iterable[ImageLike],
        *,
        threshold: float | None = None,
        batch_size: int = 8,
        multi_scale: "MultiScale | None" = None,
    ) -> "list[Prediction]":
        """Finds objects in images.

        The result for an image does not depend on which other images are asked for: only images of
        the same size share a pass, so that none is padded because of another.

        Args:
            images: file paths, PIL images, uint8 arrays [H, W, 3], tensors [3, H, W] of uint8 or of
                floats in [0, 1]; many of them or one.
            threshold: the least score to return, of the calibrated scores where the detector has a calibration. By
                default the detector's ``draw_threshold`` (best F1 on validation), and everything where it has none.
            batch_size: how many images are read and passed at a time.
            multi_scale: the scales and flips to merge, by default the image as it is.

        Returns:
            A prediction for each image, in order.

        Raises:
            DataError: if an image cannot be read or has another shape or type.
        """
        least = self.draw_threshold if threshold is None else threshold
        if isinstance(images, str | Path | Image.Image) or getattr(images, "ndim", 4) < 4:
            images = [images]  # type: ignore[list-item]
        remaining = iter(images)
        predictions: list[Prediction] = []
        with evaluation_mode(self):
            while chunk := list(islice(remaining, batch_size)):
                tensors = [image_tensor(image) for image in chunk]
                detections = detect_by_size(self, tensors, multi_scale)
                for image, tensor, found in zip(chunk, tensors, detections, strict=True):
                    predictions.append(_prediction(self, image, tensor, found, least))
        return predictions


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
        found["boxes"] = mirrored(found["boxes"], image.shape[-1])
    return detections


# --- pictures of any kind ---------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """The objects found in one image, best first; all tensors are on the CPU.

    Attributes:
        boxes: float [n, 4], corners x1, y1, x2, y2 in pixels of the image.
        scores: float [n], descending; with a calibrated detector, the expected precision.
        labels: int64 [n], index of the class among the detector's.
        class_names: n names, the class of each detection.
        image_size: width and height of the image.
        path: file of the image, where it came from one.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    image_size: tuple[int, int]
    path: str | None = None

    def __len__(self) -> int:
        return len(self.scores)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        rows = zip(self.class_names, self.labels.tolist(), self.scores.tolist(), self.boxes.tolist(), strict=True)
        return {
            "path": self.path,
            "width": self.image_size[0],
            "height": self.image_size[1],
            "detections": [
                {"class_name": name, "label": label, "score": score, "box": box} for name, label, score, box in rows
            ],
        }


def image_tensor(image: ImageLike) -> Tensor:
    """Any kind of picture as float32 [3, H, W] in [0, 1]; DataError for what cannot be read or is of another kind.

    Example:
        >>> image_tensor(np.full((2, 3, 3), 255, dtype=np.uint8)).shape
        torch.Size([3, 2, 3])
    """
    tensor = _as_tensor(image)
    if tensor.ndim != 3 or tensor.shape[0] != 3 or tensor.numel() == 0:
        raise DataError(f"an image tensor must be [3, H, W], got {list(tensor.shape)}")
    if tensor.dtype == torch.uint8:
        return tensor.float() / 255
    if not tensor.is_floating_point():
        raise DataError(f"an image tensor must be uint8 or floats in [0, 1], got {tensor.dtype}")
    low, high = float(tensor.min()), float(tensor.max())
    if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
        raise DataError(
            f"a float image must be in [0, 1], got {low:.3g} to {high:.3g}: "
            "hand it over before normalisation, or as uint8"
        )
    return tensor.float()


def _as_tensor(image: ImageLike) -> Tensor:
    if isinstance(image, Tensor):
        return image.as_subclass(Tensor)
    if isinstance(image, str | Path):
        return read_image(image)
    pixels = _decode(image) if isinstance(image, Image.Image) else image
    if not isinstance(pixels, np.ndarray):
        raise DataError(f"an image must be a path, PIL image, array or tensor, got {type(image)}")
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or pixels.shape[2:] not in ((), (3,)):
        raise DataError(f"an image array must be uint8 [H, W, 3] or [H, W], got {pixels.dtype} {list(pixels.shape)}")
    colour = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)
    return torch.from_numpy(colour.transpose(2, 0, 1).copy())


def _decode(image: Image.Image) -> np.ndarray:
    try:
        return np.asarray(to_rgb(ImageOps.exif_transpose(image)))  # [H, W, 3]
    except (OSError, ValueError, SyntaxError) as error:  # Pillow reads only now
        name = getattr(image, "filename", "") or "a PIL image"
        raise DataError(f"{name}: damaged image: {error}") from error


def detect_by_size(
    detector: ObjectDetector, tensors: Sequence[Tensor], multi_scale: MultiScale | None = None
) -> list[Detections]:
    """Images of one size share a pass: padding would make one's result depend on another."""
    by_size: dict[torch.Size, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_size.setdefault(tensor.shape, []).append(index)
    found: dict[int, Detections] = {}
    device = next(detector.parameters()).device if isinstance(detector, nn.Module) else "cpu"
    for indices in by_size.values():
        batch = [tensors[index].to(device) for index in indices]
        results = multi_scale(detector, batch) if multi_scale else detector.detect(batch)
        found.update(zip(indices, results, strict=True))
    return [found[index] for index in range(len(tensors))]


def _prediction(
    detector: ObjectDetector, image: ImageLike, tensor: Tensor, found: Detections, threshold: float | None
) -> Prediction:
    boxes, scores, labels = (found[key].detach().cpu() for key in ("boxes", "scores", "labels"))
    if detector.calibration is not None:
        calibrated = np.asarray(detector.calibration(scores.double().numpy()))
        scores = torch.from_numpy(calibrated).to(scores.dtype)
    if threshold is not None:
        keep = scores >= threshold
        boxes, scores, labels = boxes[keep], scores[keep], labels[keep]
    height, width = tensor.shape[1:]
    return Prediction(
        boxes=boxes,
        scores=scores,
        labels=labels,
        class_names=tuple(detector.class_names[label] for label in labels.tolist()),
        image_size=(width, height),
        path=str(image) if isinstance(image, str | Path) else None,
    )


@contextmanager
def evaluation_mode(detector: ObjectDetector) -> Iterator[None]:
    """No gradients, and the mode of the detector is left as it was, by the last of several threads."""
    switched = isinstance(detector, nn.Module) and _switch(detector, +1)
    try:
        with torch.inference_mode():
            yield
    finally:
        if switched:
            _switch(detector, -1)  # type: ignore[arg-type]


_SWITCH = threading.Lock()
_SWITCHED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how many threads need evaluation mode


def _switch(module: nn.Module, change: int) -> bool:
    """Brings a module in training mode into evaluation mode, and back when nobody needs that; False for others."""
    with _SWITCH:
        users = _SWITCHED.get(module, 0)
        if users == 0 and not module.training:
            return False
        _SWITCHED[module] = users + change
        if users == 0 or users + change == 0:
            module.train(users + change == 0)
        return True
