"""Matching of detections and objects by the rules of COCO or VOC at one IoU, and precision-recall curves."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from aploss.data.annotations import Annotations
from aploss.evaluation.tables import Detections, DetectionTable, Truth, as_tables

RECALL_POINTS = np.linspace(0.0, 1.0, 101)


@dataclass(frozen=True, kw_only=True)
class Matches:
    """The outcome for each of n detections and g objects.

    Attributes:
        iou: smallest overlap of a match.
        correct: whether the detection found an object that counts, bool [n].
        ignored: whether it matched a crowd or difficult object, which is neither right nor wrong, bool [n].
        objects: index of the matched object, -1 if unmatched, int64 [n].
        overlaps: IoU with the matched object; if unmatched, the largest IoU with an object of its image and class, or
            0, float64 [n].
        found: whether the object was found, bool [g].
        counted: whether the object counts (neither crowd nor difficult), bool [g].
        order: detections by descending score, ties in the order of the metric, int64 [n].

    Example:
        >>> matches = match_detections({"images": [], "categories": [], "annotations": []}, [])
        >>> matches.correct.shape, matches.found.shape
        ((0,), (0,))
    """

    iou: float
    correct: np.ndarray
    ignored: np.ndarray
    objects: np.ndarray
    overlaps: np.ndarray
    found: np.ndarray
    counted: np.ndarray
    order: np.ndarray


class _Pairs(NamedTuple):
    """Detections and objects of the same image and category, one row per pair."""

    detections: np.ndarray  # index of the detection, ascending, int64 [p]
    objects: np.ndarray  # index of the object, ascending within a detection, int64 [p]
    overlaps: np.ndarray  # their IoU (with a crowd: the part of the detection inside it), float64 [p]


def match_detections(ground_truth: Truth, detections: Detections, iou: float = 0.5) -> Matches:
    """Returns the matches of detections with objects of their image and class, best score first, as COCO finds them.

    A detection takes the free object it overlaps most, if the overlap is at least ``iou``. Objects that count are
    preferred to crowd and difficult ones; a crowd can take any number of detections.

    Args:
        ground_truth: COCO dict or arrays.
        detections: COCO results or a table.
        iou: smallest overlap of a match.

    Example:
        >>> box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 10]}
        >>> truth = {"images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}], "annotations": [box]}
        >>> matches = match_detections(truth, [{**box, "score": 0.3}, {**box, "score": 0.6}])
        >>> matches.correct  # the second takes the object, the first is a duplicate
        array([False,  True])
    """
    truth, table = as_tables(ground_truth, detections)
    pairs = _pairs(truth, table, truth.crowd)
    # equal scores: COCO proceeds image by image in the order of their ids
    order = np.lexsort((table.image_ids, -table.scores))
    close = np.flatnonzero(pairs.overlaps >= min(iou, 1 - 1e-10))
    return _matches(truth, iou, pairs, close, order, reusable=truth.crowd)


def match_voc(ground_truth: Truth, detections: Detections, iou: float = 0.5) -> Matches:
    """Returns the matches of detections as the VOC kit finds them.

    A detection is compared only with the object of its class that it overlaps most, free or not: the first detection of
    an object is correct and later ones are wrong, but all are ignored if the object is difficult. (COCO would look for
    the next best free object.)

    Args:
        ground_truth, detections, iou: see :func:`match_detections`.

    Example:
        >>> box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 8]}
        >>> truth = {"images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}], "annotations": [box]}
        >>> match_voc(truth, [{**box, "score": 0.3}, {**box, "score": 0.6}]).correct
        array([False,  True])
    """
    truth, table = as_tables(ground_truth, detections)
    pairs = _pairs(truth, table, np.zeros_like(truth.crowd))
    # the pair with the largest overlap of each detection, the first of equal ones
    best = np.lexsort((-pairs.overlaps, pairs.detections))
    best = best[np.unique(pairs.detections[best], return_index=True)[1]]
    order = np.argsort(-table.scores, kind="stable")
    return _matches(truth, iou, pairs, best[pairs.overlaps[best] >= iou], order, reusable=~truth.counted)


def _matches(
    truth: Annotations, iou: float, pairs: _Pairs, close: np.ndarray, order: np.ndarray, *, reusable: np.ndarray
) -> Matches:
    """Lets the detections take objects in the given order.

    Only the pairs with the indices ``close`` may match; a ``reusable`` [g] object takes any number of detections.
    """
    rank = np.argsort(order)  # the inverse permutation
    detection, candidate = pairs.detections[close], pairs.objects[close]
    # a detection prefers objects that count, then the largest overlap, then the later object
    preference = np.lexsort((-candidate, -pairs.overlaps[close], ~truth.counted[candidate], rank[detection]))
    objects = np.full(len(order), -1, dtype=np.int64)
    taken = np.zeros(len(truth), dtype=bool)
    for row in preference:
        if objects[detection[row]] < 0 and not taken[candidate[row]]:
            objects[detection[row]] = candidate[row]
            taken[candidate[row]] = not reusable[candidate[row]]
    overlaps = np.zeros(len(order))
    np.maximum.at(overlaps, pairs.detections, pairs.overlaps)
    is_match = pairs.objects == objects[pairs.detections]
    overlaps[pairs.detections[is_match]] = pairs.overlaps[is_match]
    matched = objects >= 0
    ignored = matched & np.append(~truth.counted, False)[objects]
    return Matches(
        iou=iou,
        correct=matched & ~ignored,
        ignored=ignored,
        objects=objects,
        overlaps=overlaps,
        found=np.isin(np.arange(len(truth)), objects),
        counted=truth.counted,
        order=order,
    )


def _pairs(truth: Annotations, table: DetectionTable, covers: np.ndarray) -> _Pairs:
    """All pairs; the intersection with an object that ``covers`` [g] is divided by the detection's area alone."""
    object_keys, keys = _group_keys(truth, truth), _group_keys(truth, table)
    by_key = np.argsort(object_keys, kind="stable")
    first = np.searchsorted(object_keys[by_key], keys, side="left")
    counts = np.searchsorted(object_keys[by_key], keys, side="right") - first
    detection = np.repeat(np.arange(len(table)), counts)
    within = np.arange(len(detection)) - np.repeat(np.cumsum(counts) - counts, counts)
    objects = by_key[np.repeat(first, counts) + within]
    return _Pairs(detection, objects, _overlaps(table.xywh[detection], truth.xywh[objects], covers[objects]))


def _group_keys(truth: Annotations, table: Annotations | DetectionTable) -> np.ndarray:
    """One number per image and category."""
    images, categories = np.searchsorted(truth.images, table.image_ids), list(truth.categories)
    return np.asarray(images * len(categories) + np.searchsorted(categories, table.category_ids))


def _overlaps(boxes: np.ndarray, others: np.ndarray, covers: np.ndarray) -> np.ndarray:
    """IoU of boxes [p, 4] with others [p, 4], xywh, in the same operations as pycocotools."""
    ends = np.minimum(boxes[:, :2] + boxes[:, 2:], others[:, :2] + others[:, 2:])
    width, height = np.maximum(ends - np.maximum(boxes[:, :2], others[:, :2]), 0.0).T
    intersection = width * height
    area = boxes[:, 2] * boxes[:, 3]
    union = np.where(covers, area, area + others[:, 2] * others[:, 3] - intersection)
    return np.asarray(np.divide(intersection, union, out=np.zeros_like(union), where=intersection > 0))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Precision over recall of one class.

    Attributes:
        recall: 0, 0.01, …, 1, float64 [101].
        precision: best precision at this recall or a higher one, 0 if it is not reached; its mean is COCO's AP at this
            IoU, float64 [101].
        scores: score threshold that reaches this recall, NaN if it is not reached, float64 [101].
        objects: number of objects that count.

    Example:
        >>> both = np.array([0.0, 1.0])
        >>> Curve(recall=both, precision=np.array([1.0, 0.5]), scores=1 - both, objects=2).average_precision
        0.75
    """

    recall: np.ndarray
    precision: np.ndarray
    scores: np.ndarray
    objects: int

    @property
    def average_precision(self) -> float:
        """Mean precision over the recall points."""
        return float(self.precision.mean())

    def as_dict(self) -> dict[str, Any]:
        """The curve as plain lists for JSON, with ``None`` for scores that are not reached."""
        return {
            "recall": self.recall.round(2).tolist(),
            "precision": self.precision.round(6).tolist(),
            "score": [None if np.isnan(score) else float(score) for score in self.scores],
            "average_precision": self.average_precision,
            "objects": self.objects,
        }


def precision_recall_curves(
    ground_truth: Truth, detections: Detections, *, matches: Matches | None = None
) -> dict[str, Curve]:
    """Computes the curve of each class in which an object counts.

    Args:
        ground_truth, detections: see :func:`match_detections`.
        matches: defaults to :func:`match_detections` at IoU 0.5.

    Returns:
        Class name → its curve.

    Example:
        >>> box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 10]}
        >>> truth = {"images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}], "annotations": [box]}
        >>> found = [{**box, "bbox": [0, 0, 10, 8], "score": 0.6}]
        >>> precision_recall_curves(truth, found)["cell"].precision.min()
        np.float64(1.0)
    """
    truth, table = as_tables(ground_truth, detections)
    matches = matches or match_detections(truth, table)
    curves = {}
    for name, objects, rows in by_category(truth, table, matches):
        if objects:
            found, best_from_here = precision_envelope(matches.correct[rows])
            places = np.searchsorted(found / objects, RECALL_POINTS, side="left")
            curves[name] = Curve(
                recall=RECALL_POINTS.copy(),
                precision=np.append(best_from_here, 0.0)[places],
                scores=np.append(table.scores[rows], np.nan)[places],
                objects=objects,
            )
    return curves


def by_category(truth: Annotations, table: DetectionTable, matches: Matches) -> Iterator[tuple[str, int, np.ndarray]]:
    """For each category its name, the number of objects that count, and its detections, best first, not ignored."""
    ranked = matches.order[~matches.ignored[matches.order]]
    objects = count_per_category(truth, truth.category_ids[truth.counted])
    found = count_per_category(truth, table.category_ids[ranked])
    grouped = ranked[np.argsort(table.category_ids[ranked], kind="stable")]
    rows = np.split(grouped, np.cumsum(found)[:-1])
    return zip(truth.categories.values(), objects.tolist(), rows, strict=False)


def count_per_category(truth: Annotations, category_ids: np.ndarray) -> np.ndarray:
    """How often each category of the ground truth occurs, int64 [K]."""
    places = np.searchsorted(list(truth.categories), category_ids)
    return np.bincount(places, minlength=len(truth.categories))


def precision_envelope(hits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number of correct detections up to each one, and the best precision from there on, [n] both."""
    found = np.cumsum(hits)
    precision = found / np.arange(1, len(hits) + 1)
    return found, np.maximum.accumulate(precision[::-1])[::-1]


def score_thresholds(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All thresholds that tell descending scores apart, each halfway to the next one, and how many scores they keep."""
    kept = np.flatnonzero(np.append(scores[:-1] != scores[1:], True)) + 1
    return (scores[kept - 1] + np.append(scores, 0.0)[kept]) / 2, kept
