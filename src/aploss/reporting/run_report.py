"""``report.html`` of a training run, made from the files in its folder alone."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aploss.reporting.blocks import (
    DASH,
    Block,
    Cell,
    Code,
    Details,
    Fact,
    Facts,
    Figure,
    Figures,
    Missing,
    Pictures,
    Section,
    Table,
    Text,
    show,
)
from aploss.reporting.page import write_page
from aploss.reporting.run_files import RunFiles, read_run
from aploss.reporting.run_pictures import PictureSource, false_alarms, gallery, misses
from aploss.reporting.run_plots import (
    ap_curves,
    class_bars,
    gradient_norm_curve,
    learning_rate_curve,
    loss_curves,
    precision_recall_plot,
    reliability_diagram,
    score_histogram,
)
from aploss.reporting.style import class_colour, loss_label

__all__ = ["write_run_report"]

logger = logging.getLogger(__name__)

CLASS_COLUMNS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR")
SIZES = {"APs": "small objects", "APm": "medium objects", "APl": "large objects"}


def write_run_report(run_folder: str | Path) -> Path:
    """Write ``report.html`` into a run folder.

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
    builders: dict[str, Callable[[RunFiles], list[Block]]] = {
        "Result": _result,
        "Training": _training,
        "Classes": _classes,
        "Scores": _scores,
        "Sample of the split": _sample,
        "Missed objects": _missed,
        "False positives": _false_positives,
        "Settings": _settings,
    }
    sections = [_section(title, build, run) for title, build in builders.items()]
    return write_page(
        run.folder / "report.html", run.name, sections, subtitle=_subtitle(run.summary)
    )


def _section(title: str, build: Callable[[RunFiles], list[Block]], run: RunFiles) -> Section:
    """A section; one that a strange file breaks must not cost the page of a long training."""
    try:
        return Section(title, build(run))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        logger.warning("section %r of the report is left out", title, exc_info=True)
        reason = f"{type(error).__name__}: {error}"
        return Section(title, [Missing(f"This part could not be made ({reason}).")])


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


def _result(run: RunFiles) -> list[Block]:
    summary = run.summary
    values = {**run.metrics, **{key: value for key, value in summary.items() if value is not None}}
    blocks: list[Block] = [Missing(f"{problem}") for problem in run.problems]
    notes = {"AP": "mean over IoU 0.50 to 0.95", "AP50": "IoU 0.50", "AP75": "IoU 0.75", **SIZES}
    facts = [
        Fact(name, show(values.get(name)), note)
        for name, note in notes.items()
        if name not in SIZES or values.get(name) is not None
    ]
    more = {
        "minutes": ("Minutes", 1, "of training"),
        "steps": ("Steps", 0, ""),
        "images_per_second": ("Images/s", 1, "in training"),
        "calibration_error": ("Calibration error", 3, "expected, after calibration"),
        "draw_threshold": ("Drawing threshold", 2, "best F1"),
    }
    for key, (name, digits, note) in more.items():
        if values.get(key) is not None:
            facts.append(Fact(name, show(values[key], digits), note))
    if not summary and not run.metrics:
        return [*blocks, _absent("summary.json", "The run has not ended, or was never evaluated.")]
    split = f"Measured on the {summary['split']} split." if summary.get("split") else ""
    return [*blocks, Facts(facts), *([Text(split)] if split else [])]


def _training(run: RunFiles) -> list[Block]:
    figures = []
    if run.training:
        figures.append(Figure(loss_curves(run.training), "Pale: each value; strong: running mean."))
    if run.validation:
        best = max(run.validation, key=lambda row: row.get("AP") or 0.0)
        note = f"Best AP {show(best.get('AP'))} at step {best.get('step', DASH)}."
        figures.append(Figure(ap_curves(run.validation), note))
        if any(row.get("seconds") is not None for row in run.validation):
            figures.append(Figure(ap_curves(run.validation, against="minutes")))
    for key, draw in (("lr", learning_rate_curve), ("gradient_norm", gradient_norm_curve)):
        if any(row.get(key) is not None for row in run.training):
            figures.append(Figure(draw(run.training)))
    if not figures:
        return [_absent("metrics.jsonl", "There are no curves to draw.")]
    blocks: list[Block] = [Figures(figures)]
    if not run.validation:
        blocks.append(Missing("No validation took place during this run."))
    return blocks


def _classes(run: RunFiles) -> list[Block]:
    per_class = run.metrics.get("per_class") or run.summary.get("per_class") or {}
    if not per_class:
        return [_absent("evaluation/metrics.json", "AP per class is not known.")]
    figures = []
    curves = {
        name: (curve["recall"], curve["precision"])
        for name, curve in (run.metrics.get("precision_recall") or {}).items()
        if len(curve["recall"])
    }
    if curves:
        scores = {name: per_class.get(name, {}).get("AP50") for name in curves}
        known = {name: value for name, value in scores.items() if value is not None}
        figures.append(Figure(precision_recall_plot(curves, known), "With AP50 of each class."))
    figures.append(Figure(class_bars(per_class)))
    columns = [
        name
        for name in CLASS_COLUMNS
        if any(row.get(name) is not None for row in per_class.values())
    ]
    counts = [name for name in ("objects", "detections") if name in next(iter(per_class.values()))]
    rows = [
        [
            Cell(name, colour=class_colour(place)),
            *(row.get(key) for key in counts),
            *(row.get(key) for key in columns),
        ]
        for place, (name, row) in enumerate(per_class.items())
    ]
    return [Figures(figures), Table(columns=["class", *counts, *columns], rows=rows)]


