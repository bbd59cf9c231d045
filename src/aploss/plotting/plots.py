"""The style of plots and pages, and the plots shared by pages, commands and studies: numbers in, SVG text out.

A loss has the same colour everywhere: it declares its label, colour, dashes and marker
(:class:`aploss.losses.LossTraits`). The colours are those of Okabe and Ito, which are distinct for all common kinds of
colour blindness, with brown and slate in place of yellow and black. Dashes and markers distinguish losses in greyscale.

Every plot is a complete SVG document with a light background, also on pages in dark mode; the same data gives the same
text, byte for byte. ``**frame`` stands for the arguments of :func:`new_plot`, the starting point for other plots.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aploss.progress import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILLION = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PURPLE, SKY, BROWN, SLATE = "#cc79a7", "#56b4e9", "#5a3a00", "#444c56"
PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BROWN, SLATE)

# Paul Tol's "muted" colours, for variants of one loss: no built-in loss has any of them.
INDIGO, ROSE, TEAL, SAND, WINE, CYAN = "#332288", "#cc6677", "#44aa99", "#b59b3a", "#882255", "#6bb8e0"
PAPER, INK, MUTED, GRID = "#fefefe", "#1c2128", "#57606b", "#dde2e8"


class LineStyle(NamedTuple):
    """Colour, dashes and marker of a series."""

    colour: str
    dashes: Any = "-"
    marker: str = ""


DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (5, 1)), (0, (1, 2)))
VARIANT_STYLES = tuple(map(LineStyle, (INDIGO, ROSE, TEAL, SAND, WINE, CYAN), DASHES, ("o", "s", "^", "D", "v", "P")))


def loss_label(name: str) -> str:
    """The display name of a loss, or of a row with its settings; any other text is returned unchanged.

    Example:
        >>> loss_label("ce-ohem"), loss_label("ap:delta=0.5 batches.size=4"), loss_label("batch size 4")
        ('CE + OHEM', 'AP-loss (delta 0.5, batches.size 4)', 'batch size 4')
        >>> loss_label("optimizer.learning_rate=0.001")
        'learning rate 0.001'
    """
    from aploss.losses.traits import traits_of  # imports torch

    loss, *settings = re.split(r"(?:^|[: ])(?=[\w.]+=)", name)
    label = traits_of(loss).label or loss
    listed = ", ".join(_setting_label(*setting.split("=", 1)) for setting in settings)
    return f"{label} ({listed})" if label and listed else label + listed


def _setting_label(key: str, value: str) -> str:
    """``learning rate 0.001``; with its group if the name alone says little: ``batches.size 4``."""
    name = key.rpartition(".")[2]
    return f"{name.replace('_', ' ') if '_' in name or '.options.' in key else key} {value}"


def line_style(name: str, index: int = 0) -> LineStyle:
    """The style that a loss declares, or the ``index``-th variant style for any other series.

    Example:
        >>> line_style("ap")
        LineStyle(colour='#0072b2', dashes='-', marker='o')
        >>> line_style("batch size 4", index=2) == VARIANT_STYLES[2]
        True
    """
    from aploss.losses.traits import traits_of

    traits = traits_of(name)
    if traits.colour:
        return LineStyle(traits.colour.lower(), traits.dashes, traits.marker)
    again, place = divmod(index, len(VARIANT_STYLES))  # a colour that is used again has other dashes
    return VARIANT_STYLES[place]._replace(dashes=DASHES[(place + again) % len(DASHES)])


def class_colour(label: int) -> str:
    """The colour of the class with 0-based index ``label``; colours repeat after eight classes."""
    return PALETTE[label % len(PALETTE)]


# --- plots ---

DOTTED = (0, (2, 2))  # for reference lines: limits, levels, the ideal

Values = Sequence[float | None] | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line, or points if its style has no dashes."""

    name: str  # for the legend; the name of a loss also selects its label and style
    x: Values  # None and NaN leave a gap
    y: Values
    band: Values | None = None  # half the width of a band around the line, such as the standard deviation
    style: LineStyle | None = None  # overrides the style selected by the name
    markers: bool = False  # mark each point; a single point is always marked


@dataclass
class Plot:
    """The figure of :func:`new_plot`; ``svg`` is set at the end of the ``with`` block."""

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
    """Creates a figure in the common style, as wide as a phone.

    Example:
        >>> with new_plot("A line", x_label="x") as plot:
        ...     _ = plot.axes.plot([0, 1], [0, 1])
        >>> plot.svg.startswith("<?xml")
        True
    """
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    sheet = Path(__file__).with_name("aploss.mplstyle")
    with warnings.catch_warnings(), style.context(sheet, after_reset=True):
        # Text is laid out with DejaVu but rendered by the browser, which has the missing glyphs.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(4.2, height))  # inches of 96 pixels
        plot = Plot(figure, figure.add_subplot())
        plot.axes.set(title=title, xlabel=x_label, ylabel=y_label)
        for axis, logarithmic in ((plot.axes.xaxis, log_x), (plot.axes.yaxis, log_y)):
            if logarithmic:  # with plain numbers: the default formatter needs mathtext
                plot.axes.set(**{f"{axis.axis_name}scale": "log"})
                axis.set_major_formatter(LogFormatter())
                axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.0, 0.5)))
        yield plot
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plot.svg = printable(text.getvalue())


