"""``report.html`` of a training run, made from the files in its folder alone."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from aploss.errors import listed
from aploss.files import write_text
from aploss.plotting import plots
from aploss.plotting.style import INK, MUTED, RIGHT, VARIANT_STYLES, WRONG, LineStyle, class_colour, loss_label
from aploss.reports import page
from aploss.reports.run_files import RunFiles, read_run
from aploss.reports.run_pictures import PictureSource, false_positives, gallery, misses

logger = logging.getLogger(__name__)

CLASS_COLUMNS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR")
METRICS = {
    "AP": "mean over IoU 0.50 to 0.95",
    "AP50": "IoU 0.50",
    "AP75": "IoU 0.75",
    "APs": "small objects",
    "APm": "medium objects",
    "APl": "large objects",
    "voc_AP50": "by the rules of Pascal VOC",
}
STEP_CURVES = {"lr": ("Learning rate", "learning rate"), "gradient_norm": ("Gradient norm", "norm")}
MAX_BARS = 24
SHOWN_NAMES = 8  # of images that could not be read

Rows = Sequence[Mapping[str, Any]]


def write_run_report(run_folder: str | Path, *, images: str | Path | None = None) -> Path:
    """Writes ``report.html``, and the plots in it as ``plots/*.svg``, into a run folder; returns the path of the page.

    Whatever the folder does not hold is left out, and the page says so: a run that was interrupted has a page, too.

    Args:
        run_folder: such as ``runs/demo``; which files are read is told in ``docs/reports.md``.
        images: folder of the dataset, for the pictures. Image files that the run names elsewhere are not opened: a run
            folder may come from a stranger, and its page shows what it opens.

    Raises:
        RunError: when it is not the folder of a run.
    """
    run = read_run(run_folder, images=images)
    sections = [_section(title, run) for title in SECTIONS]
    for section in sections:
        for block in section.blocks:
            for figure in block.figures if isinstance(block, page.Figures) else ():
                write_text(run.folder / "plots" / f"{figure.name}.svg", figure.svg)
    title = run.folder.resolve().name
    return page.write_page(run.folder / "report.html", title, sections, subtitle=_subtitle(run.summary))


def _section(title: str, run: RunFiles) -> page.Section:
    """A section; one that a strange file breaks must not cost the page of a long training."""
    try:
        return page.Section(title, SECTIONS[title](run))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        logger.warning("section %r of the report is left out", title, exc_info=True)
        return page.Section(title, [page.Missing(f"This part could not be made ({type(error).__name__}: {error}).")])


def _subtitle(summary: Mapping[str, Any]) -> str:
    if not summary:
        return "This run has no summary yet."
    loss = loss_label(str(summary.get("loss", "an unknown loss")))
    data = "" if summary.get("data") is None else f" on {summary['data']}"
    seed = "" if summary.get("seed") is None else f", seed {summary['seed']}"
    return f"{summary.get('detector', 'a detector')} trained with {loss}{data}{seed}"


def _result(run: RunFiles) -> list[page.Block]:
    summary = run.summary
    values = {**run.metrics, **{key: value for key, value in summary.items() if value is not None}}
    blocks: list[page.Block] = [page.Missing(problem) for problem in run.problems]
    facts = [
        page.Fact(name.replace("voc_", "VOC "), page.show(values.get(name)), note)
        for name, note in METRICS.items()
        if name in ("AP", "AP50", "AP75") or values.get(name) is not None
    ]
    drawn = values.get("calibration_error_drawn")
    more = {
        "minutes": ("Minutes", 1, "of training"),
        "steps": ("Steps", 0, f"{values['epochs']:.1f} epochs" if values.get("epochs") else ""),
        "images_per_second": ("Images/s", 1, "in training"),
        "calibration_error": ("Calibration error", 3, "expected" if drawn is None else f"{drawn:.3f} of those drawn"),
        "draw_threshold": ("Drawing threshold", 2, "best F1 on validation"),
    }
    for key, (name, digits, note) in more.items():
        if values.get(key) is not None and (key, values[key]) != ("images_per_second", 0.0):
            facts.append(page.Fact(name, page.show(values[key], digits), note))
    if not summary and not run.metrics:
        return [*blocks, _absent("summary.json", "The run has not ended, or was never evaluated.")]
    return [*blocks, page.Facts(facts), *_story(summary)]


def _story(summary: Mapping[str, Any]) -> list[page.Block]:
    """In words: on what it was measured, which weights these are, and why the training ended."""
    parts = []
    if summary.get("split"):
        parts.append(f"Measured on the {summary['split']} split.")
    if summary.get("best_step") is not None and summary["best_step"] != summary.get("steps"):
        parts.append(f"The weights are those of step {summary['best_step']}, best on validation.")
    reasons = {"patience": "AP no longer rose", "minutes": "the time limit was reached"}
    if summary.get("stopped_by") in reasons:
        parts.append(f"Training ended early because {reasons[summary['stopped_by']]}.")
    if summary.get("bad_steps"):
        parts.append(f"{summary['bad_steps']} step(s) with NaN or Inf were skipped.")
    if unreadable := summary.get("unreadable_images"):
        names = listed([Path(str(path)).name for path in unreadable], SHOWN_NAMES)
        parts.append(
            f"{len(unreadable)} image(s) could not be read; training took others, measuring left them out: {names}."
        )
    return [page.Text(" ".join(parts))] if parts else []


def _training(run: RunFiles) -> list[page.Block]:
    figures = []
    if run.training:
        note = "Pale: each value; strong: running mean."
        figures.append(page.SvgFigure(loss_curves(run.training), note, name="loss"))
    if run.validation:
        best = max(run.validation, key=lambda row: row.get("AP") or 0.0)
        note = f"Best AP {page.show(best.get('AP'))} at step {best.get('step', page.DASH)}."
        figures.append(page.SvgFigure(ap_curves(run.validation), note, name="AP"))
        if any(row.get("seconds") is not None for row in run.validation):
            drawing = ap_curves(run.validation, against="minutes")
            figures.append(page.SvgFigure(drawing, label="AP over time", name="AP-over-time"))
    for key in STEP_CURVES:
        if any(row.get(key) is not None for row in run.training):
            figures.append(page.SvgFigure(step_curve(run.training, key), label=key, name=key))
    if not figures:
        return [_absent("metrics.jsonl", "There are no curves to draw.")]
    rows = {
        "No step of this run was logged.": run.training,
        "No validation took place during this run.": run.validation,
    }
    return [page.Figures(figures), *(page.Missing(text) for text, found in rows.items() if not found)]


def _classes(run: RunFiles) -> list[page.Block]:
    per_class = run.metrics.get("per_class") or run.summary.get("per_class") or {}
    if not per_class:
        return [_absent("evaluation/metrics.json", "AP per class is not known.")]
    figures = []
    stored = run.metrics.get("precision_recall") or {}
    curves = {name: SimpleNamespace(**curve) for name, curve in stored.items() if len(curve["recall"])}
    if curves:
        scores = {name: per_class.get(name, {}).get("AP50") for name in curves}
        drawing = plots.precision_recall_plot(curves, scores=scores)
        figures.append(page.SvgFigure(drawing, "With AP50 of each class.", name="precision-recall"))
    figures.append(page.SvgFigure(class_bars(per_class), label="AP of each class", name="classes"))
    keys = [name for name in ("objects", "detections") if name in next(iter(per_class.values()))]
    keys += [name for name in CLASS_COLUMNS if any(row.get(name) is not None for row in per_class.values())]
    rows = [
        [page.Cell(name, colour=class_colour(place)), *map(row.get, keys)]
        for place, (name, row) in enumerate(per_class.items())
    ]
    return [page.Figures(figures), page.Table(columns=["class", *keys], rows=rows)]


def _scores(run: RunFiles) -> list[page.Block]:
    text = (
        "A ranking loss orders detections; the numbers themselves mean nothing until they are calibrated. After "
        "calibration a score of 0.7 stands for about 70 % precision. The order of the detections, and with it AP, "
        "stays the same."
    )
    blocks: list[page.Block] = [page.Text(text)]
    figures = []
    calibration = run.calibration
    before, after = calibration.get("before") or {}, calibration.get("after") or {}
    if before.get("bins") or after.get("bins"):
        errors = [part.get("expected_calibration_error") for part in (before, after)]
        drawing = reliability_diagram(before.get("bins", []), after.get("bins", []), *errors)
        note = f"{_measured_on(calibration)}Larger marks stand for more detections."
        figures.append(page.SvgFigure(drawing, note, name="reliability"))
    else:
        blocks.append(_absent("evaluation/calibration.json", "There is no reliability diagram."))
    outcomes, threshold = run.outcomes, run.threshold
    if outcomes is not None and len(outcomes):
        right, wrong = run.scores[outcomes == 1], run.scores[outcomes == 0]
        above = (run.scores[outcomes >= 0] >= threshold).sum()
        share = f", {(right >= threshold).sum() / above:.0%} of them right" if above else ""
        note = f"{above} of {(outcomes >= 0).sum()} detections are drawn{share}."
        label = "calibrated score" if "calibrated_scores" in calibration else "score"
        drawing = score_histogram(right, wrong, threshold=threshold, x_label=label)
        figures.append(page.SvgFigure(drawing, note, name="scores"))
    return [*blocks, page.Figures(figures)] if figures else blocks


def _measured_on(calibration: Mapping[str, Any]) -> str:
    fitted, measured = calibration.get("fitted_on"), calibration.get("measured_on")
    if not fitted or not measured:
        return ""
    if fitted == measured:
        return f"Fitted and measured on the {fitted} split, so it looks better than it is. "
    return f"Fitted on the {fitted} split, measured on the {measured} split. "


def _sample(run: RunFiles) -> list[page.Block]:
    if not run.ground_truth.get("images"):
        return [_absent("evaluation/ground_truth.json", "There are no pictures to show.")]
    source = PictureSource(run)
    text = (
        "Images evenly spaced through the split, not picked by how well they came out. White dashes: the objects as "
        f"annotated. Solid, in the colour of the class: detections with a score of at least {run.threshold:.2f}."
    )
    colours = [(class_colour(place), name) for place, name in enumerate(source.class_names.values())]
    legend = [page.Legend(colours)] if source.colours_differ else []
    return [page.Text(text), *legend, *_shown(gallery(source), source, 280)]


def _missed(run: RunFiles) -> list[page.Block]:
    text = "Objects that no drawn detection found (IoU 0.5): first those without any detection, the largest first; "
    text += "at most two of one image."
    none = f"Every object was found with a score of at least {run.threshold:.2f}."
    return _chosen_pictures(run, misses, text, none, "What was missed is not known.")


def _false_positives(run: RunFiles) -> list[page.Block]:
    text = "The wrong detections with the highest scores, at most two of one image. "
    text += "Some may be objects that nobody annotated."
    unknown = "Which detections are wrong is not known."
    return _chosen_pictures(run, false_positives, text, "No detection is wrong.", unknown)


def _chosen_pictures(
    run: RunFiles, choose: Callable[[PictureSource], list[page.Picture]], text: str, none: str, unknown: str
) -> list[page.Block]:
    """Pictures that need to know which detection found which object."""
    if run.outcomes is None or not run.ground_truth.get("images"):
        why = "is not in the folder of this run, or not of the same detections as `evaluation/detections.json`."
        return [page.Missing(f"{unknown} `evaluation/matches.json` {why}")]
    source = PictureSource(run)
    pictures = choose(source)
    if not pictures and not source.unreadable:
        return [page.Text(none)]
    return [page.Text(text), *_shown(pictures, source, 155)]


def _shown(pictures: list[page.Picture], source: PictureSource, width: int) -> list[page.Block]:
    blocks: list[page.Block] = [page.Pictures(pictures, width)] if pictures else []
    if source.unreadable:
        count, first = len(source.unreadable), next(iter(source.unreadable.values()))
        blocks.append(page.Missing(f"{count} image(s) could not be read, the first: {first}"))
    return blocks


def _settings(run: RunFiles) -> list[page.Block]:
    blocks: list[page.Block] = []
    if command := run.summary.get("command") or run.environment.get("command"):
        text = command if isinstance(command, str) else " ".join(map(str, command))
        blocks.append(page.Code(text, "The command of this run"))
    blocks.append(page.Code(f"aploss predict {run.folder} IMAGES... --out DIR", "To use the model"))
    if run.config:
        blocks.append(page.Details("All settings (`config.yaml`)", [page.Code(run.config)]))
    else:
        blocks.append(_absent("config.yaml", "The settings are not known."))
    if run.environment:
        table = page.Table(columns=["what", "value"], rows=_flat(run.environment))
        blocks.append(page.Details("Versions and hardware (`environment.json`)", [table]))
    else:
        blocks.append(_absent("environment.json", "Versions are not known."))
    return blocks


def _flat(document: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """A nested dictionary as rows of dotted names and texts."""
    rows: list[tuple[str, str]] = []
    for key, value in document.items():
        name = f"{above}{key}"
        rows += _flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, page.show(value))]
    return rows


def _absent(file: str, consequence: str) -> page.Missing:
    return page.Missing(f"{consequence} `{file}` is not in the folder of this run.")


SECTIONS: Mapping[str, Callable[[RunFiles], list[page.Block]]] = {
    "Result": _result,
    "Training": _training,
    "Classes": _classes,
    "Scores": _scores,
    "Sample of the split": _sample,
    "Missed objects": _missed,
    "False positives": _false_positives,
    "Settings": _settings,
}
"""Title → what makes the section, in the order of the page."""


def loss_curves(rows: Rows) -> str:
    """The parts of the training loss over steps: raw values pale, their running mean on top."""
    series = []
    for key, style in zip(("loss", "classification", "box"), VARIANT_STYLES, strict=False):
        steps, values = _column(rows, "step", key)
        for faint, shown in ((True, values), (False, _running_mean(values))) if len(steps) else ():
            x, y = plots.thin_out(steps, shown)
            series.append(plots.Series(name="total" if key == "loss" else key, x=x, y=y, style=style, faint=faint))
    return plots.line_plot(
        series, title="Training loss", x_label="step", y_label="loss", y_range=(0, None), whole_x=True
    )


def step_curve(rows: Rows, key: str) -> str:
    """The learning rate (``"lr"``), or the ``"gradient_norm"`` before clipping on a log axis."""
    title, label = STEP_CURVES[key]
    steps, values = plots.thin_out(*_column(rows, "step", key))
    log_y = key == "gradient_norm"
    series = [plots.Series(name=label, x=steps, y=np.where(values > 0, values, np.nan) if log_y else values)]
    scale: dict[str, Any] = {"log_y": True} if log_y else {"y_range": (0, None)}
    return plots.line_plot(series, title=title, x_label="step", y_label=label, whole_x=True, **scale)


def ap_curves(rows: Rows, *, against: str = "step") -> str:
    """AP, AP50 and AP75 on the validation split over ``"step"`` or ``"minutes"``."""
    over_time = against == "minutes"
    factor, key = (1 / 60, "seconds") if over_time else (1.0, "step")
    series = []
    for name, style in zip(("AP", "AP50", "AP75"), VARIANT_STYLES, strict=False):
        x, y = _column(rows, key, name)
        if len(x):
            series.append(plots.Series(name=name, x=x * factor, y=y, style=style, markers=len(x) <= 40))
    title = "AP on the validation split" + ", over time" * over_time
    return plots.line_plot(series, title=title, x_label=against, y_label="AP", y_range=(0, 1), whole_x=not over_time)


def reliability_diagram(
    before: Rows, after: Rows, error_before: float | None = None, error_after: float | None = None
) -> str:
    """Precision of the detections over their score, before and after calibration.

    Args:
        before, after: bins with ``confidence``, ``precision`` and ``count``; empty bins are left out, and the size of
            a marker grows with the bin's share of detections.
        error_before, error_after: the expected calibration errors, for the legend.
    """
    looks = (("before", before, error_before, VARIANT_STYLES[1]), ("after calibration", after, error_after, RIGHT))
    with plots.new_plot(
        "Do scores mean precision?", x_label="score", y_label="precision (IoU 0.5)", height=3.4
    ) as plot:
        plot.axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=plots.DOTTED)
        entries = {"ideal": LineStyle(MUTED, plots.DOTTED)}
        for name, bins, error, style in looks:
            full = [one for one in bins if one.get("count")]
            if not full:
                continue
            x, y, counts = (plots.numbers([one[key] for one in full]) for key in ("confidence", "precision", "count"))
            look: dict[str, Any] = {"s": 14 + 130 * (counts / counts.sum()), "marker": style.marker, "alpha": 0.85}
            plot.axes.plot(x, y, color=style.colour, linestyle=style.dashes, linewidth=1.4)
            plot.axes.scatter(x, y, color=style.colour, linewidths=0, clip_on=False, **look)
            entries[name if error is None else f"{name} (error {error:.3f})"] = style
        plot.axes.set(xlim=(0, 1), ylim=(0, 1))
        plots.add_legend(plot, entries, markers=True)
    return plot.svg


def score_histogram(correct: plots.Values, wrong: plots.Values, *, threshold: float, x_label: str = "score") -> str:
    """How many right and wrong detections have which score, on a logarithmic axis."""
    with plots.new_plot("Scores of the detections", x_label=x_label, y_label="detections") as plot:
        entries = {}
        for name, values, style in (("correct", correct, RIGHT), ("false positive", wrong, WRONG)):
            heights, edges = np.histogram(np.clip(plots.numbers(values), 0, 1), np.linspace(0, 1, 41))
            plot.axes.stairs(heights, edges, color=style.colour, fill=True, alpha=0.18)
            plot.axes.stairs(heights, edges, color=style.colour, linestyle=style.dashes, linewidth=1.6)
            entries[f"{name} ({len(values)})"] = style
        plot.axes.axvline(threshold, color=INK, linewidth=1, linestyle=plots.DOTTED)
        entries[f"drawing threshold {threshold:.2f}"] = LineStyle(INK, plots.DOTTED)
        plot.axes.set_xlim(0, 1)
        plots.count_axis(plot.axes)
        plots.add_legend(plot, entries)
    return plot.svg


def class_bars(per_class: Mapping[str, Mapping[str, Any]]) -> str:
    """AP of every class, the best first; of many classes the twelve best and worst."""
    values = dict(zip(per_class, plots.numbers([row.get("AP") for row in per_class.values()]).tolist(), strict=True))
    names = sorted(values, key=lambda name: -np.nan_to_num(values[name], nan=-1.0))
    title = "AP per class"
    if len(names) > MAX_BARS:
        half = MAX_BARS // 2
        title = f"AP: {half} best and {half} worst of {len(names)} classes"
        names = names[:half] + names[-half:]
    return plots.bar_plot(names, [values[name] for name in names], title=title, x_label="AP", x_range=(0, 1.12))


def _column(rows: Rows, x_key: str, y_key: str) -> tuple[np.ndarray, np.ndarray]:
    """Two columns of the rows that have both, as arrays."""
    chosen = [row for row in rows if row.get(x_key) is not None and row.get(y_key) is not None]
    return plots.numbers([row[x_key] for row in chosen]), plots.numbers([row[y_key] for row in chosen])


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over a centred window of about a thirtieth of the run; NaN is left out of it."""
    half = len(values) // 60
    if half == 0:
        return values
    known = np.isfinite(values)
    sums, counts = (np.convolve(one, np.ones(2 * half + 1), "same") for one in (np.where(known, values, 0), known))
    mean: np.ndarray = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
    return mean
