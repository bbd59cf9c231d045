"""The one dataset type that every reader fills and everything else reads."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset
from torchvision import tv_tensors

from aploss.data.images import read_image
from aploss.data.problems import Problem
from aploss.errors import DataError

__all__ = ["DetectionDataset", "Sample", "concatenate"]

Sample = tuple[tv_tensors.Image, dict[str, Any]]


class DetectionDataset(Dataset[Sample]):
    """Images with labelled boxes, stored as flat arrays: COCO's 860,000 boxes take 30 MB.

    Item i is ``(image, target)``: the image as uint8 ``tv_tensors.Image`` [3, H, W], the target a
    dict with ``boxes`` (``tv_tensors.BoundingBoxes``, xyxy, float32 [n, 4]), ``labels`` (int64
    [n], from 0), ``difficult`` and ``crowd`` (bool [n]) and ``image_id`` (int). So
    ``torchvision.transforms.v2`` works on it as it is.

    Args:
        root: Folder that the image paths are relative to.
        class_names: Names of the K classes; label k is ``class_names[k]``.
        image_paths: One path below `root` for each of the n images.
        image_sizes: (width, height) of each image, int [n, 2].
        boxes_per_image: How many of the boxes belong to each image, int [n].
        boxes: xyxy in pixels, float [m, 4]: those of the first image, then of the second, ...
        labels: int [m], from 0 to K - 1.
        difficult: bool [m]; none where not given.
        crowd: bool [m]; none where not given.
        areas: float [m], what COCO calls an object's area; that of the box where not given.
        image_ids: int [n], distinct, at least 1; 1..n where not given.
        problems: What the reader dropped or remarked on.
        name: What to call the dataset; the folder's name where not given.
        split: What part of it this is.

    Example:
        >>> dataset = DetectionDataset(
        ...     root="shapes", class_names=("disc", "star"), image_paths=("a.png", "b.png"),
        ...     image_sizes=[(64, 48), (64, 48)], boxes_per_image=[0, 1],
        ...     boxes=[(3, 4, 20, 30)], labels=[1], split="train")
        >>> len(dataset), dataset.image_id(1), dataset.boxes(1).tolist(), dataset.labels(1)
        (2, 2, [[3.0, 4.0, 20.0, 30.0]], array([1]))
    """

    def __init__(
        self,
        *,
        root: str | Path,
        class_names: Sequence[str],
        image_paths: Sequence[str],
        image_sizes: ArrayLike,
        boxes_per_image: ArrayLike,
        boxes: ArrayLike,
        labels: ArrayLike,
        difficult: ArrayLike | None = None,
        crowd: ArrayLike | None = None,
        areas: ArrayLike | None = None,
        image_ids: ArrayLike | None = None,
        problems: Iterable[Problem] = (),
        name: str | None = None,
        split: str = "all",
    ) -> None:
        self.root = Path(root)
        self.class_names = tuple(class_names)
        self.name = self.root.resolve().name if name is None else name
        self.split = split
        self.problems = list(problems)
        images, count = len(image_paths), np.size(np.asarray(labels))
        self._paths = list(image_paths)
        self._sizes = _array(image_sizes, np.int32, (images, 2))
        self._boxes = _array(boxes, np.float32, (count, 4))
        self._labels = _array(labels, np.int64, (count,))
        self._difficult = _array(
            np.zeros(count) if difficult is None else difficult, bool, (count,)
        )
        self._crowd = _array(np.zeros(count) if crowd is None else crowd, bool, (count,))
        self._areas = _array(
            _box_areas(self._boxes) if areas is None else areas, np.float32, (count,)
        )
        ids = np.arange(1, images + 1) if image_ids is None else image_ids
        self._ids = _array(ids, np.int64, (images,))
        self._starts = np.concatenate(
            [[0], np.cumsum(_array(boxes_per_image, np.int64, (images,)))]
        )
        self._check()

    def _check(self) -> None:
        if self._starts[-1] != len(self._boxes):
            raise DataError(
                f"boxes_per_image counts {self._starts[-1]} boxes, but there are {len(self._boxes)}"
            )
        if len(set(self.class_names)) != len(self.class_names):
            raise DataError(f"class names must be distinct, got {', '.join(self.class_names)}")
        if (
            len(self._labels)
            and not 0 <= self._labels.min() <= self._labels.max() < self.num_classes
        ):
            raise DataError(f"labels must be in 0..{self.num_classes - 1}")
        if len(self._ids) and (self._ids.min() < 1 or len(np.unique(self._ids)) < len(self._ids)):
            raise DataError("image ids must be distinct and at least 1")

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Sample:
        width, height = self.image_size(index)
        rows = self._rows(index)
        image = read_image(self.image_path(index), size=(width, height))
        boxes = tv_tensors.BoundingBoxes(
            torch.from_numpy(self._boxes[rows].copy()), format="XYXY", canvas_size=(height, width)
        )
        return tv_tensors.Image(image), {
            "boxes": boxes,
            "labels": torch.from_numpy(self._labels[rows].copy()),
            "difficult": torch.from_numpy(self._difficult[rows].copy()),
            "crowd": torch.from_numpy(self._crowd[rows].copy()),
            "image_id": self.image_id(index),
        }

    def __repr__(self) -> str:
        return (
            f"DetectionDataset({self.name!r}, split={self.split!r}, {len(self):,} images, "
            f"{self.num_boxes:,} boxes, {self.num_classes} classes)"
        )

    @property
    def num_classes(self) -> int:
        """K, the number of classes."""
        return len(self.class_names)

    @property
    def num_boxes(self) -> int:
        """The number of usable boxes in all images."""
        return len(self._boxes)

    def image_id(self, index: int) -> int:
        """The image's id: distinct, at least 1, the same at every loading."""
        return int(self._ids[index])

    def image_path(self, index: int) -> Path:
        """Where the image file is."""
        return self.root / self._paths[index]

    def relative_path(self, index: int) -> str:
        """Where the image file is below :attr:`root`."""
        return self._paths[index]

    def image_size(self, index: int) -> tuple[int, int]:
        """(width, height) as annotated, or as in the file where the annotation has no size."""
        width, height = self._sizes[index].tolist()
        return width, height

    def boxes(self, index: int) -> NDArray[np.float32]:
        """xyxy boxes of one image, float32 [n, 4]; the image is not read."""
        return self._boxes[self._rows(index)]

    def labels(self, index: int) -> NDArray[np.int64]:
        """Labels of one image, int64 [n], from 0."""
        return self._labels[self._rows(index)]

    def difficult(self, index: int) -> NDArray[np.bool_]:
        """Which boxes of one image are marked difficult, bool [n]."""
        return self._difficult[self._rows(index)]

    def crowd(self, index: int) -> NDArray[np.bool_]:
        """Which boxes of one image mark a crowd of objects, bool [n]."""
        return self._crowd[self._rows(index)]

    def areas(self, index: int) -> NDArray[np.float32]:
        """Areas of one image's objects in square pixels, float32 [n]."""
        return self._areas[self._rows(index)]

    def boxes_per_image(self) -> NDArray[np.int64]:
        """How many boxes each image has, int64 [n]."""
        return np.diff(self._starts)

    def all_boxes(self) -> NDArray[np.float32]:
        """xyxy boxes of all images one after the other, float32 [m, 4]."""
        return self._boxes

    def all_labels(self) -> NDArray[np.int64]:
        """Labels of all images one after the other, int64 [m]."""
        return self._labels

    def all_difficult(self) -> NDArray[np.bool_]:
        """Which of all boxes are marked difficult, bool [m]."""
        return self._difficult

    def all_crowd(self) -> NDArray[np.bool_]:
        """Which of all boxes mark a crowd, bool [m]."""
        return self._crowd

    def _rows(self, index: int) -> slice:
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        index %= len(self)
        return slice(int(self._starts[index]), int(self._starts[index + 1]))

    def to_coco(self) -> dict[str, Any]:
        """The annotations as a COCO ground-truth dict.

        Returns:
            ``images`` (with ``id``, ``file_name`` below :attr:`root`, ``width``, ``height``),
            ``annotations`` (ids from 1; ``category_id`` is the label + 1; ``bbox`` is xywh;
            ``area``, ``iscrowd``, ``difficult``) and ``categories`` (ids 1..K).
        """
        image_of_box = np.repeat(self._ids, np.diff(self._starts)).tolist()
        corners = self._boxes.astype(np.float64)  # so that x + w gives x2 back exactly
        bboxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1).tolist()
        columns = (self._labels + 1, self._areas.astype(np.float64), self._crowd, self._difficult)
        category_ids, areas, crowds, difficults = (column.tolist() for column in columns)
        return {
            "images": [
                {"id": image_id, "file_name": path, "width": width, "height": height}
                for image_id, path, (width, height) in zip(
                    self._ids.tolist(), self._paths, self._sizes.tolist(), strict=True
                )
            ],
            "annotations": [
                {
                    "id": row + 1,
                    "image_id": image_of_box[row],
                    "category_id": category_ids[row],
                    "bbox": bboxes[row],
                    "area": areas[row],
                    "iscrowd": int(crowds[row]),
                    "difficult": int(difficults[row]),
                }
                for row in range(self.num_boxes)
            ],
            "categories": [{"id": k + 1, "name": name} for k, name in enumerate(self.class_names)],
        }

    def subset(self, indices: Sequence[int], *, split: str | None = None) -> "DetectionDataset":
        """Some of the images, in the order given, with their ids.

        Args:
            indices: Distinct numbers from 0 to ``len(self) - 1``.
            split: A new name for the part; the present one where not given.
        """
        chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise DataError(f"a subset's indices must be in 0..{len(self) - 1}")
        counts = np.diff(self._starts)[chosen]
        starts = np.cumsum(counts) - counts  # where each image's boxes begin in the subset
        rows = np.arange(counts.sum()) + np.repeat(self._starts[chosen] - starts, counts)
        return DetectionDataset(
            root=self.root,
            class_names=self.class_names,
            image_paths=[self._paths[i] for i in chosen.tolist()],
            image_sizes=self._sizes[chosen],
            boxes_per_image=counts,
            boxes=self._boxes[rows],
            labels=self._labels[rows],
            difficult=self._difficult[rows],
            crowd=self._crowd[rows],
            areas=self._areas[rows],
            image_ids=self._ids[chosen],
            problems=self.problems,
            name=self.name,
            split=self.split if split is None else split,
        )


