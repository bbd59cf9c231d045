"""The result of one study of the paper's theory, and the page of several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aploss.reports.page import Figures, Section, SvgFigure, Table, Text, Verdict, write_page


def differentiate(function: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[float, Tensor]:
    """The value of a function and its gradient on the inputs."""
    leaf = inputs.clone().requires_grad_()
    value = function(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.item(), gradient


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
