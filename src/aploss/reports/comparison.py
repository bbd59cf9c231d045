"""A comparison of losses, or a table or figure of the paper: spreads and paired differences over seeds, the page and
the Markdown table."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from aploss.files import write_text
from aploss.plotting.plots import Series, Values, add_number, line_plot, name_rows, new_plot, numbers, shorten
from aploss.plotting.style import INK, MUTED, LineStyle, line_style, loss_label
from aploss.reports import page


@dataclass(frozen=True)
class Spread:
    """A value over seeds: how many, their mean, and the standard deviation of a sample (n - 1)."""

    count: int
    mean: float  # NaN without a value
    deviation: float  # NaN with fewer than two


def known_values(values: Sequence[float | None]) -> list[float]:
    """The values without None and NaN.

    Example:
        >>> known_values([0.5, None, float("nan")])
        [0.5]
    """
    return [float(value) for value in values if value is not None and not math.isnan(value)]


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and sample standard deviation of what is known.

    Example:
        >>> spread([0.25, 0.5, 0.75, None])  # deviation: sqrt((0.25² + 0 + 0.25²) / 2)
        Spread(count=3, mean=0.5, deviation=0.25)
    """
    known = known_values(values)
    mean = float(np.mean(known)) if known else math.nan
    deviation = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
    return Spread(len(known), mean, deviation)


@dataclass(frozen=True, kw_only=True)
class TrainingCurve:
    """AP of one run while it trained, between 0 and 1; ``minutes`` may be empty."""

    steps: Sequence[float]
    values: Sequence[float]
    minutes: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row: a loss, or a setting of it, trained with some seeds. Values are between 0 and 1, and shown times 100."""

    name: str  # the name of a loss, or any text such as ``"batch size 4"``
    values: Mapping[str, Sequence[float | None]]  # metric → value of each seed; None or NaN: not known
    minutes: Sequence[float] = ()  # training time of each seed
    paper: Mapping[str, float] = field(default_factory=dict)  # metric → the paper's value
    curves: Sequence[TrainingCurve] = ()  # one for each seed
    note: str = ""  # such as the learning rate

    def __post_init__(self) -> None:
        for value in known_values([*self.paper.values(), *(v for row in self.values.values() for v in row)]):
            if not 0 <= value <= 1:
                raise ValueError(f"{self.name}: values are between 0 and 1, got {value}")

    def known(self, metric: str) -> list[float]:
        """The values of a metric without None and NaN."""
        return known_values(self.values.get(metric, ()))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A paired difference over seeds, ``name`` minus ``baseline``, between -1 and 1.

    ``low`` and ``high`` are the confidence interval of the mean, NaN for fewer than two values.
    """

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
        """Both names, written out."""
        return f"{loss_label(self.name)} \N{MINUS SIGN} {loss_label(self.baseline)}"


