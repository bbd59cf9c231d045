"""Average precision as COCO and VOC measure it, LRP, curves, matching and calibration of scores.

faster-coco-eval is imported when a COCO metric is computed. Ground truth is a COCO dict or arrays
(``dataset.annotations`` of a loaded dataset, or :func:`read_ground_truth`), detections are COCO results or a
:class:`DetectionTable`.
"""

from aploss.evaluation.calibration import (
    Calibration,
    calibrate_detections,
    calibration_report,
    expected_calibration_error,
    fit_calibration,
)
from aploss.evaluation.matching import Curve, Matches, match_detections, match_voc, precision_recall_curves
from aploss.evaluation.metrics import (
    COCO_IOUS,
    HEADLINE_METRICS,
    LOWER_IS_BETTER,
    METRICS,
    Metrics,
    OptimalLRP,
    coco_metrics,
    optimal_lrp,
    voc_metrics,
)
from aploss.evaluation.tables import DetectionTable, read_detections, read_ground_truth

__all__ = [
    "COCO_IOUS", "HEADLINE_METRICS", "LOWER_IS_BETTER", "METRICS", "Calibration", "Curve", "DetectionTable",
    "Matches", "Metrics", "OptimalLRP", "calibrate_detections", "calibration_report", "coco_metrics",
    "expected_calibration_error", "fit_calibration", "match_detections", "match_voc", "optimal_lrp",
    "precision_recall_curves", "read_detections", "read_ground_truth", "voc_metrics",
]  # fmt: skip
