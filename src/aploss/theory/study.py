"""The result of one study of the paper's theory: plots, tables and verdicts; and the controls of its updates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aploss.reports.page import Figures, Section, SvgFigure, Table, Text, Verdict, write_page

PAPER_UPDATE = "error-driven"  # the paper's update; every other one is a control
COMMON = 8.0  # the part that the features of all boxes share: no ranking sees it, a classifier without bias does
NOISE = 0.5  # of the features that do not separate

Update = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # the paper's step, weights, features → step [D]


def updates_and_controls(positives: int, random: np.random.Generator) -> dict[str, Update]:
    """The paper's update of linear weights, and the controls; the first boxes of a sample are its positives."""

    def random_direction(step: np.ndarray, theta: np.ndarray, features: np.ndarray) -> np.ndarray:
        direction = random.normal(size=len(step))
        return np.asarray(direction * np.sqrt(step @ step / (direction @ direction)))

    def cross_entropy(step: np.ndarray, theta: np.ndarray, features: np.ndarray) -> np.ndarray:
        errors = 1 / (1 + np.exp(-(features @ theta)))
        errors[:positives] -= 1
        return np.asarray(-errors @ features / np.vdot(features, features))  # a learning rate at which it is stable

    return {
        PAPER_UPDATE: lambda step, *_: step,
        "no update": lambda step, *_: 0 * step,
        "reversed sign": lambda step, *_: -step,
        "random direction": random_direction,
        "cross-entropy": cross_entropy,
    }


@dataclass(frozen=True, kw_only=True)
class Study:
    """A claim of the paper, put to the test.

    Attributes:
        name: name on the command line.
        title: heading of its section.
        place: section, figure or appendix of the paper.
        text: the experiment in words.
        figures: plots.
        tables: numbers.
        verdicts: the claims; every one is asserted in the tests.

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
    """
    controls = {name: passed for name, passed in passes.items() if name != PAPER_UPDATE}
    failing, passing = (
        ", ".join(f'"{name}"' for name, passed in controls.items() if passed is outcome) for outcome in (False, True)
    )
    if passes[PAPER_UPDATE] and passing:
        return Verdict(None, f"{claim}; {passing} passes the same check", "not informative")
    return Verdict(passes[PAPER_UPDATE], f"{claim}; violated, as it must be, by {failing}" if failing else claim)


def write_studies(studies: Sequence[Study], folder: Path) -> Path:
    """Writes ``report.html`` with a section for each study.

    Args:
        studies: the results.
        folder: an existing or new folder.

    Returns:
        The page.

    Example:
        >>> from aploss.theory import STUDIES
        >>> write_studies([STUDIES["consistency"](0)], Path("theory")).name
        'report.html'
    """
    sections = [
        Section(one.title, [*one.verdicts, Text(f"{one.place}. {one.text}"), Figures(one.figures), *one.tables])
        for one in studies
    ]
    held = [verdict.holds is True for study in studies for verdict in study.verdicts]
    subtitle = f"{sum(held)} of {len(held)} claims hold"
    return write_page(folder / "report.html", "The paper's theorems, put to the test", sections, subtitle=subtitle)
