"""One layout for every page: a single file without scripts that asks nothing of the network."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from aploss.files import write_text
from aploss.reporting.blocks import Section
from aploss.reporting.style import THEME

__all__ = ["embed_svg", "render_page", "write_page"]


def write_page(
    path: str | Path,
    title: str,
    sections: Sequence[Section],
    *,
    subtitle: str = "",
    footer: str = "",
) -> Path:
    """Write a self-contained page.

    Args:
        path: the HTML file; its folder is made when it is not there.
        title: the heading and the browser's title.
        sections: what the page shows; each gets a place in the table of contents.
        subtitle: a line below the heading.
        footer: a line at the end.

    Returns:
        The path of the page.

    Example:
        >>> import tempfile
        >>> from aploss.reporting.blocks import Section, Text, Verdict
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sections = [Section("Result", [Verdict(True, "loss is zero"), Text("Done.")])]
        ...     write_page(Path(folder) / "page.html", "Convergence", sections).name
        'page.html'
    """
    page = Path(path)
    write_text(page, render_page(title, sections, subtitle=subtitle, footer=footer))
    return page


def render_page(
    title: str, sections: Sequence[Section], *, subtitle: str = "", footer: str = ""
) -> str:
    """The HTML text of a page; see :func:`write_page`."""
    anchors = _anchors([section.title for section in sections])
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            subtitle=subtitle,
            footer=footer or f"Made by aploss {_version()}",
            sections=list(zip(anchors, sections, strict=True)),
            theme=list(THEME.items()),
            embed=_embedder(),
        )
    )


def embed_svg(svg: str, *, prefix: str, label: str = "") -> Markup:
    """An SVG document as part of a page.

    Its colours become the page's variables, so that it follows dark mode; its ids get a prefix,
    so that two plots on a page do not use each other's parts; its size is the column's.

    Args:
        svg: of :mod:`aploss.reporting.plots`: text of strangers is escaped in it.
        prefix: different for each plot of a page.
        label: read aloud by screen readers.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
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


def _embedder() -> Callable[[str, str], Markup]:
    """A function for the template that numbers the plots of one page."""
    count = 0

    def embed(svg: str, label: str) -> Markup:
        nonlocal count
        count += 1
        return embed_svg(svg, prefix=f"p{count}-", label=label)

    return embed


def _anchors(titles: Sequence[str]) -> list[str]:
    """An id for each section: the title's words, made different where they are the same."""
    anchors: list[str] = []
    for title in titles:
        words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        anchor, number = words, 2
        while anchor in anchors:
            anchor, number = f"{words}-{number}", number + 1
        anchors.append(anchor)
    return anchors


def _inline(text: str) -> Markup:
    """Escaped text in which words between backticks are code."""
    parts = str(text).split("`")
    if len(parts) % 2 == 0:  # a lone backtick is just that
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else part
        for index, part in enumerate(parts)
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("aploss.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(inline=_inline, themed=_themed)
    return environment


def _version() -> str:
    try:
        return version("aploss")
    except PackageNotFoundError:
        return "(not installed)"
