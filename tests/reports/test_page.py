"""Pages: self-contained, and escaped whatever names they are given."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from aploss.plotting.plots import Series, line_plot
from aploss.reports.page import (
    DASH,
    Block,
    Cell,
    Code,
    Facts,
    Figures,
    Picture,
    Section,
    SvgFigure,
    Table,
    Text,
    Verdict,
    write_page,
)

EVIL = "<script>alert('x')</script>\"' onload=alert(1) {{ 7 * 7 }} </style> `code` &amp; \x1b[31m\u202e"
PIXEL = "data:image/png;base64,iVBORw0KGgo="


class Reader(HTMLParser):
    """Collects tags, attributes and text as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def every_block(text: str) -> list[Block]:
    svg = line_plot([Series(name=text, x=[0, 1], y=[0, 1]), Series(name="b", x=[0], y=[0])])
    rows = [[text, 1.0], [Cell(text, True, "#0072b2"), None]]
    return [
        Text(text), Text(text, missing=True), Code(text, text), Facts([(text, text, text)]),
        *(Verdict(holds, text) for holds in (True, False, None)),
        Table(columns=[text, "n"], rows=rows, caption=text),
        Figures([SvgFigure(svg, text, text), Picture(PIXEL, text)], legend=[("#0072b2", text)]),
        Section(text, [Text(text)]),
    ]  # fmt: skip


@pytest.fixture
def read(tmp_path: Path):
    """Writes a page of blocks and reads it."""

    def write_and_read(*blocks: Block, title: str = "T", subtitle: str = "") -> str:
        page = write_page(tmp_path / "page.html", title, [Section(title, blocks)], subtitle=subtitle)
        return page.read_text(encoding="utf-8")

    return write_and_read


def test_text_never_becomes_markup(read) -> None:
    page = read(*every_block(EVIL), title=EVIL, subtitle=EVIL)
    reader = Reader(page)
    assert not [tag for tag, _ in reader.tags if tag in ("script", "iframe", "object", "embed")]
    for _, attributes in reader.tags:
        assert not [name for name in attributes if name.startswith("on")]
    assert "{{ 7 * 7 }}" in reader.text
    assert not re.search(r"\b49\b", reader.text)
    assert page.count("</style>") == 1
    svg = every_block("\x1b\u202e")[-2].figures[0].svg
    for text in (page, svg):
        assert not set(text) & {"\x1b", "\u202e"}
    assert ElementTree.fromstring(svg) is not None  # XML has no control characters


def test_a_page_loads_nothing_and_its_ids_are_unique(read) -> None:
    page = read(*every_block("text"))
    tags = Reader(page).tags
    for tag, attributes in tags:
        for name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
    assert "@import" not in page
    assert "default-src 'none'" in page
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 0
    assert set(re.findall(r'href="#([^"]+)', page)) <= set(ids)


def test_words_between_backticks_are_code_but_an_unpaired_backtick_is_text(read) -> None:
    page = read(Text("run `a <b>` now\n\nit`s"))
    assert "run <code>a &lt;b&gt;</code> now" in page
    assert "<p>it`s</p>" in page


def test_columns_of_numbers_are_aligned_to_the_right(read) -> None:
    table = Table(columns=["name", "AP", "±"], rows=[["a", 0.5, "0.5 ± 0.1"], ["b", None, DASH]])
    assert table.numeric == [False, True, True]
    assert read(table).count('class="number"') == 6


def test_a_table_may_be_empty_but_not_ragged(read) -> None:
    assert [tag for tag, _ in Reader(read(Table(columns=["a", "b"], rows=[]))).tags].count("tr") == 1
    with pytest.raises(ValueError, match="zip"):
        read(Table(columns=["a", "b"], rows=[[1, 2], [1]]))
