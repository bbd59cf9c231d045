"""What the three parts of Table 1 share: AP-loss on RetinaNet, one setting varied."""

from collections.abc import Sequence
from typing import Any

from aploss.reproduction.page import PageText
from aploss.reproduction.paper_numbers import MEASURED_ON
from aploss.reproduction.request import Request, small_note

__all__ = ["AP_OPTIONS", "STEPS", "ablation_text"]

STEPS = 500  # at small scale
AP_OPTIONS: dict[str, Any] = {
    "loss": "ap",
    "criterion": {"options": {"delta": 1.0, "interpolated": True}},
}


def ablation_text(
    request: Request,
    *,
    title: str,
    summary: str,
    row: str,
    reference: str,
    verdicts: Sequence[tuple[bool | None, str]],
) -> PageText:
    """The page of one part of Table 1.

    Args:
        request: what was asked for.
        title, summary: texts.
        row: head of the first column.
        reference: the paper's choice, which the others are subtracted from.
        verdicts: the paper's claims.
    """
    same = "All rows have the learning rate of the recipe: the setting is varied, nothing is tuned."
    return PageText(
        title=title,
        summary=f"{summary}\n\n{same}",
        reference=reference,
        verdicts=verdicts,
        notes=small_note(request),
        paper=MEASURED_ON["voc"],
        row_name=row,
    )
