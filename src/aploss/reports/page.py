"""One layout for every page: a single file without scripts that asks nothing of the network.

A page is made of blocks of plain data. All texts are shown literally, since class and file names come from strangers;
only in running text (not in tables and below pictures) words between backticks look like code.
"""

import itertools
import math
import numbers
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from aploss.files import write_text
from aploss.plotting.style import THEME

DASH = "\u2013"


@dataclass(frozen=True)
class Text:
    """Paragraphs, separated by empty lines."""

    text: str

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


@dataclass(frozen=True)
class Cell:
    """A cell of a table that needs more than a value: bold, or a swatch of some colour before it."""

    value: Any
    strong: bool = False
    colour: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under named columns; it scrolls inside its own box where the screen is narrow.

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
    caption: str = ""  # a line below
    digits: int = 3  # decimals of floats

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
        return [all(map(_is_number, column)) for column in zip(*self.rows, strict=True)] or [False] * len(self.columns)

    def markdown(self) -> str:
        """The same table for a Markdown document."""
        ruler = "|".join("---:" if right else ":---" for right in self.numeric)
        rows = [[self.cell(content) for content in row] for row in self.rows]
        texts = [[f"**{cell.value}**" if cell.strong else cell.value for cell in row] for row in rows]
        return "\n".join([_markdown_row(self.columns), f"|{ruler}|", *map(_markdown_row, texts)])


@dataclass(frozen=True)
class SvgFigure:
    """A plot as SVG text, with a line below."""

    svg: str  # of :mod:`aploss.plotting.plots`
    caption: str = ""  # the line
    label: str = ""  # for those who cannot see the plot; the caption where it is empty
    name: str = ""  # of the file, without ending, where plots are also written as files


@dataclass(frozen=True)
class Figures:
    """Plots, side by side where there is room."""

    figures: Sequence[SvgFigure]


@dataclass(frozen=True)
class Picture:
    """A picture as a ``data:`` address with a line below."""

    source: str
    caption: str = ""

    def __post_init__(self) -> None:
        if not self.source.startswith("data:image/"):
            raise ValueError(f"a page holds its pictures itself, got {self.source[:60]!r}")


@dataclass(frozen=True)
class Pictures:
    """A gallery."""

    pictures: Sequence[Picture]
    width: int = 240  # the least width of a picture in pixels; as many columns as fit
    columns: int | None = None  # always so many columns instead, for pictures that belong side by side


@dataclass(frozen=True)
class Legend:
    """What colours stand for: (colour, name) each."""

    entries: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Code:
    """A command or a file, literally."""

    text: str
    caption: str = ""


@dataclass(frozen=True)
class Verdict:
    """A claim and whether it holds; None stands for "not decided"."""

    holds: bool | None
    claim: str

    @property
    def word(self) -> str:
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


@dataclass(frozen=True)
class Missing:
    """A note in place of something that cannot be shown."""

    text: str


@dataclass(frozen=True)
class Link:
    """The way to another page, by its place relative to this one."""

    place: str
    text: str

    def __post_init__(self) -> None:
        if ":" in self.place or self.place.startswith(("/", "\\")):
            raise ValueError(f"a page links to its neighbours alone, got {self.place!r}")


@dataclass(frozen=True)
class Details:
    """Blocks that are folded away until the reader asks for them."""

    summary: str
    blocks: Sequence["Block"]


Block = Text | Facts | Table | Figures | Pictures | Legend | Code | Verdict | Missing | Link | Details


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
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return f"{float(value):.{digits}f}" if math.isfinite(value) else DASH
    return DASH if value is None else str(value)


def _is_number(content: Any) -> bool:
    value = content.value if isinstance(content, Cell) else content
    if isinstance(value, str):
        # "0.735 ± 0.004", "+0.021" and "–" stand in columns of numbers.
        return bool(value) and set(value) <= set("0123456789.+-\u2212±\u2013%, []")
    return not isinstance(value, bool)


def _markdown_row(cells: Sequence[Any]) -> str:
    texts = [" ".join(str(cell).split()).replace("|", "\\|") for cell in cells]
    return "| " + " | ".join(texts) + " |"


def write_page(path: str | Path, title: str, sections: Sequence[Section], *, subtitle: str = "") -> Path:
    """Writes a self-contained page, each section with a place in the table of contents, and returns its path.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sections = [Section("Result", [Verdict(True, "loss is zero"), Text("Done.")])]
        ...     write_page(Path(folder) / "page.html", "Convergence", sections).name
        'page.html'
    """
    write_text(Path(path), render_page(title, sections, subtitle=subtitle))
    return Path(path)


def render_page(title: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    """The HTML text of a page; see :func:`write_page`."""
    count = itertools.count(1)
    try:
        installed = version("aploss")
    except PackageNotFoundError:
        installed = "(not installed)"
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            subtitle=subtitle,
            footer=f"Made by aploss {installed}",
            sections=list(zip(_anchors(sections), sections, strict=True)),
            theme=list(THEME.items()),
            embed=lambda svg, label: embed_svg(svg, prefix=f"p{next(count)}-", label=label),
        )
    )


def embed_svg(svg: str, *, prefix: str, label: str = "") -> Markup:
    """An SVG document as part of a page.

    Its colours become the page's variables, so that it follows dark mode; its ids get a prefix, different for each
    plot, so that two on a page do not use each other's parts; its size is the column's. Screen readers read the label.
    """
    body = re.sub(r"<(metadata|style)\b[^>]*>.*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # Only inside tags: a class may well be called "#0072b2".
    body = re.sub(r"<[^>]*>", lambda tag: _adapt_tag(tag.group(), prefix), body)
    head, _, rest = body.partition(">")
    head = re.sub(r'\s(width|height|version|xmlns(:xlink)?)="[^"]*"', "", head)
    return Markup(f'{head} role="img" aria-label="{escape(label)}">{rest}')


def _adapt_tag(tag: str, prefix: str) -> str:
    tag = re.sub(r'\bid="', f'id="{prefix}', tag)
    tag = re.sub(r"url\(#", f"url(#{prefix}", tag)
    tag = re.sub(r'xlink:href="#', f'href="#{prefix}', tag)
    return re.sub(r"#[0-9a-f]{6}\b", lambda colour: _themed(colour.group()), tag)


def _themed(colour: str) -> str:
    return f"var({THEME[colour][0]})" if colour in THEME else colour


def _anchors(sections: Sequence[Section]) -> list[str]:
    """An id for each section: the title's words, made different where they are the same."""
    anchors: list[str] = []
    for section in sections:
        words = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        choices = itertools.chain([words], (f"{words}-{number}" for number in itertools.count(2)))
        anchors.append(next(one for one in choices if one not in anchors))
    return anchors


def _inline(text: str) -> Markup:
    """Escaped text in which words between backticks are code."""
    parts = str(text).split("`")
    if len(parts) % 2 == 0:  # a lone backtick is just that
        return escape(text)
    parts[1::2] = [Markup("<code>{}</code>").format(part) for part in parts[1::2]]
    return Markup("").join(parts)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    loader = PackageLoader("aploss.reports")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(inline=_inline, themed=_themed, kind=lambda block: type(block).__name__.lower())
    return environment
