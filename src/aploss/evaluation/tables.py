"""What metrics compare: annotated objects and detections, as flat arrays that are checked once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import msgspec
import numpy as np
from msgspec import UNSET

from aploss.data.annotations import FIRST_TEXT, Annotations, DetectionDataset, TextIds, as_rows, is_text_id, number_text
from aploss.data.coco import (
    CocoEntryError,
    CocoObjects,
    coco_document,
    coco_results,
    id_of,
    number_texts,
    read_objects,
    shown,
)
from aploss.errors import DataError

Table = TypeVar("Table")


@dataclass(frozen=True, kw_only=True, eq=False)
class GroundTruth(Annotations):
    """The annotated objects of a dataset, from COCO's own files or dicts.

    Any :class:`~aploss.data.Annotations` will do where a ground truth is wanted, such as ``dataset.annotations`` of a
    loaded dataset.

    Attributes:
        file_names: image id → file name, of the images that have one.
    """

    file_names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def from_coco(cls, dataset: dict[str, Any]) -> "GroundTruth":
        """Reads a COCO ground-truth dict (``images``, ``annotations``, ``categories``).

        Ids are whole numbers or text. Those of annotations are not used: they may be missing, repeated or start at 0.
        ``area`` is taken from the annotation,
        as pycocotools does, and is width times height where it is missing.

        Raises:
            DataError: a key is missing, a value is not what it should be, an id repeats or an annotation belongs to no
                image or category. The entry's index is named.

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
            found = getattr(content, section)
            if found is UNSET:
                raise DataError(f"no '{section}': a COCO ground truth has images, annotations and categories")
            if not isinstance(found, list):
                raise DataError(f"'{section}' is a {type(found).__name__}, expected a list")
        texts = number_texts(content)
        images = _distinct_ids(content.images, "images", texts)
        categories = _distinct_ids(content.categories, "categories", texts)
        objects = _checked(content.annotations, "annotations", texts)
        _only_known(objects.image_ids, images, "images", texts, "annotations")
        _only_known(objects.category_ids, categories, "categories", texts, "annotations")
        names = zip(images.tolist(), (entry.file_name for entry in content.images), strict=True)
        return cls(
            image_ids=objects.image_ids,
            category_ids=objects.category_ids,
            xywh=objects.xywh,
            areas=np.where(np.isnan(objects.values), np.prod(objects.xywh[:, 2:], axis=1), objects.values),
            crowd=objects.flags >= 2,
            difficult=objects.flags % 2 == 1,
            images=np.sort(images),
            categories=_names(content.categories, categories, texts),
            texts=texts,
            file_names={number: name for number, name in names if isinstance(name, str)},
        )