def paired_difference(
    first: Sequence[float | None],
    second: Sequence[float | None],
    *,
    name: str = "first",
    baseline: str = "second",
    metric: str = "AP",
    confidence: float = 0.95,
) -> Difference:
    """``first - second`` seed by seed, and the interval of its mean by Student's t distribution.

    Runs of one seed share initial weights and data order, so their difference varies less than either of them. A pair
    counts where both are known; the interval is NaN for fewer than two pairs.

    Example:
        >>> one = paired_difference([0.74, 0.75], [0.72, 0.71])  # 0.03 ± 12.706 * 0.01
        >>> round(one.mean, 4), round(one.low, 4), round(one.high, 4)
        (0.03, -0.0971, 0.1571)
    """
    pairs = [known for pair in zip(first, second, strict=True) if len(known := known_values(pair)) == 2]
    values = tuple(one - other for one, other in pairs)
    low = high = math.nan
    if len(values) > 1:
        from scipy.stats import ttest_1samp

        with warnings.catch_warnings():  # equal differences have an interval without any width
            warnings.simplefilter("ignore", RuntimeWarning)
            low, high = map(float, ttest_1samp(values, 0.0).confidence_interval(confidence))
    mean = spread(values).mean
    names = {"name": name, "baseline": baseline, "metric": metric}
    return Difference(**names, values=values, mean=mean, low=low, high=high, confidence=confidence)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything a page of a comparison shows."""

    title: str  # such as ``"Table 2: RetinaNet with four losses"``
    entries: Sequence[Entry] = ()  # the rows, in the order they are shown
    metrics: Sequence[str] = ("AP", "AP50", "AP75")  # the columns; the first one is drawn
    summary: str = ""  # what is compared and what came out, in words
    differences: Sequence[Difference] = ()  # paired differences over seeds
    verdicts: Sequence[tuple[bool | None, str]] = ()  # (holds or not or None, claim)
    facts: Mapping[str, Any] = field(default_factory=dict)  # name → value for the headline, such as seeds, minutes
    command: str = ""  # the exact command that makes this page again
    paper: str = ""  # what the paper's numbers were measured on; empty without such numbers
    notes: str = ""  # paragraphs below the table: differences from the paper, and why
    provenance: Mapping[str, Any] = field(default_factory=dict)  # name → value: commit, versions, hardware, seeds
    sections: Sequence[page.Section] = ()  # more sections, shown before the last one
    row_name: str = "loss"  # head of the first column
    curve_label: str = "AP"  # what the values of the curves are; the label of the y axis, in percent


def write_comparison_report(comparison: Comparison, out: str | Path) -> Path:
    """Writes ``report.html`` and ``table.md`` into the folder ``out``; returns the path of the page."""
    write_text(Path(out) / "table.md", comparison_markdown(comparison))
    result: list[page.Block] = [page.Verdict(holds, claim) for holds, claim in comparison.verdicts]
    if comparison.summary:
        result.append(page.Text(comparison.summary))
    if comparison.facts:
        result.append(page.Facts([page.Fact(name, page.show(value, 1)) for name, value in comparison.facts.items()]))
    result.append(comparison_table(comparison))
    if comparison.notes:
        result.append(page.Text(comparison.notes))
    sections = [page.Section("Result", result)]
    if spread := _spread_blocks(comparison):
        sections.append(page.Section("Spread over seeds", spread))
    curves = [
        page.SvgFigure(curve_plot(comparison.entries, against=against, label=comparison.curve_label))
        for against in ("steps", "minutes")
        if any(_has_curves(entry, against) for entry in comparison.entries)
    ]
    if curves:
        text = f"Mean over seeds; the band is ± one standard deviation of {comparison.curve_label}."
        sections.append(page.Section("While training", [page.Text(text), page.Figures(curves)]))
    sections += [*comparison.sections, page.Section("How it was made", _provenance_blocks(comparison))]
    return page.write_page(Path(out) / "report.html", comparison.title, sections)


def comparison_table(comparison: Comparison) -> page.Table:
    """Mean ± standard deviation of every metric in percent, the paper's numbers beside it.

    The best mean of a column is bold. The standard deviation is that of a sample (n - 1).
    """
    entries = comparison.entries
    columns: dict[str, list[Any]] = {
        comparison.row_name: [
            page.Cell(loss_label(entry.name), colour=line_style(entry.name, place).colour)
            for place, entry in enumerate(entries)
        ]
    }
    for metric in comparison.metrics:
        means = [spread(known).mean if (known := entry.known(metric)) else None for entry in entries]
        best = max((value for value in means if value is not None), default=None)
        columns[metric] = [
            page.Cell(_spread_text(entry.known(metric)), strong=value is not None and value == best)
            for entry, value in zip(entries, means, strict=True)
        ]
        if any(metric in entry.paper for entry in entries):
            columns[f"{metric}, paper"] = [_percent(entry.paper.get(metric)) for entry in entries]
    optional: dict[str, list[Any]] = {
        "seeds": [len(next(iter(entry.values.values()), ())) for entry in entries],
        "minutes": [spread(entry.minutes).mean if entry.minutes else None for entry in entries],
        "note": [entry.note for entry in entries],
    }
    columns.update({name: values for name, values in optional.items() if any(values)})
    caption = "In percent: mean ± standard deviation over seeds."
    caption += f" Paper: {comparison.paper}." if comparison.paper else ""
    rows = list(zip(*columns.values(), strict=True))
    return page.Table(columns=list(columns), rows=rows, caption=caption, digits=1)


def comparison_markdown(comparison: Comparison) -> str:
    """The table, the differences, the command and the provenance as a Markdown document."""
    table, differences = comparison_table(comparison), comparison.differences
    verdicts = [page.Verdict(holds, claim) for holds, claim in comparison.verdicts]
    parts = [
        f"# {comparison.title}",
        comparison.summary,
        table.markdown(),
        table.caption,
        _difference_table(differences).markdown() if differences else "",
        "\n".join(f"- {verdict.word}: {verdict.claim}" for verdict in verdicts),
        comparison.notes,
        f"```\n{comparison.command}\n```" if comparison.command else "",
        "\n".join(f"- {name}: {page.show(value)}" for name, value in comparison.provenance.items()),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def mean_and_band(curves: Sequence[tuple[Values, Values]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean of several curves and their standard deviation, where all of them are known.

    Curves need not share their points (evaluations of two runs never fall on the same second): each is interpolated
    at every point of all, between the latest start and the earliest end. From (x, y) of each seed, x ascending, to x,
    mean and sample standard deviation (0 for a single curve), float64 [n] each.
    """
    pairs = [np.stack([numbers(x), numbers(y)]) for x, y in curves]  # [2, points] each
    known = [pair[:, valid] for pair in pairs if (valid := np.isfinite(pair).all(axis=0)).any()]
    if not known:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    start, end = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    grid = np.unique(np.concatenate([x for x, _ in known]))
    grid = grid[(grid >= start) & (grid <= end)]
    values = np.array([np.interp(grid, x, y) for x, y in known])  # [seeds, n]
    deviation = values.std(axis=0, ddof=1) if len(known) > 1 else np.zeros(len(grid))
    return grid, values.mean(axis=0), deviation