def line_plot(
    series: Sequence[Series],
    *,
    whole_x: bool = False,
    y_range: tuple[float | None, float | None] | None = None,
    **frame: Any,
) -> str:
    """Draws lines with optional bands.

    Args:
        series: drawn in order, with a legend below the axes if there are several.
        whole_x: label only integers on the x axis, for steps.
        y_range: limits of the y axis; None for an automatic limit.

    Example:
        >>> line_plot([Series(name="ap", x=[1, 2], y=[0.5, 0.7])], title="AP").count("<svg")
        1
    """
    entries: dict[str, LineStyle] = {}
    with new_plot(**frame) as plot:
        for index, one in enumerate(series):
            x, y, style = numbers(one.x), numbers(one.y), one.style or line_style(one.name, index)
            if not one.markers and np.isfinite(x + y).sum() != 1:  # a line through a single point would be invisible
                style = style._replace(marker="")
            entries[loss_label(one.name)] = style
            if one.band is not None:
                band = numbers(one.band)
                plot.axes.fill_between(x, y - band, y + band, color=style.colour, alpha=0.18, linewidth=0)
            plot.axes.plot(x, y, color=style.colour, linestyle=style.dashes, marker=style.marker)
        if whole_x:
            plot.axes.locator_params(axis="x", integer=True)
        if y_range is not None:
            plot.axes.set_ylim(*y_range)
        if len(entries) > 1:
            add_legend(plot, entries)
    return plot.svg


def precision_recall_plot(curves: Mapping[str, Any], iou: float = 0.5) -> str:
    """Draws precision over recall of every class, with its average precision in the legend, and the mean.

    If there are more classes than colours, only the three best and the three worst are named and coloured. ``curves``
    maps classes to objects such as :class:`aploss.evaluation.Curve`, all with the same recall points.
    """
    scores = {name: float(np.mean(curve.precision)) for name, curve in curves.items()}
    order = sorted(curves, key=lambda name: -scores[name])
    named = list(curves) if len(order) <= len(PALETTE) else [*order[:3], *order[-3:]]
    styles = dict(zip(named, map(LineStyle, PALETTE, DASHES), strict=False))
    entries: dict[str, LineStyle] = {}
    with new_plot(f"Precision and recall at IoU {iou:g}", x_label="recall", y_label="precision", height=3.4) as plot:
        if len(order) > 1:
            mean = np.mean([curve.precision for curve in curves.values()], axis=0)
            plot.axes.plot(curves[order[0]].recall, mean, color=INK, linewidth=2.4, zorder=3)
            entries[f"mean {100 * mean.mean():.1f} %"] = LineStyle(INK)
        for name in order:
            look: dict[str, Any] = {"color": MUTED, "alpha": 0.25, "linewidth": 0.8}
            if name in styles:
                entries[f"{shorten(name)} {100 * scores[name]:.1f} %"] = styles[name]
                look = {"color": styles[name].colour, "linestyle": styles[name].dashes}
            plot.axes.plot(curves[name].recall, curves[name].precision, **look)
        if len(order) > len(named):
            entries[f"{len(order) - len(named)} other classes"] = LineStyle(GRID)
        plot.axes.set(xlim=(0, 1.01), ylim=(0, 1.02))
        add_legend(plot, entries)
    return plot.svg


def add_legend(plot: Plot, entries: Mapping[str, LineStyle]) -> None:
    """Adds a legend below the axes."""
    from matplotlib.lines import Line2D

    handles: list[Any] = [
        Line2D([], [], color=colour, linestyle=dashes, marker=marker) for colour, dashes, marker in entries.values()
    ]
    # A zero-width space, since matplotlib drops labels that begin with an underscore.
    labels = ["\u200b" * name.startswith("_") + shorten(name, 46) for name in entries]
    columns = int(np.clip(52 // (8 + max(map(len, labels))), 1, 4))
    plot.figure.legend(handles, labels, loc="outside lower left", ncols=columns, columnspacing=1.4)


def numbers(values: Values) -> np.ndarray:
    """Float64 [n] with NaN in place of None and infinity."""
    array = np.asarray(values, dtype=np.float64)  # None becomes NaN
    return np.where(np.isfinite(array), array, np.nan)


def thin_out(x: np.ndarray, y: np.ndarray, most: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` points, each the mean of neighbours without NaN, which smooths and keeps pages small."""
    if len(x) <= most:
        return x, y
    known = [piece[~np.isnan(piece)] for piece in np.array_split(y, most)]
    means = [piece.mean() if len(piece) else np.nan for piece in known]
    return np.array([piece.mean() for piece in np.array_split(x, most)]), np.array(means)


def shorten(text: str, most: int = 22) -> str:
    """The text on one line, cut after ``most`` characters."""
    line = " ".join(printable(text).split()) or "(no name)"
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"
