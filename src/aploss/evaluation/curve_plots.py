"""Precision-recall curves as SVG drawings."""

import io
from collections.abc import Mapping

import numpy as np

from aploss.evaluation.curves import Curve
from aploss.reporting.drawing import add_legend, new_plot, shorten
from aploss.reporting.style import (
    GRID,
    INK,
    LOSS_STYLES,
    MUTED,
    LineStyle,
    class_colour,
    plot_style,
)

__all__ = ["plot_classes_together", "plot_each_class"]

MOST_NAMED = len(LOSS_STYLES)  # more colours and dashes than that cannot be told apart


def plot_classes_together(curves: Mapping[str, Curve], iou: float) -> str:
    """All classes and their mean in one drawing.

    With more classes than colours each class is a pale line, and only the mean, the best and the
    worst class are named.

    Args:
        curves: class → curve, at least one.
        iou: the IoU they were measured at, for the title.

    Returns:
        The SVG document.
    """
    ranked = sorted(curves, key=lambda name: -curves[name].average_precision)
    many = len(ranked) > MOST_NAMED
    named = [ranked[0], ranked[-1]] if many else ranked
    dashes = [style.dashes for style in LOSS_STYLES.values()]
    mean = np.mean([curve.precision for curve in curves.values()], axis=0)
    entries = {f"mean of classes {mean.mean():.3f}": LineStyle(INK, "-", "")}
    with new_plot(f"Precision and recall at IoU {iou:g}", x_label="recall", y_label="precision",
                  width=5.6, height=4.4) as plot:  # fmt: skip
        for name in ranked if many else []:
            curve = curves[name]
            plot.axes.plot(curve.recall, curve.precision, color=MUTED, alpha=0.25, linewidth=0.8)
        for place, name in enumerate(named):
            curve, style = curves[name], LineStyle(class_colour(place), dashes[place], "")
            plot.axes.plot(
                curve.recall, curve.precision, color=style.colour, linestyle=style.dashes
            )
            entries[f"{shorten(name)} {curve.average_precision:.3f}"] = style
        if many:
            entries[f"{len(ranked) - len(named)} other classes"] = LineStyle(GRID, "-", "")
        if len(curves) > 1:
            plot.axes.plot(curve.recall, mean, color=INK, linewidth=2.4)
        else:
            entries.pop(next(iter(entries)))
        plot.axes.set(xlim=(0, 1), ylim=(0, 1.02))
        add_legend(plot.figure, entries, always=True)
    return plot.svg


def plot_each_class(curves: Mapping[float, Mapping[str, Curve]]) -> str:
    """A small panel for each class, with a curve for each IoU: the looser the box, the darker.

    Args:
        curves: IoU → class → curve; the same classes, at least one, for each IoU.

    Returns:
        The SVG document.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = list(next(iter(curves.values())))
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    width, height = max(4.8, 2.3 * columns + 0.6), 1.9 * rows + 1.1
    shades = colormaps["viridis"](np.linspace(0.0, 0.82, len(curves)))
    with plot_style():
        # placed by hand and without shared axes: both take half a minute for 80 panels
        figure = Figure(figsize=(width, height))
        figure.set_layout_engine("none")
        same = {"xlim": (0, 1), "ylim": (0, 1.02), "yticks": [0, 0.5, 1]}
        places = {
            "left": 0.6 / width, "right": 1 - 0.15 / width, "wspace": 0.12,
            "bottom": 0.8 / height, "top": 1 - 0.3 / height, "hspace": 0.28,
        }  # fmt: skip
        panels = figure.subplots(rows, columns, squeeze=False, subplot_kw=same, gridspec_kw=places)
        for panel, name in zip(panels.flat, names, strict=False):
            for (iou, of_class), shade in zip(curves.items(), shades, strict=True):
                curve = of_class[name]
                panel.plot(curve.recall, curve.precision, color=shade, label=f"IoU {iou:g}")
            panel.set_title(shorten(name))
            panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            panel.tick_params(labelleft=False, labelbottom=False)
        for panel in panels[:, 0]:
            panel.tick_params(labelleft=True)
        for panel in panels.flat[max(0, len(names) - columns) : len(names)]:
            panel.tick_params(labelbottom=True)
        for panel in panels.flat[len(names) :]:
            panel.set_visible(False)
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="lower left", ncols=len(labels), handlelength=1.2, columnspacing=1
        )
        figure.supxlabel("recall", y=0.38 / height, va="bottom", fontsize=9.5)
        figure.supylabel("precision", fontsize=9.5)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
