"""MOVED"""

from aploss.reports.run_report import write_run_report  # noqa: F401
