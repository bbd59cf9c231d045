"""Average precision as in Pascal VOC: 11 points until 2009, area under the curve since 2010."""

import numpy as np

from aploss.data.annotations import Annotations
from aploss.errors import ConfigError
from aploss.evaluation.matching import Matches, Pairs, by_category, candidate_pairs, precision_envelope
from aploss.evaluation.metrics import Metrics, make_metrics, mean_over_classes
from aploss.evaluation.tables import Detections, DetectionTable, Truth, as_tables


def voc_metrics(ground_truth: Truth, detections: Detections, *, year: int = 2012, iou: float = 0.5) -> Metrics:
    """Scores detections by the rules of the VOC development kit.

    Boxes are continuous: a box from pixel 1 to pixel 10 of a VOC file, both included, is ``x = 0, width = 10`` here.
    The kit's "+1" in widths is therefore already in them, and the overlaps are the kit's own.

    Args:
        ground_truth: COCO dict or arrays; ``difficult`` and crowd objects are ignored.
        detections: COCO results or a table. There is no limit of detections per image.
        year: up to 2009 the 11-point average, from 2010 the area under the curve.
        iou: smallest overlap of a match.

    Returns:
        ``AP`` at ``iou``, ``AP50`` and ``AP75``; sizes and recalls are COCO's and stay NaN, as does the AP of a class
        without an object that counts.

    Raises:
        ConfigError: an IoU outside (0, 1] or a year without VOC.
        DataError: ground truth or detections that cannot be read.
    """
    if not 0 < iou <= 1:
        raise ConfigError(f"iou is {iou}, expected more than 0 and at most 1")
    if not 2005 <= year <= 2012:
        raise ConfigError(f"year is {year}, expected 2007 (11 points) or 2012 (area)")
    truth, table = as_tables(ground_truth, detections)
    pairs = candidate_pairs(truth, table, crowds_cover=False)
    columns = {}
    for column, threshold in (("AP", iou), ("AP50", 0.5), ("AP75", 0.75)):
        matches = _match(truth, table, pairs, threshold)
        columns[column] = [
            voc_average_precision(matches.correct[rows], objects, year=year)
            for _, objects, rows in by_category(truth, table, matches)
        ]
    return make_metrics(
        truth,
        table,
        lambda k: {column: values[k] for column, values in columns.items()},
        metric="voc07" if year < 2010 else "voc12",
        iou=f"{iou:.2f}",
        **{column: mean_over_classes(values) for column, values in columns.items()},
    )


def match_voc(ground_truth: Truth, detections: Detections, iou: float = 0.5) -> Matches:
    """Matches as the VOC kit does.

    A detection is compared only with the object of its class it overlaps most, whether that one is free or not: the
    first to come is correct, later ones are wrong, and all are ignored where the object is difficult. (COCO would look
    for the next best free object.)
    """
    truth, table = as_tables(ground_truth, detections)
    return _match(truth, table, candidate_pairs(truth, table, crowds_cover=False), iou)


def voc_average_precision(hits: np.ndarray, positives: int, *, year: int) -> float:
    """AP of one class.

    Args:
        hits: whether each detection is correct, highest score first, ignored ones left out, [n].
        positives: objects that count.
        year: up to 2009 the 11-point average, from 2010 the area under the curve.

    Returns:
        AP, or NaN when there is no object.

    Example:
        >>> voc_average_precision(np.array([True, False, True]), 2, year=2012)  # (1 + 2/3) / 2
        0.8333333333333333
    """
    if positives == 0:
        return float("nan")
    if len(hits) == 0:
        return 0.0
    found, best_from_here = precision_envelope(hits)
    if year < 2010:
        # first place with recall >= step / 10, in integers: 3 of 10 objects is recall 0.3, which a float 0.1 * 3 would
        # miss
        places = np.searchsorted(10 * found, np.arange(11) * positives, side="left")
        return float(np.append(best_from_here, 0.0)[places].sum() / 11)
    return float(best_from_here[np.asarray(hits, dtype=bool)].sum() / positives)


def _match(truth: Annotations, table: DetectionTable, pairs: Pairs, iou: float) -> Matches:
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
    objects, first = np.unique(nearest[claims], return_index=True)
    correct = np.zeros(len(table), dtype=bool)
    correct[claims[first]] = True
    found = np.zeros(len(truth), dtype=bool)
    found[objects] = True
    found[nearest[ignored]] = True
    return Matches(
        iou=iou,
        correct=correct,
        ignored=ignored,
        objects=np.where(correct | ignored, nearest, -1),
        overlaps=overlaps,
        found=found,
        counted=truth.counted,
        order=order,
    )
