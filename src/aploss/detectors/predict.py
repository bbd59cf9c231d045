"""From pictures of any kind to boxes with calibrated scores and class names."""

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

from aploss.data.images import read_image, to_rgb
from aploss.detectors.postprocess import Detections, MultiScale, ObjectDetector
from aploss.errors import DataError

TOLERANCE = 0.01  # resizing may leave [0, 1] by a little
ImageLike = str | Path | Image.Image | np.ndarray | Tensor


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


def predict(
    detector: ObjectDetector,
    images: ImageLike | Iterable[ImageLike],
    *,
    threshold: float | None = None,
    batch_size: int = 8,
    multi_scale: MultiScale | None = None,
) -> list[Prediction]:
    """Finds objects in images.

    The result for an image does not depend on which other images are asked for: only images of
    the same size share a pass, so that none is padded because of another.

    Args:
        detector: from :func:`~aploss.detectors.load`, :func:`~aploss.detectors.build_detector` or
            an :class:`~aploss.detectors.export.OnnxDetector`.
        images: file paths, PIL images, uint8 arrays [H, W, 3], tensors [3, H, W] of uint8 or of
            floats in [0, 1]; many of them or one.
        threshold: the least score to return, of the calibrated scores where the detector has a
            calibration. By default the detector's ``draw_threshold`` (best F1 on validation), and
            everything where it has none.
        batch_size: how many images are read and passed at a time.
        multi_scale: the scales and flips to merge, by default the image as it is.

    Returns:
        A prediction for each image, in order.

    Raises:
        DataError: if an image cannot be read or has another shape or type.
    """
    least = detector.draw_threshold if threshold is None else threshold
    if isinstance(images, str | Path | Image.Image) or getattr(images, "ndim", 4) < 4:
        images = [images]  # type: ignore[list-item]
    remaining = iter(images)
    predictions: list[Prediction] = []
    with evaluation_mode(detector):
        while chunk := list(islice(remaining, batch_size)):
            tensors = [image_tensor(image) for image in chunk]
            detections = detect_by_size(detector, tensors, multi_scale)
            for image, tensor, found in zip(chunk, tensors, detections, strict=True):
                predictions.append(_prediction(detector, image, tensor, found, least))
    return predictions


def image_tensor(image: ImageLike) -> Tensor:
    """Any kind of picture as float32 [3, H, W] in [0, 1].

    Raises:
        DataError: if it cannot be read or has another shape or type.

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
    device = _device_of(detector)
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


def _device_of(detector: ObjectDetector) -> torch.device:
    if isinstance(detector, nn.Module):
        return next(detector.parameters()).device
    return torch.device("cpu")


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
