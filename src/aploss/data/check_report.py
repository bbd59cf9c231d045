"""MOVED"""

from aploss.data.check import check_report  # noqa: F401
