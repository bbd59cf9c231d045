"""Numbers in, SVG text out: the plots that pages, commands and studies share.

Every function returns a complete SVG document with a light background, which can be saved as a file;
:mod:`aploss.reports.page` embeds it so that it follows dark mode. The same data gives the same text, byte for byte.
For a plot of another kind, use :func:`new_plot`; ``frame`` stands for its arguments in all functions.
"""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from aploss.plotting.style import DASHES, GRID, INK, MUTED, PALETTE, LineStyle, line_style, loss_label, plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NAMED_CURVES = 6  # of classes, where there are more of them than colours
DOTTED = (0, (2, 2))  # lines that are no data: limits, levels, the ideal

Values = Sequence[float | None] | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line or cloud of points with its name in the legend."""

    name: str  # shown in the legend; the name of a loss chooses its style and is written out
    x: Values  # of the points; None and NaN leave a gap
    y: Values  # of the points
    low: Values | None = None  # the lower edge of a band around the line, such as mean - standard deviation
    high: Values | None = None  # its upper edge
    style: LineStyle | None = None  # overrides the style that the name would give
    markers: bool = False  # a marker on each point, for few points; a single point always has one
    faint: bool = False  # drawn thin and pale without a legend entry, as raw values behind a smooth line


@dataclass
class Plot:
    """What :func:`new_plot` hands out; ``svg`` is there after the ``with`` block."""

    figure: "Figure"
    axes: "Axes"
    svg: str = field(default="", repr=False)


@contextmanager
def new_plot(
    title: str = "",
    *,
    x_label: str = "",
    y_label: str = "",
    log_x: bool = False,
    log_y: bool = False,
    height: float = 3,
) -> Iterator[Plot]:
    """A figure in the common style, as wide as a phone.

    Example:
        >>> with new_plot("A line", x_label="x") as plot:
        ...     _ = plot.axes.plot([0, 1], [0, 1])
        >>> plot.svg.startswith("<?xml")
        True
    """
    from matplotlib.figure import Figure

    with plot_style():
        figure = Figure(figsize=(4.2, height))  # inches: at 96 pixels each, what a phone shows
        plot = Plot(figure, figure.add_subplot())
        plot.axes.set(title=title, xlabel=x_label, ylabel=y_label)
        _make_logarithmic(plot.axes, log_x, log_y)
        yield plot
        plot.svg = _svg(figure)


def line_plot(
    series: Sequence[Series],
    *,
    whole_x: bool = False,
    y_range: tuple[float | None, float | None] | None = None,
    level: tuple[str, float] | None = None,
    **frame: Any,
) -> str:
    """Lines with optional bands.

    Args:
        series: drawn in order; the legend stands below the axes when there are several.
        whole_x: only whole numbers beside the x axis, for steps.
        y_range: limits of the y axis; None for an automatic end.
        level: a horizontal line (name, y), such as a bound or the paper's number.

    Example:
        >>> line_plot([Series(name="ap", x=[1, 2], y=[0.5, 0.7])], title="AP").count("<svg")
        1
    """
    entries = _legend_entries(series)
    with new_plot(**frame) as plot:
        for index, one in enumerate(series):
            _draw_line(plot.axes, one, _style_of(one, index))
        if level is not None:
            entries[level[0]] = LineStyle(INK, DOTTED)
            plot.axes.axhline(level[1], color=INK, linewidth=1, linestyle=DOTTED)
        if whole_x:
            left, right = plot.axes.get_xlim()
            if right - left < 2:  # a single step: no fractions of it beside the axis
                plot.axes.set_xlim(left - 1, right + 1)
            plot.axes.locator_params(axis="x", integer=True)
        if y_range is not None:
            plot.axes.set_ylim(*y_range)
        add_legend(plot, entries, markers=any(map(_has_markers, series)))
    return plot.svg


def scatter_plot(groups: Sequence[Series], *, diagonal: bool = False, **frame: Any) -> str:
    """Clouds of points, one style for each group; ``diagonal`` adds the line y = x.

    Example:
        >>> scatter_plot([Series(name="steps", x=[1, 2], y=[2, 1])], diagonal=True).count("<svg")
        1
    """
    with new_plot(**frame) as plot:
        for index, group in enumerate(groups):
            x, y, style = numbers(group.x), numbers(group.y), _style_of(group, index)
            plot.axes.scatter(x, y, s=16, marker=style.marker, color=style.colour, alpha=0.75, linewidths=0)
        if diagonal:
            plot.axes.axline((1, 1), (2, 2), color=MUTED, linewidth=1, linestyle=DOTTED, zorder=0.5)
        add_legend(plot, _legend_entries(groups), markers=True, lines=False)
    return plot.svg


def field_plot(
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    values: np.ndarray,
    *,
    arrows: tuple[np.ndarray, np.ndarray] | None = None,
    paths: Sequence[Series] = (),
    value_label: str = "",
    **frame: Any,
) -> str:
    """A function of two variables as shaded levels, with arrows and paths over it.

    Args:
        x, y: the grid's coordinates, [n] and [m].
        values: the function on the grid, [m, n].
        arrows: components (along x, along y), each [m, n]; about 14 per row are drawn, all of one length.
        paths: lines over the field; a circle marks the start, a cross the end.
        value_label: what the shades stand for.

    Example:
        >>> grid = np.linspace(-1, 1, 9)
        >>> field_plot(grid, grid, grid[:, None] * grid).count("<svg")
        1
    """
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    frame.setdefault("height", 3.6)
    with new_plot(**frame) as plot:
        axes = plot.axes
        axes.grid(visible=False)
        shades = axes.contourf(xs, ys, values, levels=16, cmap="cividis")
        plot.figure.colorbar(shades, ax=axes, label=value_label, pad=0.02).outline.set_visible(False)
        if arrows is not None:
            _draw_arrows(axes, xs, ys, arrows)
        for index, path in enumerate(paths):
            _draw_path(axes, path, _style_of(path, index))
        axes.set(xlim=(xs.min(), xs.max()), ylim=(ys.min(), ys.max()))
        add_legend(plot, _legend_entries(paths), always=True)
    return plot.svg


def bar_plot(names: Sequence[str], values: Values, *, x_range: tuple[float, float] | None = None, **frame: Any) -> str:
    """Horizontal bars with their names on the left and their values at the end.

    Example:
        >>> "cat" in bar_plot(["cat", "dog"], [0.5, 0.25])
        True
    """
    known, places = numbers(values), np.arange(len(names))
    lengths = np.nan_to_num(known)
    frame.setdefault("height", 0.9 + 0.26 * len(names))
    with new_plot(**frame) as plot:
        axes = plot.axes
        axes.barh(places, lengths, color=PALETTE[0], height=0.66)
        name_rows(axes, [shorten(name) for name in names])
        axes.invert_yaxis()
        if x_range is not None:
            axes.set_xlim(*x_range)
        for place, length, value in zip(places, lengths, known, strict=True):
            text = "no value" if np.isnan(value) else f"{value:.3f}"
            add_number(axes, text, (length, place), shift=(4, 0), va="center")
    return plot.svg


def precision_recall_plot(
    curves: Mapping[str, Any], iou: float = 0.5, *, scores: Mapping[str, float | None] | None = None
) -> str:
    """Precision over recall, a line for every class, and their mean.

    With more classes than colours only the three best and three worst are named and coloured; the others are pale
    lines behind them, since no reader can tell dozens of colours apart.

    Args:
        curves: class → what has ``recall`` and ``precision``, such as :class:`aploss.evaluation.Curve`.
        iou: the IoU they were measured at, for the title.
        scores: class → its AP, shown in the legend and used for choosing; the mean precision of a curve where it is
            not given, and no number for a class that is not in it.
    """
    if scores is None:
        scores = {name: float(np.mean(curve.precision)) for name, curve in curves.items()}
    known = {name: value for name, value in scores.items() if value is not None and value == value}
    order = sorted(curves, key=lambda name: -known.get(name, -1.0))
    many = len(order) > len(PALETTE)
    half = MAX_NAMED_CURVES // 2
    named = [*order[:half], *order[-half:]] if many else order
    labels = {name: number for number, name in enumerate(named if many else curves)}
    entries: dict[str, LineStyle] = {}
    title = f"Precision and recall at IoU {iou:g}"
    with new_plot(title, x_label="recall", y_label="precision", height=3.4) as plot:
        for name in order[half:-half] if many else ():
            curve = curves[name]
            plot.axes.plot(curve.recall, curve.precision, color=MUTED, alpha=0.25, linewidth=0.8)
        for name in named:
            curve, style = curves[name], LineStyle(PALETTE[labels[name]], DASHES[labels[name]])
            plot.axes.plot(curve.recall, curve.precision, color=style.colour, linestyle=style.dashes)
            entries[f"{shorten(name)} {known[name]:.3f}" if name in known else name] = style
        if many:
            entries[f"{len(order) - len(named)} other classes"] = LineStyle(GRID)
        if len({np.asarray(curve.recall).tobytes() for curve in curves.values()}) == 1 < len(order):
            mean = np.mean([curve.precision for curve in curves.values()], axis=0)
            plot.axes.plot(curves[order[0]].recall, mean, color=INK, linewidth=2.4)
            value = f" {np.mean(list(known.values())):.3f}" if known else ""
            entries = {f"mean{value}": LineStyle(INK), **entries}
        plot.axes.set(xlim=(0, 1.01), ylim=(0, 1.02))
        add_legend(plot, entries, always=True)
    return plot.svg


def precision_recall_panels(curves: Mapping[float, Mapping[str, Any]]) -> str:
    """A small panel for each class, with a curve for each IoU: the looser the box, the darker.

    Args:
        curves: IoU → class → curve, as in :func:`precision_recall_plot`; the same classes, at least one, for each IoU.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = list(next(iter(curves.values())))
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    width, height = max(4.8, 2.3 * columns + 0.6), 1.9 * rows + 1.1
    shades = colormaps["viridis"](np.linspace(0.0, 0.82, len(curves)))
    with plot_style():
        # Placed by hand and without shared axes: both take half a minute for 80 panels.
        figure = Figure(figsize=(width, height))
        figure.set_layout_engine("none")
        same = {"xlim": (0, 1), "ylim": (0, 1.02), "yticks": [0, 0.5, 1]}
        places = {"left": 0.6 / width, "right": 1 - 0.15 / width, "bottom": 0.8 / height, "top": 1 - 0.3 / height}
        places |= {"wspace": 0.12, "hspace": 0.28}
        panels = figure.subplots(rows, columns, squeeze=False, subplot_kw=same, gridspec_kw=places)
        for number, panel in enumerate(panels.flat):
            if number >= len(names):
                panel.set_visible(False)
                continue
            for (iou, of_class), shade in zip(curves.items(), shades, strict=True):
                curve = of_class[names[number]]
                panel.plot(curve.recall, curve.precision, color=shade, label=f"IoU {iou:g}")
            panel.set_title(shorten(names[number]))
            panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            panel.tick_params(labelleft=number % columns == 0, labelbottom=number >= len(names) - columns)
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower left", ncols=len(labels), handlelength=1.2, columnspacing=1)
        figure.supxlabel("recall", y=0.38 / height, va="bottom", fontsize=9.5)
        figure.supylabel("precision", fontsize=9.5)
        return _svg(figure)


