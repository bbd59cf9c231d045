"""MOVED"""

from aploss.training.splits import RunData, load_run_data  # noqa: F401