def concatenate(parts: Sequence[DetectionDataset], *, split: str | None = None) -> DetectionDataset:
    """Joins datasets of the same classes; an image that is in several is taken once.

    Args:
        parts: At least one.
        split: Name of the whole; the parts' splits joined by ``+`` where not given.

    Returns:
        A dataset below the folder that the parts share. Image ids are kept where they stay
        distinct, otherwise they are 1..n.

    Raises:
        DataError: The class names differ.
    """
    if len({part.class_names for part in parts}) != 1:
        lists = " and ".join(sorted({", ".join(part.class_names) for part in parts}))
        raise DataError(f"datasets to be joined must have the same classes, got {lists}")
    root = Path(os.path.commonpath([part.root.resolve() for part in parts]))
    paths: list[str] = []
    seen: set[str] = set()
    fresh = []
    for part in parts:
        prefix = part.root.resolve().relative_to(root)
        full = [(prefix / path).as_posix() for path in part._paths]
        new = [i for i, path in enumerate(full) if path not in seen]
        seen.update(full)
        paths += [full[i] for i in new]
        fresh.append(part if len(new) == len(part) else part.subset(new))

    def joined(column: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, column) for part in fresh])

    ids = joined("_ids")
    return DetectionDataset(
        root=root,
        class_names=parts[0].class_names,
        image_paths=paths,
        image_sizes=joined("_sizes"),
        boxes_per_image=np.concatenate([np.diff(part._starts) for part in fresh]),
        boxes=joined("_boxes"),
        labels=joined("_labels"),
        difficult=joined("_difficult"),
        crowd=joined("_crowd"),
        areas=joined("_areas"),
        image_ids=ids if len(np.unique(ids)) == len(ids) else None,
        problems=list(dict.fromkeys(problem for part in parts for problem in part.problems)),
        name=parts[0].name,
        split="+".join(part.split for part in parts) if split is None else split,
    )


def _array(values: ArrayLike, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    array = np.ascontiguousarray(values, dtype=dtype)
    if array.size == 0 and 0 in shape:
        return array.reshape(shape)
    if array.shape != shape:
        raise DataError(f"expected an array of shape {shape}, got {array.shape}")
    return array


def _box_areas(boxes: NDArray[np.float32]) -> NDArray[np.float32]:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
