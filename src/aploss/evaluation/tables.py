"""Ground truth and detections as flat arrays, validated once when they are read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from msgspec import UNSET

from aploss.data import coco
from aploss.data.annotations import Annotations, as_rows
from aploss.errors import DataError
from aploss.progress import printable


@dataclass(frozen=True, kw_only=True)
class DetectionTable:
    """Detections of many images, with boxes stored as in COCO results so that files are reproduced exactly.

    Attributes:
        image_ids: int64 [n].
        category_ids: int64 [n].
        xywh: left, top, width, height in pixels, float64 [n, 4].
        scores: float64 [n]. Only their order matters; equal scores keep the order of the table.

    Example:
        >>> found = {"boxes": np.array([[10, 20, 40, 60]]), "scores": np.array([0.9]), "labels": np.array([1])}
        >>> DetectionTable.from_predictions([7], [found]).to_results()
        [{'image_id': 7, 'category_id': 2, 'bbox': [10.0, 20.0, 30.0, 40.0], 'score': 0.9}]
    """

    image_ids: np.ndarray
    category_ids: np.ndarray
    xywh: np.ndarray
    scores: np.ndarray

    boxes = Annotations.boxes

    def __len__(self) -> int:
        return len(self.scores)

    @classmethod
    def from_predictions(cls, image_ids: Sequence[int], predictions: Sequence[dict[str, Any]]) -> "DetectionTable":
        """Collects the predictions of a detector; the category id of a label is label + 1.

        Args:
            image_ids: the id of each image.
            predictions: for each image ``boxes`` xyxy [m, 4], ``scores`` [m] and 0-based ``labels`` [m]; numpy arrays
                or tensors on any device.

        Raises:
            DataError: if lengths differ, or a box or score is not finite.
        """
        boxes, scores, labels = (
            [np.asarray(entry[key].cpu() if hasattr(entry[key], "cpu") else entry[key], float) for entry in predictions]
            for key in ("boxes", "scores", "labels")
        )
        counts, *others = (list(map(len, column)) for column in (scores, boxes, labels))
        if others != [counts, counts] or len(image_ids) != len(counts):
            raise DataError("predictions need one image id each, and as many boxes as scores and labels")
        corners = np.concatenate([np.zeros((0, 4)), *(one.reshape(-1, 4) for one in boxes)])
        values = np.concatenate([[], *scores])
        if not (np.isfinite(corners).all() and np.isfinite(values).all()):
            raise DataError("a prediction has a box or score that is not finite")
        return cls(
            image_ids=np.repeat(np.asarray(image_ids, np.int64), counts),
            category_ids=np.concatenate([[], *labels]).astype(np.int64) + 1,
            # the difference of two float32 values is exact in float64, so `boxes` returns them unchanged
            xywh=np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1),
            scores=values,
        )

    def to_results(self) -> list[dict[str, Any]]:
        """Returns COCO results as plain dicts, which JSON stores exactly."""
        return as_rows(image_id=self.image_ids, category_id=self.category_ids, bbox=self.xywh, score=self.scores)


Truth = dict[str, Any] | Annotations  # accepted as ground truth
Detections = Sequence[dict[str, Any]] | DetectionTable  # accepted as detections


def as_tables(ground_truth: Truth, detections: Detections) -> tuple[Annotations, DetectionTable]:
    """Converts both to arrays; raises ``DataError`` if a detection's image or category is not in the ground truth."""
    truth = ground_truth if isinstance(ground_truth, Annotations) else read_ground_truth(ground_truth)
    table = detections if isinstance(detections, DetectionTable) else read_detections(detections)
    _check_known("detections", "image_id", table.image_ids, truth.images)
    _check_known("detections", "category_id", table.category_ids, list(truth.categories))
    return truth, table


