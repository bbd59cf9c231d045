"""MOVED"""

from aploss.evaluation.voc import voc_metrics  # noqa: F401