def add_legend(
    plot: Plot, entries: Mapping[str, LineStyle], *, markers: bool = False, lines: bool = True, always: bool = False
) -> None:
    """A legend below the axes, where it covers no data; left out for a single entry."""
    from matplotlib.lines import Line2D

    if len(entries) < (1 if always else 2):
        return
    handles: list[Any] = [
        Line2D([], [], color=colour, linestyle=dashes if lines else "", marker=marker if markers else "")
        for colour, dashes, marker in entries.values()
    ]
    # A zero-width space: matplotlib drops labels that begin with an underscore.
    labels = ["\u200b" * name.startswith("_") + shorten(name, 46) for name in entries]
    columns = int(np.clip(52 // (8 + max(map(len, labels))), 1, 4))
    plot.figure.legend(handles, labels, loc="outside lower left", ncols=columns, columnspacing=1.4)


def name_rows(axes: "Axes", names: Sequence[str]) -> None:
    """Names the places 0, 1, ... of the y axis, without ticks and lines."""
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def add_number(axes: "Axes", text: str, place: tuple[Any, Any], *, shift: tuple[float, float], **align: Any) -> None:
    """Writes a number at a place of the plot, moved by some points."""
    axes.annotate(text, place, xytext=shift, textcoords="offset points", fontsize=8.5, color=INK, **align)


def count_axis(axes: "Axes") -> None:
    """Makes the y axis logarithmic from 1 on, with 0 below it: for counts, which may be 0."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_text(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def power_text(value: float) -> str:
    """A number beside a logarithmic axis, such as 0.01, 1000 or 10⁶."""
    exponent = round(math.log10(value)) if value > 0 else 0
    if value > 0 and not -4 < exponent < 5 and math.isclose(value, 10.0**exponent):
        return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:g}"


def numbers(values: Values) -> np.ndarray:
    """Float64 [n] with NaN where there is no finite number."""
    array = np.asarray(values, dtype=np.float64)  # None becomes NaN
    return np.where(np.isfinite(array), array, np.nan)


def thin_out(x: np.ndarray, y: np.ndarray, most: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` points, each the mean of neighbours, so that pages stay small."""
    if len(x) <= most:
        return x, y
    known = [piece[~np.isnan(piece)] for piece in np.array_split(y, most)]
    means = [piece.mean() if len(piece) else np.nan for piece in known]
    return np.array([piece.mean() for piece in np.array_split(x, most)]), np.array(means)


def shorten(text: str, most: int = 22) -> str:
    """The text on one line, cut after ``most`` characters.

    Example:
        >>> shorten("a very long name of a class")
        'a very long name of a…'
    """
    line = " ".join(text.split()) or "(no name)"
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def _svg(figure: "Figure") -> str:
    from matplotlib import rcParams
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)  # the layout measures its letters
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        # What is laid out needs no engine, and whatever has one is drawn twice when it is saved.
        rcParams["figure.constrained_layout.use"] = False  # until the end of plot_style()
        figure.set_layout_engine(None)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _style_of(series: Series, index: int) -> LineStyle:
    return series.style or line_style(series.name, index)


def _legend_entries(series: Sequence[Series]) -> dict[str, LineStyle]:
    return {loss_label(one.name): _style_of(one, index) for index, one in enumerate(series)}


def _has_markers(series: Series) -> bool:
    """Whether its points are marked: a line through a single point would not be seen."""
    known = np.isfinite(numbers(series.x) + numbers(series.y))
    return series.markers or int(known.sum()) == 1


def _draw_line(axes: "Axes", series: Series, style: LineStyle) -> None:
    x, y = numbers(series.x), numbers(series.y)
    if series.low is not None and series.high is not None:
        low, high = numbers(series.low), numbers(series.high)
        axes.fill_between(x, low, high, color=style.colour, alpha=0.18, linewidth=0)
    look = {"linestyle": "-", "linewidth": 0.8, "alpha": 0.35} if series.faint else {"linestyle": style.dashes}
    axes.plot(x, y, color=style.colour, marker=style.marker if _has_markers(series) else "", **look)


def _make_logarithmic(axes: "Axes", x: bool, y: bool) -> None:
    """Makes the chosen axes logarithmic, with plain numbers beside them."""
    from matplotlib.ticker import FuncFormatter, LogFormatter

    class PlainLogFormatter(LogFormatter):
        """Leaves the choice of the ticks that are named to matplotlib, not their names."""

        def __call__(self, value: float, position: int | None = None) -> str:
            return power_text(value) if super().__call__(value, position) else ""

    for axis, wanted in ((axes.xaxis, x), (axes.yaxis, y)):
        if wanted:
            axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_major_formatter(FuncFormatter(lambda value, _: power_text(value)))
            axis.set_minor_formatter(PlainLogFormatter(minor_thresholds=(1.0, 0.5)))


def _draw_arrows(axes: "Axes", x: np.ndarray, y: np.ndarray, arrows: tuple[np.ndarray, np.ndarray]) -> None:
    step = (max(1, round(len(y) / 14)), max(1, round(len(x) / 14)))
    chosen = np.s_[step[0] // 2 :: step[0], step[1] // 2 :: step[1]]
    u, v = np.asarray(arrows[0], float)[chosen], np.asarray(arrows[1], float)[chosen]
    length = np.hypot(u, v)
    length[length == 0] = np.nan  # no direction, no arrow
    grid_x, grid_y = np.meshgrid(x, y)
    look: Any = {"color": "#f4f6f8", "alpha": 0.75, "scale": 26, "width": 0.004, "pivot": "mid"}
    axes.quiver(grid_x[chosen], grid_y[chosen], u / length, v / length, **look)


def _draw_path(axes: "Axes", path: Series, style: LineStyle) -> None:
    from matplotlib import patheffects

    x, y = numbers(path.x), numbers(path.y)
    halo = [patheffects.withStroke(linewidth=4.2, foreground="#ffffff")]
    axes.plot(x, y, color=style.colour, linestyle=style.dashes, linewidth=2.2, path_effects=halo)
    marks: dict[str, Any] = {"markeredgecolor": "#ffffff", "markersize": 8, "color": style.colour, "clip_on": False}
    axes.plot(x[:1], y[:1], marker="o", **marks)
    axes.plot(x[-1:], y[-1:], marker="X", **marks)
