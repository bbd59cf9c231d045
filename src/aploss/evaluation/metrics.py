"""Average precision by the rules of COCO (by faster-coco-eval) and of Pascal VOC, LRP, and the list of metrics."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isnan, nan
from typing import Any, NamedTuple

import numpy as np

from aploss.data.annotations import Annotations, as_rows
from aploss.errors import ConfigError
from aploss.evaluation import matching
from aploss.evaluation.tables import Detections, DetectionTable, Truth, as_tables


class Average(NamedTuple):
    """What one of COCO's averages measures, and which of the accumulated results it is the mean of."""

    meaning: str
    kind: str = "precision"  # or "recall"
    iou: float | None = None  # None: all IoUs that are measured
    size: str = "all"  # of the objects
    limit: int | None = None  # detections per image and class; None: as many as are allowed


# To add a metric, add it here and as a field of :class:`Metrics`.
COCO_AVERAGES = {
    "AP": Average("mean over IoU 0.50 to 0.95"),
    "AP50": Average("IoU 0.50", iou=0.5),
    "AP75": Average("IoU 0.75", iou=0.75),
    "APs": Average("small objects", size="small"),
    "APm": Average("medium objects", size="medium"),
    "APl": Average("large objects", size="large"),
    "AR": Average("largest recall, mean over IoU 0.50 to 0.95", "recall"),
    "AR1": Average("with 1 detection per image and class", "recall", limit=1),
    "AR10": Average("with 10 detections per image and class", "recall", limit=10),
    "ARs": Average("small objects", "recall", size="small"),
    "ARm": Average("medium objects", "recall", size="medium"),
    "ARl": Average("large objects", "recall", size="large"),
}
# The metrics that logs, reports, trackers and comparisons show: name → what it measures.
METRICS = {name: average.meaning for name, average in COCO_AVERAGES.items() if average.kind == "precision"}
METRICS |= {"voc_AP50": "by the rules of Pascal VOC", "oLRP": "error at the best threshold, lower is better"}
LOWER_IS_BETTER = ("oLRP",)
HEADLINE_METRICS = ("AP", "AP50", "AP75")  # where there is room for three
COCO_IOUS = np.linspace(0.5, 0.95, 10)


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Average precision and recall, NaN where a value is undefined, such as ``APs`` without a small object.

    Attributes:
        metric: ``"coco"``, ``"voc07"`` or ``"voc12"``.
        iou: the IoU that ``AP`` was measured at: ``"0.50:0.95"``, or a single one.
        images: number of images evaluated.
        objects: number of objects that count, which excludes crowds and difficult ones.
        detections: number of detections scored.
        AP, AP50, AP75, APs, APm, APl: average precision, mean over the classes that have objects; small objects are
            below 32² pixels, large ones above 96².
        AR, AR1, AR10, ARs, ARm, ARl: largest recall, mean over IoUs and classes.
        oLRP, oLRP_loc, oLRP_fp, oLRP_fn: optimal LRP error at IoU 0.5 and its parts, mean over classes, lower is
            better; see :func:`~aploss.evaluation.optimal_lrp`.
        per_class: class name → the same averages, with ``objects``, ``detections`` and ``lrp_threshold``.

    Example:
        >>> metrics = Metrics(metric="voc12", iou="0.50", images=1, objects=2, detections=3, AP=0.5)
        >>> metrics.as_dict()["AP"], metrics.as_dict()["APs"]
        (0.5, None)
    """

    metric: str
    iou: str
    images: int
    objects: int
    detections: int
    AP: float = nan
    AP50: float = nan
    AP75: float = nan
    APs: float = nan
    APm: float = nan
    APl: float = nan
    AR: float = nan
    AR1: float = nan
    AR10: float = nan
    ARs: float = nan
    ARm: float = nan
    ARl: float = nan
    oLRP: float = nan  # noqa: N815
    oLRP_loc: float = nan  # noqa: N815
    oLRP_fp: float = nan  # noqa: N815
    oLRP_fn: float = nan  # noqa: N815
    per_class: dict[str, dict[str, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The metrics as plain values for JSON, with ``None`` in place of NaN."""
        return {name: _none_for_nan(value) for name, value in asdict(self).items()}

    def table(self) -> str:
        """A text table with a row per class and one for the mean; undefined columns are omitted."""
        rows: dict[str, dict[str, Any]] = {**self.per_class, "mean": vars(self)}
        columns = [name for name in (*METRICS, "AR") if any(not isnan(row.get(name, nan)) for row in rows.values())]
        width = max(len("class"), *map(len, rows))
        lines = [f"{'class':<{width}} {'objects':>8} {'detections':>10}" + "".join(f" {name:>6}" for name in columns)]
        for name, row in rows.items():
            values = [row.get(column, nan) for column in columns]
            cells = "".join(f" {'-' if isnan(value) else f'{value:.3f}':>6}" for value in values)
            lines.append(f"{name:<{width}} {row['objects']:>8} {row['detections']:>10}{cells}")
        ruler = "-" * len(lines[0])
        return "\n".join([lines[0], ruler, *lines[1:-1], ruler, lines[-1]])


