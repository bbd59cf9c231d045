"""The common style of plots and pages: a loss has the same colour everywhere.

A loss declares its label, colour, dashes and marker (:class:`aploss.losses.LossTraits`). The colours are those of Okabe
and Ito, which are distinct for all common kinds of colour blindness, with brown and slate in place of yellow and black.
Dashes and markers distinguish losses in greyscale. Plots are always light, also on pages in dark mode, since the
colours are chosen for a light background.
"""

import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
    if not settings:
        return label
    listed = ", ".join(_setting_label(*setting.split("=", 1)) for setting in settings)
    return f"{label} ({listed})" if label else listed


def _setting_label(key: str, value: str) -> str:
    """``learning rate 0.001``; with its group if the name alone says little: ``batches.size 4``."""
    name = key.rpartition(".")[2]
    return f"{name.replace('_', ' ') if '_' in name or '.options.' in key else key} {value}"


def line_style(name: str, index: int = 0) -> LineStyle:
    """The style of a loss, or the ``index``-th variant style for any other series.

    A registered loss without a colour gets a variant style that depends only on its name.

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
        index = zlib.crc32(name.encode("utf-8", "surrogatepass")) % len(VARIANT_STYLES)
    again, place = divmod(index, len(VARIANT_STYLES))
    # A colour that is used again has other dashes and another marker.
    marker = VARIANT_STYLES[(place + again) % len(VARIANT_STYLES)].marker
    return LineStyle(VARIANT_STYLES[place].colour, DASHES[(place + again) % len(DASHES)], marker)


def class_colour(label: int) -> str:
    """The colour of the class with 0-based index ``label``; colours repeat after eight classes."""
    return PALETTE[label % len(PALETTE)]


@contextmanager
def plot_style() -> Iterator[None]:
    """Applies the style sheet ``aploss.mplstyle`` inside the context without changing global settings."""
    from matplotlib import style

    with warnings.catch_warnings(), style.context(Path(__file__).with_name("aploss.mplstyle"), after_reset=True):
        # Text is laid out with DejaVu but rendered by the browser, which has the missing glyphs.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
