"""Pages: self-contained, and literal whatever names they are given."""

import os
import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import Markup

from aploss.plotting.plots import Series, line_plot
from aploss.plotting.style import THEME
from aploss.reports.page import (
    DASH,
    Block,
    Cell,
    Code,
    Details,
    Fact,
    Facts,
    Figures,
    Missing,
    Picture,
    Pictures,
    Section,
    SvgFigure,
    Table,
    Text,
    Verdict,
    embed_svg,
    render_page,
    write_page,
)

EVIL = "<script>alert('x')</script>\"' onload=alert(1) {{ 7 * 7 }} </style> `code` &amp;"
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
    return [
        Text(text), Facts([Fact(text, text, text)]), Code(text, text), Missing(text),
        Verdict(True, text), Verdict(False, text), Verdict(None, text),
        Table(columns=[text, "n"], rows=[[text, 1.0], [Cell(text, True, "#0072b2"), None]],
              caption=text),
        Figures([SvgFigure(svg, text, text)]), Pictures([Picture(PIXEL, text, text)]),
        Details(text, [Text(text)]),
    ]  # fmt: skip


def test_no_text_becomes_markup() -> None:
    page = render_page(EVIL, [Section(EVIL, every_block(EVIL))], subtitle=EVIL, footer=EVIL)
    reader = Reader(page)
    assert not [tag for tag, _ in reader.tags if tag in ("script", "iframe", "object", "embed")]
    for _, attributes in reader.tags:
        assert not [name for name in attributes if name.startswith("on")]
    assert "{{ 7 * 7 }}" in reader.text
    assert not re.search(r"\b49\b", reader.text)
    assert page.count("</style>") == 1


def test_a_page_asks_nothing_of_the_network() -> None:
    page = render_page("Title", [Section("One", every_block("text"))])
    for tag, attributes in Reader(page).tags:
        for name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "default-src 'none'" in page


def test_no_id_occurs_twice_and_every_reference_is_found() -> None:
    svg = line_plot([Series(name="ap", x=[0, 1], y=[0, 1], markers=True)])
    figures = Figures([SvgFigure(svg), SvgFigure(svg), SvgFigure(svg)])
    page = render_page("T", [Section("Same", [figures]), Section("Same", []), Section("?!", [])])
    ids = [attributes["id"] for _, attributes in Reader(page).tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"same", "same-2", "section"} <= set(ids)
    references = re.findall(r'(?:href="#|url\(#)([^")]+)', page)
    assert references
    assert set(references) <= set(ids)


def test_plots_follow_dark_mode() -> None:
    svg = line_plot([Series(name="ap", x=[0, 1], y=[0, 1]), Series(name="#0072b2", x=[], y=[])])
    embedded = embed_svg(svg, prefix="p-", label='a "plot"')
    assert isinstance(embedded, Markup)
    assert "var(--plot-blue)" in embedded
    assert ">#0072b2<" in embedded  # a name that looks like a colour stays what it is
    inside_tags = "".join(re.findall(r"<[^>]*>", embedded))
    assert not [colour for colour in THEME if colour in inside_tags]
    assert 'aria-label="a &#34;plot&#34;"' in embedded
    page = render_page("T", [])
    for light, (variable, dark) in THEME.items():
        assert f"{variable}: {light}" in page
        assert f"{variable}: {dark}" in page


def test_words_between_backticks_are_code_but_a_lone_one_is_not() -> None:
    page = render_page("T", [Section("S", [Text("run `a <b>` now\n\nit`s")])])
    assert "run <code>a &lt;b&gt;</code> now" in page
    assert "<p>it`s</p>" in page


def test_numbers_are_set_to_the_right() -> None:
    table = Table(columns=["name", "AP", "±"], rows=[["a", 0.5, "0.5 ± 0.1"], ["b", None, DASH]])
    assert table.numeric == [False, True, True]
    page = render_page("T", [Section("S", [table])])
    assert page.count('class="number"') == 6


def test_an_empty_table_is_only_a_head() -> None:
    page = render_page("T", [Section("S", [Table(columns=["a", "b"], rows=[])])])
    assert [tag for tag, _ in Reader(page).tags].count("tr") == 1


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells, the table 2"):
        Table(columns=["a", "b"], rows=[[1]])


def test_a_picture_from_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="a page holds its pictures itself"):
        Picture("https://example.org/picture.png")


def test_files_are_written_whole_and_readable(tmp_path: Path) -> None:
    path = write_page(tmp_path / "new" / "page.html", "Ünïcode", [])
    assert "<title>Ünïcode</title>" in path.read_text(encoding="utf-8")
    assert os.listdir(path.parent) == ["page.html"]  # noqa: PTH208
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
