"""MOVED"""

from aploss.reports.run_pictures import side_by_side  # noqa: F401
