"""What every study of an appendix hands over: numbers, plots, and claims that hold or do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aploss.files import write_json
from aploss.reports.page import Figures, Section, SvgFigure, Table, Text, Verdict, write_page


@dataclass(frozen=True, kw_only=True)
class Study:
    """A claim of the paper, put to the test.

    Attributes:
        name: on the command line and of the folder.
        title: of the page.
        place: where in the paper.
        text: what is done and what it shows.
        figures: plots.
        tables: numbers.
        verdicts: the claims; every one is asserted in the tests.
        numbers: everything measured, for other programs.
    """

    name: str
    title: str
    place: str
    text: str
    figures: Sequence[SvgFigure]
    verdicts: Sequence[Verdict]
    numbers: dict[str, Any]
    tables: Sequence[Table] = ()

    @property
    def holds(self) -> bool:
        """Whether every claim holds."""
        return all(verdict.holds is True for verdict in self.verdicts)


def write_study(study: Study, folder: Path) -> Path:
    """Writes ``report.html`` and ``numbers.json``; returns the page."""
    claims = [{"claim": v.claim, "holds": v.holds} for v in study.verdicts]
    write_json(folder / "numbers.json", {**study.numbers, "verdicts": claims})
    sections = [
        Section("Claim", [Text(study.text)]),
        Section("What was found", [Figures(study.figures), *study.tables]),
        Section("Verdict", study.verdicts),
    ]
    return write_page(folder / "report.html", study.title, sections, subtitle=study.place)


def write_index(studies: Sequence[Study], folder: Path) -> Path:
    """Writes ``index.html``, which has the verdicts of all studies and links to their pages; returns it."""
    sections = [
        Section(study.title, [Text(study.place), *study.verdicts], link=f"{study.name}/report.html")
        for study in studies
    ]
    held = [verdict.holds is True for study in studies for verdict in study.verdicts]
    subtitle = f"{sum(held)} of {len(held)} claims hold"
    return write_page(folder / "index.html", "The paper's theorems, put to the test", sections, subtitle=subtitle)
