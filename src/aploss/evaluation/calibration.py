"""Calibration: a strictly increasing map from a detector's scores to probabilities, and how reliable these are.

A ranking loss orders detections but leaves the scale of their scores open. The map is fitted on a validation set; since
it is strictly increasing, the order of the detections, and hence AP, is unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from aploss.data.annotations import as_rows
from aploss.errors import DataError
from aploss.evaluation.matching import Matches, match_detections, score_thresholds
from aploss.evaluation.metrics import optimal_lrp
from aploss.evaluation.tables import Detections, Truth, as_tables

Values = np.ndarray | Sequence[float]  # scores, or True and False
BINS = 10
# Relative increase per doubling of the score. Neighbouring float32 scores differ by at least 2^-24 of their size, so
# their probabilities differ by about 1e-6 * 2^-24 / 2 = 3e-14 of theirs: far more than the 2e-16 that float64 resolves,
# and over all 149 doublings of float32 still only 1.5e-4.
RISE_PER_OCTAVE = 1e-6


@dataclass(frozen=True, eq=False)
class Calibration:
    """A piecewise linear, strictly increasing map from scores in [0, 1] to probabilities.

    Attributes:
        x: scores of the knots, ascending from 0 to 1, float64 [k].
        y: their probabilities, ascending, float64 [k].
        class_thresholds: the LRP-optimal threshold of each class, a calibrated score; empty if none was determined.

    Example:
        >>> calibration = Calibration(x=[0, 0.2, 1], y=[0, 0.9, 1])
        >>> calibration([0.1, 0.2]).tolist()
        [0.45, 0.9]
    """

    x: np.ndarray
    y: np.ndarray
    class_thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        x, y = (np.asarray(values, dtype=np.float64) for values in (self.x, self.y))
        if x.ndim != 1 or x.shape != y.shape or len(x) < 2:
            raise DataError(f"calibration knots of shapes {x.shape} and {y.shape}, expected [k]")
        increasing = bool(np.all(np.diff(x) > 0) and np.all(np.diff(y) > 0))  # also False for NaN
        if not increasing or x[0] != 0 or x[-1] != 1 or y[0] < 0 or y[-1] > 1:
            raise DataError("calibration knots must increase from score 0 to 1, within [0, 1]")
        if not all(0 <= threshold <= 1 for threshold in self.class_thresholds):
            raise DataError(f"class thresholds must be in [0, 1], got {self.class_thresholds}")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y)

    def __call__(self, scores: Values) -> np.ndarray:
        """Returns the probabilities of scores in [0, 1], float64 of the same shape.

        Different float32 scores give different float64 probabilities in the same order. Rounding to float32 may make
        some of them equal, so sort before rounding.
        """
        return np.asarray(np.interp(_as_scores(scores), self.x, self.y))

    def to_dict(self) -> dict[str, list[float]]:
        """Returns the knots and thresholds as plain lists, for checkpoints and JSON."""
        return {"x": self.x.tolist(), "y": self.y.tolist(), "class_thresholds": list(self.class_thresholds)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Calibration":
        """Inverse of :meth:`to_dict`. Raises ``DataError`` if the values are not an increasing map."""
        try:
            return cls(values["x"], values["y"], tuple(map(float, values.get("class_thresholds", ()))))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not a calibration: {error}") from None


def fit_calibration(scores: Values, correct: Values) -> Calibration:
    """Fits the map by centred isotonic regression (Oron and Flournoy, 2017).

    Isotonic regression is constant on each of its blocks. Here the mean score of a block gets its precision, and lines
    join these points, so that scores do not repeat in steps. Two artificial detections, a correct one at the lowest
    score and a wrong one at the highest, keep probabilities away from 0 and 1 (Laplace's rule): ten correct detections
    do not prove certainty. Score 0 is mapped to 0.

    Args:
        scores: scores of detections in [0, 1], [n]. Without a score above 0 the result is the identity.
        correct: whether each detection found an object, [n]. Leave out ignored detections.

    Returns:
        The map. All its parts rise by at least one millionth per doubling of the score.

    Example:
        >>> calibration = fit_calibration([0.01, 0.01, 0.2, 0.2, 0.2, 0.2], [0, 0, 1, 1, 1, 1])
        >>> calibration([0.01, 0.2]).round(2).tolist()  # (0 + 1) / (2 + 1) and 4 / (4 + 1)
        [0.33, 0.8]
    """
    score, right = _as_arrays(scores, correct)
    score = score.astype(np.float32).astype(np.float64)  # all knots are float32 numbers, so at least a step apart
    score, right = score[score > 0], right[score > 0]
    if not score.size:
        return Calibration(x=np.array([0.0, 1.0]), y=np.array([0.0, 1.0]))
    x, y = _with_ends(*_isotonic(score, right), score.min(), score.max())
    # one knot per doubling bounds the slope from below, so that no two float32 scores become equal
    knots = np.union1d(x, 2.0 ** np.arange(int(np.floor(np.log2(x[0]))) + 1, 1))
    probabilities = np.interp(knots, x, y) * (1 + RISE_PER_OCTAVE * np.log2(knots))
    return Calibration(x=np.append(0.0, knots), y=np.append(0.0, probabilities))


def _isotonic(scores: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of the isotonic regression (pool adjacent violators): their mean scores, ascending, and precision."""
    x, place = np.unique(np.append(scores, [scores.min(), scores.max()]), return_inverse=True)
    hits, counts = np.bincount(place, np.append(correct, [1.0, 0.0])), np.bincount(place)
    blocks: list[np.ndarray] = []  # correct detections, detections, sum of scores
    for block in np.stack([hits, counts, counts * x], axis=1):
        while blocks and blocks[-1][0] * block[1] >= block[0] * blocks[-1][1]:
            block += blocks.pop()
        blocks.append(block)
    hits, counts, sums = np.array(blocks).T
    return (sums / counts).astype(np.float32).astype(np.float64), hits / counts


def _with_ends(x: np.ndarray, y: np.ndarray, lowest: float, highest: float) -> tuple[np.ndarray, np.ndarray]:
    """Extends the first and last line to the lowest and highest score, at most halfway to 0 and 1."""
    slopes = np.diff(y) / np.diff(x) if len(x) > 1 else np.zeros(1)
    low = max(y[0] / 2, y[0] - slopes[0] * (x[0] - lowest))
    high = min((1 + y[-1]) / 2, y[-1] + slopes[-1] * (highest - x[-1]))
    places, first = np.unique(np.concatenate([[lowest], x, [highest]]), return_index=True)
    return places, np.concatenate([[low], y, [high]])[first]


def calibrate_detections(
    ground_truth: Truth, detections: Detections, *, matches: Matches | None = None
) -> tuple[Calibration, float]:
    """Fits the calibration and the thresholds on a validation set.

    Args:
        ground_truth: COCO dict or arrays of the validation set.
        detections: a detector's raw detections on it, without a score threshold.
        matches: defaults to :func:`match_detections` at IoU 0.5.

    Returns:
        The calibration, shared by all classes, with the LRP-optimal threshold of each class, and the threshold with the
        best F1, which replaces the former for classes without a correct detection. Thresholds are calibrated scores.

    Example:
        >>> box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 10]}
        >>> truth = {"images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}], "annotations": [box]}
        >>> found = [{**box, "bbox": [x, 0, 10, 10], "score": 0.2 - x / 500} for x in (0, 50)]
        >>> calibration, threshold = calibrate_detections(truth, found)
        >>> calibration([0.1, 0.2]) >= threshold
        array([False,  True])
    """
    truth, table = as_tables(ground_truth, detections)
    matches = matches or match_detections(truth, table)
    scores, correct = table.scores[~matches.ignored], matches.correct[~matches.ignored]
    calibration = fit_calibration(scores, correct)
    threshold = _best_f1_threshold(calibration(scores), correct, int(truth.counted.sum()))
    raw = np.array([one.lrp_threshold for one in optimal_lrp(truth, table, matches=matches).values()])
    per_class = np.where(np.isnan(raw), threshold, calibration(np.nan_to_num(raw)))
    return replace(calibration, class_thresholds=tuple(per_class.tolist())), threshold


def calibration_report(
    ground_truth: Truth,
    detections: Detections,
    calibration: Calibration,
    threshold: float,
    *,
    matches: Matches | None = None,
) -> dict[str, Any]:
    """Measures a calibration on detections that it was not fitted on.

    Args:
        ground_truth, detections, matches: see :func:`calibrate_detections`.
        calibration: fitted on another set.
        threshold: calibrated score from which detections are drawn.

    Returns:
        Plain values for JSON: ``iou``, ``draw_threshold`` and, ``before`` and ``after`` calibration, the
        ``expected_calibration_error`` of the drawn detections, the ``bins`` of their reliability diagram (``lower``,
        ``upper``, ``count``, ``confidence``, ``precision``), and under ``all`` the error over all detections.

    Example:
        >>> box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 10]}
        >>> truth = {"images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}], "annotations": [box]}
        >>> found = [{**box, "bbox": [0, 0, 10, 8], "score": 0.6}]
        >>> report = calibration_report(truth, found, Calibration(x=[0, 1], y=[0, 1]), 0.5)
        >>> report["after"]["expected_calibration_error"]
        0.4
    """
    truth, table = as_tables(ground_truth, detections)
    matches = matches or match_detections(truth, table)
    correct, scores = matches.correct[~matches.ignored], table.scores[~matches.ignored]
    calibrated = calibration(scores)
    drawn = calibrated >= threshold
    report: dict[str, Any] = {"iou": matches.iou, "draw_threshold": threshold}
    for name, values in (("before", scores), ("after", calibrated)):
        report[name] = {
            "expected_calibration_error": expected_calibration_error(values[drawn], correct[drawn]),
            "bins": _reliability(values[drawn], correct[drawn]),
            "all": {"expected_calibration_error": expected_calibration_error(values, correct)},
        }
    return report


def _reliability(probabilities: Values, correct: Values) -> list[dict[str, float]]:
    """Compares predicted with true precision in ten bins of equal width; empty bins are left out."""
    values, right = _as_arrays(probabilities, correct)
    edges = np.linspace(0.0, 1.0, BINS + 1)
    place = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, BINS - 1)  # the last one includes 1
    counts = np.bincount(place, minlength=BINS)
    means = [np.bincount(place, one, minlength=BINS) / np.maximum(1, counts) for one in (values, right)]
    columns = {"lower": edges[:-1], "upper": edges[1:], "count": counts, "confidence": means[0], "precision": means[1]}
    return as_rows(**{name: column[counts > 0] for name, column in columns.items()})


