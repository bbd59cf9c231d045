"""MOVED"""

from aploss.training.run_folder import MetricsLog, read_rows  # noqa: F401
