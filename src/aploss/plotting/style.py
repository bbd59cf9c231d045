"""One look for every plot and page: the same loss has the same colour everywhere.

A loss states its label, colour, dashes and marker itself (:class:`aploss.losses.LossTraits`). The colours are those of
Okabe and Ito, which stay apart for all common kinds of colour blindness, with brown and slate instead of yellow and
black, which are hardly seen on white or on dark. Dashes and markers tell losses apart on a grey print. A plot is drawn
in the light colours below; a page maps each of them to a CSS variable (:data:`THEME`), so that it follows dark mode.
"""

import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

BLUE, ORANGE, GREEN, VERMILLION = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PURPLE, SKY, BROWN, SLATE = "#cc79a7", "#56b4e9", "#5a3a00", "#444c56"
PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BROWN, SLATE)

# Paul Tol's "muted" colours, for variants of one loss: none of our losses has any of them.
INDIGO, ROSE, TEAL, SAND, WINE, CYAN = "#332288", "#cc6677", "#44aa99", "#b59b3a", "#882255", "#6bb8e0"

# Not pure black and white: these exact values never occur as data colours, so a page can find them.
PAPER, INK, MUTED, GRID = "#fefefe", "#1c2128", "#57606b", "#dde2e8"

THEME: Mapping[str, tuple[str, str]] = {
    PAPER: ("--plot-paper", "#161b22"),
    INK: ("--plot-ink", "#e6edf3"),
    MUTED: ("--plot-muted", "#9aa5b1"),
    GRID: ("--plot-grid", "#30363d"),
    BLUE: ("--plot-blue", "#3b9cff"),
    VERMILLION: ("--plot-vermillion", "#e8551f"),
    GREEN: ("--plot-green", "#2a9474"),
    ORANGE: ("--plot-orange", "#ffd75e"),
    PURPLE: ("--plot-purple", "#ee6cbb"),
    SKY: ("--plot-sky", "#6fd6ff"),
    BROWN: ("--plot-brown", "#bf9c5e"),
    SLATE: ("--plot-slate", "#d5dade"),
    INDIGO: ("--plot-indigo", "#9a8cf0"),
    ROSE: ("--plot-rose", "#e08b99"),
    TEAL: ("--plot-teal", "#5fc9b7"),
    SAND: ("--plot-sand", "#ddcc77"),
    WINE: ("--plot-wine", "#d0679a"),
    CYAN: ("--plot-cyan", "#a5dcf5"),
}
"""Light colour → (CSS variable, its value in dark mode)."""


class LineStyle(NamedTuple):
    """How one series is drawn; the dashes and the marker tell it apart without colour."""

    colour: str
    dashes: Any = "-"
    marker: str = ""


DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (5, 1)), (0, (1, 2)))
VARIANT_STYLES = tuple(map(LineStyle, (INDIGO, ROSE, TEAL, SAND, WINE, CYAN), DASHES, ("o", "s", "^", "D", "v", "P")))
RIGHT, WRONG = LineStyle(BLUE, "-", "o"), LineStyle(VERMILLION, "--", "s")


def loss_label(name: str) -> str:
    """The readable name of a loss, or of a row with its settings; any other text, as ``ap, delta 2``, stays as it is.

    Example:
        >>> loss_label("ce-ohem"), loss_label("ap:delta=0.5 batches.size=4"), loss_label("batch size 4")
        ('CE + OHEM', 'AP-loss (delta 0.5, batches.size 4)', 'batch size 4')
        >>> loss_label("optimizer.learning_rate=0.001")
        'learning rate 0.001'
    """
    from aploss.losses.traits import traits_of  # on first use: it imports torch

    loss, *settings = re.split(r"(?:^|[: ])(?=[\w.]+=)", name)
    label = traits_of(loss).label or loss
    if not settings:
        return label
    listed = ", ".join(_setting_label(*setting.split("=", 1)) for setting in settings)
    return f"{label} ({listed})" if label else listed


def _setting_label(key: str, value: str) -> str:
    """``learning rate 0.001``; with its group where the name alone says little: ``batches.size 4``."""
    name = key.rpartition(".")[2]
    return f"{name.replace('_', ' ') if '_' in name or '.options.' in key else key} {value}"


def line_style(name: str, index: int = 0) -> LineStyle:
    """The style of a loss, or the ``index``-th style of variants for any other series.

    A registered loss that states no colour gets a variant's style, always the same one.

    Example:
        >>> line_style("ap")
        LineStyle(colour='#0072b2', dashes='-', marker='o')
        >>> line_style("batch size 4", index=2) == VARIANT_STYLES[2]
        True
    """
    from aploss.losses.traits import LOSSES, traits_of

    traits = traits_of(name)
    if traits.colour:
        return LineStyle(traits.colour.lower(), traits.dashes, traits.marker)
    if name in LOSSES:
        index = zlib.crc32(name.encode("utf-8", "surrogatepass"))
    again, place = (0 if name in LOSSES else index // len(VARIANT_STYLES)), index % len(VARIANT_STYLES)
    # A colour that comes again has other dashes and another marker.
    marker = VARIANT_STYLES[(place + again) % len(VARIANT_STYLES)].marker
    return LineStyle(VARIANT_STYLES[place].colour, DASHES[(place + again) % len(DASHES)], marker)


def class_colour(label: int) -> str:
    """The colour of the class with 0-based number ``label``; it repeats after eight classes."""
    return PALETTE[label % len(PALETTE)]


_SETTINGS: Any = {  # of matplotlib, which types every key by itself; letters of the size of a phone's
    "figure.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "text.parse_math": False,  # a class may be called "$5 note"
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 9.5,
    "svg.fonttype": "none",  # text stays text: small, selectable, and every script has a font
    "svg.hashsalt": "aploss",  # the same data gives the same file, byte for byte
}


@contextmanager
def plot_style() -> Iterator[None]:
    """Draw inside this context to get the common look; global settings stay as they were."""
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context():
        # Text is laid out with DejaVu but shown by the browser, which has the other glyphs.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield
