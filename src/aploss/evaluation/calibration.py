"""Scores that mean something: a monotone map from a detector's score to a probability, and how far probabilities can be
believed.

A ranking loss orders detections and leaves the scores anywhere. The map is fitted on detections of a validation set and
is strictly increasing, so the order, and with it AP, stays what it was.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from aploss.errors import DataError
from aploss.evaluation.matching import Matches, match_detections
from aploss.evaluation.tables import Detections, Truth, as_tables

Values = np.ndarray | Sequence[float]
Flags = np.ndarray | Sequence[bool]
BINS = 10
# Relative rise per doubling of the score. Two neighbouring float32 scores differ by at least 2^-24 of their size, so
# their probabilities by about 1e-6 * 2^-24 / 2 = 3e-14 of theirs: far more than the 2e-16 that float64 resolves, and
# over all 149 doublings of float32 still only 1.5e-4.
RISE_PER_OCTAVE = 1e-6


@dataclass(frozen=True, eq=False)
class Calibration:
    """A piecewise linear, strictly increasing map from scores in [0, 1] to probabilities.

    Attributes:
        x: scores of the knots, ascending from 0 to 1, float64 [k].
        y: their probabilities, ascending, float64 [k].

    Example:
        >>> calibration = Calibration(x=[0, 0.2, 1], y=[0, 0.9, 1])
        >>> calibration([0.1, 0.2]).tolist()
        [0.45, 0.9]
    """

    x: np.ndarray
    y: np.ndarray

    def __post_init__(self) -> None:
        x, y = (np.asarray(values, dtype=np.float64) for values in (self.x, self.y))
        if x.ndim != 1 or x.shape != y.shape or len(x) < 2:
            raise DataError(f"calibration knots of shapes {x.shape} and {y.shape}, expected [k]")
        rising = bool(np.all(np.diff(x) > 0) and np.all(np.diff(y) > 0))  # False with NaN too
        if not rising or x[0] != 0 or x[-1] != 1 or y[0] < 0 or y[-1] > 1:
            raise DataError("calibration knots must rise from score 0 to 1, within [0, 1]")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y)

    def __call__(self, scores: Values) -> np.ndarray:
        """Probabilities of scores, float64 of the same shape.

        Different float32 scores give different float64 probabilities in the same order. Rounded to float32 afterwards
        some may become equal: sort before, not after.

        Raises:
            DataError: a score outside [0, 1].
        """
        values = np.asarray(scores, dtype=np.float64)
        if values.size and not (values.min() >= 0 and values.max() <= 1):
            raise DataError("calibration is for scores in [0, 1]; apply a sigmoid to logits first")
        return np.asarray(np.interp(values, self.x, self.y))

    def to_dict(self) -> dict[str, list[float]]:
        """The knots as plain lists, for checkpoints and JSON."""
        return {"x": self.x.tolist(), "y": self.y.tolist()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Calibration":
        """The opposite of :meth:`to_dict`. Raises ``DataError`` for anything that is no map."""
        try:
            return cls(x=np.array(values["x"], dtype=float), y=np.array(values["y"], dtype=float))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a calibration: {error}") from None


def fit_calibration(scores: Values, correct: Flags) -> Calibration:
    """Fits the map on detections by isotonic regression.

    Two made-up detections, a correct one at the lowest score and a wrong one at the highest, keep probabilities away
    from 0 and 1 (Laplace's rule): ten detections, all correct, do not prove certainty. The steps of the regression are
    joined by lines, flat parts rise by one millionth per doubling of the score, score 0 stays 0, and above the highest
    score seen nothing more is claimed than at it.

    Args:
        scores: scores in [0, 1] of detections, any order, [n].
        correct: whether each found an object, [n]. Leave ignored detections out.

    Returns:
        The map; the identity when there is nothing to learn from (no score above 0).

    Raises:
        DataError: lengths that differ, or a score outside [0, 1].

    Example:
        >>> calibration = fit_calibration([0.01, 0.01, 0.2, 0.2, 0.2, 0.2], [0, 0, 1, 1, 1, 1])
        >>> calibration([0.01, 0.2]).round(2).tolist()  # (0 + 1) / (2 + 1) and 4 / (4 + 1)
        [0.33, 0.8]
    """
    score, right = _numbers(scores, correct)
    if score.size and not (score.min() >= 0 and score.max() <= 1):
        raise DataError("scores must be in [0, 1] to be calibrated")
    # knots are then at least one float32 step apart, far enough to rise from one to the next
    score = score.astype(np.float32).astype(np.float64)
    positive = score > 0
    score, right = score[positive], right[positive]
    if not score.size:
        return Calibration(x=np.array([0.0, 1.0]), y=np.array([0.0, 1.0]))
    return _strictly_increasing(*_isotonic(score, right))


def _isotonic(scores: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Corners of the isotonic regression: scores, strictly ascending, and probabilities.

    Pool adjacent violators: a score whose share of correct detections is not above that of the block before it joins
    that block, as often as that is so.
    """
    x, place = np.unique(np.append(scores, [scores.min(), scores.max()]), return_inverse=True)
    hits, counts = np.bincount(place, np.append(correct, [1.0, 0.0])), np.bincount(place)
    blocks: list[tuple[float, int, int]] = []  # correct detections, detections, distinct scores
    for hit, count in zip(hits.tolist(), counts.tolist(), strict=True):
        distinct = 1
        while blocks and blocks[-1][0] * count >= hit * blocks[-1][1]:
            before = blocks.pop()
            hit, count, distinct = hit + before[0], count + before[1], distinct + before[2]
        blocks.append((hit, count, distinct))
    y = np.repeat([hit / count for hit, count, _ in blocks], [distinct for *_, distinct in blocks])
    rises = np.diff(y) > 0
    corner = np.append(True, rises) | np.append(rises, True)  # both ends of every flat part
    return x[corner], y[corner]


def _strictly_increasing(x: np.ndarray, y: np.ndarray) -> Calibration:
    """The corners as a map of the whole of [0, 1] on which no two float32 scores become equal."""
    lowest = int(np.floor(np.log2(x[0])))
    knots = np.union1d(x, 2.0 ** np.arange(lowest + 1, 1))  # one per doubling bounds the slope from below
    probabilities = np.interp(knots, x, y) * (1 + RISE_PER_OCTAVE * np.log2(knots))
    return Calibration(x=np.append(0.0, knots), y=np.append(0.0, probabilities))


def calibrate_detections(
    ground_truth: Truth, detections: Detections, *, iou: float = 0.5, matches: Matches | None = None
) -> "tuple[Calibration, DrawThreshold]":
    """Fits the calibration and the threshold to draw at on the detections of a validation set.

    Args:
        ground_truth: COCO dict or arrays of the validation set.
        detections: a detector's raw detections on it, without a score threshold.
        iou: overlap from which a detection is correct.
        matches: of these detections, where they are known; ``iou`` is then theirs.

    Returns:
        The calibration of all classes together, and the threshold with the best F1, which is a calibrated score.
    """
    truth, table = as_tables(ground_truth, detections)
    matches = match_detections(truth, table, iou) if matches is None else matches
    scores, correct = table.scores[~matches.ignored], matches.correct[~matches.ignored]
    calibration = fit_calibration(scores, correct)
    return calibration, best_f1_threshold(calibration(scores), correct, int(truth.counted.sum()))


def calibration_report(
    ground_truth: Truth,
    detections: Detections,
    calibration: Calibration,
    threshold: float,
    *,
    iou: float = 0.5,
    matches: Matches | None = None,
) -> dict[str, Any]:
    """What the calibration does to detections it was not fitted on, as plain values for JSON.

    Args:
        ground_truth: COCO dict or arrays.
        detections: a detector's raw detections.
        calibration: fitted on others.
        threshold: the calibrated score from which detections are drawn.
        iou: overlap from which a detection is correct.
        matches: of these detections, where they are known; ``iou`` is then theirs.

    Returns:
        ``iou``, ``draw_threshold``, ``calibrated_scores`` of all detections; what is drawn: ``drawn`` detections, their
        ``precision``, ``recall`` and ``f1``; ``before`` and ``after``: ``expected_calibration_error`` of the drawn
        detections, ``noise`` that chance alone would give, ``bins``; and under ``all`` the error of all detections with
        bins of equal width and of equal mass. The drawn are the same detections before and after.
    """
    truth, table = as_tables(ground_truth, detections)
    matches = match_detections(truth, table, iou) if matches is None else matches
    judged = ~matches.ignored
    calibrated = calibration(table.scores)
    correct = matches.correct[judged]
    drawn = calibrated[judged] >= threshold
    right, shown, objects = correct[drawn].sum(), drawn.sum(), matches.counted.sum()
    return {
        "iou": matches.iou,
        "draw_threshold": threshold,
        "drawn": int(shown),
        "precision": float(right / max(1, shown)),
        "recall": float(right / max(1, objects)),
        "f1": float(2 * right / max(1, shown + objects)),
        "before": _errors(table.scores[judged], correct, drawn),
        "after": _errors(calibrated[judged], correct, drawn),
        "calibrated_scores": calibrated.tolist(),
    }


def _errors(values: np.ndarray, correct: np.ndarray, drawn: np.ndarray) -> dict[str, Any]:
    return {
        "expected_calibration_error": expected_calibration_error(values[drawn], correct[drawn]),
        "noise": expected_noise(values[drawn]),
        "bins": [asdict(row) for row in reliability(values[drawn], correct[drawn])],
        "all": {
            "expected_calibration_error": expected_calibration_error(values, correct),
            "equal_mass_error": expected_calibration_error(values, correct, equal_mass_edges(values)),
        },
    }


# --- reliability ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReliabilityBin:
    """Detections with a probability in [lower, upper): claimed (mean probability) and true."""

    lower: float
    upper: float
    count: int
    confidence: float
    precision: float


@dataclass(frozen=True, kw_only=True)
class DrawThreshold:
    """The score from which detections are drawn, and what is then right and found."""

    threshold: float
    f1: float
    precision: float
    recall: float


def reliability(probabilities: Values, correct: Flags, bins: int | np.ndarray = BINS) -> list[ReliabilityBin]:
    """Claimed against true precision, bin by bin; empty bins are left out.

    Args:
        probabilities: in [0, 1], [n].
        correct: whether each detection found an object, [n].
        bins: number of equal-width bins over [0, 1], or their edges, ascending.

    Example:
        >>> [row] = reliability([0.72, 0.78], [True, False])
        >>> row.count, row.confidence, row.precision
        (2, 0.75, 0.5)
    """
    values, right = _numbers(probabilities, correct)
    edges, place = _binned(values, bins)
    counts, claimed, true = (np.bincount(place, weights) for weights in (None, values, right))
    return [
        ReliabilityBin(
            lower=float(edges[index]),
            upper=float(edges[index + 1]),
            count=int(counts[index]),
            confidence=float(claimed[index] / counts[index]),
            precision=float(true[index] / counts[index]),
        )
        for index in np.flatnonzero(counts)
    ]


def expected_calibration_error(probabilities: Values, correct: Flags, bins: int | np.ndarray = BINS) -> float:
    """Mean distance of claimed and true precision over the bins, each weighted by its count.

    It depends on which detections are given: a detector's 100 best per image are mostly certain background, which is
    easy to be right about. Give those above the threshold to judge what people see. 0 when there is no detection.
    """
    rows = reliability(probabilities, correct, bins)
    total = sum(row.count for row in rows)
    return sum(row.count * abs(row.confidence - row.precision) for row in rows) / max(1, total)


def expected_noise(probabilities: Values, bins: int | np.ndarray = BINS) -> float:
    """The calibration error that perfectly true probabilities would show by chance.

    The number of correct detections in a bin has variance sum p (1 - p); a normal variable is on average sqrt(2 / pi)
    standard deviations from its mean.
    """
    values, _ = _numbers(probabilities, np.zeros(len(probabilities)))
    _, place = _binned(values, bins)
    variance = np.bincount(place, weights=values * (1 - values))
    return float(np.sqrt(2 / np.pi * variance).sum() / max(1, len(values)))


def equal_mass_edges(probabilities: Values, bins: int = BINS) -> np.ndarray:
    """Edges of bins with about the same number of detections in each, float64 [at most bins + 1].

    Equal probabilities share a bin, so there may be fewer.
    """
    if len(probabilities) == 0:
        return np.array([0.0, 1.0])
    inner = np.quantile(probabilities, np.linspace(0, 1, bins + 1)[1:-1])
    return np.unique(np.concatenate([[0.0], inner, [1.0]]))


def best_f1_threshold(scores: Values, correct: Flags, objects: int) -> DrawThreshold:
    """The threshold with the best F1 over all classes together.

    It lies halfway to the next lower score, so that it does not hang on the last digit of one.

    Args:
        scores: of detections, ignored ones left out, [n].
        correct: whether each found an object, [n].
        objects: number of objects that count.

    Returns:
        The threshold; 0.5 with F1 0 when nothing was found.

    Example:
        >>> best = best_f1_threshold([0.9, 0.8, 0.2, 0.1], [True, True, False, True], objects=3)
        >>> best.threshold, best.precision  # F1 with the 2 best 4/5, with all 6/7
        (0.05, 0.75)
    """
    values, right = _numbers(scores, correct)
    if objects < right.sum():
        raise DataError(f"{int(right.sum())} correct detections of {objects} objects")
    if not right.any():
        return DrawThreshold(threshold=0.5, f1=0.0, precision=0.0, recall=0.0)
    order = np.argsort(-values, kind="stable")
    descending = np.append(values[order], 0.0)
    last_of_ties = np.flatnonzero(np.append(descending[:-2] != descending[1:-1], True))
    found = np.cumsum(right[order])[last_of_ties]
    f1 = 2 * found / (last_of_ties + 1 + objects)
    best = int(np.argmax(f1))
    last = last_of_ties[best]
    return DrawThreshold(
        threshold=float(descending[last : last + 2].mean()),
        f1=float(f1[best]),
        precision=float(found[best] / (last + 1)),
        recall=float(found[best] / objects),
    )


def _binned(values: np.ndarray, bins: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges of the bins, and the bin of each value; the last bin includes its upper edge."""
    edges = np.linspace(0.0, 1.0, bins + 1) if isinstance(bins, int) else np.asarray(bins)
    return edges, np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)


def _numbers(values: Values, correct: Flags) -> tuple[np.ndarray, np.ndarray]:
    numbers, right = np.asarray(values, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if numbers.ndim != 1 or numbers.shape != right.shape:
        raise DataError(f"{numbers.shape} scores and {right.shape} outcomes, expected [n] of both")
    return numbers, right
