"""MOVED"""

from aploss.evaluation.matching import (  # noqa: F401
    Curve,
    curves_as_dict,
    precision_recall_curves,
)
