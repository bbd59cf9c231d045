"""Average precision and recall as in COCO, computed by faster-coco-eval."""

from math import nan
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from aploss.data.annotations import Annotations, as_rows
from aploss.errors import ConfigError
from aploss.evaluation.metrics import Metrics, make_metrics
from aploss.evaluation.tables import Detections, DetectionTable, Truth, as_tables

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
