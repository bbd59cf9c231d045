"""Precision-recall curves per class."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aploss.evaluation.detections import DetectionTable, as_detections
from aploss.evaluation.ground_truth import GroundTruth, as_ground_truth
from aploss.evaluation.matching import Matches, match_detections

__all__ = ["RECALL_POINTS", "Curve", "curves_as_dict", "precision_recall_curves"]

RECALL_POINTS = np.linspace(0.0, 1.0, 101)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Precision over recall of one class.

    Attributes:
        recall: 0, 0.01, …, 1, float64 [101].
        precision: the best precision at this recall or a higher one, 0 where the recall is not
            reached; the mean of it is COCO's AP at this IoU, float64 [101].
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
    ground_truth: dict[str, Any] | GroundTruth,
    detections: Sequence[dict[str, Any]] | DetectionTable,
    *,
    iou: float = 0.5,
    matches: Matches | None = None,
) -> dict[str, Curve]:
    """The curve of each class that has an object that counts.

    Args:
        ground_truth: COCO dict or arrays.
        detections: COCO results or a table.
        iou: smallest overlap of a match.
        matches: outcomes to draw the curve of, such as those of ``match_voc``; COCO's matching at
            ``iou`` when not given.
    """
    truth = as_ground_truth(ground_truth)
    table = as_detections(detections, truth)
    matches = match_detections(truth, table, iou) if matches is None else matches
    ranked = matches.order[~matches.ignored[matches.order]]
    curves = {}
    for category, name in truth.categories.items():
        objects = int((truth.counted & (truth.category_ids == category)).sum())
        chosen = ranked[table.category_ids[ranked] == category]
        if objects:
            curves[name] = _curve(matches.correct[chosen], table.scores[chosen], objects)
    return curves


def curves_as_dict(curves: dict[str, Curve]) -> dict[str, dict[str, Any]]:
    """Curves as lists for JSON, with a mean curve's worth of digits: class → recall, precision,
    score (``None`` where the recall is not reached), average_precision, objects."""
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


def _curve(hits: np.ndarray, scores: np.ndarray, objects: int) -> Curve:
    found = np.cumsum(hits)
    precision = found / np.arange(1, len(hits) + 1)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    places = np.searchsorted(found / objects, RECALL_POINTS, side="left")
    return Curve(
        recall=RECALL_POINTS.copy(),
        precision=np.append(best_from_here, 0.0)[places],
        scores=np.append(scores, np.nan)[places],
        objects=objects,
    )
