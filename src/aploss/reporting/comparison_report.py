"""The page and Markdown table of a comparison of losses, or of a table or figure of the paper."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from aploss.files import write_text
from aploss.reporting.blocks import (
    DASH,
    Block,
    Cell,
    Code,
    Fact,
    Facts,
    Figure,
    Figures,
    Section,
    Table,
    Text,
    Verdict,
    show,
)
from aploss.reporting.comparison_data import Comparison, Curve, Difference, Entry
from aploss.reporting.comparison_plots import comparison_curves, difference_plot, spread_plot
from aploss.reporting.page import write_page
from aploss.reporting.style import line_style, loss_label

__all__ = [
    "Comparison",
    "Curve",
    "Difference",
    "Entry",
    "comparison_markdown",
    "comparison_sections",
    "comparison_table",
    "write_comparison",
]


def write_comparison(folder: str | Path, comparison: Comparison) -> Path:
    """Write ``report.html`` and ``table.md`` into a folder.

    Returns:
        The path of the page.
    """
    root = Path(folder)
    write_text(root / "table.md", comparison_markdown(comparison))
    return write_page(root / "report.html", comparison.title, comparison_sections(comparison))


def comparison_sections(comparison: Comparison) -> list[Section]:
    """The sections of the page."""
    result: list[Block] = [Verdict(holds, claim) for holds, claim in comparison.verdicts]
    if comparison.summary:
        result.append(Text(comparison.summary))
    if comparison.facts:
        facts = [Fact(name, show(value, 1)) for name, value in comparison.facts.items()]
        result.append(Facts(facts))
    result.append(comparison_table(comparison))
    if comparison.notes:
        result.append(Text(comparison.notes))
    sections = [Section("Result", result)]
    figures = _spread_figures(comparison)
    if figures:
        spread: list[Block] = [Figures(figures)]
        if comparison.differences:
            spread.append(_difference_table(comparison))
        sections.append(Section("Spread over seeds", spread))
    curves = _curve_figures(comparison)
    if curves:
        text = f"Mean over seeds; the band is ± one standard deviation of {comparison.curve_label}."
        sections.append(Section("While training", [Text(text), Figures(curves)]))
    return [*sections, *comparison.sections, _repeat(comparison)]


def comparison_table(comparison: Comparison) -> Table:
    """Mean ± standard deviation of every metric in percent, the paper's numbers beside it.

    The best mean of a column is bold. The standard deviation is that of a sample (n - 1).
    """
    entries = comparison.entries
    columns: list[str] = [comparison.row_name]
    cells: list[list[Any]] = [
        [Cell(loss_label(entry.name), colour=line_style(entry.name, place).colour)]
        for place, entry in enumerate(entries)
    ]
    for metric in comparison.metrics:
        columns.append(metric)
        means = [_mean(entry.values.get(metric, ())) for entry in entries]
        best = max((value for value in means if value is not None), default=None)
        for row, entry, value in zip(cells, entries, means, strict=True):
            row.append(Cell(_spread_text(entry.values.get(metric, ())), strong=value == best))
        if any(metric in entry.paper for entry in entries):
            columns.append(f"{metric}, paper")
            for row, entry in zip(cells, entries, strict=True):
                row.append(_percent(entry.paper.get(metric)))
    optional: dict[str, list[Any]] = {
        "seeds": [len(next(iter(entry.values.values()), ())) for entry in entries],
        "minutes": [_mean(entry.minutes) for entry in entries],
        "note": [entry.note for entry in entries],
    }
    for name, values in optional.items():
        if any(values):
            columns.append(name)
            for row, value in zip(cells, values, strict=True):
                row.append(value)
    caption = "In percent: mean ± standard deviation over seeds."
    caption += f" Paper: {comparison.paper}." if comparison.paper else ""
    return Table(columns=columns, rows=cells, caption=caption, digits=1)


def comparison_markdown(comparison: Comparison) -> str:
    """The table, the differences, the command and the provenance as a Markdown document."""
    table = comparison_table(comparison)
    parts = [f"# {comparison.title}", comparison.summary, table.markdown(), table.caption]
    if comparison.differences:
        parts.append(_difference_table(comparison).markdown())
    parts.append(
        "\n".join(
            f"- {Verdict(holds, claim).word}: {claim}" for holds, claim in comparison.verdicts
        )
    )
    parts.append(comparison.notes)
    if comparison.command:
        parts.append(f"```\n{comparison.command}\n```")
    parts.append("\n".join(f"- {name}: {show(v)}" for name, v in comparison.provenance.items()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _spread_figures(comparison: Comparison) -> list[Figure]:
    metric = comparison.metrics[0]
    values = {
        entry.name: [100 * one for one in entry.values.get(metric, ())]
        for entry in comparison.entries
    }
    figures = []
    if any(len(seeds) > 1 for seeds in values.values()):
        drawing = spread_plot(values, title=f"{metric} of every seed", x_label=f"{metric} (%)")
        note = "Circles: seeds. Mark and line: mean ± one standard deviation."
        figures.append(Figure(drawing, note))
    if comparison.differences:
        rows = {
            one.label: (
                [100 * v for v in one.values],
                100 * one.mean,
                100 * one.low,
                100 * one.high,
            )
            for one in comparison.differences
        }
        metric = comparison.differences[0].metric
        drawing = difference_plot(
            rows, title="Paired differences", x_label=f"difference of {metric} (points)"
        )
        share = comparison.differences[0].confidence
        note = f"Circles: the difference for one seed. Line: {share:.0%} confidence interval."
        figures.append(Figure(drawing, note))
    return figures


def _curve_figures(comparison: Comparison) -> list[Figure]:
    over_steps = {
        entry.name: [(one.steps, [100 * v for v in one.values]) for one in entry.curves]
        for entry in comparison.entries
        if entry.curves
    }
    over_time = {
        entry.name: [(one.minutes, [100 * v for v in one.values]) for one in entry.curves]
        for entry in comparison.entries
        if entry.curves and all(len(one.minutes) for one in entry.curves)
    }
    label = comparison.curve_label
    figures = []
    for curves, what, x_label in ((over_steps, "steps", "step"), (over_time, "time", "minutes")):
        if curves:
            drawing = comparison_curves(
                curves, title=f"{label} against {what}", x_label=x_label, y_label=f"{label} (%)"
            )
            figures.append(Figure(drawing))
    return figures


def _difference_table(comparison: Comparison) -> Table:
    rows = [
        [one.label, one.metric, f"{100 * one.mean:+.1f}",
         f"[{100 * one.low:+.1f}, {100 * one.high:+.1f}]", len(one.values)]
        for one in comparison.differences
    ]  # fmt: skip
    share = comparison.differences[0].confidence
    columns = ["difference", "metric", "mean", f"{share:.0%} interval", "seeds"]
    return Table(columns=columns, rows=rows, caption="In points of a percent, paired over seeds.")


def _repeat(comparison: Comparison) -> Section:
    blocks: list[Block] = []
    if comparison.command:
        blocks.append(Code(comparison.command, "To make this page again"))
    if comparison.provenance:
        rows = [[name, show(value)] for name, value in comparison.provenance.items()]
        blocks.append(Table(columns=["what", "value"], rows=rows))
    return Section("How it was made", blocks or [Text("Nothing was recorded.")])


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if value is not None and value == value]
    return mean(known) if known else None


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f}"


def _spread_text(values: Sequence[float]) -> str:
    known = [value for value in values if value is not None and value == value]
    if len(known) < 2:
        return _percent(known[0] if known else None)
    return f"{_percent(mean(known))} ± {_percent(stdev(known))}"
