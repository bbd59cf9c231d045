"""Short runs on a tiny dataset."""

from tiny_runs import config_in, finished_run, make_config, no_page, rectangles, short_detector, spawn  # noqa: F401
