"""MOVED"""

from aploss.detectors.postprocess import (  # noqa: F401
    Detections,
    MultiScale,
    ObjectDetector,
    merge_detections,
)