def _none_for_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _none_for_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and isnan(value) else value


def _make_metrics(
    truth: Annotations, table: DetectionTable, averages: Sequence[dict[str, float]], **how: str
) -> Metrics:
    """Metrics of the averages of each class, followed by those over all classes, with the counts."""
    objects = matching.count_per_category(truth, truth.category_ids[truth.counted]).tolist()
    found = matching.count_per_category(truth, table.category_ids).tolist()
    per_class = {
        name: {"objects": objects[k], "detections": found[k], **averages[k]}
        for k, name in enumerate(truth.categories.values())
    }
    counts = {"images": len(truth.images), "objects": sum(objects), "detections": len(table)}
    return Metrics(**how, **counts, **averages[-1], per_class=per_class)  # type: ignore[arg-type]


def coco_metrics(
    ground_truth: Truth, detections: Detections, *, iou: float | None = None, max_detections: int = 100
) -> Metrics:
    """Returns COCO's metrics, equal to those of pycocotools.

    ``difficult`` objects, which COCO does not have, are treated as COCO treats objects outside the size range that is
    measured: missing one costs nothing, a detection matched to it is neither right nor wrong, further detections of it
    are wrong.

    Args:
        ground_truth: COCO dict or arrays.
        detections: COCO results or a table.
        iou: if given, ``AP``, ``AR`` and the size metrics are measured at this IoU instead of 0.50:0.05:0.95.
        max_detections: number of detections per image and class that are considered, best first.

    Raises:
        ConfigError: if ``iou`` or ``max_detections`` is out of range.
        DataError: if the ground truth or the detections are invalid.

    Example:
        >>> box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 10]}
        >>> truth = {"images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}], "annotations": [box]}
        >>> found = [{**box, "bbox": [0, 0, 10, 8], "score": 0.6}]
        >>> round(coco_metrics(truth, found).AP, 3)  # IoU 0.8: right at 7 of the 10 IoUs
        0.7
    """
    _check_iou(iou)
    if max_detections < 1:
        raise ConfigError(f"max_detections is {max_detections}, expected at least 1")
    truth, table = as_tables(ground_truth, detections)
    evaluation = None
    if truth.counted.any():
        ious = COCO_IOUS if iou is None else np.unique([0.5, 0.75, iou])
        # faster-coco-eval counts in 32 bits; no image has more detections than there are
        evaluation = _evaluate(truth, table, ious, min(max_detections, max(1, len(table))))
    classes = [*(slice(k, k + 1) for k in range(len(truth.categories))), slice(None)]
    averages = [_averages(evaluation, iou, one) for one in classes]
    lrp = [one._asdict() for one in optimal_lrp(truth, table).values()]
    means = {name: _mean([one[name] for one in lrp]) for name in OptimalLRP._fields if name != "lrp_threshold"}
    averages = [{**row, **more} for row, more in zip(averages, [*lrp, means], strict=True)]
    return _make_metrics(truth, table, averages, metric="coco", iou="0.50:0.95" if iou is None else f"{iou:.2f}")


def _check_iou(iou: float | None) -> None:
    if iou is not None and not 0 < iou <= 1:
        raise ConfigError(f"iou is {iou}, expected more than 0 and at most 1")


