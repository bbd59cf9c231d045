"""The sections of a run's page, each from the files of the run to blocks."""

from collections.abc import Callable, Mapping
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
    Legend,
    Missing,
    Picture,
    Pictures,
    Table,
    Text,
    show,
)
from aploss.reporting.run_files import RunFiles
from aploss.reporting.run_images import PictureSource
from aploss.reporting.run_pictures import false_alarms, gallery, misses
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
from aploss.reporting.style import class_colour

__all__ = ["SECTIONS"]

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


def _result(run: RunFiles) -> list[Block]:
    summary = run.summary
    values = {**run.metrics, **{key: value for key, value in summary.items() if value is not None}}
    blocks: list[Block] = [Missing(f"{problem}") for problem in run.problems]
    facts = [
        Fact(name.replace("voc_", "VOC "), show(values.get(name)), note)
        for name, note in METRICS.items()
        if name in ("AP", "AP50", "AP75") or values.get(name) is not None
    ]
    drawn = values.get("calibration_error_drawn")
    more = {
        "minutes": ("Minutes", 1, "of training"),
        "steps": ("Steps", 0, f"{values['epochs']:.1f} epochs" if values.get("epochs") else ""),
        "images_per_second": ("Images/s", 1, "in training"),
        "calibration_error": (
            "Calibration error", 3, "expected" if drawn is None else f"{drawn:.3f} of those drawn",
        ),
        "draw_threshold": ("Drawing threshold", 2, "best F1 on validation"),
    }  # fmt: skip
    for key, (name, digits, note) in more.items():
        if values.get(key) is not None and (key, values[key]) != ("images_per_second", 0.0):
            facts.append(Fact(name, show(values[key], digits), note))
    if not summary and not run.metrics:
        return [*blocks, _absent("summary.json", "The run has not ended, or was never evaluated.")]
    return [*blocks, Facts(facts), *_story(summary)]


def _story(summary: Mapping[str, Any]) -> list[Block]:
    """In words: on what it was measured, which weights these are, and why the training ended."""
    parts = []
    if summary.get("split"):
        parts.append(f"Measured on the {summary['split']} split.")
    if summary.get("best_step") is not None and summary["best_step"] != summary.get("steps"):
        parts.append(f"The weights are those of step {summary['best_step']}, best on validation.")
    reasons = {"patience": "AP no longer rose", "minutes": "its time was over"}
    if summary.get("stopped_by") in reasons:
        parts.append(f"Training ended early because {reasons[summary['stopped_by']]}.")
    if summary.get("bad_steps"):
        parts.append(f"{summary['bad_steps']} step(s) with numbers that are not finite: skipped.")
    return [Text(" ".join(parts))] if parts else []


def _training(run: RunFiles) -> list[Block]:
    figures = []
    if run.training:
        note = "Pale: each value; strong: running mean."
        figures.append(Figure(loss_curves(run.training), note, name="loss"))
    if run.validation:
        best = max(run.validation, key=lambda row: row.get("AP") or 0.0)
        note = f"Best AP {show(best.get('AP'))} at step {best.get('step', DASH)}."
        figures.append(Figure(ap_curves(run.validation), note, name="AP"))
        if any(row.get("seconds") is not None for row in run.validation):
            drawing = ap_curves(run.validation, against="minutes")
            figures.append(Figure(drawing, label="AP over time", name="AP-over-time"))
    for key, draw in (("lr", learning_rate_curve), ("gradient_norm", gradient_norm_curve)):
        if any(row.get(key) is not None for row in run.training):
            figures.append(Figure(draw(run.training), label=key, name=key))
    if not figures:
        return [_absent("metrics.jsonl", "There are no curves to draw.")]
    blocks: list[Block] = [Figures(figures)]
    if not run.training:
        blocks.append(Missing("No step of this run was logged."))
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
        drawing = precision_recall_plot(curves, known)
        figures.append(Figure(drawing, "With AP50 of each class.", name="precision-recall"))
    figures.append(Figure(class_bars(per_class), label="AP of each class", name="classes"))
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
        note = f"{_measured_on(calibration)}Larger marks stand for more detections."
        figures.append(Figure(drawing, note, name="reliability"))
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
        figures.append(Figure(drawing, note + ".", name="scores"))
    return [*blocks, Figures(figures)] if figures else blocks


def _measured_on(calibration: Mapping[str, Any]) -> str:
    fitted, measured = calibration.get("fitted_on"), calibration.get("measured_on")
    if not fitted or not measured:
        return ""
    if fitted == measured:
        return f"Fitted and measured on the {fitted} split, so it looks better than it is. "
    return f"Fitted on the {fitted} split, measured on the {measured} split. "


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
    colours = [
        (class_colour(place), name) for place, name in enumerate(source.class_names.values())
    ]
    legend: list[Block] = [Legend(colours)] if source.colours_differ else []
    return [Text(text), *legend, *_shown(pictures, source, 280)]


def _missed(run: RunFiles) -> list[Block]:
    if run.outcomes is None or not run.ground_truth.get("images"):
        return [_unmatched("What was missed is not known.")]
    source = PictureSource(run)
    pictures = misses(source)
    if not pictures and not source.unreadable:
        return [Text(f"Every object was found with a score of at least {run.threshold:.2f}.")]
    text = (
        "Objects that no drawn detection found (IoU 0.5): first those without any detection, "
        "the largest first; at most two of one image."
    )
    return [Text(text), *_shown(pictures, source, 155)]


def _false_positives(run: RunFiles) -> list[Block]:
    if run.outcomes is None or not run.ground_truth.get("images"):
        return [_unmatched("Which detections are wrong is not known.")]
    source = PictureSource(run)
    pictures = false_alarms(source)
    if not pictures and not source.unreadable:
        return [Text("No detection is wrong.")]
    text = (
        "The wrong detections with the highest scores, at most two of one image. "
        "Some may be objects that nobody annotated."
    )
    return [Text(text), *_shown(pictures, source, 155)]


def _shown(pictures: list[Picture], source: PictureSource, width: int) -> list[Block]:
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


def _unmatched(consequence: str) -> Missing:
    return Missing(
        f"{consequence} `evaluation/matches.json` is not in the folder of this run, or not of the "
        "same detections as `evaluation/detections.json`."
    )


def _absent(file: str, consequence: str) -> Missing:
    return Missing(f"{consequence} `{file}` is not in the folder of this run.")


SECTIONS: Mapping[str, Callable[[RunFiles], list[Block]]] = {
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
