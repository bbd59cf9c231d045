"""From images of any kind to boxes with calibrated scores and class names, at one scale or several."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor

from aploss.data.images import read_image, to_rgb
from aploss.detectors.postprocess import Detections, merge_detections
from aploss.errors import ConfigError, DataError

if TYPE_CHECKING:
    from aploss.detectors.detector import Detector

DEFAULT_SCALES = (0.75, 1.0, 1.25, 1.5)
TOLERANCE = 0.01  # resizing may overshoot [0, 1] slightly
ImageLike = str | Path | Image.Image | np.ndarray | Tensor


@dataclass(frozen=True, kw_only=True)
class MultiScale:
    """Multi-scale testing: detections at several scales and of the mirrored image, merged by NMS.

    As in the lower half of Table 3; the paper does not state its scales.

    Attributes:
        scales: factors on the detector's ``test_size``. Default: 0.75 to 1.5, for SSD 1.0 to 1.5, since its last
            feature maps vanish in smaller images.
        flip: also use the mirrored image at every scale.

    Example:
        >>> from aploss.detectors import build_detector
        >>> detector = build_detector("retinanet-tiny", class_names=["cat"], test_size=(64, 64)).eval()
        >>> len(MultiScale(scales=(1.0, 1.5))(detector, [torch.zeros(3, 64, 64)]))  # one result per image
        1
    """

    scales: tuple[float, ...] | None = None
    flip: bool = True

    def __post_init__(self) -> None:
        if self.scales is not None and not (self.scales and min(self.scales) > 0):
            raise ConfigError(f"multi-scale testing needs scales above 0, got {self.scales}")

    def __call__(self, detector: "Detector", images: list[Tensor]) -> list[Detections]:
        """Detections of all views of the images, merged by the detector's class-wise NMS.

        Args:
            detector: a detector in evaluation mode.
            images: float [3, h, w] in [0, 1], of any sizes.

        Returns:
            For each image a dict like the detector's: ``boxes`` [n, 4] in its pixels, ``scores`` [n] descending and
            uncalibrated, ``labels`` [n].
        """
        smallest = 0.0 if detector.keeps_aspect_ratio else 1.0
        shorter, longest = detector.test_size
        views: list[list[Detections]] = []
        for scale in self.scales or [one for one in DEFAULT_SCALES if one >= smallest]:
            size = (max(1, round(shorter * scale)), max(1, round(longest * scale)))
            views.append(detector.detect(images, size=size))
            if self.flip:
                views.append(detector.detect([image.flip(-1) for image in images], size=size))
                for image, found in zip(images, views[-1], strict=True):
                    left, top, right, bottom = found["boxes"].unbind(1)
                    found["boxes"] = torch.stack([image.shape[-1] - right, top, image.shape[-1] - left, bottom], dim=1)
        return [merge_detections(of_image, detector) for of_image in zip(*views, strict=True)]


@dataclass(frozen=True)
class Prediction:
    """The objects found in one image in descending order of scores, on the CPU.

    Attributes:
        boxes: float [n, 4], corners x1, y1, x2, y2 in pixels of the image.
        scores: float [n]; the expected precision if the detector is calibrated.
        labels: int64 [n], indices into the detector's classes.
        class_names: the names of the n classes.
        image_size: width and height of the image.
        path: file of the image, if it was read from one.

    Example:
        >>> box = torch.tensor([[1.0, 2.0, 30.0, 40.0]])
        >>> Prediction(box, torch.tensor([0.5]), torch.tensor([1]), ("dog",), (64, 48)).to_dict()["detections"]
        [{'class_name': 'dog', 'label': 1, 'score': 0.5, 'box': [1.0, 2.0, 30.0, 40.0]}]
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
    """Converts an image of any kind to float32 [3, H, W] in [0, 1]; raises DataError if it cannot.

    Example:
        >>> image_tensor(np.full((2, 3, 3), 255, dtype=np.uint8)).shape
        torch.Size([3, 2, 3])
    """
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)):
            raise DataError(f"an image array must be uint8 [H, W, 3] or [H, W], got {image.dtype} {list(image.shape)}")
        image = Image.fromarray(image)
    if isinstance(image, Image.Image):
        try:
            image = pil_to_tensor(to_rgb(ImageOps.exif_transpose(image)))
        except (OSError, ValueError, SyntaxError) as error:  # Pillow decodes lazily
            name = getattr(image, "filename", "") or "a PIL image"
            raise DataError(f"{name}: damaged image: {error}") from error
    tensor = read_image(image) if isinstance(image, str | Path) else image
    if not isinstance(tensor, Tensor):
        raise DataError(f"an image must be a path, PIL image, array or tensor, got {type(image)}")
    if tensor.ndim != 3 or tensor.shape[0] != 3 or tensor.numel() == 0:
        raise DataError(f"an image tensor must be [3, H, W], got {list(tensor.shape)}")
    if tensor.dtype == torch.uint8:
        return tensor.as_subclass(Tensor).float() / 255
    if not tensor.is_floating_point():
        raise DataError(f"an image tensor must be uint8 or floats in [0, 1], got {tensor.dtype}")
    low, high = float(tensor.min()), float(tensor.max())
    if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
        raise DataError(
            f"a float image must be in [0, 1], got {low:.3g} to {high:.3g}: pass it before normalisation, or as uint8"
        )
    return tensor.as_subclass(Tensor).float()