def _evaluate(truth: Annotations, table: DetectionTable, ious: np.ndarray, max_detections: int) -> Any:
    """Runs faster-coco-eval and returns its evaluation object."""
    from faster_coco_eval.core.faster_eval_api import COCOeval_faster

    # an area outside every size range makes the evaluation ignore an object
    areas = np.where(truth.difficult, -1.0, truth.areas)
    objects = _coco_api(truth, truth, areas, iscrowd=truth.crowd.astype(int))
    areas = table.xywh[:, 2] * table.xywh[:, 3]
    detections = _coco_api(truth, table, areas, iscrowd=areas * 0, score=table.scores)
    evaluation = COCOeval_faster(objects, detections, "bbox", print_function=lambda *_: None)
    evaluation.params.iouThrs = ious
    evaluation.params.maxDets = sorted({1, min(10, max_detections), max_detections})
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation


def _coco_api(truth: Annotations, table: Annotations | DetectionTable, areas: np.ndarray, **columns: np.ndarray) -> Any:
    """Objects or detections as faster-coco-eval's ``COCO``.

    Images, categories and annotations are numbered from 1 in the order of their own ids: id 0 would mean "unmatched",
    and ties are broken in the order of image ids.
    """
    from faster_coco_eval import COCO

    rows = as_rows(
        id=np.arange(1, len(table) + 1),
        image_id=np.searchsorted(truth.images, table.image_ids) + 1,
        category_id=np.searchsorted(list(truth.categories), table.category_ids) + 1,
        bbox=table.xywh,
        area=areas,
        **columns,
    )
    images = [{"id": index} for index in range(1, len(truth.images) + 1)]
    categories = [{"id": index, "name": ""} for index in range(1, len(truth.categories) + 1)]
    return COCO({"images": images, "categories": categories, "annotations": rows})


def _averages(evaluation: Any, iou: float | None, classes: slice) -> dict[str, float]:
    """Each of ``COCO_AVERAGES`` over some classes; NaN where no object counts."""
    values = dict.fromkeys(COCO_AVERAGES, nan)
    for name, average in COCO_AVERAGES.items() if evaluation is not None else ():
        params = evaluation.params
        wanted = average.iou or iou
        thresholds = slice(None) if wanted is None else np.isclose(params.iouThrs, wanted)
        area = params.areaRngLbl.index(average.size)
        limit = params.maxDets.index(min(average.limit or params.maxDets[-1], params.maxDets[-1]))
        # precision [T, R, K, A, M], recall [T, K, A, M]; -1 where no object counts
        chosen = evaluation.eval[average.kind][thresholds][..., classes, area, limit]
        values[name] = _mean(np.where(chosen > -1, chosen, nan))
    return values


def _mean(values: np.ndarray | Sequence[float]) -> float:
    """Mean of the values that are not NaN; NaN if there is none."""
    known = np.asarray(values)[~np.isnan(values)]
    return float(known.mean()) if known.size else nan


def voc_metrics(ground_truth: Truth, detections: Detections, *, year: int = 2012, iou: float = 0.5) -> Metrics:
    """Computes average precision by the rules of the VOC development kit.

    Boxes are continuous: a box from pixel 1 to pixel 10 of a VOC file, both included, is ``x = 0, width = 10`` here.
    Widths therefore already contain the kit's "+1", and overlaps are equal to the kit's.

    Args:
        ground_truth: COCO dict or arrays; ``difficult`` and crowd objects are ignored.
        detections: COCO results or a table, without a limit per image.
        year: 2009 or earlier for the 11-point average, 2010 or later for the area under the curve.
        iou: smallest overlap of a match.

    Returns:
        Metrics with ``AP`` at ``iou``, ``AP50`` and ``AP75``; all others are NaN.

    Example:
        >>> box = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 10]}
        >>> truth = {"images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}], "annotations": [box]}
        >>> metrics = voc_metrics(truth, [{**box, "bbox": [0, 0, 10, 7], "score": 0.6}])
        >>> metrics.AP50, metrics.AP75
        (1.0, 0.0)
    """
    _check_iou(iou)
    if not 2005 <= year <= 2012:
        raise ConfigError(f"year is {year}, expected 2007 (11 points) or 2012 (area)")
    truth, table = as_tables(ground_truth, detections)
    columns = {}
    for column, threshold in (("AP", iou), ("AP50", 0.5), ("AP75", 0.75)):
        matches = matching.match_voc(truth, table, threshold)
        found = matching.by_category(truth, table, matches)
        values = [_voc_average_precision(matches.correct[rows], objects, year) for _, objects, rows in found]
        columns[column] = [*values, _mean(values)]
    averages = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return _make_metrics(truth, table, averages, metric="voc07" if year < 2010 else "voc12", iou=f"{iou:.2f}")


