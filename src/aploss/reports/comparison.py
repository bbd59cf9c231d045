"""The page and Markdown table of a comparison, with means, standard deviations and paired differences over seeds."""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aploss.evaluation import HEADLINE_METRICS, LOWER_IS_BETTER
from aploss.files import write_text
from aploss.plotting.plots import Series, Values, line_plot, line_style, loss_label, numbers
from aploss.reports import page


@dataclass(frozen=True)
class Spread:
    """Mean (NaN without values) and sample standard deviation (NaN for fewer than two values) over seeds."""

    count: int
    mean: float
    deviation: float


def known_values(values: Sequence[float | None]) -> list[float]:
    """The values without None and NaN.

    Example:
        >>> known_values([0.5, None, float("nan")])
        [0.5]
    """
    return [float(value) for value in values if value is not None and not math.isnan(value)]


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and sample standard deviation of the known values.

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
    """A metric of one run during training, between 0 and 1; ``minutes`` may be empty."""

    steps: Sequence[float]
    values: Sequence[float]
    minutes: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row: a loss, or a setting of it, trained with some seeds. Values are between 0 and 1, shown in percent."""

    name: str  # the name of a loss, or any text such as ``"batch size 4"``
    values: Mapping[str, Sequence[float | None]]  # metric → value of each seed; None or NaN if unknown
    minutes: Sequence[float] = ()  # training time of each seed
    paper: Mapping[str, float] = field(default_factory=dict)  # metric → the paper's value
    curves: Sequence[TrainingCurve] = ()  # one for each seed
    note: str = ""  # such as the learning rate


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
        """Both names as they are displayed."""
        return f"{loss_label(self.name)} \N{MINUS SIGN} {loss_label(self.baseline)}"

    @property
    def is_decided(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    @property
    def gain(self) -> tuple[float, float]:
        """The interval of the improvement: negated if lower values of the metric are better."""
        return (-self.high, -self.low) if self.metric in LOWER_IS_BETTER else (self.low, self.high)

    def __str__(self) -> str:
        if not self.values:
            return "no values"
        interval = f" {_interval(self)}, {len(self.values)} seeds" if len(self.values) > 1 else ", one seed"
        return f"{100 * self.mean:+.1f} {self.metric}{interval}"


def paired_difference(
    first: Sequence[float | None],
    second: Sequence[float | None],
    *,
    name: str = "first",
    baseline: str = "second",
    metric: str = "AP",
    confidence: float = 0.95,
) -> Difference:
    """Computes ``first - second`` per seed and the interval of its mean by Student's t distribution.

    Runs with the same seed share initial weights and data order, so their difference varies less than either of them.
    Pairs with an unknown value are left out; the interval is NaN for fewer than two pairs.

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

        with warnings.catch_warnings():  # equal differences have an interval of width zero
            warnings.simplefilter("ignore", RuntimeWarning)
            low, high = map(float, ttest_1samp(values, 0.0).confidence_interval(confidence))
    names, mean = {"name": name, "baseline": baseline, "metric": metric}, spread(values).mean
    return Difference(**names, values=values, mean=mean, low=low, high=high, confidence=confidence)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The content of a comparison page."""

    title: str  # such as ``"Table 2: RetinaNet with four losses"``
    entries: Sequence[Entry] = ()  # the rows in order
    metrics: Sequence[str] = HEADLINE_METRICS  # the columns; the first one is plotted
    summary: str = ""  # the setup and the result, in words
    differences: Sequence[Difference] = ()
    class_differences: Sequence[Difference] = ()  # in the AP of single classes
    verdicts: Sequence[page.Verdict] = ()
    command: str = ""  # the command that reproduces the page
    paper: str = ""  # the setup of the paper's numbers
    notes: str = ""  # paragraphs below the table, such as differences from the paper
    provenance: Mapping[str, Any] = field(default_factory=dict)  # detector, data, seeds, commit, hardware
    sections: Sequence[page.Section] = ()  # additional sections
    row_name: str = "loss"  # header of the first column
    curve_label: str = "AP"  # the metric of the curves
    confidence: float = 0.95  # of the intervals


def write_comparison_report(comparison: Comparison, out: str | Path) -> Path:
    """Writes ``report.html``, ``table.md`` and ``table.tex`` into the folder ``out``; returns the path of the page."""
    write_text(Path(out) / "table.md", comparison_markdown(comparison))
    write_text(Path(out) / "table.tex", latex(comparison_table(comparison)))
    result: list[page.Block] = [
        *comparison.verdicts,
        comparison_table(comparison),
        page.Text(f"{comparison.summary}\n\n{comparison.notes}"),
    ]
    sections = [page.Section("Result", result)]
    if comparison.differences:
        classes = comparison.class_differences
        by_class = [page.Section("By class", [_difference_table(classes)])] if classes else []
        sections.append(page.Section("Differences", [_difference_table(comparison.differences), *by_class]))
    curves = []
    for against, what in (("steps", "steps"), ("minutes", "time")):
        if any(_has_curves(entry, against) for entry in comparison.entries):
            title = f"{comparison.curve_label} against {what}"
            svg = curve_plot(comparison.entries, against=against, title=title, label=comparison.curve_label)
            curves.append(page.SvgFigure(svg, label=title))
    if curves:
        note = page.Text("Mean over seeds, where all of them have a value; the band is ± one standard deviation.")
        sections.append(page.Section("Training curves", [page.Figures(curves), note]))
    provenance: list[page.Block] = [page.Code(comparison.command, "Command")] if comparison.command else []
    if comparison.provenance:
        rows = [[name, page.show(value, 1)] for name, value in comparison.provenance.items()]
        provenance.append(page.Table(columns=["what", "value"], rows=rows))
    sections += [*comparison.sections, *([page.Section("Provenance", provenance)] if provenance else [])]
    return page.write_page(Path(out) / "report.html", comparison.title, sections)


def comparison_table(comparison: Comparison) -> page.Table:
    """Mean ± sample standard deviation of every metric in percent, next to the paper's numbers.

    The best row is bold if the intervals of its differences from all others exclude zero.
    """
    entries = comparison.entries
    columns: dict[str, list[Any]] = {
        comparison.row_name: [
            page.Cell(loss_label(entry.name), colour=line_style(entry.name, place).colour)
            for place, entry in enumerate(entries)
        ]
    }
    for metric in comparison.metrics:
        spreads = [spread(entry.values.get(metric, ())) for entry in entries]
        columns[metric] = [
            page.Cell(_spread_text(one), strong=_is_best(entry, entries, metric, comparison.confidence))
            for entry, one in zip(entries, spreads, strict=True)
        ]
        if any(metric in entry.paper for entry in entries):
            columns[f"{metric}, paper"] = [page.percent(entry.paper.get(metric)) for entry in entries]
    optional: dict[str, list[Any]] = {
        "seeds": [len(known_values(entry.values.get(comparison.metrics[0], ()))) for entry in entries],
        "minutes": [spread(entry.minutes).mean if entry.minutes else None for entry in entries],
        "note": [entry.note for entry in entries],
    }
    columns.update({name: values for name, values in optional.items() if any(values)})
    caption = "In percent: mean ± standard deviation over seeds; bold where the intervals decide which row is best."
    caption += "".join(f" {metric}: lower is better." for metric in comparison.metrics if metric in LOWER_IS_BETTER)
    caption += f" Paper: {comparison.paper}." if comparison.paper else ""
    rows = list(zip(*columns.values(), strict=True))
    return page.Table(columns=list(columns), rows=rows, caption=caption, digits=1)


def _is_best(entry: Entry, entries: Sequence[Entry], metric: str, confidence: float) -> bool:
    """Whether a row is ahead of every other one by the paired interval."""
    values, others = entry.values.get(metric, ()), [one.values.get(metric, ()) for one in entries if one is not entry]
    if {*map(len, others)} != {len(values)}:  # other seeds, or the only row
        return False
    pairs = [paired_difference(values, one, metric=metric, confidence=confidence) for one in others]
    return all(one.gain[0] > 0 for one in pairs)


def latex(table: page.Table) -> str:
    """The table as LaTeX, for the package booktabs."""
    rows = [[rf"\textbf{{{_tex(one.value)}}}" if one.strong else _tex(one.value) for one in row] for row in table.cells]
    lines = [" & ".join(row) + r" \\" for row in [list(map(_tex, table.columns)), *rows]]
    columns = "".join("r" if right else "l" for right in table.numeric)
    middle = [lines[0], r"\midrule", *lines[1:]]
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *middle, r"\bottomrule", r"\end{tabular}", ""])


def _tex(text: str) -> str:
    text = re.sub(r"([&%$#_{}])", r"\\\1", text.replace("\\", "/"))
    return text.replace("±", r"$\pm$").replace(page.DASH, "--").replace("~", " ").replace("^", " ")


def comparison_markdown(comparison: Comparison) -> str:
    """The table, the differences, the command and the provenance as a Markdown document."""
    table, differences = comparison_table(comparison), comparison.differences
    parts = [
        f"# {comparison.title}",
        "\n".join(f"- {verdict.word}: {verdict.claim}" for verdict in comparison.verdicts),
        comparison.summary,
        table.markdown(),
        table.caption,
        _difference_table(differences).markdown() if differences else "",
        comparison.notes,
        f"```\n{comparison.command}\n```" if comparison.command else "",
        "\n".join(f"- {name}: {page.show(value, 1)}" for name, value in comparison.provenance.items()),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def mean_and_band(curves: Sequence[tuple[Values, Values]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Averages curves (x, y) over seeds where all of them are known.

    Curves need not share their points: each is interpolated at the points of all, between the latest start and the
    earliest end. Returns x, mean and sample standard deviation (0 for a single curve), float64 [n] each.
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


def curve_plot(entries: Sequence[Entry], *, against: str = "steps", label: str = "AP", title: str = "") -> str:
    """Plots the mean over seeds of each row's curves against ``"steps"`` or ``"minutes"``, with a band of ± one
    standard deviation."""
    series = []
    for index, entry in enumerate(entries):
        if _has_curves(entry, against):
            points = [(getattr(one, against), 100 * numbers(one.values)) for one in entry.curves]
            x, y, band = mean_and_band(points)
            style = line_style(entry.name, index)
            series.append(Series(name=entry.name, x=x, y=y, band=band, style=style, markers=len(x) <= 25))
    return line_plot(series, title=title, x_label=against, y_label=f"{label} (%)", height=3.4)


def _has_curves(entry: Entry, against: str) -> bool:
    """Whether every seed has a curve of more than one point."""
    return bool(entry.curves) and all(len(getattr(one, against)) > 1 for one in entry.curves)


def _difference_table(differences: Sequence[Difference]) -> page.Table:
    rows = [
        [
            one.label,
            one.metric,
            page.DASH if math.isnan(one.mean) else f"{100 * one.mean:+.1f}",
            page.Cell(_interval(one), strong=one.is_decided),
            len(one.values),
        ]
        for one in differences
    ]
    columns = ["difference", "metric", "mean", f"{100 * differences[0].confidence:.3g} % interval", "seeds"]
    caption = "In percentage points, paired over seeds; intervals without zero are bold."
    return page.Table(columns=columns, rows=rows, caption=caption)


def _interval(one: Difference) -> str:
    return page.DASH if math.isnan(one.low) else f"[{100 * one.low:+.1f}, {100 * one.high:+.1f}]"


def _spread_text(one: Spread) -> str:
    return page.percent(one.mean) + (f" ± {page.percent(one.deviation)}" if one.count > 1 else "")