def curve_plot(entries: Sequence[Entry], *, against: str = "steps", label: str = "AP") -> str:
    """A line for each row with curves of ``label`` against ``"steps"`` or ``"minutes"``: the mean over seeds, with a
    band of ± one standard deviation."""
    series = []
    for index, entry in enumerate(entries):
        if _has_curves(entry, against):
            points = [(getattr(one, against), 100 * numbers(one.values)) for one in entry.curves]
            x, y, deviation = mean_and_band(points)
            band = {"low": y - deviation, "high": y + deviation} if len(points) > 1 else {}
            style = line_style(entry.name, index)
            series.append(Series(name=entry.name, x=x, y=y, style=style, markers=len(x) <= 25, **band))
    what, x_label = ("steps", "step") if against == "steps" else ("time", "minutes")
    return line_plot(series, title=f"{label} against {what}", x_label=x_label, y_label=f"{label} (%)", height=3.4)


def spread_plot(entries: Sequence[Entry], metric: str = "AP") -> str:
    """A mark for every seed of each row, their mean, and ± one standard deviation."""
    rows = []
    for place, entry in enumerate(entries):
        seeds = 100 * numbers(entry.known(metric))
        centre = float(seeds.mean()) if len(seeds) else math.nan
        deviation = seeds.std(ddof=1) if len(seeds) > 1 else 0.0
        span, style = (centre - deviation, centre + deviation), line_style(entry.name, place)
        rows.append((loss_label(entry.name), seeds, centre, span, style, f"{centre:.1f}"))
    return _row_plot(f"{metric} of every seed", f"{metric} (%)", rows)


