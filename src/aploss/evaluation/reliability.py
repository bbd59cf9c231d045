"""How far scores can be believed: reliability bins, calibration error, the threshold to draw at."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aploss.errors import DataError

__all__ = [
    "DrawThreshold",
    "ReliabilityBin",
    "best_f1_threshold",
    "equal_mass_edges",
    "expected_calibration_error",
    "expected_noise",
    "reliability",
]

BINS = 10


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


def reliability(
    probabilities: np.ndarray | Sequence[float],
    correct: np.ndarray | Sequence[bool],
    bins: int | np.ndarray = BINS,
) -> list[ReliabilityBin]:
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
    values, right = _checked(probabilities, correct)
    edges, place = _binned(values, bins)
    counts = np.bincount(place, minlength=len(edges) - 1)
    claimed = np.bincount(place, weights=values, minlength=len(edges) - 1)
    true = np.bincount(place, weights=right, minlength=len(edges) - 1)
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


def expected_calibration_error(
    probabilities: np.ndarray | Sequence[float],
    correct: np.ndarray | Sequence[bool],
    bins: int | np.ndarray = BINS,
) -> float:
    """Mean distance of claimed and true precision over the bins, each weighted by its count.

    It depends on which detections are given: a detector's 100 best per image are mostly certain
    background, which is easy to be right about. Give those above the threshold to judge what
    people see. 0 when there is no detection.
    """
    rows = reliability(probabilities, correct, bins)
    total = sum(row.count for row in rows)
    return sum(row.count * abs(row.confidence - row.precision) for row in rows) / max(1, total)


def expected_noise(
    probabilities: np.ndarray | Sequence[float], bins: int | np.ndarray = BINS
) -> float:
    """The calibration error that perfectly true probabilities would show by chance.

    The number of correct detections in a bin has variance sum p (1 - p); a normal variable is on
    average sqrt(2 / pi) standard deviations from its mean.
    """
    values, _ = _checked(probabilities, np.zeros(len(probabilities)))
    _, place = _binned(values, bins)
    variance = np.bincount(place, weights=values * (1 - values))
    return float(np.sqrt(2 / np.pi * variance).sum() / max(1, len(values)))


def equal_mass_edges(probabilities: np.ndarray | Sequence[float], bins: int = BINS) -> np.ndarray:
    """Edges of bins with about the same number of detections in each, float64 [at most bins + 1].

    Equal probabilities share a bin, so there may be fewer.
    """
    if len(probabilities) == 0:
        return np.array([0.0, 1.0])
    inner = np.quantile(probabilities, np.linspace(0, 1, bins + 1)[1:-1])
    return np.unique(np.concatenate([[0.0], inner, [1.0]]))


def best_f1_threshold(
    scores: np.ndarray | Sequence[float], correct: np.ndarray | Sequence[bool], objects: int
) -> DrawThreshold:
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
    values, right = _checked(scores, correct)
    if objects < right.sum():
        raise DataError(f"{int(right.sum())} correct detections of {objects} objects")
    if not right.any():
        return DrawThreshold(threshold=0.5, f1=0.0, precision=0.0, recall=0.0)
    order = np.argsort(-values, kind="stable")
    descending = values[order]
    lower = np.append(descending[1:], 0.0)
    last_of_ties = np.flatnonzero(np.append(descending[:-1] != descending[1:], True))
    found = np.cumsum(right[order])[last_of_ties]
    drawn = last_of_ties + 1
    best = int(np.argmax(2 * found / (drawn + objects)))
    return DrawThreshold(
        threshold=float((descending[last_of_ties[best]] + lower[last_of_ties[best]]) / 2),
        f1=float(2 * found[best] / (drawn[best] + objects)),
        precision=float(found[best] / drawn[best]),
        recall=float(found[best] / objects),
    )


def _binned(values: np.ndarray, bins: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges of the bins, and the bin of each value; the last bin includes its upper edge."""
    edges = np.linspace(0.0, 1.0, bins + 1) if isinstance(bins, int) else np.asarray(bins)
    place = np.searchsorted(edges, values, side="right") - 1
    return edges, np.clip(place, 0, len(edges) - 2)


def _checked(
    values: np.ndarray | Sequence[float], correct: np.ndarray | Sequence[bool]
) -> tuple[np.ndarray, np.ndarray]:
    numbers, right = np.asarray(values, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if numbers.ndim != 1 or numbers.shape != right.shape:
        raise DataError(f"{numbers.shape} scores and {right.shape} outcomes, expected [n] of both")
    return numbers, right
