"""MOVED"""

from pathlib import Path

from aploss.reports.comparison import Comparison, write_comparison_report


def write_comparison(folder: str | Path, comparison: Comparison) -> Path:
    return write_comparison_report(comparison, folder)
