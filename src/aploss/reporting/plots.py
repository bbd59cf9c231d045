"""MOVED"""

from aploss.plotting.plots import (  # noqa: F401
    Series,
    bar_plot,
    field_plot,
    line_plot,
    new_plot,
    scatter_plot,
)
