"""MOVED"""

from aploss.detectors.predict import voc_annotation, yolo_rows  # noqa: F401
