"""What a comparison hands to its page: plain values, one row a loss or setting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aploss.reporting.blocks import Section
from aploss.reporting.style import loss_label

__all__ = ["Comparison", "Curve", "Difference", "Entry"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """AP of one run while it trained; ``minutes`` may be empty."""

    steps: Sequence[float]
    values: Sequence[float]
    minutes: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row: a loss, or a setting of it, trained with some seeds.

    Attributes:
        name: a loss name as in ``LOSS_LABELS``, or any text such as ``"batch size 4"``.
        values: metric → its value for each seed, between 0 and 1; shown times 100, as in the paper.
        minutes: training time of each seed.
        paper: metric → the paper's value, between 0 and 1.
        curves: one for each seed.
        note: such as the learning rate.
    """

    name: str
    values: Mapping[str, Sequence[float]]
    minutes: Sequence[float] = ()
    paper: Mapping[str, float] = field(default_factory=dict)
    curves: Sequence[Curve] = ()
    note: str = ""

    def __post_init__(self) -> None:
        numbers = [*self.paper.values(), *(one for row in self.values.values() for one in row)]
        for value in numbers:
            if value is not None and not (value != value or 0 <= value <= 1):
                raise ValueError(f"{self.name}: values are between 0 and 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A paired difference over seeds, ``name`` minus ``baseline``, with its interval (0 to 1)."""

    name: str
    baseline: str
    values: Sequence[float]
    mean: float
    low: float
    high: float
    metric: str = "AP"
    confidence: float = 0.95

    @property
    def label(self) -> str:
        return f"{loss_label(self.name)} \N{MINUS SIGN} {loss_label(self.baseline)}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything a page of a comparison shows.

    Attributes:
        title: such as ``"Table 2: RetinaNet with four losses"``.
        entries: the rows, in the order they are shown.
        metrics: the columns; the first one is drawn.
        summary: what is compared and what came out, in words.
        differences: paired differences over seeds.
        verdicts: (holds or not or None, claim).
        facts: name → value for the headline, such as seeds, minutes, detector.
        command: the exact command that makes this page again.
        paper: what the paper's numbers were measured on; empty without such numbers.
        notes: paragraphs below the table: differences from the paper, and why.
        provenance: name → value: commit, versions, hardware, seeds.
        sections: more sections, shown before the last one.
        row_name: head of the first column.
        curve_label: what ``Curve.values`` are; the label of the y axis, in percent.
    """

    title: str
    entries: Sequence[Entry]
    metrics: Sequence[str] = ("AP", "AP50", "AP75")
    summary: str = ""
    differences: Sequence[Difference] = ()
    verdicts: Sequence[tuple[bool | None, str]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    paper: str = ""
    notes: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    sections: Sequence[Section] = ()
    row_name: str = "loss"
    curve_label: str = "AP"
