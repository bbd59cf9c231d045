"""What a page is built from: plain data, without any HTML.

All texts are shown literally, since class and file names come from strangers; only in running
text (not in tables and below pictures) words between backticks look like code.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "DASH",
    "Block",
    "Cell",
    "Code",
    "Details",
    "Fact",
    "Facts",
    "Figure",
    "Figures",
    "Legend",
    "Missing",
    "Picture",
    "Pictures",
    "Section",
    "Table",
    "Text",
    "Verdict",
    "show",
]

DASH = "\u2013"
NUMBER_CHARACTERS = set("0123456789.+-\u2212±\u2013%, []")


@dataclass(frozen=True)
class Text:
    """Paragraphs, separated by empty lines."""

    text: str
    kind: str = field(default="text", init=False)

    @property
    def paragraphs(self) -> list[str]:
        return [part.strip() for part in self.text.split("\n\n") if part.strip()]


@dataclass(frozen=True)
class Fact:
    """One headline number: its name, its value, and a small line below."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Facts:
    """Headline numbers side by side."""

    facts: Sequence[Fact]
    kind: str = field(default="facts", init=False)


@dataclass(frozen=True)
class Cell:
    """A cell of a table that needs more than a value.

    Attributes:
        value: a text, a number, or None.
        strong: bold, for the best of a column.
        colour: a swatch before the text, such as the colour of a loss.
    """

    value: Any
    strong: bool = False
    colour: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under named columns; it scrolls inside its own box where the screen is narrow.

    Attributes:
        columns: the heads.
        rows: a value or :class:`Cell` for each column.
        caption: a line below.
        digits: decimals of floats.

    Example:
        >>> table = Table(columns=["loss", "AP"], rows=[["AP-loss", 0.7354], ["a|b", None]])
        >>> print(table.markdown())
        | loss | AP |
        |:---|---:|
        | AP-loss | 0.735 |
        | a\\|b | – |
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    digits: int = 3
    kind: str = field(default="table", init=False)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} cells, the table {len(self.columns)}")

    def cell(self, content: Any) -> Cell:
        """The content as a cell whose value is text."""
        cell = content if isinstance(content, Cell) else Cell(content)
        return Cell(show(cell.value, self.digits), cell.strong, cell.colour)

    @property
    def numeric(self) -> list[bool]:
        """For each column whether it holds numbers, which are set to the right."""
        return [all(map(_is_number, column)) for column in zip(*self.rows, strict=True)] or [
            False
        ] * len(self.columns)

    def markdown(self) -> str:
        """The same table for a Markdown document."""
        lines = [_markdown_row(self.columns)]
        lines.append("|" + "|".join("---:" if right else ":---" for right in self.numeric) + "|")
        for row in self.rows:
            cells = [self.cell(content) for content in row]
            lines.append(_markdown_row([f"**{c.value}**" if c.strong else c.value for c in cells]))
        return "\n".join(lines)


@dataclass(frozen=True)
class Figure:
    """A plot as SVG text, with a line below.

    Attributes:
        svg: of :mod:`aploss.reporting.plots`.
        caption: the line.
        label: for those who cannot see the plot; the caption where it is empty.
        name: of the file, without ending, where plots are also written as files.
    """

    svg: str
    caption: str = ""
    label: str = ""
    name: str = ""


@dataclass(frozen=True)
class Figures:
    """Plots, side by side where there is room."""

    figures: Sequence[Figure]
    kind: str = field(default="figures", init=False)


@dataclass(frozen=True)
class Picture:
    """A picture as a ``data:`` address with a line below."""

    source: str
    caption: str = ""
    alternative: str = ""

    def __post_init__(self) -> None:
        if not self.source.startswith("data:image/"):
            raise ValueError(f"a page holds its pictures itself, got {self.source[:60]!r}")


@dataclass(frozen=True)
class Pictures:
    """A gallery.

    Attributes:
        pictures: in the order of reading.
        width: the least width of a picture in pixels; as many columns as fit.
        columns: always so many columns instead, for pictures that belong side by side.
    """

    pictures: Sequence[Picture]
    width: int = 240
    columns: int | None = None
    kind: str = field(default="pictures", init=False)


@dataclass(frozen=True)
class Legend:
    """What colours stand for: (colour, name) each."""

    entries: Sequence[tuple[str, str]]
    kind: str = field(default="legend", init=False)


@dataclass(frozen=True)
class Code:
    """A command or a file, literally."""

    text: str
    caption: str = ""
    kind: str = field(default="code", init=False)


@dataclass(frozen=True)
class Verdict:
    """A claim and whether it holds; None stands for "not decided"."""

    holds: bool | None
    claim: str
    kind: str = field(default="verdict", init=False)

    @property
    def word(self) -> str:
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


@dataclass(frozen=True)
class Missing:
    """A note in place of something that cannot be shown."""

    text: str
    kind: str = field(default="missing", init=False)


@dataclass(frozen=True)
class Details:
    """Blocks that are folded away until the reader asks for them."""

    summary: str
    blocks: Sequence["Block"]
    kind: str = field(default="details", init=False)


Block = Text | Facts | Table | Figures | Pictures | Legend | Code | Verdict | Missing | Details


@dataclass(frozen=True)
class Section:
    """A heading, also in the table of contents, and what stands below it."""

    title: str
    blocks: Sequence[Block]


def show(value: Any, digits: int = 3) -> str:
    """A value as text: a dash for nothing, fixed decimals for floats.

    Example:
        >>> show(0.5), show(None), show(float("nan")), show(True), show(1200)
        ('0.500', '–', '–', 'yes', '1200')
    """
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return f"{float(value):.{digits}f}" if math.isfinite(value) else DASH
    return str(value)


def _is_number(content: Any) -> bool:
    value = content.value if isinstance(content, Cell) else content
    if isinstance(value, str):
        # "0.735 ± 0.004", "+0.021" and "–" stand in columns of numbers.
        return bool(value) and set(value) <= NUMBER_CHARACTERS
    return not isinstance(value, bool)


def _markdown_row(cells: Sequence[Any]) -> str:
    texts = [" ".join(str(cell).split()).replace("|", "\\|") for cell in cells]
    return "| " + " | ".join(texts) + " |"
