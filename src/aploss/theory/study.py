"""The result of one study of the paper's theory: numbers, plots and verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aploss.files import write_json
from aploss.reports.page import Figures, Section, SvgFigure, Table, Text, Verdict, write_page

PAPER_UPDATE = "error-driven"  # the paper's update; every other one is a control


@dataclass(frozen=True, kw_only=True)
class Study:
    """A claim of the paper, put to the test.

    Attributes:
        name: name on the command line and of the folder.
        title: title of the page.
        place: section, figure or appendix of the paper.
        text: the experiment in words.
        figures: plots.
        tables: numbers.
        verdicts: the claims; every one is asserted in the tests.
        numbers: all measured values, for other programs.

    Example:
        >>> from aploss.theory import STUDIES
        >>> study = STUDIES["consistency"](0)  # the argument is the seed
        >>> study.place, study.holds
        ('Observation 1 and Appendix 4', True)
    """

    name: str
    title: str
    place: str
    text: str
    verdicts: Sequence[Verdict]
    numbers: dict[str, Any]
    figures: Sequence[SvgFigure] = ()
    tables: Sequence[Table] = ()

    @property
    def holds(self) -> bool:
        """Whether every claim holds."""
        return all(verdict.holds is True for verdict in self.verdicts)


def checked_verdict(claim: str, passes: Mapping[str, bool]) -> Verdict:
    """The verdict on a claim about the paper's update, given that every control must violate it.

    Args:
        claim: the claim, without a full stop.
        passes: name of an update → whether it passes the check; :data:`PAPER_UPDATE` is the one that is judged.

    Example:
        >>> checked_verdict("the loss falls", {"error-driven": True, "no update": False}).holds
        True
        >>> print(checked_verdict("the loss is positive", {"error-driven": True, "no update": True}).claim)
        the loss is positive; not informative: "no update" passes the same check
    """
    controls = {name: passed for name, passed in passes.items() if name != PAPER_UPDATE}
    failing, passing = (
        ", ".join(f'"{name}"' for name, passed in controls.items() if passed is outcome) for outcome in (False, True)
    )
    if passes[PAPER_UPDATE] and passing:
        return Verdict(None, f"{claim}; not informative: {passing} passes the same check")
    return Verdict(passes[PAPER_UPDATE], f"{claim}; violated, as it must be, by {failing}" if failing else claim)


def write_study(study: Study, folder: Path) -> Path:
    """Writes ``report.html`` and ``numbers.json``.

    Args:
        study: the result.
        folder: an existing or new folder.

    Returns:
        The page.

    Example:
        >>> from aploss.theory import STUDIES
        >>> page = write_study(STUDIES["method"](0), Path("theory/method"))  # doctest: +SKIP
    """
    claims = [{"claim": v.claim, "holds": v.holds} for v in study.verdicts]
    write_json(folder / "numbers.json", {**study.numbers, "verdicts": claims})
    sections = [
        Section("Claim", [Text(study.text)]),
        Section("Results", [Figures(study.figures), *study.tables]),
        Section("Verdict", study.verdicts),
    ]
    return write_page(folder / "report.html", study.title, sections, subtitle=study.place)


def write_index(studies: Sequence[Study], folder: Path) -> Path:
    """Writes ``index.html`` with the verdicts of all studies and links to their pages.

    Args:
        studies: the results, each written to ``folder / study.name`` by :func:`write_study`.
        folder: an existing or new folder.

    Returns:
        The page.

    Example:
        >>> page = write_index(studies, Path("theory"))  # doctest: +SKIP
    """
    sections = [
        Section(study.title, [Text(study.place), *study.verdicts], link=f"{study.name}/report.html")
        for study in studies
    ]
    held = [verdict.holds is True for study in studies for verdict in study.verdicts]
    subtitle = f"{sum(held)} of {len(held)} claims hold"
    return write_page(folder / "index.html", "The paper's theorems, put to the test", sections, subtitle=subtitle)
