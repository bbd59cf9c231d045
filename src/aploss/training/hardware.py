"""MOVED"""

from aploss.training.machine import choose_device, choose_workers  # noqa: F401