def _voc_average_precision(hits: np.ndarray, positives: int, year: int) -> float:
    """AP of a class, NaN without objects; ``hits`` [n]: whether each detection is correct, best first."""
    if positives == 0:
        return nan
    found, best_from_here = matching.precision_envelope(hits)
    if year < 2010:
        # recall >= step / 10 in integers: 3 of 10 objects reach recall 0.3, but not the float 0.1 * 3
        places = np.searchsorted(10 * found, np.arange(11) * positives, side="left")
        return float(np.append(best_from_here, 0.0)[places].sum() / 11)
    return float(best_from_here[np.asarray(hits, dtype=bool)].sum() / positives)


class OptimalLRP(NamedTuple):
    """oLRP of a class, its parts at the optimal threshold, and that threshold.

    All are NaN if no object of the class counts. If no detection is correct, oLRP is 1 and localisation, false
    positives and threshold are NaN.

    Attributes:
        oLRP: the error, in [0, 1].
        oLRP_loc: mean of 1 - IoU over the true positives.
        oLRP_fp, oLRP_fn: 1 - precision, 1 - recall.
        lrp_threshold: halfway between the last score that is kept and the next lower one.

    Example:
        >>> OptimalLRP(oLRP=0.2, oLRP_loc=0.1, oLRP_fp=0.0, oLRP_fn=0.0, lrp_threshold=0.3).oLRP
        0.2
    """

    oLRP: float  # noqa: N815
    oLRP_loc: float  # noqa: N815
    oLRP_fp: float  # noqa: N815
    oLRP_fn: float  # noqa: N815
    lrp_threshold: float


def optimal_lrp(
    ground_truth: Truth, detections: Detections, *, matches: matching.Matches | None = None
) -> dict[str, OptimalLRP]:
    """Computes localisation recall precision (Oksuz et al., ECCV 2018, TPAMI 2022) of each class.

    AP rates a ranking; LRP rates the detections that remain above a score threshold s, including how well they fit:

        LRP(s) = (sum over true positives of (1 - IoU) / (1 - tau) + false positives + false negatives) / their number

    It is 0 for perfect detections and 1 if nothing is found. oLRP is its minimum over s, and the threshold that attains
    it is the one to deploy the class with.

    Args:
        ground_truth: COCO dict or arrays; crowd and difficult objects are ignored.
        detections: COCO results or a table, without a score threshold.
        matches: defaults to :func:`match_detections` at IoU 0.5, which is tau.

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
    matches = matches or matching.match_detections(truth, table)
    return {
        name: _optimum(table.scores[rows], matches.correct[rows], matches.overlaps[rows], objects, matches.iou)
        for name, objects, rows in matching.by_category(truth, table, matches)
    }


def _optimum(scores: np.ndarray, correct: np.ndarray, overlaps: np.ndarray, objects: int, iou: float) -> OptimalLRP:
    """oLRP of the detections of a class, best first, without ignored ones."""
    if objects == 0:
        return OptimalLRP(nan, nan, nan, nan, nan)
    if not correct.any():
        return OptimalLRP(1.0, nan, nan, 1.0, nan)
    thresholds, kept = matching.score_thresholds(scores)
    found, distance = np.cumsum(correct)[kept - 1], np.cumsum(np.where(correct, 1 - overlaps, 0.0))[kept - 1]
    # with n detections kept: true positives + false positives + false negatives = n + objects - true positives
    error = (distance / (1 - iou) + (kept - found) + (objects - found)) / (kept + objects - found)
    best = int(np.argmin(error))
    return OptimalLRP(
        oLRP=float(error[best]),
        oLRP_loc=float(distance[best] / found[best]),
        oLRP_fp=float(1 - found[best] / kept[best]),
        oLRP_fn=float(1 - found[best] / objects),
        lrp_threshold=float(thresholds[best]),
    )
