"""Average precision as COCO and VOC measure it: as attributes, as a dict for JSON and as a table for people.

COCO's numbers are computed by faster-coco-eval; VOC's are 11 points until 2009, the area under the curve since 2010.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from math import isnan, nan
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from aploss.data.annotations import Annotations, as_rows
from aploss.errors import ConfigError
from aploss.evaluation.matching import (
    assign_voc,
    by_category,
    candidate_pairs,
    objects_per_category,
    precision_envelope,
)
from aploss.evaluation.tables import Detections, DetectionTable, Truth, as_tables

# The numbers that logs, reports, trackers and comparisons show, with what each one measures. Adding a metric means
# adding it here and computing it in :class:`Metrics`.
METRICS = {
    "AP": "mean over IoU 0.50 to 0.95",
    "AP50": "IoU 0.50",
    "AP75": "IoU 0.75",
    "APs": "small objects",
    "APm": "medium objects",
    "APl": "large objects",
    "voc_AP50": "by the rules of Pascal VOC",
}
HEADLINE_METRICS = ("AP", "AP50", "AP75")  # where there is room for three
TABLE_COLUMNS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR")
COCO_IOUS = np.linspace(0.5, 0.95, 10)

# value → (precision or recall, IoU, size of the objects, detections per image and class)
AVERAGES: dict[str, tuple[str, float | None, str, int | None]] = {
    "AP": ("precision", None, "all", None),
    "AP50": ("precision", 0.5, "all", None),
    "AP75": ("precision", 0.75, "all", None),
    "APs": ("precision", None, "small", None),
    "APm": ("precision", None, "medium", None),
    "APl": ("precision", None, "large", None),
    "AR1": ("recall", None, "all", 1),
    "AR10": ("recall", None, "all", 10),
    "AR": ("recall", None, "all", None),
    "ARs": ("recall", None, "small", None),
    "ARm": ("recall", None, "medium", None),
    "ARl": ("recall", None, "large", None),
}


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Average precision and recall. NaN where a value is not defined, such as ``APs`` where no small object counts.

    Attributes:
        metric: ``"coco"``, ``"voc07"`` or ``"voc12"``.
        iou: what ``AP`` was measured at: ``"0.50:0.95"``, or one IoU.
        images: images evaluated.
        objects: objects that count, so without crowds and difficult ones.
        detections: detections scored.
        AP: average precision, mean over the classes that have objects.
        AP50: at IoU 0.5.
        AP75: at IoU 0.75.
        APs: of objects below 32² pixels.
        APm: of objects between 32² and 96² pixels.
        APl: of objects above 96² pixels.
        AR: largest recall with all detections allowed per image, mean over IoUs and classes.
        AR1: the same with 1 detection per image and class.
        AR10: the same with 10.
        ARs: ``AR`` of small objects.
        ARm: of medium ones.
        ARl: of large ones.
        per_class: class name → the same values, and ``objects`` and ``detections``.

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
    per_class: dict[str, dict[str, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no NaN: ``None`` stands where a value is undefined."""
        return _without_nan(asdict(self))  # type: ignore[no-any-return]

    def table(self) -> str:
        """One row per class and one for the mean, with the columns that are defined anywhere."""
        rows: dict[str, dict[str, Any]] = {**self.per_class, "mean": vars(self)}
        columns = [name for name in TABLE_COLUMNS if any(not isnan(row.get(name, nan)) for row in rows.values())]
        width = max(len("class"), *map(len, rows))
        header = f"{'class':<{width}} {'objects':>8} {'detections':>10}"
        header += "".join(f" {name:>6}" for name in columns)
        lines = [header, "-" * len(header)]
        for name, row in rows.items():
            if name == "mean":
                lines.append(lines[1])
            line = f"{name:<{width}} {row['objects']:>8} {row['detections']:>10}"
            values = [row.get(column, nan) for column in columns]
            lines.append(line + "".join(f" {'-' if isnan(one) else f'{one:.3f}':>6}" for one in values))
        return "\n".join(lines)


def make_metrics(
    truth: Annotations, table: DetectionTable, of_class: Callable[[int], dict[str, float]], **values: Any
) -> Metrics:
    """The values with the counts that go with them; ``of_class`` gives those of the k-th class."""
    objects = objects_per_category(truth, truth.category_ids[truth.counted]).tolist()
    found = objects_per_category(truth, table.category_ids).tolist()
    return Metrics(
        images=len(truth.images),
        objects=sum(objects),
        detections=len(table),
        per_class={
            name: {"objects": objects[k], "detections": found[k], **of_class(k)}
            for k, name in enumerate(truth.categories.values())
        },
        **values,
    )


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and isnan(value) else value


# --- COCO -------------------------------------------------------------------------------------


