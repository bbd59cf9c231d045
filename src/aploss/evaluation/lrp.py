"""Localisation recall precision (Oksuz et al., ECCV 2018, TPAMI 2022): the error of a detector at its best threshold.

AP rates a ranking; LRP rates the detections that remain above a score threshold, including how well their boxes fit:

    LRP(s) = (sum over true positives of (1 - IoU) / (1 - tau) + false positives + false negatives) / their total number

It is 0 for perfect detections and 1 if nothing is found. oLRP is its minimum over thresholds s, and the threshold that
attains it is the one to deploy the class with.
"""

from math import nan
from typing import NamedTuple

import numpy as np

from aploss.evaluation.matching import Matches, by_category, match_detections
from aploss.evaluation.tables import Detections, Truth, as_tables


class OptimalLRP(NamedTuple):
    """oLRP of a class, its parts at the optimal threshold, and that threshold.

    All are NaN if no object of the class counts. If no detection is correct, oLRP is 1 and localisation, false
    positives and threshold are NaN.

    Example:
        >>> OptimalLRP(oLRP=0.2, oLRP_loc=0.1, oLRP_fp=0.0, oLRP_fn=0.0, lrp_threshold=0.3).oLRP
        0.2
    """

    oLRP: float  # noqa: N815
    oLRP_loc: float  # noqa: N815  # mean of 1 - IoU over the true positives
    oLRP_fp: float  # noqa: N815  # 1 - precision
    oLRP_fn: float  # noqa: N815  # 1 - recall
    lrp_threshold: float  # halfway between the last score that is kept and the next lower one


def optimal_lrp(
    ground_truth: Truth, detections: Detections, *, iou: float = 0.5, matches: Matches | None = None
) -> dict[str, OptimalLRP]:
    """Computes oLRP and the LRP-optimal score threshold of each class.

    Args:
        ground_truth: COCO dict or arrays; crowd and difficult objects are ignored.
        detections: COCO results or a table, without a score threshold.
        iou: tau, the smallest overlap of a match.
        matches: precomputed matches at this IoU.

    Returns:
        Class name → its :class:`OptimalLRP`.

    Example:
        >>> truth = {
        ...     "images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}],
        ...     "annotations": [{"image_id": 1, "category_id": 1, "bbox": [x, 0, 10, 10]} for x in (0, 20)],
        ... }
        >>> boxes = {0.9: [0, 0, 10, 8], 0.5: [20, 0, 10, 10], 0.1: [50, 0, 10, 10]}
        >>> found = [{"image_id": 1, "category_id": 1, "bbox": box, "score": score} for score, box in boxes.items()]
        >>> best = optimal_lrp(truth, found)["cell"]
        >>> round(best.oLRP, 3), round(best.oLRP_loc, 3), best.lrp_threshold  # (0.2 / 0.5 + 0) / 2 objects
        (0.2, 0.1, 0.3)
    """
    truth, table = as_tables(ground_truth, detections)
    matches = match_detections(truth, table, iou) if matches is None else matches
    return {
        name: _optimum(table.scores[rows], matches.correct[rows], matches.overlaps[rows], objects, matches.iou)
        for name, objects, rows in by_category(truth, table, matches)
    }


def _optimum(scores: np.ndarray, correct: np.ndarray, overlaps: np.ndarray, objects: int, iou: float) -> OptimalLRP:
    """oLRP of the detections of a class, best first, without ignored ones."""
    if objects == 0:
        return OptimalLRP(nan, nan, nan, nan, nan)
    if not correct.any():
        return OptimalLRP(1.0, nan, nan, 1.0, nan)
    last_of_ties = np.flatnonzero(np.append(scores[:-1] != scores[1:], True))
    found, kept = np.cumsum(correct)[last_of_ties], last_of_ties + 1
    distance = np.cumsum(np.where(correct, 1 - overlaps, 0.0))[last_of_ties]
    # with n detections kept: true positives + false positives + false negatives = n + objects - true positives
    error = (distance / (1 - iou) + (kept - found) + (objects - found)) / (kept + objects - found)
    best = int(np.argmin(error))
    last = last_of_ties[best]
    return OptimalLRP(
        oLRP=float(error[best]),
        oLRP_loc=float(distance[best] / found[best]),
        oLRP_fp=float(1 - found[best] / kept[best]),
        oLRP_fn=float(1 - found[best] / objects),
        lrp_threshold=float((scores[last] + (scores[last + 1] if last + 1 < len(scores) else 0.0)) / 2),
    )
