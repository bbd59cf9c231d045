"""One layout for every page: a single HTML file without scripts or external resources.

A page consists of blocks of plain data. All text is escaped, since class and file names are untrusted; in running text,
words between backticks are set as code.
"""

import base64
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from aploss.files import write_text
from aploss.progress import printable

DASH = "\u2013"


@dataclass(frozen=True)
class Text:
    """Paragraphs, separated by empty lines; ``missing`` marks a note in place of content that cannot be shown."""

    text: str
    missing: bool = False


@dataclass(frozen=True)
class Code:
    """A command or a file, shown verbatim."""

    text: str
    caption: str = ""


@dataclass(frozen=True)
class Verdict:
    """A claim and whether it holds; None if undecided."""

    holds: bool | None
    claim: str
    label: str = ""  # in place of "holds", "does not hold" or "not decided"

    @property
    def word(self) -> str:
        """The verdict in words."""
        return self.label or {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


@dataclass(frozen=True)
class Facts:
    """Headline numbers side by side: (name, value, note) of each."""

    facts: Sequence[tuple[str, str, str]]
    lead: bool = False  # whether the first one is the most important


@dataclass(frozen=True)
class Cell:
    """A table cell that is bold or has a colour swatch."""

    value: Any
    strong: bool = False
    colour: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under named columns. On narrow screens each row becomes a block, or the table scrolls horizontally.

    Example:
        >>> table = Table(columns=["loss", "AP"], rows=[["AP-loss", 0.7354], ["a|b", None]])
        >>> print(table.markdown())
        | loss | AP |
        |:---|---:|
        | AP-loss | 0.735 |
        | a\\|b | – |
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]  # a value or :class:`Cell` for each column
    caption: str = ""
    digits: int = 3  # decimals of floats
    stack: bool = True  # whether rows become blocks on narrow screens

    @property
    def cells(self) -> list[list[Cell]]:
        """All rows as cells whose values are text."""
        rows = [[one if isinstance(one, Cell) else Cell(one) for one in row] for row in self.rows]
        return [[Cell(show(one.value, self.digits), one.strong, one.colour) for one in row] for row in rows]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds numbers, such as "0.735 ± 0.004", which are aligned to the right."""
        texts = ["".join(cell.value for cell in column) for column in zip(*self.cells, strict=True)]
        return [set(text) <= set("0123456789.+-\u2212±\u2013%, []") for text in texts] or [False] * len(self.columns)

    def markdown(self) -> str:
        """The table in Markdown."""
        ruler = "|".join("---:" if right else ":---" for right in self.numeric)
        texts = [[f"**{cell.value}**" if cell.strong else cell.value for cell in row] for row in self.cells]
        return "\n".join([_markdown_row(self.columns), f"|{ruler}|", *map(_markdown_row, texts)])


@dataclass(frozen=True)
class SvgFigure:
    """A plot of :mod:`aploss.plotting.plots`."""

    svg: str
    caption: str = ""
    label: str = ""  # alternative text; default: the caption
    name: str = ""  # file name without extension, for plots that are also written as files

    @property
    def source(self) -> str:
        """The plot as a data URI."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"


@dataclass(frozen=True)
class Picture:
    """An image given as a data URI, the only kind that the content security policy of a page allows."""

    source: str
    caption: str = ""


@dataclass(frozen=True)
class Figures:
    """Plots or pictures in a grid."""

    figures: Sequence[SvgFigure | Picture]
    width: int = 310  # minimum width of a column in pixels
    columns: int | None = None  # fixed number of columns instead, for pictures that belong side by side
    legend: Sequence[tuple[str, str]] = ()  # (colour, name) of each class


@dataclass(frozen=True)
class Section:
    """A heading with blocks below it. A section inside another section is folded."""

    title: str
    blocks: Sequence["Block"]


Block = Text | Code | Verdict | Facts | Table | Figures | Section


def show(value: Any, digits: int = 3) -> str:
    """A value as text, with fixed decimals for floats and a dash for None and NaN.

    Example:
        >>> show(0.5), show(None), show(float("nan")), show(True), show(1200)
        ('0.500', '–', '–', 'yes', '1200')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return f"{float(value):.{digits}f}" if math.isfinite(value) else DASH
    return DASH if value is None else str(value)


def percent(value: float | None, unit: str = "") -> str:
    """A value between 0 and 1 in percent, with one decimal and a dash for None and NaN.

    Example:
        >>> percent(0.7354), percent(0.7354, " %"), percent(None, " %")
        ('73.5', '73.5 %', '–')
    """
    return DASH if value is None or math.isnan(value) else f"{100 * value:.1f}{unit}"


def _markdown_row(cells: Sequence[Any]) -> str:
    texts = [" ".join(str(cell).split()).replace("|", "\\|") for cell in cells]
    return "| " + " | ".join(texts) + " |"


def write_page(path: str | Path, title: str, sections: Sequence[Section], *, subtitle: str = "") -> Path:
    """Writes a self-contained page with a table of contents and returns its path.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sections = [Section("Result", [Verdict(True, "loss is zero"), Text("Done.")])]
        ...     write_page(Path(folder) / "page.html", "Convergence", sections).name
        'page.html'
    """
    page = ENVIRONMENT.get_template("page.html.j2")
    text = page.render(title=title, subtitle=subtitle, sections=sections, version=version("aploss"))
    write_text(Path(path), printable(text))
    return Path(path)


def _inline(text: str) -> Markup:
    """Escaped text with words between backticks as code."""
    parts = str(text).split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick
        return escape(text)
    parts[1::2] = [Markup("<code>{}</code>").format(part) for part in parts[1::2]]
    return Markup("").join(parts)


LOADER = PackageLoader("aploss.reports")
ENVIRONMENT = Environment(
    loader=LOADER, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
ENVIRONMENT.filters.update(inline=_inline, kind=lambda block: type(block).__name__.lower())