def coco_metrics(
    ground_truth: Truth, detections: Detections, *, iou: float | None = None, max_detections: int = 100
) -> Metrics:
    """Scores detections by the rules of COCO; the numbers are those of pycocotools.

    ``difficult`` objects, which COCO does not know, are handled as COCO handles an object outside the size range being
    measured: it costs nothing to miss one, a detection matched with it counts neither as right nor as wrong, further
    detections on it are wrong.

    Args:
        ground_truth: COCO dict or arrays. Arrays that are measured on again and again are made ready once.
        detections: COCO results or a table.
        iou: measure ``AP``, ``AR`` and the sizes at this IoU alone, not at 0.50:0.05:0.95.
        max_detections: how many detections of an image and class are looked at, best first.

    Raises:
        ConfigError: ``iou`` or ``max_detections`` out of range.
        DataError: ground truth or detections that cannot be read.

    Example:
        >>> truth = {
        ...     "images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}],
        ...     "annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 10]}],
        ... }
        >>> found = [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 10, 8], "score": 0.6}]
        >>> round(coco_metrics(truth, found).AP, 3)  # IoU 0.8: right at 7 of the 10 IoUs
        0.7
    """
    if iou is not None and not 0 < iou <= 1:
        raise ConfigError(f"iou is {iou}, expected more than 0 and at most 1")
    if max_detections < 1:
        raise ConfigError(f"max_detections is {max_detections}, expected at least 1")
    truth, table = as_tables(ground_truth, detections)
    ious = COCO_IOUS if iou is None else np.unique([0.5, 0.75, iou])
    # The tool counts in 32 bits; no image has more detections than there are.
    limit = min(max_detections, max(1, len(table)))
    measured = _evaluate(truth, table, ious, limit) if truth.counted.any() else None
    return make_metrics(
        truth,
        table,
        lambda k: _averages(measured, iou, slice(k, k + 1)),
        metric="coco",
        iou="0.50:0.95" if iou is None else f"{iou:.2f}",
        **_averages(measured, iou, slice(None)),
    )


def _evaluate(truth: Annotations, table: DetectionTable, ious: np.ndarray, max_detections: int) -> Any:
    """A faster-coco-eval object that has run."""
    from faster_coco_eval.core.faster_eval_api import COCOeval_faster

    if truth not in _PREPARED:
        # an area outside every size range is how the tool is told to ignore an object
        areas = np.where(truth.difficult, -1.0, truth.areas)
        _PREPARED[truth] = _tool_dataset(truth, truth, areas, iscrowd=truth.crowd.astype(int))
    areas = table.xywh[:, 2] * table.xywh[:, 3]
    detections = _tool_dataset(truth, table, areas, iscrowd=areas * 0, score=table.scores)
    evaluation = COCOeval_faster(_PREPARED[truth], detections, "bbox", print_function=lambda *_: None)
    evaluation.params.iouThrs = ious
    evaluation.params.maxDets = sorted({1, min(10, max_detections), max_detections})
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation


# The tool's own form of a ground truth, made at its first use and kept as long as it is.
_PREPARED: "WeakKeyDictionary[Annotations, Any]" = WeakKeyDictionary()


def _tool_dataset(
    truth: Annotations, table: Annotations | DetectionTable, areas: np.ndarray, **columns: np.ndarray
) -> Any:
    """Objects or detections as the tool takes them.

    Images, categories and annotations are counted from 1, in the order of their own ids: the tool takes id 0 for "not
    matched" and breaks ties in the order of image ids.
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
    """Each of ``AVERAGES`` over some classes; NaN where no object counts."""
    if evaluation is None:
        return dict.fromkeys(AVERAGES, nan)
    values = {}
    for name, (kind, own_iou, size, limit) in AVERAGES.items():
        measured = evaluation.eval[kind]  # precision [T, R, K, A, M], recall [T, K, A, M]
        thresholds = slice(None)
        if (wanted := own_iou or iou) is not None:
            thresholds = np.isclose(evaluation.params.iouThrs, wanted)
        area = evaluation.params.areaRngLbl.index(size)
        limits = evaluation.params.maxDets
        most = limits.index(min(limit or limits[-1], limits[-1]))
        chosen = measured[thresholds][..., classes, area, most]
        defined = chosen[chosen > -1]  # the tool's mark for "no such object"
        values[name] = float(defined.mean()) if defined.size else nan
    return values


# --- Pascal VOC -------------------------------------------------------------------------------


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
        matches = assign_voc(truth, table, pairs, threshold)
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
        **{column: _mean_of_defined(values) for column, values in columns.items()},
    )


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


def _mean_of_defined(values: Iterable[float]) -> float:
    """Mean of the values that are defined; NaN when none is."""
    defined = [value for value in values if not isnan(value)]
    return sum(defined) / len(defined) if defined else nan
