"""The plots of a comparison: lines with their spread over seeds, and differences between losses."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aploss.reporting.drawing import Series, new_plot, numbers, shorten
from aploss.reporting.plots import line_plot
from aploss.reporting.style import INK, MUTED, LineStyle, line_style, loss_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["comparison_curves", "difference_plot", "mean_and_band", "spread_plot"]

Points = tuple[Sequence[float], Sequence[float]]


def mean_and_band(curves: Sequence[Points]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean of several curves and their standard deviation, where all of them are known.

    Curves need not share their points (evaluations of two runs never fall on the same second):
    each is interpolated at every point of all, between the latest start and the earliest end.

    Args:
        curves: (x, y) of each seed, x ascending.

    Returns:
        x, mean and sample standard deviation (0 for a single curve), float64 [n] each.

    Example:
        >>> x, mean, deviation = mean_and_band([([0, 2], [0, 2]), ([0, 1, 2], [2, 3, 4])])
        >>> x, mean, deviation.round(3)
        (array([0., 1., 2.]), array([1., 2., 3.]), array([1.414, 1.414, 1.414]))
    """
    known = []
    for points in curves:
        x, y = numbers(points[0]), numbers(points[1])
        valid = np.isfinite(x) & np.isfinite(y)
        if valid.any():
            known.append((x[valid], y[valid]))
    if not known:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    start, end = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    grid = np.unique(np.concatenate([x for x, _ in known]))
    grid = grid[(grid >= start) & (grid <= end)]
    values = np.array([np.interp(grid, x, y) for x, y in known])  # [seeds, n]
    deviation = values.std(axis=0, ddof=1) if len(known) > 1 else np.zeros(len(grid))
    return grid, values.mean(axis=0), deviation


def comparison_curves(
    curves: Mapping[str, Sequence[Points]],
    *,
    title: str,
    x_label: str,
    y_label: str = "AP (%)",
    log_y: bool = False,
) -> str:
    """A line for each loss: the mean over seeds, with a band of ± one standard deviation.

    Args:
        curves: loss (or variant) → (x, y) of each seed.
        title, x_label, y_label: texts.
        log_y: a logarithmic y axis.
    """
    series = []
    for index, (name, seeds) in enumerate(curves.items()):
        x, mean, deviation = mean_and_band(seeds)
        band = len(seeds) > 1
        series.append(
            Series(
                name=loss_label(name), x=x, y=mean,
                low=mean - deviation if band else None, high=mean + deviation if band else None,
                style=line_style(name, index), markers=len(x) <= 25,
            )
        )  # fmt: skip
    return line_plot(series, title=title, x_label=x_label, y_label=y_label, log_y=log_y, height=3.4)


def spread_plot(values: Mapping[str, Sequence[float]], *, title: str, x_label: str) -> str:
    """A row for each loss: a mark for every seed, the mean, and ± one standard deviation."""
    with new_plot(title, x_label=x_label, height=_height(len(values))) as plot:
        for row, (name, seeds) in enumerate(values.items()):
            style = line_style(name, row)
            known = numbers(seeds)[np.isfinite(numbers(seeds))]
            if len(known) == 0:
                continue
            deviation = known.std(ddof=1) if len(known) > 1 else 0.0
            span = (known.mean() - deviation, known.mean() + deviation)
            _draw_row(plot.axes, row, known, float(known.mean()), span, style, "{:.1f}")
        _name_rows(plot.axes, [loss_label(name) for name in values])
    return plot.svg


def difference_plot(
    differences: Mapping[str, tuple[Sequence[float], float, float, float]],
    *,
    title: str,
    x_label: str,
) -> str:
    """A row for each paired difference: a mark for every seed, the mean and its interval.

    Args:
        differences: name → (value of each seed, mean, low, high).
        title, x_label: texts.
    """
    with new_plot(title, x_label=x_label, height=_height(len(differences))) as plot:
        plot.axes.axvline(0, color=INK, linewidth=1)
        for row, (seeds, mean, low, high) in enumerate(differences.values()):
            style = LineStyle(INK, "-", "o")
            _draw_row(plot.axes, row, numbers(seeds), mean, (low, high), style, "{:+.1f}")
        _name_rows(plot.axes, list(differences))
    return plot.svg


def _draw_row(
    axes: "Axes",
    row: int,
    seeds: np.ndarray,
    mean: float,
    span: tuple[float, float],
    style: LineStyle,
    number: str,
) -> None:
    axes.plot(span, [row, row], color=style.colour, linewidth=2.4, solid_capstyle="butt")
    axes.plot([mean], [row], color=style.colour, marker=style.marker, markersize=8)
    axes.scatter(
        seeds, np.full(len(seeds), row + 0.24), s=14, marker="o", facecolors="none",
        edgecolors=MUTED, linewidths=1,
    )  # fmt: skip
    axes.annotate(
        number.format(mean), (mean, row), xytext=(0, 6), textcoords="offset points", ha="center",
        va="bottom", fontsize=8.5, color=INK,
    )  # fmt: skip


def _name_rows(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [shorten(name, 28) for name in names], color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _height(rows: int) -> float:
    return 0.95 + 0.42 * max(rows, 1)
