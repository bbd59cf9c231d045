"""Which detection found which object, by the rules of COCO or VOC at one IoU; and the curves that follow from it."""

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
        iou: the overlap from which a detection counts.
        correct: the detection found an object that counts, bool [n].
        ignored: it lies on a crowd or difficult object: neither right nor wrong, bool [n].
        objects: index of the object it was matched with, -1 for none, int64 [n].
        overlaps: IoU with that object, or the largest one with any object of its image and class; 0 where there is
            none, float64 [n].
        found: the object was found, bool [g].
        counted: the object counts (neither crowd nor difficult), bool [g].
        order: detections from the highest score to the lowest, ties as the metric takes them, int64 [n].
    """

    iou: float
    correct: np.ndarray
    ignored: np.ndarray
    objects: np.ndarray
    overlaps: np.ndarray
    found: np.ndarray
    counted: np.ndarray
    order: np.ndarray

    @property
    def wrong(self) -> np.ndarray:
        """False positives, bool [n]."""
        return np.asarray(~(self.correct | self.ignored))

    @property
    def missed(self) -> np.ndarray:
        """False negatives, bool [g]."""
        return np.asarray(self.counted & ~self.found)


class Pairs(NamedTuple):
    """Detections and objects of the same image and category, one row per pair, p rows."""

    detections: np.ndarray  # index of the detection, ascending, int64 [p]
    objects: np.ndarray  # index of the object, ascending within a detection, int64 [p]
    overlaps: np.ndarray  # their IoU (with a crowd: the part of the detection inside it), float64 [p]


def match_detections(ground_truth: Truth, detections: Detections, iou: float = 0.5) -> Matches:
    """Matches detections with objects of their image and class, best score first, as COCO does.

    A detection takes the free object it overlaps most, if by at least ``iou``. Objects that count come before crowd and
    difficult ones; a crowd can take any number of detections.

    Args:
        ground_truth: COCO dict or arrays.
        detections: COCO results or a table.
        iou: smallest overlap of a match.

    Example:
        >>> truth = {
        ...     "images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}],
        ...     "annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 10]}],
        ... }
        >>> box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 8]}
        >>> matches = match_detections(truth, [{**box, "score": 0.3}, {**box, "score": 0.6}])
        >>> matches.correct  # the second takes the object, the first is a duplicate
        array([False,  True])
    """
    truth, table = as_tables(ground_truth, detections)
    pairs = candidate_pairs(truth, table, crowds_cover=True)
    # equal scores: COCO goes image by image in the order of their ids
    order = np.lexsort((table.image_ids, -table.scores))
    objects = _assign(truth, pairs, order, iou)
    matched = objects >= 0
    ignored = matched.copy()
    ignored[matched] = ~truth.counted[objects[matched]]
    overlaps = np.zeros(len(table))
    np.maximum.at(overlaps, pairs.detections, pairs.overlaps)
    of_match = pairs.objects == objects[pairs.detections]
    overlaps[pairs.detections[of_match]] = pairs.overlaps[of_match]
    return _matches(truth, iou, objects=objects, ignored=ignored, overlaps=overlaps, order=order)


def _matches(
    truth: Annotations, iou: float, *, objects: np.ndarray, ignored: np.ndarray, **rest: np.ndarray
) -> Matches:
    """What follows from the object of every detection (-1: none), and from which of these count neither way."""
    found = np.isin(np.arange(len(truth)), objects)
    correct = (objects >= 0) & ~ignored
    return Matches(
        iou=iou, correct=correct, ignored=ignored, objects=objects, found=found, counted=truth.counted, **rest
    )


def match_voc(ground_truth: Truth, detections: Detections, iou: float = 0.5) -> Matches:
    """Matches as the VOC kit does.

    A detection is compared only with the object of its class it overlaps most, whether that one is free or not: the
    first to come is correct, later ones are wrong, and all are ignored where the object is difficult. (COCO would look
    for the next best free object.)
    """
    truth, table = as_tables(ground_truth, detections)
    return assign_voc(truth, table, candidate_pairs(truth, table, crowds_cover=False), iou)


def assign_voc(truth: Annotations, table: DetectionTable, pairs: Pairs, iou: float) -> Matches:
    """As :func:`match_voc`, of tables whose pairs are known."""
    # of each detection's pairs the one with the largest overlap, the first of equal ones
    best = np.lexsort((-pairs.overlaps, pairs.detections))
    _, first = np.unique(pairs.detections[best], return_index=True)
    best = best[first]
    nearest = np.full(len(table), -1, dtype=np.int64)
    overlaps = np.zeros(len(table))
    nearest[pairs.detections[best]] = pairs.objects[best]
    overlaps[pairs.detections[best]] = pairs.overlaps[best]

    order = np.argsort(-table.scores, kind="stable")
    close = (nearest >= 0) & (overlaps >= iou)
    ignored = close & ~truth.counted[nearest] if len(truth) else close
    claims = order[(close & ~ignored)[order]]
    _, first = np.unique(nearest[claims], return_index=True)
    correct = np.zeros(len(table), dtype=bool)
    correct[claims[first]] = True
    objects = np.where(correct | ignored, nearest, -1)
    return _matches(truth, iou, objects=objects, ignored=ignored, overlaps=overlaps, order=order)


def candidate_pairs(truth: Annotations, table: DetectionTable, *, crowds_cover: bool) -> Pairs:
    """All pairs; with ``crowds_cover`` the intersection with a crowd is divided by the detection's area alone."""
    object_keys = _group_keys(truth, truth.image_ids, truth.category_ids)
    keys = _group_keys(truth, table.image_ids, table.category_ids)
    by_key = np.argsort(object_keys, kind="stable")
    first = np.searchsorted(object_keys[by_key], keys, side="left")
    counts = np.searchsorted(object_keys[by_key], keys, side="right") - first
    detection = np.repeat(np.arange(len(table)), counts)
    within = np.arange(len(detection)) - np.repeat(np.cumsum(counts) - counts, counts)
    objects = by_key[np.repeat(first, counts) + within]
    overlaps = _overlaps(table.xywh[detection], truth.xywh[objects], truth.crowd[objects] & crowds_cover)
    return Pairs(detection, objects, overlaps)


