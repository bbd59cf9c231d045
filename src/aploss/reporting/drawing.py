"""What every plot is made of: a figure in the common style, series, a legend, clean numbers."""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from aploss.reporting.style import LineStyle, line_style, plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "HEIGHT",
    "WIDTH",
    "Plot",
    "Series",
    "add_legend",
    "count_axis",
    "draw_series",
    "logarithmic",
    "new_plot",
    "numbers",
    "power_text",
    "series_style",
    "shorten",
    "thin_out",
]

MOST_POINTS = 500
WIDTH, HEIGHT = 4.2, 3.0  # inches: at 96 pixels each, what a phone shows


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line or cloud of points with its name in the legend.

    Attributes:
        name: shown in the legend; the name of a loss chooses its style and is written out.
        x, y: the points; None and NaN leave a gap.
        low, high: the edges of a band around the line, such as mean ± standard deviation.
        style: overrides the style that the name would give.
        markers: a marker on each point, for few points.
        faint: drawn thin and pale without a legend entry, as raw values behind a smooth line.
    """

    name: str
    x: Sequence[float | None] | np.ndarray
    y: Sequence[float | None] | np.ndarray
    low: Sequence[float | None] | np.ndarray | None = None
    high: Sequence[float | None] | np.ndarray | None = None
    style: LineStyle | None = None
    markers: bool = False
    faint: bool = False


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
    width: float = WIDTH,
    height: float = HEIGHT,
) -> Iterator[Plot]:
    """A figure in the common style; sizes in inches, as wide as a phone by default.

    Example:
        >>> with new_plot("A line", x_label="x") as plot:
        ...     _ = plot.axes.plot([0, 1], [0, 1])
        >>> plot.svg.startswith("<?xml")
        True
    """
    from matplotlib.figure import Figure

    with plot_style():
        figure = Figure(figsize=(width, height))
        plot = Plot(figure, figure.add_subplot())
        plot.axes.set(title=title, xlabel=x_label, ylabel=y_label)
        yield plot
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plot.svg = text.getvalue()


def draw_series(axes: "Axes", series: Sequence[Series]) -> None:
    """The lines and bands of ``series`` on existing axes."""
    for index, one in enumerate(series):
        style = series_style(one, index)
        x, y = numbers(one.x), numbers(one.y)
        if one.low is not None and one.high is not None:
            axes.fill_between(
                x, numbers(one.low), numbers(one.high), color=style.colour, alpha=0.18, linewidth=0
            )
        axes.plot(
            x, y,
            color=style.colour,
            linestyle="-" if one.faint else style.dashes,
            linewidth=0.8 if one.faint else 1.8,
            alpha=0.35 if one.faint else 1.0,
            marker=style.marker if one.markers else "",
        )  # fmt: skip


def add_legend(
    figure: "Figure",
    entries: dict[str, LineStyle],
    *,
    markers: bool = False,
    lines: bool = True,
    always: bool = False,
) -> None:
    """A legend below the axes, where it covers no data; left out for a single entry."""
    from matplotlib.lines import Line2D

    if len(entries) < (1 if always else 2):
        return
    handles: list[Any] = [
        Line2D([], [], color=style.colour, linestyle=style.dashes if lines else "",
               marker=style.marker if markers else "")
        for style in entries.values()
    ]  # fmt: skip
    # A zero-width space: matplotlib drops labels that begin with an underscore.
    labels = ["\u200b" * name.startswith("_") + shorten(name, 34) for name in entries]
    columns = int(np.clip(52 // (8 + max(map(len, labels))), 1, 4))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, columnspacing=1.4)


def logarithmic(axes: "Axes", which: str) -> None:
    """Make the ``"x"`` or ``"y"`` axis logarithmic, with plain numbers beside it."""
    from matplotlib.ticker import FuncFormatter, LogFormatter

    class PlainLogFormatter(LogFormatter):
        """Leaves the choice of the ticks that are named to matplotlib, not their names."""

        def __call__(self, value: float, position: int | None = None) -> str:
            return power_text(value) if super().__call__(value, position) else ""

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: power_text(value)))
    axis.set_minor_formatter(PlainLogFormatter(minor_thresholds=(1.0, 0.5)))


def count_axis(axes: "Axes") -> None:
    """Make the y axis logarithmic from 1 on, with 0 below it: for counts, which may be 0."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_text(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def power_text(value: float) -> str:
    """A number beside a logarithmic axis.

    Example:
        >>> power_text(0.01), power_text(1000.0), power_text(1e6), power_text(2e-5)
        ('0.01', '1000', '10⁶', '2e-05')
    """
    exponent = round(math.log10(value)) if value > 0 else 0
    if value > 0 and not -4 < exponent < 5 and math.isclose(value, 10.0**exponent):
        return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:g}"


def numbers(values: Sequence[float | None] | np.ndarray) -> np.ndarray:
    """Float64 [n] with NaN where there is no finite number.

    Example:
        >>> numbers([1, None, float("inf")])
        array([ 1., nan, nan])
    """
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    array[~np.isfinite(array)] = np.nan
    return array


def thin_out(
    x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` points, each the mean of a run of neighbours, so that pages stay small.

    Example:
        >>> thin_out(np.arange(4.0), np.array([0.0, 2.0, 4.0, 6.0]), most=2)
        (array([0.5, 2.5]), array([1., 5.]))
    """
    if len(x) <= most:
        return x, y
    pieces = np.array_split(np.arange(len(x)), most)
    return (
        np.array([x[piece].mean() for piece in pieces]),
        np.array([_mean(y[piece]) for piece in pieces]),
    )


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def shorten(text: str, most: int = 22) -> str:
    """The text on one line, cut after ``most`` characters.

    Example:
        >>> shorten("a very long name of a class")
        'a very long name of a…'
    """
    line = " ".join(text.split()) or "(no name)"
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def series_style(series: Series, index: int) -> LineStyle:
    """The style of the ``index``-th series of a plot: its own, its loss's, or a variant's."""
    return series.style or line_style(series.name, index)