@dataclass(frozen=True, kw_only=True)
class DetectionTable:
    """Detections of many images.

    Boxes are stored as COCO results have them, so that a results file is scored on the very numbers in it and written
    back unchanged; ``boxes`` gives corners.

    Attributes:
        image_ids: int64 [n].
        category_ids: int64 [n].
        xywh: left, top, width, height in pixels, float64 [n, 4].
        scores: float64 [n]. Their order matters, their scale does not. Equal scores keep the order of the table.
        texts: what stands for ids that are text.

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
    texts: TextIds = field(default_factory=lambda: TextIds({}, {}))

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def boxes(self) -> np.ndarray:
        """Boxes as xyxy, float64 [n, 4]."""
        return np.concatenate([self.xywh[:, :2], self.xywh[:, :2] + self.xywh[:, 2:]], axis=1)

    @classmethod
    def from_results(cls, results: Sequence[dict[str, Any]]) -> "DetectionTable":
        """Reads COCO results: dicts with ``image_id``, ``category_id``, ``bbox`` and ``score``.

        Raises:
            DataError: an entry lacks a key or has a value it cannot have; its index is named.
        """
        try:
            entries = coco_results(results)
        except msgspec.ValidationError:
            expected = "a list of COCO results (image_id, category_id, bbox, score)"
            raise DataError(f"the detections are not what they should be: expected {expected}") from None
        texts = TextIds({}, {})
        found = _checked(entries, "detections", texts, scored=True)
        columns = {"image_ids": found.image_ids, "category_ids": found.category_ids, "xywh": found.xywh}
        return cls(**columns, scores=found.values, texts=texts)

    @classmethod
    def from_predictions(
        cls,
        image_ids: Sequence[int],
        predictions: Sequence[dict[str, Any]],
        *,
        category_ids: Sequence[int] | None = None,
    ) -> "DetectionTable":
        """Gathers a detector's predictions, one dict per image.

        Args:
            image_ids: the id of each image.
            predictions: per image ``boxes`` xyxy [m, 4], ``scores`` [m], ``labels`` [m] counted from 0; numpy arrays or
                tensors on any device.
            category_ids: the category of each label; label + 1 when not given.

        Raises:
            DataError: lengths that differ, or a box or score that is not finite.
        """
        if len(image_ids) != len(predictions):
            raise DataError(f"{len(image_ids)} image ids for {len(predictions)} predictions")
        boxes = _gather([entry["boxes"] for entry in predictions]).reshape(-1, 4)
        scores = _gather([entry["scores"] for entry in predictions])
        labels = _gather([entry["labels"] for entry in predictions]).astype(np.int64)
        counts = [len(entry["scores"]) for entry in predictions]
        if not len(boxes) == len(scores) == len(labels):
            raise DataError(f"{len(boxes)} boxes, {len(scores)} scores, {len(labels)} labels")
        if not (np.isfinite(boxes).all() and np.isfinite(scores).all()):
            raise DataError("a prediction has a box or score that is not finite")
        categories = labels + 1 if category_ids is None else np.asarray(category_ids)[labels]
        return cls(
            image_ids=np.repeat(np.asarray(image_ids, dtype=np.int64), counts),
            category_ids=categories.astype(np.int64),
            # a difference of float32 values is exact in float64, so boxes come back unchanged
            xywh=np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1),
            scores=scores,
        )

    def to_results(self) -> list[dict[str, Any]]:
        """COCO results: plain dicts that ``json.dump`` writes without losing a digit."""
        return as_rows(
            image_id=_with_texts(self.image_ids, self.texts.images),
            category_id=_with_texts(self.category_ids, self.texts.categories),
            bbox=self.xywh,
            score=self.scores,
        )

    def with_scores(self, scores: np.ndarray) -> "DetectionTable":
        """The same detections with other scores [n], such as calibrated ones."""
        values = np.asarray(scores, dtype=np.float64)
        if values.shape != self.scores.shape:
            raise DataError(f"{values.shape} scores for {len(self)} detections")
        return replace(self, scores=values)


Truth = dict[str, Any] | Annotations  # what metrics take as ground truth
Detections = Sequence[dict[str, Any]] | DetectionTable  # and as detections


@overload
def as_ground_truth(ground_truth: dict[str, Any]) -> GroundTruth: ...
@overload
def as_ground_truth(ground_truth: Truth | DetectionDataset) -> Annotations: ...
def as_ground_truth(ground_truth: Truth | DetectionDataset) -> Annotations:
    """The ground truth as arrays: of a COCO dict or a dataset; arrays are handed back."""
    if isinstance(ground_truth, Annotations):
        return ground_truth
    if isinstance(ground_truth, DetectionDataset):
        return ground_truth.annotations
    return GroundTruth.from_coco(ground_truth)


def as_detections(detections: Detections, ground_truth: Annotations) -> DetectionTable:
    """The detections as a table whose images and categories are those of the ground truth.

    Raises:
        DataError: a detection of an image or category the ground truth does not have.
    """
    if not isinstance(detections, DetectionTable):
        detections = DetectionTable.from_results(detections)
    if any(detections.texts) and detections.texts is not ground_truth.texts:
        detections = _numbered_as(ground_truth.texts, detections)
    _only_known(detections.image_ids, ground_truth.images, "images", detections.texts, "detections")
    _only_known(detections.category_ids, list(ground_truth.categories), "categories", detections.texts, "detections")
    return detections


def _numbered_as(texts: TextIds, table: DetectionTable) -> DetectionTable:
    """The detections with the numbers that ids of text have in the ground truth; others get numbers beyond them."""
    columns, everything = [table.image_ids.copy(), table.category_ids.copy()], TextIds(*map(dict, texts))
    for column, own, known in zip(columns, table.texts, everything, strict=True):
        is_text = is_text_id(column)
        numbers = np.array([number_text(known, text) for text in own], np.int64)
        column[is_text] = numbers[column[is_text] - FIRST_TEXT]
    return replace(table, image_ids=columns[0], category_ids=columns[1], texts=everything)


def _with_texts(column: np.ndarray, texts: dict[str, int]) -> np.ndarray:
    """Ids as they were read: text where it was text."""
    if not texts:
        return column
    text_of = {number: text for text, number in texts.items()}
    return np.array([text_of.get(number, number) for number in column.tolist()], object)


def as_tables(ground_truth: Truth, detections: Detections) -> tuple[Annotations, DetectionTable]:
    """Both as arrays, the detections checked against the ground truth."""
    truth = as_ground_truth(ground_truth)
    return truth, as_detections(detections, truth)


def read_ground_truth(path: str | Path) -> GroundTruth:
    """Reads COCO annotations from a JSON file.

    Raises:
        DataError: the file is not there, is not JSON, or an entry is wrong; it names the file.
    """
    return _read(path, GroundTruth.from_coco)


def read_detections(path: str | Path) -> DetectionTable:
    """Reads COCO results from a JSON file. Raises like :func:`read_ground_truth`."""
    return _read(path, DetectionTable.from_results)


def _read(path: str | Path, parse: Callable[[Any], Table]) -> Table:
    file = Path(path)
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise DataError("cannot be read (a pipe or device, not a file)")
        return parse(file.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None


def _checked(entries: Sequence[Any], where: str, texts: TextIds, *, scored: bool = False) -> CocoObjects:
    """The entries' columns, where all are right."""
    objects = read_objects(entries, where, _refuse, texts, scored=scored)
    right = np.isfinite(objects.xywh).all(axis=1) & (objects.xywh[:, 2:] >= 0).all(axis=1)
    for row in np.flatnonzero(~right):
        box = f"[{', '.join(f'{number:g}' for number in objects.xywh[row])}]"
        if not np.isfinite(objects.xywh[row]).all():
            raise DataError(f"{where}[{row}]: 'bbox' is {box}, expected four finite numbers")
        wrong = f"'bbox' has a negative width or height: {box}"
        raise DataError(f"{where}[{row}]: {wrong}; it must be [x, y, width, height]")
    return objects


