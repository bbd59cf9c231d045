"""Average precision as COCO and VOC measure it, curves, matching and calibration of scores.

Imports numpy alone; faster-coco-eval and scikit-learn are imported when a COCO metric is computed
or a calibration fitted. Ground truth is a COCO dict or a :class:`GroundTruth`, detections are COCO
results or a :class:`DetectionTable`.
"""

from aploss.evaluation.calibration import (
    Calibration,
    calibrate_detections,
    calibration_report,
    fit_calibration,
)
from aploss.evaluation.coco_metrics import COCO_IOUS, coco_metrics
from aploss.evaluation.curves import Curve, curves_as_dict, precision_recall_curves
from aploss.evaluation.detections import DetectionTable, as_detections
from aploss.evaluation.files import read_detections, read_ground_truth
from aploss.evaluation.ground_truth import GroundTruth, as_ground_truth
from aploss.evaluation.matching import Matches, match_detections
from aploss.evaluation.metrics import Metrics
from aploss.evaluation.reliability import (
    DrawThreshold,
    ReliabilityBin,
    best_f1_threshold,
    equal_mass_edges,
    expected_calibration_error,
    expected_noise,
    reliability,
)
from aploss.evaluation.voc_metrics import match_voc, voc_average_precision, voc_metrics

__all__ = [
    "COCO_IOUS",
    "Calibration",
    "Curve",
    "DetectionTable",
    "DrawThreshold",
    "GroundTruth",
    "Matches",
    "Metrics",
    "ReliabilityBin",
    "as_detections",
    "as_ground_truth",
    "best_f1_threshold",
    "calibrate_detections",
    "calibration_report",
    "coco_metrics",
    "curves_as_dict",
    "equal_mass_edges",
    "expected_calibration_error",
    "expected_noise",
    "fit_calibration",
    "match_detections",
    "match_voc",
    "precision_recall_curves",
    "read_detections",
    "read_ground_truth",
    "reliability",
    "voc_average_precision",
    "voc_metrics",
]
