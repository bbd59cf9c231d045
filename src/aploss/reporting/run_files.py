"""MOVED"""

from aploss.reports.run_files import RunFiles, matches_document, read_run  # noqa: F401