def read_ground_truth(source: str | Path | dict[str, Any]) -> Annotations:
    """Returns the COCO annotations (``images``, ``annotations``, ``categories``) in a JSON file or a dict as arrays.

    Annotation ids are not used: they may be missing or repeated. ``area`` defaults to width times height.

    Args:
        source: the file, or its content.

    Raises:
        DataError: if the file cannot be read, a key is missing, a value is invalid, an id is repeated, or an annotation
            refers to an unknown image or category. The message contains the path and the index of the entry.

    Example:
        >>> box = {"image_id": 7, "category_id": 1, "bbox": [2, 3, 10, 20]}
        >>> truth = {"images": [{"id": 7}], "categories": [{"id": 1, "name": "cell"}], "annotations": [box]}
        >>> read_ground_truth(truth).boxes
        array([[ 2.,  3., 12., 23.]])
    """
    with _content(source) as dataset:
        sections = coco.coco_sections(dataset)
        images = _by_id(sections["images"], coco.CocoImage, "images")
        categories = _by_id(sections["categories"], coco.CocoCategory, "categories")
        objects, columns = _read_objects(sections["annotations"], "annotations", coco.ANNOTATION_KINDS)
        _check_known("annotations", "image_id", columns["image_ids"], [*images])
        _check_known("annotations", "category_id", columns["category_ids"], [*categories])
        areas = [one.bbox[2] * one.bbox[3] if one.area is None else one.area for one in objects]
        return Annotations(
            **columns,
            areas=np.array(areas, np.float64),
            crowd=np.array([one.iscrowd for one in objects], bool),
            difficult=np.array([one.difficult for one in objects], bool),
            images=np.sort(np.array([*images], np.int64)),
            categories=_unique_names(categories),
        )


def read_detections(source: str | Path | Sequence[dict[str, Any]]) -> DetectionTable:
    """Returns the COCO results (``image_id``, ``category_id``, ``bbox``, ``score``) in a JSON file or a list as arrays.

    Args:
        source: the file, or its content.

    Raises:
        DataError: if the file cannot be read, or an entry lacks a key or has an invalid value. The message contains the
            path and the index of the entry.

    Example:
        >>> read_detections([{"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 8], "score": 0.6}]).scores.tolist()
        [0.6]
    """
    with _content(source) as results:
        found, columns = _read_objects(coco.parse_json(results), "detections", coco.RESULT_KINDS)
    return DetectionTable(**columns, scores=np.array([one.score for one in found], np.float64))


@contextmanager
def _content(source: Any) -> Iterator[Any]:
    """Yields the bytes of a file, or plain data as it is; errors about a file begin with its path."""
    path = source if isinstance(source, (str, Path)) else None
    name = "" if path is None else f"{path}: "
    try:
        if path is not None and Path(path).exists() and not Path(path).is_file():  # reading a pipe would block
            raise DataError("cannot be read (not a file)")
        yield source if path is None else Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{name}cannot be read ({error.strerror})") from None
    except DataError as error:
        raise DataError(f"{name}{error}") from None
    except ValueError as error:
        raise DataError(f"{name}not JSON ({error})") from None


def _read_objects(section: Any, where: str, kinds: coco.Kinds) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Annotations or detections, and the columns that both have; raises ``DataError`` at the first invalid entry."""
    objects = list(coco.read_entries(section, kinds, where, _raise).values())
    xywh = np.array([one.bbox for one in objects], np.float64).reshape(-1, 4)
    for row in np.flatnonzero(~(np.isfinite(xywh) & (xywh >= [-np.inf, -np.inf, 0, 0])).all(axis=1)):
        box = ", ".join(f"{number:g}" for number in xywh[row])
        raise DataError(f"{where}[{row}]: 'bbox' is [{box}], expected finite [x, y, width, height] of size 0 or more")
    ids = {f"{key}s": np.array([getattr(one, key) for one in objects], np.int64) for key in ("image_id", "category_id")}
    return objects, {**ids, "xywh": xywh}


def _raise(kind: str, message: str) -> NoReturn:
    raise DataError(message)


def _by_id(section: Any, struct: type[Any], where: str) -> dict[int, Any]:
    """Id → entry; raises ``DataError`` at the first invalid entry or repeated id."""
    entries = {}
    for row, entry in coco.read_entries(section, {struct: ""}, where, _raise).items():
        if entry.id in entries:
            raise DataError(f"{where}[{row}] repeats id {entry.id}")
        entries[entry.id] = entry
    return entries


def _unique_names(categories: dict[int, coco.CocoCategory]) -> dict[int, str]:
    """Category id → name, ascending by id; made unique, since each name is a row of the table."""
    names: dict[int, str] = {}
    for number, entry in sorted(categories.items()):
        name = f"category {number}" if entry.name is UNSET else printable(str(entry.name))
        names[number] = f"{name} (id {number})" if name in names.values() else name
    return names


def _check_known(where: str, key: str, ids: np.ndarray, known: np.ndarray | list[int]) -> None:
    unknown = np.flatnonzero(~np.isin(ids, known))
    if unknown.size:
        row, more = unknown[0], f" (and {unknown.size - 1} more entries)" if unknown.size > 1 else ""
        raise DataError(f"{where}[{row}]: {key} {ids[row]} is not in the annotations{more}")