def expected_calibration_error(probabilities: Values, correct: Values) -> float:
    """Returns the mean distance of predicted and true precision over ten bins, weighted by count; 0 without detections.

    The error depends on the selection: a detector's 100 best per image are mostly background, which is easy to be right
    about. To judge the detections that people see, pass those above the threshold.

    Args:
        probabilities: in [0, 1], [n].
        correct: whether each detection found an object, [n].

    Example:
        >>> expected_calibration_error([0.72, 0.78], [True, False])  # predicted 0.75, true 0.5
        0.25
    """
    rows = _reliability(probabilities, correct)
    total = sum(row["count"] for row in rows)
    return sum(row["count"] * abs(row["confidence"] - row["precision"]) for row in rows) / max(1, total)


def _best_f1_threshold(scores: np.ndarray, correct: np.ndarray, objects: int) -> float:
    """The threshold with the best F1 over all classes, halfway between two scores; 0.5 without a correct detection."""
    if not correct.any():
        return 0.5
    order = np.argsort(-scores, kind="stable")
    thresholds, kept = score_thresholds(scores[order])
    return float(thresholds[np.argmax(2 * np.cumsum(correct[order])[kept - 1] / (kept + objects))])


def _as_arrays(scores: Values, correct: Values) -> tuple[np.ndarray, np.ndarray]:
    values, right = _as_scores(scores), np.asarray(correct, dtype=np.float64)
    if values.ndim != 1 or values.shape != right.shape:
        raise DataError(f"{values.shape} scores and {right.shape} outcomes, expected [n] of both")
    return values, right


def _as_scores(scores: Values) -> np.ndarray:
    values = np.asarray(scores, dtype=np.float64)
    if values.size and not (values.min() >= 0 and values.max() <= 1):
        raise DataError("calibration is for scores in [0, 1]; apply a sigmoid to logits first")
    return values
