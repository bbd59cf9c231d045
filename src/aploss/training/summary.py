"""MOVED"""

from aploss.training.run_folder import Summary  # noqa: F401
