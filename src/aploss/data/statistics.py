"""Counts and histograms of a dataset's boxes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from aploss.data.dataset import DetectionDataset

__all__ = ["BOX_SIZE_EDGES", "SplitStatistics", "split_statistics"]

# Side of the square of a box's area, in pixels; 32 and 96 are COCO's small and large.
BOX_SIZE_EDGES = (0, 8, 16, 32, 64, 96, 128, 256, 512)
_OBJECT_EDGES = (0, 1, 2, 3, 5, 9, 17, 33, 65, 129)


@dataclass(frozen=True)
class SplitStatistics:
    """What is usable in a split.

    Attributes:
        images: Number of images.
        empty_images: How many of them have no box.
        boxes: Number of boxes.
        difficult: How many boxes are marked difficult.
        crowd: How many boxes mark a crowd.
        boxes_of_class: Class name → number of boxes.
        box_sizes: Range of √area in pixels ("8-16") → number of boxes.
        boxes_per_image: Range of numbers of boxes ("3-4") → number of images.
        image_sizes: Smallest and largest width and height.
    """

    images: int
    empty_images: int
    boxes: int
    difficult: int
    crowd: int
    boxes_of_class: dict[str, int]
    box_sizes: dict[str, int]
    boxes_per_image: dict[str, int]
    image_sizes: dict[str, int]

    def to_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return asdict(self)


def split_statistics(parts: Sequence[DetectionDataset]) -> SplitStatistics:
    """Counts datasets together.

    Example:
        >>> dataset = DetectionDataset(
        ...     root=".", class_names=("disc",), image_paths=("a.png", "b.png"),
        ...     image_sizes=[(64, 48), (64, 48)], boxes_per_image=[0, 1],
        ...     boxes=[(0, 0, 9, 16)], labels=[0])
        >>> counts = split_statistics([dataset])
        >>> counts.images, counts.empty_images, counts.boxes_of_class, counts.box_sizes["8-16"]
        (2, 1, {'disc': 1}, 1)
    """
    names = list(dict.fromkeys(name for part in parts for name in part.class_names))
    of_class = dict.fromkeys(names, 0)
    for part in parts:
        counts = np.bincount(part.all_labels(), minlength=part.num_classes)
        for name, count in zip(part.class_names, counts.tolist(), strict=True):
            of_class[name] += count
    boxes = np.concatenate([np.zeros((0, 4)), *(part.all_boxes() for part in parts)])
    sides = np.sqrt(np.prod(boxes[:, 2:] - boxes[:, :2], axis=1))
    per_image = np.concatenate([np.zeros(0, int), *(part.boxes_per_image() for part in parts)])
    sizes = np.array([part.image_size(i) for part in parts for i in range(len(part))])
    sizes = sizes.reshape(-1, 2)
    return SplitStatistics(
        images=len(per_image),
        empty_images=int((per_image == 0).sum()),
        boxes=len(boxes),
        difficult=sum(int(part.all_difficult().sum()) for part in parts),
        crowd=sum(int(part.all_crowd().sum()) for part in parts),
        boxes_of_class=of_class,
        box_sizes=_histogram(sides, BOX_SIZE_EDGES, whole=False),
        boxes_per_image=_histogram(per_image, _OBJECT_EDGES, whole=True),
        image_sizes={
            f"{which}_{side}": int(function(sizes[:, column])) if len(sizes) else 0
            for which, function in (("smallest", np.min), ("largest", np.max))
            for column, side in enumerate(("width", "height"))
        },
    )


def _histogram(values: np.ndarray, edges: Sequence[int], *, whole: bool) -> dict[str, int]:
    counts, _ = np.histogram(values, [*edges, np.inf])
    return {
        _range_name(start, stop, whole=whole): count
        for start, stop, count in zip(edges, [*edges[1:], None], counts.tolist(), strict=True)
    }


def _range_name(start: int, stop: int | None, *, whole: bool) -> str:
    if stop is None:
        return f"{start}+"
    last = stop - 1 if whole else stop
    return f"{start}" if whole and last == start else f"{start}-{last}"