def _group_keys(truth: Annotations, image_ids: np.ndarray, category_ids: np.ndarray) -> np.ndarray:
    """One number per image and category."""
    images, categories = np.searchsorted(truth.images, image_ids), list(truth.categories)
    return np.asarray(images * len(categories) + np.searchsorted(categories, category_ids))


def _overlaps(boxes: np.ndarray, others: np.ndarray, crowd: np.ndarray) -> np.ndarray:
    """IoU of boxes [p, 4] with others [p, 4], xywh, in the operations of the COCO tools."""
    ends = np.minimum(boxes[:, :2] + boxes[:, 2:], others[:, :2] + others[:, 2:])
    width, height = np.maximum(ends - np.maximum(boxes[:, :2], others[:, :2]), 0.0).T
    intersection = width * height
    area = boxes[:, 2] * boxes[:, 3]
    union = np.where(crowd, area, area + others[:, 2] * others[:, 3] - intersection)
    return np.asarray(np.divide(intersection, union, out=np.zeros_like(union), where=intersection > 0))


def _assign(truth: Annotations, pairs: Pairs, order: np.ndarray, iou: float) -> np.ndarray:
    """Index of the object each detection takes, -1 for none, int64 [n]."""
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    close = np.flatnonzero(pairs.overlaps >= min(iou, 1 - 1e-10))
    detection, candidate = pairs.detections[close], pairs.objects[close]
    # what a detection prefers: objects that count, then large overlap, then the later object
    preference = np.lexsort((-candidate, -pairs.overlaps[close], ~truth.counted[candidate], rank[detection]))
    objects = np.full(len(order), -1, dtype=np.int64)
    taken = np.zeros(len(truth), dtype=bool)
    for row in preference:
        if objects[detection[row]] < 0 and not taken[candidate[row]]:
            objects[detection[row]] = candidate[row]
            taken[candidate[row]] = not truth.crowd[candidate[row]]
    return objects


