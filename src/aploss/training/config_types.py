"""MOVED"""

from aploss.training.config import Setting, settings_of  # noqa: F401
