"""Data in, SVG text out: the kinds of drawing that all pages share.

Every function returns a complete SVG document with a light background, which can be saved as a
file; :mod:`aploss.reporting.page` embeds it so that it follows dark mode. The same data gives
the same text, byte for byte. For a drawing of another kind, use :func:`new_plot`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from aploss.reporting.drawing import (
    HEIGHT,
    WIDTH,
    Series,
    add_legend,
    draw_series,
    logarithmic,
    new_plot,
    numbers,
    series_style,
    shorten,
)
from aploss.reporting.style import INK, MUTED, LineStyle, line_style, loss_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Series", "bar_plot", "field_plot", "line_plot", "new_plot", "scatter_plot"]


def line_plot(
    series: Sequence[Series],
    *,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    log_x: bool = False,
    log_y: bool = False,
    whole_x: bool = False,
    y_range: tuple[float | None, float | None] | None = None,
    level: tuple[str, float] | None = None,
    width: float = WIDTH,
    height: float = HEIGHT,
) -> str:
    """Lines with optional bands.

    Args:
        series: drawn in order; the legend stands below the axes when there are several.
        title, x_label, y_label: texts.
        log_x, log_y: logarithmic axes.
        whole_x: only whole numbers beside the x axis, for steps.
        y_range: limits of the y axis; None for an automatic end.
        level: a horizontal line (name, y), such as a bound or the paper's number.
        width, height: in inches.

    Returns:
        The SVG document.

    Example:
        >>> line_plot([Series(name="ap", x=[1, 2], y=[0.5, 0.7])], title="AP").count("<svg")
        1
    """
    with new_plot(title, x_label=x_label, y_label=y_label, width=width, height=height) as plot:
        draw_series(plot.axes, series)
        if level is not None:
            plot.axes.axhline(level[1], color=INK, linewidth=1, linestyle=(0, (2, 2)))
        _scales(plot.axes, log_x=log_x, log_y=log_y)
        if whole_x:
            plot.axes.locator_params(axis="x", integer=True)
        if y_range is not None:
            plot.axes.set_ylim(*y_range)
        entries = {
            loss_label(one.name): series_style(one, index) for index, one in enumerate(series)
        }
        if level is not None:
            entries[level[0]] = LineStyle(INK, (0, (2, 2)), "")
        add_legend(plot.figure, entries, markers=any(one.markers for one in series))
    return plot.svg


def scatter_plot(
    groups: Sequence[Series],
    *,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    log_x: bool = False,
    log_y: bool = False,
    diagonal: bool = False,
    width: float = WIDTH,
    height: float = HEIGHT,
) -> str:
    """Clouds of points, one style for each group; ``diagonal`` adds the line y = x.

    Example:
        >>> scatter_plot([Series(name="steps", x=[1, 2], y=[2, 1])], diagonal=True).count("<svg")
        1
    """
    with new_plot(title, x_label=x_label, y_label=y_label, width=width, height=height) as plot:
        for index, group in enumerate(groups):
            style = series_style(group, index)
            plot.axes.scatter(
                numbers(group.x), numbers(group.y), s=16, marker=style.marker, color=style.colour,
                alpha=0.75, linewidths=0,
            )  # fmt: skip
        _scales(plot.axes, log_x=log_x, log_y=log_y)
        if diagonal:
            plot.axes.axline(
                (1, 1), (2, 2), color=MUTED, linewidth=1, linestyle=(0, (2, 2)), zorder=0.5
            )
        entries = {
            loss_label(group.name): series_style(group, index) for index, group in enumerate(groups)
        }
        add_legend(plot.figure, entries, markers=True, lines=False)
    return plot.svg


def field_plot(
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    values: np.ndarray,
    *,
    arrows: tuple[np.ndarray, np.ndarray] | None = None,
    paths: Sequence[Series] = (),
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    value_label: str = "",
    width: float = WIDTH,
    height: float = 3.6,
) -> str:
    """A function of two variables as shaded levels, with arrows and paths over it.

    Args:
        x, y: the grid's coordinates, [n] and [m].
        values: the function on the grid, [m, n].
        arrows: components (along x, along y), each [m, n]; only about 14 arrows a row are drawn,
            all of one length, so that they show directions alone.
        paths: lines over the field; a circle marks the start, a cross the end.
        title, x_label, y_label, value_label: texts.
        width, height: in inches.

    Returns:
        The SVG document.

    Example:
        >>> grid = np.linspace(-1, 1, 9)
        >>> field_plot(grid, grid, grid[:, None] * grid).count("<svg")
        1
    """
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    with new_plot(title, x_label=x_label, y_label=y_label, width=width, height=height) as plot:
        axes = plot.axes
        axes.grid(visible=False)
        shades = axes.contourf(xs, ys, values, levels=16, cmap="cividis")
        bar = plot.figure.colorbar(shades, ax=axes, label=value_label, pad=0.02)
        bar.outline.set_visible(False)
        if arrows is not None:
            _draw_arrows(axes, xs, ys, arrows)
        for index, path in enumerate(paths):
            _draw_path(axes, path, series_style(path, index))
        axes.set(xlim=(xs.min(), xs.max()), ylim=(ys.min(), ys.max()))
        entries = {
            loss_label(path.name): series_style(path, index) for index, path in enumerate(paths)
        }
        add_legend(plot.figure, entries, always=True)
    return plot.svg


def bar_plot(
    names: Sequence[str],
    values: Sequence[float | None],
    *,
    errors: Sequence[float] | None = None,
    colours: Sequence[str] | None = None,
    title: str = "",
    x_label: str = "",
    x_range: tuple[float, float] | None = None,
    digits: int = 3,
    width: float = WIDTH,
) -> str:
    """Horizontal bars with their names on the left and their values at the end.

    Example:
        >>> "cat" in bar_plot(["cat", "dog"], [0.5, 0.25])
        True
    """
    lengths = numbers(values)
    places = np.arange(len(names))
    shades = list(colours) if colours is not None else [line_style("ap").colour] * len(names)
    with new_plot(title, x_label=x_label, width=width, height=0.9 + 0.26 * len(names)) as plot:
        axes = plot.axes
        axes.barh(
            places, np.nan_to_num(lengths), color=shades, height=0.66, xerr=errors, ecolor=INK
        )
        axes.set_yticks(places, [shorten(name) for name in names], color=INK)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        if x_range is not None:
            axes.set_xlim(*x_range)
        ends = np.nan_to_num(lengths) + (0 if errors is None else np.asarray(errors))
        for place, end, value in zip(places, ends, lengths, strict=True):
            text = "no value" if np.isnan(value) else f"{value:.{digits}f}"
            axes.annotate(
                text, (end, place), xytext=(4, 0), textcoords="offset points", va="center",
                fontsize=8.5, color=INK,
            )  # fmt: skip
    return plot.svg


def _scales(axes: "Axes", *, log_x: bool, log_y: bool) -> None:
    if log_x:
        logarithmic(axes, "x")
    if log_y:
        logarithmic(axes, "y")


def _draw_arrows(
    axes: "Axes", x: np.ndarray, y: np.ndarray, arrows: tuple[np.ndarray, np.ndarray]
) -> None:
    step = (max(1, round(len(y) / 14)), max(1, round(len(x) / 14)))
    chosen = np.s_[step[0] // 2 :: step[0], step[1] // 2 :: step[1]]
    u, v = np.asarray(arrows[0], float)[chosen], np.asarray(arrows[1], float)[chosen]
    length = np.hypot(u, v)
    length[length == 0] = np.nan  # no direction, no arrow
    grid_x, grid_y = np.meshgrid(x, y)
    axes.quiver(
        grid_x[chosen], grid_y[chosen], u / length, v / length, color="#f4f6f8", alpha=0.75,
        scale=26, width=0.004, pivot="mid",
    )  # fmt: skip


def _draw_path(axes: "Axes", path: Series, style: LineStyle) -> None:
    from matplotlib import patheffects

    x, y = numbers(path.x), numbers(path.y)
    halo = [patheffects.withStroke(linewidth=4.2, foreground="#ffffff")]
    axes.plot(x, y, color=style.colour, linestyle=style.dashes, linewidth=2.2, path_effects=halo)
    marks = {"markeredgecolor": "#ffffff", "markersize": 8, "color": style.colour, "clip_on": False}
    axes.plot(x[:1], y[:1], marker="o", **marks)  # type: ignore[arg-type]
    axes.plot(x[-1:], y[-1:], marker="X", **marks)  # type: ignore[arg-type]
