"""Pages in a real browser: nothing wider than a phone, nothing loaded, nothing broken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aploss.data.check import check_dataset
from aploss.plotting.plots import Series, line_plot
from aploss.reports.comparison import Comparison, write_comparison_report
from aploss.reports.data_page import write_data_page
from aploss.reports.page import Figures, Section, SvgFigure, Table, Text, Verdict, write_page
from aploss.reports.run_report import write_run_report

SIZES = {"phone": (390, 844), "desktop": (1440, 900)}
MEASURE = """(() => {
  const wide = document.documentElement.clientWidth;
  const scrolls = (one) => one.closest('.scroll, pre, nav ul') !== null;
  const boxes = [...document.querySelectorAll('body *')].filter((one) => !scrolls(one));
  return {
    page: document.documentElement.scrollWidth - wide,
    outside: boxes.filter((one) => one.getBoundingClientRect().right > wide + 1)
      .map((one) => one.tagName + '.' + (one.className.baseVal ?? one.className)).slice(0, 5),
    broken: [...document.images].filter((one) => !one.complete || one.naturalWidth === 0).length,
    images: document.images.length,
    plots: [...document.querySelectorAll('.svgfigure img')].map((one) => one.width / one.naturalWidth),
    ids: document.querySelectorAll('[id]').length
      - new Set([...document.querySelectorAll('[id]')].map((one) => one.id)).size,
    scripts: document.scripts.length,
  };
})()"""
COLOURS = """(() => {
  const of = (one, what) => getComputedStyle(document.querySelector(one))[what];
  return [of('section', 'backgroundColor'), of('p, td', 'color')];
})()"""

Page = Callable[[str], Path]


@pytest.fixture
def page(make_run: Callable[..., Path], comparison: Comparison, tmp_path: Path) -> Page:
    """Makes one of the kinds of page."""

    def make(kind: str) -> Path:
        if kind == "run":
            return write_run_report(make_run(images=5, steps=300))
        if kind == "unfinished run":
            run = make_run(images=1, steps=100)
            for path in (run / "evaluation").iterdir():
                path.unlink()
            return write_run_report(run)
        if kind == "data":
            scenes = make_run(images=5, steps=0) / "evaluation/ground_truth.json"
            for image in scenes.parent.with_name("scenes").iterdir():
                image.rename(scenes.parent / image.name)
            return write_data_page(check_dataset(scenes), tmp_path / "data.html")
        if kind == "comparison":
            return write_comparison_report(comparison, tmp_path)
        return write_page(tmp_path / "theory.html", "W" * 120, theory_sections(), subtitle="w" * 200)

    return make


def theory_sections() -> list[Section]:
    """The widest things one can think of."""
    plot = line_plot([Series(name=letter * 60, x=[0, 1], y=[0, 1]) for letter in "pq"])
    table = Table(columns=[f"column {k}" for k in range(30)], rows=[["x" * 80, *range(29)]])
    text = "word" * 60
    return [Section(text, [Verdict(True, text), Text(text), table, Figures([SvgFigure(plot, text)])])]


@pytest.mark.parametrize("kind", ["run", "unfinished run", "data", "comparison", "theory"])
def test_pages_fit_phone_and_desktop_and_load_nothing(browser: Any, page: Page, kind: str, tmp_path: Path) -> None:
    path = page(kind)
    for name, (width, height) in SIZES.items():
        browser.open(path, width, height)
        found = browser.evaluate(MEASURE)
        assert found["page"] <= 0, (name, found)
        assert found["outside"] == [], (name, found)
        assert found["broken"] == 0
        assert found["images"] > 0 or kind != "run"
        assert found["plots"]
        assert min(found["plots"]) > 0.65, (name, found)  # letters of at least 8 pixels
        assert found["ids"] == 0
        assert found["scripts"] == 0
        assert browser.requests() == [path.resolve().as_uri()]
        assert browser.faults() == []


def test_pages_follow_dark_mode(browser: Any, page: Page) -> None:
    path = page("comparison")
    browser.open(path, *SIZES["desktop"])
    assert browser.evaluate(COLOURS) == ["rgb(254, 254, 254)", "rgb(28, 33, 40)"]
    browser.open(path, *SIZES["desktop"], dark=True)
    assert browser.evaluate(COLOURS) == ["rgb(22, 27, 34)", "rgb(230, 237, 243)"]


def test_a_script_that_slips_in_does_not_run(browser: Any, page: Page, tmp_path: Path) -> None:
    """The policy of the page is the second line of defence, so it is tested by itself."""
    text = page("comparison").read_text(encoding="utf-8")
    attack = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("</main>", f"{attack}</main>"), encoding="utf-8")
    browser.open(broken, *SIZES["phone"])
    assert browser.evaluate("document.title") != "taken"
    assert browser.faults()  # the browser says what it refused
