"""From results to ``report.html``, ``table.md`` and ``results.json``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aploss.files import write_json
from aploss.reporting.blocks import DASH, Cell, Section, Table, Text
from aploss.reporting.comparison_report import Comparison, write_comparison
from aploss.reporting.style import line_style, loss_label
from aploss.reproduction.results import Results
from aploss.training.run_folder import describe_environment

__all__ = ["PageText", "command_line", "make_comparison", "write_results"]


@dataclass(frozen=True, kw_only=True)
class PageText:
    """What a page says besides its numbers.

    Attributes:
        title: heading.
        summary: what is compared, in words.
        metrics: columns; the first is drawn, and differences are of it.
        reference: the row that the others are subtracted from; None for no differences.
        verdicts: (holds or not or None, claim).
        notes: paragraphs below the table.
        paper: what the paper's numbers were measured on.
        sections: more sections.
        row_name: head of the first column.
        curve_label: what the curves show.
    """

    title: str
    summary: str
    metrics: Sequence[str] = ("AP", "AP50", "AP75")
    reference: str | None = None
    verdicts: Sequence[tuple[bool | None, str]] = ()
    notes: str = ""
    paper: str = ""
    sections: Sequence[Section] = field(default_factory=tuple)
    row_name: str = "loss"
    curve_label: str = "AP on validation"


def write_results(out: Path, results: Results, text: PageText, *, command: str) -> Path:
    """Writes the three files of a comparison into a folder.

    Returns:
        The path of the page.
    """
    comparison = make_comparison(results, text, command=command)
    document = {
        "title": text.title,
        "command": command,
        **results.document(text.metrics, text.reference),
        "verdicts": [{"holds": holds, "claim": claim} for holds, claim in text.verdicts],
        "environment": describe_environment(),
    }
    page = write_comparison(out, comparison)
    write_json(out / "results.json", document)
    return page


def make_comparison(results: Results, text: PageText, *, command: str) -> Comparison:
    """What the page shows."""
    metric = text.metrics[0]
    differences = [] if text.reference is None else results.differences(text.reference, metric)
    summary = text.summary
    if not results.complete:
        total = len(results.plan.variants) * len(results.plan.seeds)
        summary += f"\n\nNot finished: {len(results.runs)} of {total} runs are done."
    tried = [_trials_section(results)] if results.trials else []
    return Comparison(
        title=text.title,
        entries=results.entries(text.metrics),
        metrics=text.metrics,
        summary=summary,
        differences=differences,
        verdicts=text.verdicts,
        facts=_facts(results),
        command=command,
        paper=text.paper,
        notes=text.notes,
        provenance=_provenance(results),
        sections=[*text.sections, *tried],
        row_name=text.row_name,
        curve_label=text.curve_label,
    )


def _facts(results: Results) -> dict[str, Any]:
    config = results.plan.variants[0].config
    return {
        "Detector": config.detector,
        "Data": _data_name(config.data),
        "Length": f"{config.schedule.length} {config.schedule.unit}",
        "Seeds": len(results.plan.seeds),
        "Minutes of training": _minutes(results),
    }


def _provenance(results: Results) -> dict[str, Any]:
    environment = describe_environment()
    config = results.plan.variants[0].config
    commits = {run.summary.commit or "unknown" for run in results.runs.values() if run.summary}
    packages = environment["packages"]
    devices = environment["devices"] or [f"{environment['cpu']}, {environment['cores']} cores"]
    folders = sorted({str(run.folder.parent) for run in results.runs.values()})
    return {
        "commit": ", ".join(sorted(commits)) or environment["commit"] or "unknown",
        "seeds": ", ".join(map(str, results.plan.seeds)),
        "minutes": f"{_minutes(results):.1f} of training and validation, trials not counted",
        "batch": f"{config.batches.size} images"
        + (f" x {config.batches.accumulate}" if config.batches.accumulate > 1 else ""),
        "image size": str(config.batches.image_size),
        "optimizer": f"{config.optimizer.name}, {config.schedule.kind}, "
        f"{config.schedule.warmup_steps} steps of warm-up",
        "learning rate": _learning_rates(results),
        "data": f"{_data_name(config.data)}, measured on "
        + ", ".join(sorted({str(r.summary.split) for r in results.runs.values() if r.summary})),
        "hardware": ", ".join(devices) + f", threads: {environment['torch_threads']}",
        "software": ", ".join(f"{name} {packages[name]}" for name in ("aploss", "torch", "numba")),
        "runs": ", ".join(folders),
    }


def _minutes(results: Results) -> float:
    # Rows may share a run: it is counted once.
    runs = {run.folder: run for run in results.runs.values() if run.summary}
    return sum(run.summary.minutes for run in runs.values() if run.summary)


def _data_name(data: str) -> str:
    return data if data == "builtin" else Path(data).resolve().name


def _trials_section(results: Results) -> Section:
    rates = sorted({trial.learning_rate for trial in results.trials})
    rows = []
    for place, variant in enumerate(results.plan.variants):
        scores = {
            trial.learning_rate: "diverged" if trial.score is None else f"{100 * trial.score:.1f}"
            for trial in results.trials
            if trial.name == variant.name
        }
        chosen = variant.config.optimizer.learning_rate
        first = Cell(loss_label(variant.name), colour=line_style(variant.name, place).colour)
        cells = [Cell(scores.get(rate, DASH), strong=rate == chosen) for rate in rates]
        rows.append([first, *cells])
    text = (
        "Every row was tried with as many learning rates and the first seed, and took the one "
        "with the best score (bold), in percent: AP on the validation split, or, where the "
        "optimisation itself is measured, the AP of the ranking of training images."
    )
    table = Table(columns=["row", *(f"{rate:.3g}" for rate in rates)], rows=rows)
    return Section("Search for learning rates", [Text(text), table])


def _learning_rates(results: Results) -> str:
    rates = {v.name: f"{v.config.optimizer.learning_rate:.3g}" for v in results.plan.variants}
    if len(set(rates.values())) == 1:
        return next(iter(rates.values()))
    return ", ".join(f"{loss_label(name)} {rate}" for name, rate in rates.items())


def command_line() -> str:
    """The command this process was started with, as a user would type it."""
    command: str = describe_environment()["command"]
    program, _, rest = command.partition(" ")
    return f"{'aploss' if program.startswith(('__main__', 'aploss')) else program} {rest}".strip()
