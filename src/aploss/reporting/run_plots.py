"""The plots of one training run, each from plain numbers to SVG text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aploss.reporting.drawing import Series, add_legend, count_axis, new_plot, numbers, thin_out
from aploss.reporting.plots import bar_plot, line_plot
from aploss.reporting.style import (
    GRID,
    INK,
    LOSS_STYLES,
    MUTED,
    PALETTE,
    VARIANT_STYLES,
    LineStyle,
    class_colour,
)

__all__ = [
    "ap_curves",
    "class_bars",
    "gradient_norm_curve",
    "learning_rate_curve",
    "loss_curves",
    "precision_recall_plot",
    "reliability_diagram",
    "score_histogram",
]

Rows = Sequence[Mapping[str, Any]]

MOST_CLASSES_IN_BARS = 24
MOST_NAMED_CURVES = 6


def loss_curves(rows: Rows) -> str:
    """The parts of the training loss over steps: raw values pale, their running mean on top.

    Args:
        rows: with ``step`` and any of ``loss``, ``classification`` and ``box``.
    """
    names = {"loss": "total", "classification": "classification", "box": "box"}
    series = []
    for (key, name), style in zip(names.items(), VARIANT_STYLES, strict=False):
        steps, values = _column(rows, "step", key)
        if len(steps) == 0:
            continue
        raw = thin_out(steps, values)
        smooth = thin_out(steps, _running_mean(values))
        series.append(Series(name=name, x=raw[0], y=raw[1], style=style, faint=True))
        series.append(Series(name=name, x=smooth[0], y=smooth[1], style=style))
    return line_plot(
        series,
        title="Training loss",
        x_label="step",
        y_label="loss",
        y_range=(0, None),
        whole_x=True,
    )


def learning_rate_curve(rows: Rows) -> str:
    """The learning rate over steps."""
    return _single_curve(rows, "lr", "Learning rate", "learning rate")


def gradient_norm_curve(rows: Rows) -> str:
    """The norm of the gradient over steps, before clipping, on a logarithmic axis."""
    return _single_curve(rows, "gradient_norm", "Gradient norm", "norm", log_y=True)


def _single_curve(rows: Rows, key: str, title: str, label: str, *, log_y: bool = False) -> str:
    steps, values = thin_out(*_column(rows, "step", key))
    if log_y:
        values = np.where(values > 0, values, np.nan)
    series = [Series(name=label, x=steps, y=values)]
    return line_plot(
        series, title=title, x_label="step", y_label=label, log_y=log_y, whole_x=True,
        y_range=None if log_y else (0, None),
    )  # fmt: skip


def ap_curves(rows: Rows, *, against: str = "step") -> str:
    """AP, AP50 and AP75 on the validation split over steps or minutes.

    Args:
        rows: with ``step``, ``seconds`` and the metrics.
        against: ``"step"`` or ``"minutes"``.
    """
    factor, key = (1.0, "step") if against == "step" else (1 / 60, "seconds")
    series = []
    for name, style in zip(("AP", "AP50", "AP75"), VARIANT_STYLES, strict=False):
        x, y = _column(rows, key, name)
        if len(x):
            series.append(Series(name=name, x=x * factor, y=y, style=style, markers=len(x) <= 40))
    title = "AP on the validation split" + ("" if against == "step" else ", over time")
    return line_plot(
        series, title=title, x_label=against, y_label="AP", y_range=(0, 1),
        whole_x=against == "step",
    )  # fmt: skip


def precision_recall_plot(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    scores: Mapping[str, float] | None = None,
) -> str:
    """Precision over recall, a line for every class.

    With many classes only the three best and three worst are named and coloured; the others are
    pale lines behind them, since no reader can tell dozens of colours apart.

    Args:
        curves: class → (recall, precision), IoU 0.5.
        scores: class → its AP50, shown in the legend and used for choosing.
    """
    known = scores or {}
    order = sorted(curves, key=lambda name: -np.nan_to_num(_number(known.get(name)), nan=-1.0))
    many = len(order) > len(PALETTE)
    named = (
        order if not many else order[: MOST_NAMED_CURVES // 2] + order[-MOST_NAMED_CURVES // 2 :]
    )
    positions = {name: position for position, name in enumerate(curves)}
    dashes = [style.dashes for style in LOSS_STYLES.values()]
    with new_plot(
        "Precision and recall at IoU 0.5", x_label="recall", y_label="precision", height=3.4
    ) as plot:
        for name in order:
            if name not in named:
                plot.axes.plot(*_curve(curves[name]), color=MUTED, alpha=0.25, linewidth=0.8)
        entries = {}
        for place, name in enumerate(named):
            number = place if many else positions[name]
            style = LineStyle(class_colour(number), dashes[number % len(dashes)], "")
            plot.axes.plot(*_curve(curves[name]), color=style.colour, linestyle=style.dashes)
            label = f"{name} {known[name]:.3f}" if np.isfinite(_number(known.get(name))) else name
            entries[label] = style
        if many:
            entries[f"{len(order) - len(named)} other classes"] = LineStyle(GRID, "-", "")
        plot.axes.set(xlim=(0, 1.01), ylim=(0, 1.02))
        add_legend(plot.figure, entries, always=True)
    return plot.svg


def reliability_diagram(
    before: Rows,
    after: Rows,
    error_before: float | None = None,
    error_after: float | None = None,
) -> str:
    """Precision of the detections over their score, before and after calibration.

    Args:
        before, after: bins with ``confidence``, ``precision`` and ``count``; empty bins are left
            out, and the size of a marker grows with the bin's share of detections.
        error_before, error_after: the expected calibration errors, for the legend.
    """
    looks = (("before", before, error_before, VARIANT_STYLES[1]),
             ("after calibration", after, error_after, LOSS_STYLES["ap"]))  # fmt: skip
    with new_plot(
        "Do scores mean precision?", x_label="score", y_label="precision (IoU 0.5)", height=3.4
    ) as plot:
        plot.axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
        entries = {"ideal": LineStyle(MUTED, (0, (2, 2)), "")}
        for name, bins, error, style in looks:
            full = [one for one in bins if one.get("count")]
            if not full:
                continue
            x, y = numbers([b["confidence"] for b in full]), numbers([b["precision"] for b in full])
            share = np.array([one["count"] for one in full]) / sum(one["count"] for one in full)
            plot.axes.plot(x, y, color=style.colour, linestyle=style.dashes, linewidth=1.4)
            plot.axes.scatter(
                x, y, s=14 + 130 * share, color=style.colour, marker=style.marker, alpha=0.85,
                linewidths=0, clip_on=False,
            )  # fmt: skip
            label = name if error is None else f"{name} (error {error:.3f})"
            entries[label] = style
        plot.axes.set(xlim=(0, 1), ylim=(0, 1))
        add_legend(plot.figure, entries, markers=True)
    return plot.svg


def score_histogram(
    correct: Sequence[float] | np.ndarray,
    wrong: Sequence[float] | np.ndarray,
    *,
    threshold: float | None = None,
    x_label: str = "score",
) -> str:
    """How many right and wrong detections have which score, on a logarithmic axis."""
    bins = np.linspace(0, 1, 41)
    looks = {"correct": LOSS_STYLES["ap"], "false positive": LOSS_STYLES["focal"]}
    with new_plot("Scores of the detections", x_label=x_label, y_label="detections") as plot:
        entries = {}
        for values, (name, style) in zip((correct, wrong), looks.items(), strict=True):
            heights, edges = np.histogram(np.clip(numbers(values), 0, 1), bins)
            plot.axes.stairs(heights, edges, color=style.colour, fill=True, alpha=0.18)
            plot.axes.stairs(
                heights, edges, color=style.colour, linestyle=style.dashes, linewidth=1.6
            )
            entries[f"{name} ({len(values)})"] = style
        if threshold is not None:
            plot.axes.axvline(threshold, color=INK, linewidth=1, linestyle=(0, (2, 2)))
            entries[f"drawing threshold {threshold:.2f}"] = LineStyle(INK, (0, (2, 2)), "")
        plot.axes.set_xlim(0, 1)
        count_axis(plot.axes)
        add_legend(plot.figure, entries)
    return plot.svg


def class_bars(per_class: Mapping[str, Mapping[str, Any]], metric: str = "AP") -> str:
    """A bar for every class, the best first; of many classes the twelve best and worst."""
    values = {name: _number(row.get(metric)) for name, row in per_class.items()}
    names = sorted(values, key=lambda name: -np.nan_to_num(values[name], nan=-1.0))
    title = f"{metric} per class"
    if len(names) > MOST_CLASSES_IN_BARS:
        half = MOST_CLASSES_IN_BARS // 2
        title = f"{metric}: {half} best and {half} worst of {len(names)} classes"
        names = names[:half] + names[-half:]
    return bar_plot(
        names, [values[name] for name in names], title=title, x_label=metric, x_range=(0, 1.12)
    )


def _column(rows: Rows, x_key: str, y_key: str) -> tuple[np.ndarray, np.ndarray]:
    """Two columns of the rows that have both, as arrays."""
    chosen = [row for row in rows if row.get(x_key) is not None and row.get(y_key) is not None]
    return numbers([row[x_key] for row in chosen]), numbers([row[y_key] for row in chosen])


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over a centred window of about a thirtieth of the run; NaN is left out of it."""
    half = len(values) // 60
    if half == 0:
        return values
    known = np.isfinite(values)
    window = np.ones(2 * half + 1)
    sums = np.convolve(np.where(known, values, 0), window, mode="same")
    counts = np.convolve(known.astype(float), window, mode="same")
    mean: np.ndarray = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
    return mean


def _curve(curve: tuple[Sequence[float], Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    recall, precision = numbers(curve[0]), numbers(curve[1])
    if len(recall) <= 200:
        return recall, precision
    chosen = np.unique(np.linspace(0, len(recall) - 1, 200).astype(int))
    return recall[chosen], precision[chosen]


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
