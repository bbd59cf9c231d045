"""Pages of runs, comparisons and studies, each one self-contained file. See ``docs/reports.md``."""
