"""MOVED"""

from aploss.reports.comparison import Comparison, Difference, Entry  # noqa: F401
from aploss.reports.comparison import TrainingCurve as Curve  # noqa: F401