def detect_by_size(
    detector: "Detector", tensors: Sequence[Tensor], multi_scale: MultiScale | None = None
) -> list[Detections]:
    """Detects in batches of equal sizes: with padding, a result would depend on the other images."""
    by_size: dict[torch.Size, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_size.setdefault(tensor.shape, []).append(index)
    found: dict[int, Detections] = {}
    for indices in by_size.values():
        batch = [tensors[index].to(detector.image_mean.device) for index in indices]
        results = multi_scale(detector, batch) if multi_scale else detector.detect(batch)
        found.update(zip(indices, results, strict=True))
    return [found[index] for index in range(len(tensors))]


def predict_batch(
    detector: "Detector", images: Sequence[ImageLike], threshold: float | Tensor | None, multi_scale: MultiScale | None
) -> list[Prediction]:
    """Predictions with calibrated scores of at least the threshold, of all classes or of each class [K]."""
    tensors, predictions = [image_tensor(image) for image in images], []
    for image, tensor, found in zip(images, tensors, detect_by_size(detector, tensors, multi_scale), strict=True):
        boxes, scores, labels = (found[key].detach().cpu() for key in ("boxes", "scores", "labels"))
        if detector.calibration is not None:
            calibrated = np.asarray(detector.calibration(scores.double().numpy()))
            scores = torch.from_numpy(calibrated).to(scores.dtype)
        if threshold is not None:
            keep = scores >= (threshold[labels] if isinstance(threshold, Tensor) else threshold)
            boxes, scores, labels = boxes[keep], scores[keep], labels[keep]
        prediction = Prediction(
            boxes=boxes,
            scores=scores,
            labels=labels,
            class_names=tuple(detector.class_names[label] for label in labels.tolist()),
            image_size=(tensor.shape[2], tensor.shape[1]),
            path=str(image) if isinstance(image, str | Path) else None,
        )
        predictions.append(prediction)
    return predictions


@contextmanager
def evaluation_mode(detector: nn.Module) -> Iterator[None]:
    """Disables gradients and switches to evaluation mode; restores the previous mode afterwards.

    cuDNN does not search for its fastest algorithms meanwhile, which it would do for every new image size.
    """
    was_training, searches = detector.training, torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = searches and not getattr(detector, "keeps_aspect_ratio", True)
        detector.eval()
        with torch.inference_mode():
            yield
    finally:
        torch.backends.cudnn.benchmark = searches
        detector.train(was_training)
