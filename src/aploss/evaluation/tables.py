"""Ground truth and detections as flat arrays, validated once when they are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET

from aploss.data.annotations import Annotations, as_rows
from aploss.data.coco import CocoObjects, CocoResults, coco_document, id_of, read_objects, shown
from aploss.errors import DataError

Table = TypeVar("Table")


@dataclass(frozen=True, kw_only=True, eq=False)
class GroundTruth(Annotations):
    """The annotated objects of a COCO file or dict.

    Metrics accept any :class:`~aploss.data.Annotations` as ground truth, such as ``dataset.annotations``.

    Attributes:
        file_names: image id → file name, for images that have one.

    Example:
        >>> truth = {"images": [{"id": 7, "file_name": "a.png"}], "categories": [], "annotations": []}
        >>> GroundTruth.from_coco(truth).file_names
        {7: 'a.png'}
    """

    file_names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def from_coco(cls, dataset: dict[str, Any]) -> "GroundTruth":
        """Reads a COCO ground-truth dict (``images``, ``annotations``, ``categories``).

        Annotation ids are not used: they may be missing or repeated. ``area`` defaults to width times height.

        Raises:
            DataError: if a key is missing, a value is invalid, an id is repeated, or an annotation refers to an unknown
                image or category. The message contains the index of the entry.

        Example:
            >>> truth = GroundTruth.from_coco({
            ...     "images": [{"id": 7}],
            ...     "categories": [{"id": 1, "name": "cell"}],
            ...     "annotations": [{"image_id": 7, "category_id": 1, "bbox": [2, 3, 10, 20]}],
            ... })
            >>> truth.boxes
            array([[ 2.,  3., 12., 23.]])
        """
        try:
            content: Any = coco_document(dataset)
        except msgspec.ValidationError:
            raise DataError("the ground truth is not a COCO dict with images and annotations") from None
        for section in ("images", "annotations", "categories"):
            entries = getattr(content, section)
            if not isinstance(entries, list):
                found = "missing" if entries is UNSET else f"a {type(entries).__name__}"
                raise DataError(
                    f"'{section}' is {found}; a COCO ground truth has lists of images, annotations, categories"
                )
        images, categories = (_unique_ids(getattr(content, kind), kind) for kind in ("images", "categories"))
        objects = _read_objects(content.annotations, "annotations")
        _check_known("annotations", "image_id", objects.image_ids, images)
        _check_known("annotations", "category_id", objects.category_ids, categories)
        names = zip(images.tolist(), (entry.file_name for entry in content.images), strict=True)
        return cls(
            image_ids=objects.image_ids,
            category_ids=objects.category_ids,
            xywh=objects.xywh,
            areas=np.where(np.isnan(objects.values), np.prod(objects.xywh[:, 2:], axis=1), objects.values),
            crowd=objects.flags >= 2,
            difficult=objects.flags % 2 == 1,
            images=np.sort(images),
            categories=_unique_names(content.categories, categories),
            file_names={number: name for number, name in names if isinstance(name, str)},
        )


@dataclass(frozen=True, kw_only=True)
class DetectionTable:
    """Detections of many images, with boxes stored as in COCO results so that files are reproduced exactly.

    Attributes:
        image_ids: int64 [n].
        category_ids: int64 [n].
        xywh: left, top, width, height in pixels, float64 [n, 4].
        scores: float64 [n]. Only their order matters; equal scores keep the order of the table.

    Example:
        >>> table = DetectionTable.from_results(
        ...     [{"image_id": 1, "category_id": 2, "bbox": [10, 20, 30, 40], "score": 0.9}]
        ... )
        >>> table.boxes
        array([[10., 20., 40., 60.]])
    """

    image_ids: np.ndarray
    category_ids: np.ndarray
    xywh: np.ndarray
    scores: np.ndarray

    boxes = Annotations.boxes

    def __len__(self) -> int:
        return len(self.scores)

    @classmethod
    def from_results(cls, results: Sequence[dict[str, Any]]) -> "DetectionTable":
        """Reads COCO results: dicts with ``image_id``, ``category_id``, ``bbox`` and ``score``.

        Raises:
            DataError: if an entry lacks a key or has an invalid value. The message contains the index of the entry.
        """
        try:
            entries = coco_document(results, CocoResults)
        except msgspec.ValidationError:
            raise DataError("expected a list of COCO results (image_id, category_id, bbox, score)") from None
        found = _read_objects(entries, "detections", scored=True)
        return cls(image_ids=found.image_ids, category_ids=found.category_ids, xywh=found.xywh, scores=found.values)

    @classmethod
    def from_predictions(
        cls,
        image_ids: Sequence[int],
        predictions: Sequence[dict[str, Any]],
        *,
        category_ids: Sequence[int] | None = None,
    ) -> "DetectionTable":
        """Collects the predictions of a detector.

        Args:
            image_ids: the id of each image.
            predictions: for each image ``boxes`` xyxy [m, 4], ``scores`` [m] and 0-based ``labels`` [m]; numpy arrays
                or tensors on any device.
            category_ids: the category of each label. Default: label + 1.

        Raises:
            DataError: if lengths differ, or a box or score is not finite.
        """
        if len(image_ids) != len(predictions):
            raise DataError(f"{len(image_ids)} image ids for {len(predictions)} predictions")
        boxes = _concatenate([entry["boxes"] for entry in predictions]).reshape(-1, 4)
        scores = _concatenate([entry["scores"] for entry in predictions])
        labels = _concatenate([entry["labels"] for entry in predictions]).astype(np.int64)
        if not len(boxes) == len(scores) == len(labels):
            raise DataError(f"{len(boxes)} boxes, {len(scores)} scores, {len(labels)} labels")
        if not (np.isfinite(boxes).all() and np.isfinite(scores).all()):
            raise DataError("a prediction has a box or score that is not finite")
        categories = labels + 1 if category_ids is None else np.asarray(category_ids)[labels]
        return cls(
            image_ids=np.repeat(np.asarray(image_ids, np.int64), [len(entry["scores"]) for entry in predictions]),
            category_ids=categories.astype(np.int64),
            # the difference of two float32 values is exact in float64, so `boxes` returns them unchanged
            xywh=np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1),
            scores=scores,
        )

    def to_results(self) -> list[dict[str, Any]]:
        """Returns COCO results as plain dicts, which JSON stores exactly."""
        return as_rows(image_id=self.image_ids, category_id=self.category_ids, bbox=self.xywh, score=self.scores)

    def with_scores(self, scores: np.ndarray) -> "DetectionTable":
        """Returns the same detections with other scores [n], such as calibrated ones."""
        values = np.asarray(scores, dtype=np.float64)
        if values.shape != self.scores.shape:
            raise DataError(f"{values.shape} scores for {len(self)} detections")
        return replace(self, scores=values)


Truth = dict[str, Any] | Annotations  # accepted as ground truth
Detections = Sequence[dict[str, Any]] | DetectionTable  # accepted as detections


def as_detections(detections: Detections, ground_truth: Annotations) -> DetectionTable:
    """Converts COCO results to a table; raises ``DataError`` if an image or category is not in the ground truth."""
    table = detections if isinstance(detections, DetectionTable) else DetectionTable.from_results(detections)
    _check_known("detections", "image_id", table.image_ids, ground_truth.images)
    _check_known("detections", "category_id", table.category_ids, list(ground_truth.categories))
    return table


def as_tables(ground_truth: Truth, detections: Detections) -> tuple[Annotations, DetectionTable]:
    """Converts both to arrays and validates the detections against the ground truth."""
    truth = ground_truth if isinstance(ground_truth, Annotations) else GroundTruth.from_coco(ground_truth)
    return truth, as_detections(detections, truth)


def read_ground_truth(path: str | Path) -> GroundTruth:
    """Reads COCO annotations from a JSON file.

    Raises:
        DataError: if the file is missing, is not JSON, or contains an invalid entry. The message names the file.

    Example:
        >>> truth = read_ground_truth("instances_val2017.json")  # doctest: +SKIP
    """
    return _read(path, GroundTruth.from_coco)


def read_detections(path: str | Path) -> DetectionTable:
    """Reads COCO results from a JSON file. Raises like :func:`read_ground_truth`.

    Example:
        >>> from tempfile import NamedTemporaryFile
        >>> with NamedTemporaryFile("w", suffix=".json") as file:
        ...     _ = file.write('[{"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 8], "score": 0.6}]')
        ...     file.flush()
        ...     read_detections(file.name).scores.tolist()
        [0.6]
    """
    return _read(path, DetectionTable.from_results)


def _read(path: str | Path, parse: Callable[[Any], Table]) -> Table:
    file = Path(path)
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):  # reading a pipe would block
            raise DataError("cannot be read (a pipe or device, not a file)")
        return parse(file.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None


def _read_objects(entries: Sequence[Any], where: str, *, scored: bool = False) -> CocoObjects:
    """The columns of annotations or detections; raises ``DataError`` at the first invalid entry."""
    objects = read_objects(entries, where, _raise, scored=scored)
    valid = np.isfinite(objects.xywh).all(axis=1) & (objects.xywh[:, 2:] >= 0).all(axis=1)
    for row in np.flatnonzero(~valid):
        box = ", ".join(f"{number:g}" for number in objects.xywh[row])
        raise DataError(f"{where}[{row}]: 'bbox' is [{box}], expected finite [x, y, width, height] of size 0 or more")
    return objects


def _raise(kind: str, message: str) -> NoReturn:
    raise DataError(message)


def _unique_ids(entries: Sequence[Any], where: str) -> np.ndarray:
    ids: dict[int, None] = {}
    for row, entry in enumerate(entries):
        if not isinstance(entry, msgspec.Struct):
            raise DataError(f"{where}[{row}] is {shown(entry)}, expected an object with keys")
        number = id_of(entry, "id", f"{where}[{row}]", "bad-entry")
        if number in ids:
            raise DataError(f"{where}[{row}] repeats id {number}")
        ids[number] = None
    return np.array(list(ids), np.int64)


def _unique_names(entries: Sequence[Any], ids: np.ndarray) -> dict[int, str]:
    """Category id → name, ascending by id; made unique, since each name is a row of the table."""
    names: dict[int, str] = {}
    for index in np.argsort(ids).tolist():
        category, name = int(ids[index]), entries[index].name
        name = f"category {category}" if name is UNSET else str(name)
        name = name.encode("utf-8", "backslashreplace").decode()  # lone surrogates
        names[category] = f"{name} (id {category})" if name in names.values() else name
    return names


def _check_known(where: str, key: str, ids: np.ndarray, known: np.ndarray | list[int]) -> None:
    unknown = np.flatnonzero(~np.isin(ids, known))
    if unknown.size:
        row, more = unknown[0], f" (and {unknown.size - 1} more entries)" if unknown.size > 1 else ""
        raise DataError(f"{where}[{row}]: {key} {ids[row]} is not in the annotations{more}")


def _concatenate(parts: Sequence[Any]) -> np.ndarray:
    """Joins arrays or tensors along the first axis, float64."""
    arrays = [part.detach().cpu().double().numpy() if hasattr(part, "detach") else np.asarray(part) for part in parts]
    filled = [array for array in arrays if len(array)]
    return np.concatenate(filled).astype(np.float64) if filled else np.zeros(0)
