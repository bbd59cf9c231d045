"""MOVED"""

from aploss.evaluation.coco import coco_metrics  # noqa: F401
