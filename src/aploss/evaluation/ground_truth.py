"""The objects of a dataset as flat arrays, checked once, whatever metric reads them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from aploss.errors import DataError
from aploss.evaluation.records import (
    box_column,
    flag_column,
    identifier_column,
    number_column,
    only_known,
)

__all__ = ["GroundTruth", "as_ground_truth"]


@dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """The annotated objects of a dataset.

    Attributes:
        image_ids: the image each object is in, int64 [g].
        category_ids: its category, int64 [g].
        xywh: its box as COCO writes it (left, top, width, height), float64 [g, 4].
        areas: its area, which decides small, medium or large, float64 [g].
        crowd: an annotation that covers a group of objects, bool [g].
        difficult: an object nobody is blamed for missing, bool [g].
        images: the ids of all images, ascending, also of those without objects, int64 [i].
        categories: category id → name, ascending by id.
    """

    image_ids: np.ndarray
    category_ids: np.ndarray
    xywh: np.ndarray
    areas: np.ndarray
    crowd: np.ndarray
    difficult: np.ndarray
    images: np.ndarray
    categories: dict[int, str]

    def __len__(self) -> int:
        return len(self.image_ids)

    @property
    def boxes(self) -> np.ndarray:
        """Boxes as xyxy, float64 [g, 4]."""
        return np.concatenate([self.xywh[:, :2], self.xywh[:, :2] + self.xywh[:, 2:]], axis=1)

    @property
    def counted(self) -> np.ndarray:
        """Whether missing the object costs recall: neither crowd nor difficult, bool [g]."""
        counted: np.ndarray = ~(self.crowd | self.difficult)
        return counted

    @classmethod
    def from_coco(cls, dataset: dict[str, Any]) -> "GroundTruth":
        """Reads a COCO ground-truth dict (``images``, ``annotations``, ``categories``).

        Annotation ids are not used: they may be missing, repeated or start at 0. ``area`` is taken
        from the annotation, as pycocotools does, and is width times height where it is missing.

        Raises:
            DataError: a key is missing, a value is not what it should be, an id repeats or an
                annotation belongs to no image or category. The entry's index is named.

        Example:
            >>> truth = GroundTruth.from_coco({
            ...     "images": [{"id": 7}],
            ...     "categories": [{"id": 1, "name": "cell"}],
            ...     "annotations": [{"image_id": 7, "category_id": 1, "bbox": [2, 3, 10, 20]}],
            ... })
            >>> truth.boxes
            array([[ 2.,  3., 12., 23.]])
        """
        if not isinstance(dataset, dict):
            raise DataError("the ground truth is not a COCO dict with images and annotations")
        images, annotations, categories = (
            _records(dataset, key) for key in ("images", "annotations", "categories")
        )
        image_list = _unique_ids(images, "images")
        names = _category_names(categories)
        image_ids = identifier_column(annotations, "image_id", "annotations")
        category_ids = identifier_column(annotations, "category_id", "annotations")
        only_known(image_ids, image_list, "image_id", "annotations")
        only_known(category_ids, np.array(list(names)), "category_id", "annotations")
        boxes = box_column(annotations, "annotations")
        return cls(
            image_ids=image_ids,
            category_ids=category_ids,
            xywh=boxes,
            areas=_areas(annotations, boxes),
            crowd=flag_column(annotations, "iscrowd", "annotations"),
            difficult=flag_column(annotations, "difficult", "annotations"),
            images=np.sort(image_list),
            categories=names,
        )


def as_ground_truth(ground_truth: dict[str, Any] | GroundTruth) -> GroundTruth:
    """The ground truth as arrays; one that is so already is handed back."""
    if isinstance(ground_truth, GroundTruth):
        return ground_truth
    return GroundTruth.from_coco(ground_truth)


def _records(dataset: dict[str, Any], key: str) -> list[Any]:
    if key not in dataset:
        raise DataError(f"no '{key}': a COCO ground truth has images, annotations and categories")
    records = dataset[key]
    if not isinstance(records, list):
        raise DataError(f"'{key}' is a {type(records).__name__}, expected a list")
    return records


def _unique_ids(records: list[Any], where: str) -> np.ndarray:
    ids = identifier_column(records, "id", where)
    _, first = np.unique(ids, return_index=True)
    if len(first) < len(ids):
        repeated = np.setdiff1d(np.arange(len(ids)), first)[0]
        raise DataError(f"{where}[{repeated}] repeats id {ids[repeated]}")
    return ids


def _category_names(categories: list[Any]) -> dict[int, str]:
    ids = _unique_ids(categories, "categories")
    names: dict[int, str] = {}
    for index in np.argsort(ids):
        name = str(categories[index].get("name", f"category {ids[index]}"))
        if name in names.values():  # one row of the table per category, so names must differ
            name = f"{name} (id {ids[index]})"
        names[int(ids[index])] = name
    return names


def _areas(annotations: list[Any], boxes: np.ndarray) -> np.ndarray:
    of_boxes = (boxes[:, 2] * boxes[:, 3]).tolist()
    given = [
        {"area": of_box if entry.get("area") is None else entry["area"]}
        for entry, of_box in zip(annotations, of_boxes, strict=True)
    ]
    return number_column(given, "area", "annotations")
