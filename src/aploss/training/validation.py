"""MOVED"""

from aploss.training.evaluate import Split, detect_split  # noqa: F401
