"""MOVED"""

from aploss.evaluation.tables import DetectionTable  # noqa: F401