def difference_plot(differences: Sequence[Difference]) -> str:
    """A mark for every seed of each paired difference, the mean and its confidence interval."""
    rows = []
    for one in differences:
        span, style = (100 * one.low, 100 * one.high), LineStyle(INK, "-", "o")
        rows.append((one.label, 100 * numbers(one.values), 100 * one.mean, span, style, f"{100 * one.mean:+.1f}"))
    return _row_plot("Paired differences", f"difference of {differences[0].metric} (points)", rows, zero=True)


def _row_plot(title: str, x_label: str, rows: Sequence[tuple[Any, ...]], *, zero: bool = False) -> str:
    """For each row (name, seeds, mean, interval, style, text) a mark with its interval, and circles for the seeds."""
    with new_plot(title, x_label=x_label, height=0.95 + 0.42 * max(len(rows), 1)) as plot:
        axes = plot.axes
        if zero:
            axes.axvline(0, color=INK, linewidth=1)
        for y, (_, seeds, centre, span, style, text) in enumerate(rows):
            if not math.isnan(centre):
                axes.plot(span, [y, y], color=style.colour, linewidth=2.4, solid_capstyle="butt")
                axes.plot([centre], [y], color=style.colour, marker=style.marker, markersize=8)
                below = np.full(len(seeds), y + 0.24)
                axes.scatter(seeds, below, s=14, marker="o", facecolors="none", edgecolors=MUTED, linewidths=1)
                add_number(axes, text, (centre, y), shift=(0, 6), ha="center", va="bottom")
        name_rows(axes, ["\n".join(wrap(shorten(name, 84), 28)) for name, *_ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.margins(x=0.12)
    return plot.svg


def _has_curves(entry: Entry, against: str) -> bool:
    """A single validation is no curve; and the seeds' minutes of one would have no stretch in common."""
    return bool(entry.curves) and all(len(getattr(one, against)) > 1 for one in entry.curves)


def _spread_blocks(comparison: Comparison) -> list[page.Block]:
    metric, figures = comparison.metrics[0], []
    if any(len(entry.known(metric)) > 1 for entry in comparison.entries):
        note = "Circles: seeds. Mark and line: mean ± one standard deviation."
        figures.append(page.SvgFigure(spread_plot(comparison.entries, metric), note))
    with_interval = [one for one in comparison.differences if not math.isnan(one.low)]
    if with_interval:
        share = with_interval[0].confidence
        note = f"Circles: the difference for one seed. Line: {share:.0%} confidence interval."
        figures.append(page.SvgFigure(difference_plot(with_interval), note))
    blocks: list[page.Block] = [page.Figures(figures)] if figures else []
    if comparison.differences:
        blocks.append(_difference_table(comparison.differences))
    return blocks


def _difference_table(differences: Sequence[Difference]) -> page.Table:
    rows = [
        [
            one.label,
            one.metric,
            page.DASH if math.isnan(one.mean) else f"{100 * one.mean:+.1f}",
            page.DASH if math.isnan(one.low) else f"[{100 * one.low:+.1f}, {100 * one.high:+.1f}]",
            len(one.values),
        ]
        for one in differences
    ]
    columns = ["difference", "metric", "mean", f"{differences[0].confidence:.0%} interval", "seeds"]
    return page.Table(columns=columns, rows=rows, caption="In percentage points, paired over seeds.")


def _provenance_blocks(comparison: Comparison) -> list[page.Block]:
    blocks: list[page.Block] = []
    if comparison.command:
        blocks.append(page.Code(comparison.command, "To make this page again"))
    if comparison.provenance:
        rows = [[name, page.show(value)] for name, value in comparison.provenance.items()]
        blocks.append(page.Table(columns=["what", "value"], rows=rows))
    return blocks or [page.Text("Nothing was recorded.")]


def _percent(value: float | None) -> str:
    return page.DASH if value is None else f"{100 * value:.1f}"


def _spread_text(values: Sequence[float]) -> str:
    one = spread(values)
    return _percent(one.mean if one.count else None) + (f" ± {_percent(one.deviation)}" if one.count > 1 else "")