# --- curves -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Precision over recall of one class.

    Attributes:
        recall: 0, 0.01, …, 1, float64 [101].
        precision: the best precision at this recall or a higher one, 0 where the recall is not reached; the mean of it
            is COCO's AP at this IoU, float64 [101].
        scores: the score a detection must have to get there, NaN where not reached, float64 [101].
        objects: objects that count.
    """

    recall: np.ndarray
    precision: np.ndarray
    scores: np.ndarray
    objects: int

    @property
    def average_precision(self) -> float:
        """Mean precision over the recall points."""
        return float(self.precision.mean())


def precision_recall_curves(
    ground_truth: Truth, detections: Detections, *, iou: float = 0.5, matches: Matches | None = None
) -> dict[str, Curve]:
    """The curve of each class that has an object that counts.

    Args:
        ground_truth: COCO dict or arrays.
        detections: COCO results or a table.
        iou: smallest overlap of a match.
        matches: outcomes to draw the curve of, such as those of ``match_voc``; COCO's matching at ``iou`` when not
            given.
    """
    truth, table = as_tables(ground_truth, detections)
    matches = match_detections(truth, table, iou) if matches is None else matches
    return {
        name: _curve(matches.correct[rows], table.scores[rows], objects)
        for name, objects, rows in by_category(truth, table, matches)
        if objects
    }


def by_category(truth: Annotations, table: DetectionTable, matches: Matches) -> Iterator[tuple[str, int, np.ndarray]]:
    """Of each category its name, how many objects count, and the detections that do, best first."""
    ranked = matches.order[~matches.ignored[matches.order]]
    objects = objects_per_category(truth, truth.category_ids[truth.counted])
    found = objects_per_category(truth, table.category_ids[ranked])
    grouped = ranked[np.argsort(table.category_ids[ranked], kind="stable")]
    rows = np.split(grouped, np.cumsum(found)[:-1])
    return zip(truth.categories.values(), objects.tolist(), rows, strict=False)


def objects_per_category(truth: Annotations, category_ids: np.ndarray) -> np.ndarray:
    """How many of these objects or detections are of each category of the truth, int64 [K]."""
    places = np.searchsorted(list(truth.categories), category_ids)
    return np.bincount(places, minlength=len(truth.categories))


def curves_as_dict(curves: dict[str, Curve]) -> dict[str, dict[str, Any]]:
    """Curves as lists for JSON: class → recall, precision, score (None if not reached), average_precision, objects."""
    return {
        name: {
            "recall": curve.recall.round(2).tolist(),
            "precision": curve.precision.round(6).tolist(),
            "score": [None if np.isnan(score) else float(score) for score in curve.scores],
            "average_precision": curve.average_precision,
            "objects": curve.objects,
        }
        for name, curve in curves.items()
    }


def precision_envelope(hits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Correct detections up to each one, and the best precision from there on, [n] both."""
    found = np.cumsum(hits)
    precision = found / np.arange(1, len(hits) + 1)
    return found, np.maximum.accumulate(precision[::-1])[::-1]


def _curve(hits: np.ndarray, scores: np.ndarray, objects: int) -> Curve:
    found, best_from_here = precision_envelope(hits)
    places = np.searchsorted(found / objects, RECALL_POINTS, side="left")
    return Curve(
        recall=RECALL_POINTS.copy(),
        precision=np.append(best_from_here, 0.0)[places],
        scores=np.append(scores, np.nan)[places],
        objects=objects,
    )
