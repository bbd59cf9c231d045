"""Short runs on a tiny data set."""

from tiny_runs import config_in, make_config, no_page, rectangles, short_detector, spawn  # noqa: F401