def _scores(run: RunFiles) -> list[Block]:
    blocks: list[Block] = [
        Text(
            "A ranking loss orders detections; the numbers themselves mean nothing until they "
            "are calibrated. After calibration a score of 0.7 stands for about 70 % precision. "
            "The order of the detections, and with it AP, stays the same."
        )
    ]
    figures = []
    calibration = run.calibration
    before, after = calibration.get("before") or {}, calibration.get("after") or {}
    if before.get("bins") or after.get("bins"):
        errors = [part.get("expected_calibration_error") for part in (before, after)]
        drawing = reliability_diagram(before.get("bins", []), after.get("bins", []), *errors)
        figures.append(Figure(drawing, "Larger marks stand for more detections."))
    else:
        blocks.append(_absent("evaluation/calibration.json", "There is no reliability diagram."))
    outcomes = run.outcomes
    if outcomes is not None and len(outcomes):
        right, wrong = run.scores[outcomes == 1], run.scores[outcomes == 0]
        calibrated = "calibrated_scores" in calibration
        label = "calibrated score" if calibrated else "score"
        threshold = run.threshold
        above = (run.scores[outcomes >= 0] >= threshold).sum()
        note = f"{above} of {(outcomes >= 0).sum()} detections are drawn"
        if above:
            note += f", {(right >= threshold).sum() / above:.0%} of them right"
        drawing = score_histogram(right, wrong, threshold=threshold, x_label=label)
        figures.append(Figure(drawing, note + "."))
    return [*blocks, Figures(figures)] if figures else blocks


def _sample(run: RunFiles) -> list[Block]:
    if not run.ground_truth.get("images"):
        return [_absent("evaluation/ground_truth.json", "There are no pictures to show.")]
    source = PictureSource(run)
    pictures = gallery(source)
    text = (
        "Images evenly spaced through the split, not picked by how well they came out. "
        "White dashes: the objects as annotated. Solid, in the colour of the class: detections "
        f"with a score of at least {run.threshold:.2f}."
    )
    return [Text(text), *_shown(pictures, source, 280)]


def _missed(run: RunFiles) -> list[Block]:
    if not run.matches or not run.ground_truth.get("images"):
        return [_absent("evaluation/matches.json", "What was missed is not known.")]
    source = PictureSource(run)
    pictures = misses(source)
    if not pictures and not source.unreadable:
        return [Text(f"Every object was found with a score of at least {run.threshold:.2f}.")]
    text = (
        "Objects that no drawn detection found (IoU 0.5): first those without any detection, "
        "the largest first; at most two of one image."
    )
    return [Text(text), *_shown(pictures, source, 150)]


def _false_positives(run: RunFiles) -> list[Block]:
    if run.outcomes is None or not run.ground_truth.get("images"):
        return [_absent("evaluation/matches.json", "Which detections are wrong is not known.")]
    source = PictureSource(run)
    pictures = false_alarms(source)
    if not pictures and not source.unreadable:
        return [Text("No detection is wrong.")]
    text = (
        "The wrong detections with the highest scores: on no object, on one of another class, "
        "off by too much, or the second on the same; at most two of one image."
    )
    return [Text(text), *_shown(pictures, source, 150)]


def _shown(pictures: list[Any], source: PictureSource, width: int) -> list[Block]:
    blocks: list[Block] = [Pictures(pictures, width)] if pictures else []
    if source.unreadable:
        first = next(iter(source.unreadable.values()))
        count = len(source.unreadable)
        blocks.append(Missing(f"{count} image(s) could not be read, the first: {first}"))
    return blocks


def _settings(run: RunFiles) -> list[Block]:
    blocks: list[Block] = []
    command = run.summary.get("command") or run.environment.get("command")
    if command:
        text = command if isinstance(command, str) else " ".join(map(str, command))
        blocks.append(Code(text, "The command of this run"))
    blocks.append(Code(f"aploss predict {run.folder} IMAGES... --out DIR", "To use the model"))
    if run.config:
        blocks.append(Details("All settings (`config.yaml`)", [Code(run.config)]))
    else:
        blocks.append(_absent("config.yaml", "The settings are not known."))
    if run.environment:
        rows = list(_flat(run.environment))
        table = Table(columns=["what", "value"], rows=rows)
        blocks.append(Details("Versions and hardware (`environment.json`)", [table]))
    else:
        blocks.append(_absent("environment.json", "Versions are not known."))
    return blocks


def _flat(document: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """A nested dictionary as rows of dotted names and texts."""
    rows: list[tuple[str, str]] = []
    for key, value in document.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            rows.extend(_flat(value, f"{name}."))
        else:
            rows.append((name, show(value)))
    return rows


def _absent(file: str, consequence: str) -> Missing:
    return Missing(f"{consequence} `{file}` is not in the folder of this run.")
