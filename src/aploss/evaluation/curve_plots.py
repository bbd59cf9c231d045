"""MOVED"""

from aploss.plotting.plots import precision_recall_panels as plot_each_class  # noqa: F401
from aploss.plotting.plots import precision_recall_plot as plot_classes_together  # noqa: F401
