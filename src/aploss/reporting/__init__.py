"""Result files in, pages and plots out; knows no torch. See ``docs/reports.md``."""
