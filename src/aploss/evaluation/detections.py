"""What a detector found, as flat arrays; COCO results and predictions are converted here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aploss.errors import DataError
from aploss.evaluation.ground_truth import GroundTruth
from aploss.evaluation.records import box_column, identifier_column, number_column, only_known

__all__ = ["DetectionTable", "as_detections"]


@dataclass(frozen=True, kw_only=True)
class DetectionTable:
    """Detections of many images.

    Boxes are stored as COCO results have them, so that a results file is scored on the very
    numbers in it and written back unchanged; ``boxes`` gives corners.

    Attributes:
        image_ids: int64 [n].
        category_ids: int64 [n].
        xywh: left, top, width, height in pixels, float64 [n, 4].
        scores: float64 [n]. Their order matters, their scale does not. Equal scores keep the order
            of the table.

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
        if not isinstance(results, (list, tuple)):
            raise DataError(
                f"the detections are a {type(results).__name__}, expected a list of COCO results "
                "(image_id, category_id, bbox, score)"
            )
        return cls(
            image_ids=identifier_column(results, "image_id", "detections"),
            category_ids=identifier_column(results, "category_id", "detections"),
            xywh=box_column(results, "detections"),
            scores=number_column(results, "score", "detections"),
        )

    @classmethod
    def from_predictions(
        cls,
        image_ids: Sequence[int],
        predictions: Sequence[dict[str, Any]],
        *,
        category_ids: Sequence[int] | None = None,
    ) -> "DetectionTable":
        """Gathers a detector's predictions, one dict an image.

        Args:
            image_ids: the id of each image.
            predictions: per image ``boxes`` xyxy [m, 4], ``scores`` [m], ``labels`` [m] counted
                from 0; numpy arrays or tensors on any device.
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
        columns = (
            self.image_ids.tolist(),
            self.category_ids.tolist(),
            self.xywh.tolist(),
            self.scores.tolist(),
        )
        return [
            {"image_id": image, "category_id": category, "bbox": box, "score": score}
            for image, category, box, score in zip(*columns, strict=True)
        ]

    def with_scores(self, scores: np.ndarray) -> "DetectionTable":
        """The same detections with other scores [n], such as calibrated ones."""
        values = np.asarray(scores, dtype=np.float64)
        if values.shape != self.scores.shape:
            raise DataError(f"{values.shape} scores for {len(self)} detections")
        return DetectionTable(
            image_ids=self.image_ids, category_ids=self.category_ids, xywh=self.xywh, scores=values
        )


def as_detections(
    detections: Sequence[dict[str, Any]] | DetectionTable, ground_truth: GroundTruth
) -> DetectionTable:
    """The detections as a table whose images and categories are those of the ground truth.

    Raises:
        DataError: a detection of an image or category the ground truth does not have.
    """
    if not isinstance(detections, DetectionTable):
        detections = DetectionTable.from_results(detections)
    only_known(detections.image_ids, ground_truth.images, "image_id", "detections")
    categories = np.array(list(ground_truth.categories), dtype=np.int64)
    only_known(detections.category_ids, categories, "category_id", "detections")
    return detections


def _gather(parts: Sequence[Any]) -> np.ndarray:
    """Arrays or tensors joined along the first axis, float64."""
    arrays = [
        part.detach().cpu().double().numpy() if hasattr(part, "detach") else np.asarray(part)
        for part in parts
    ]
    filled = [array for array in arrays if len(array)]
    return np.concatenate(filled).astype(np.float64) if filled else np.zeros(0)
