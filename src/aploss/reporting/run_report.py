"""``report.html`` of a training run, made from the files in its folder alone."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aploss.files import write_text
from aploss.reporting.blocks import Figures, Missing, Section
from aploss.reporting.page import write_page
from aploss.reporting.run_files import RunFiles, read_run
from aploss.reporting.run_sections import SECTIONS
from aploss.reporting.style import loss_label

__all__ = ["write_run_report"]

logger = logging.getLogger(__name__)


def write_run_report(run_folder: str | Path) -> Path:
    """Write ``report.html``, and the plots in it as ``plots/*.svg``, into a run folder.

    Whatever the folder does not hold is left out, and the page says so: a page can be made of a
    run that was interrupted.

    Args:
        run_folder: such as ``runs/demo``; which files are read is told in ``docs/reports.md``.

    Returns:
        The path of the page.

    Raises:
        RunError: when it is not the folder of a run.
    """
    run = read_run(run_folder)
    sections = [_section(title, run) for title in SECTIONS]
    for section in sections:
        for block in section.blocks:
            for figure in block.figures if isinstance(block, Figures) else ():
                write_text(run.folder / "plots" / f"{figure.name}.svg", figure.svg)
    return write_page(
        run.folder / "report.html", run.name, sections, subtitle=_subtitle(run.summary)
    )


def _section(title: str, run: RunFiles) -> Section:
    """A section; one that a strange file breaks must not cost the page of a long training."""
    try:
        return Section(title, SECTIONS[title](run))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        logger.warning("section %r of the report is left out", title, exc_info=True)
        return Section(
            title, [Missing(f"This part could not be made ({type(error).__name__}: {error}).")]
        )


def _subtitle(summary: Mapping[str, Any]) -> str:
    if not summary:
        return "This run has no summary yet."
    text = f"{summary.get('detector', 'a detector')} trained with "
    text += loss_label(str(summary.get("loss", "an unknown loss")))
    if summary.get("data") is not None:
        text += f" on {summary['data']}"
    if summary.get("seed") is not None:
        text += f", seed {summary['seed']}"
    return text
