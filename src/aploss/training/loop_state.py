"""MOVED"""

from aploss.training.distributed import LostProcessError, TrainingInterruptedError  # noqa: F401