def _refuse(kind: str, message: str) -> NoReturn:
    raise DataError(message)


def _distinct_ids(entries: Sequence[Any], where: str, texts: TextIds) -> np.ndarray:
    ids = []
    for row, entry in enumerate(entries):
        if not isinstance(entry, msgspec.Struct):
            raise DataError(f"{where}[{row}] is {shown(entry)}, expected an object with keys")
        try:
            ids.append(id_of(entry, "id", f"{where}[{row}]", "bad-entry", getattr(texts, where)))
        except CocoEntryError as error:
            raise DataError(str(error)) from None
    column = np.array(ids, np.int64)
    _, first = np.unique(column, return_index=True)
    if len(first) < len(column):
        repeated = np.setdiff1d(np.arange(len(column)), first)[0]
        raise DataError(f"{where}[{repeated}] repeats id {entries[repeated].id!r}")
    return column


def _names(entries: Sequence[Any], ids: np.ndarray, texts: TextIds) -> dict[int, str]:
    """Category id → name, ascending by id; names differ, for each is a row of the table."""
    names: dict[int, str] = {}
    taken, written = set(), texts.shown("categories", ids.tolist())
    for index in np.argsort(ids).tolist():
        category, name = int(ids[index]), entries[index].name
        name = f"category {written[index]}" if name is UNSET else str(name)
        name = name.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair
        names[category] = f"{name} (id {written[index]})" if name in taken else name
        taken.add(names[category])
    return names


def _only_known(column: np.ndarray, known: np.ndarray | list[int], kind: str, texts: TextIds, where: str) -> None:
    unknown = np.flatnonzero(~np.isin(column, known))
    if unknown.size:
        row, more = unknown[0], f" (and {unknown.size - 1} more entries)" if unknown.size > 1 else ""
        key = {"images": "image_id", "categories": "category_id"}[kind]
        (value,) = texts.shown(kind, [int(column[row])])
        raise DataError(f"{where}[{row}]: {key} {value} is not in the annotations' list{more}")


def _gather(parts: Sequence[Any]) -> np.ndarray:
    """Arrays or tensors joined along the first axis, float64."""
    arrays = [part.detach().cpu().double().numpy() if hasattr(part, "detach") else np.asarray(part) for part in parts]
    filled = [array for array in arrays if len(array)]
    return np.concatenate(filled).astype(np.float64) if filled else np.zeros(0)
