"""What `aploss train --data PATH` does with nothing else said: settings for machine and data."""

from typing import Any

import numpy as np
import torch

from aploss.data.dataset import DetectionDataset
from aploss.data.load import load_dataset

__all__ = ["suggest_image_sizes", "suggest_recipe"]

LARGEST_SIDE = 320  # of a square with as many pixels as a CPU trains on in reasonable time
SMALLEST_SIDE = 128
STRIDE = 32  # images are padded to multiples of it anyway


def suggest_recipe(device: torch.device) -> str:
    """The recipe for data nobody has made one for."""
    return "any-gpu" if device.type == "cuda" else "any-cpu"


def suggest_image_sizes(recipe: str, data: str, *, format: str = "auto") -> dict[str, Any]:
    """Settings of a run that follow from the size and shape of its images.

    On a CPU images are trained on in the shape that most have, so that objects look the same as
    in testing, and no larger than they are. A GPU has pixels to spare and augmentation that
    changes shapes: there the recipe's own size stays.

    Args:
        recipe: of :func:`suggest_recipe`.
        data: see :func:`~aploss.data.load.load_dataset`.
        format: of the data.
    """
    if recipe != "any-cpu":
        return {}
    height, width = usual_size(load_dataset(data, format=format))
    shorter = min(height, width)
    return {
        "batches": {"image_size": [height, width]},
        "model": {"options": {"test_size": [shorter, 2 * shorter]}},
    }


def usual_size(dataset: DetectionDataset) -> tuple[int, int]:
    """Height and width, multiples of 32, of the usual shape of a dataset's images.

    Example:
        >>> dataset = DetectionDataset(
        ...     root=".", class_names=["a"], image_paths=["1.png"], image_sizes=[(640, 480)],
        ...     boxes_per_image=[0], boxes=[], labels=[])
        >>> usual_size(dataset)
        (288, 384)
    """
    sizes = np.array([dataset.image_size(index) for index in range(len(dataset))], dtype=float)
    ratio = float(np.median(sizes[:, 0] / sizes[:, 1]))  # width over height
    side = float(np.median(np.sqrt(sizes.prod(axis=1))))
    side = min(max(side, SMALLEST_SIDE), LARGEST_SIDE)
    ratio = min(max(ratio, 0.5), 2.0)
    height, width = side / ratio**0.5, side * ratio**0.5
    rounded = (max(STRIDE, STRIDE * round(length / STRIDE)) for length in (height, width))
    return next(rounded), next(rounded)
