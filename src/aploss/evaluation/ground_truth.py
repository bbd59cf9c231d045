"""MOVED"""

from aploss.evaluation.tables import GroundTruth, as_ground_truth  # noqa: F401
