"""``report.html`` of a training run, made from the files in its folder alone."""

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from aploss.data.images import ImageError, read_image
from aploss.errors import listed
from aploss.evaluation import HEADLINE_METRICS, METRICS
from aploss.files import write_text
from aploss.plotting import plots
from aploss.plotting.pictures import crop_around, data_uri, outline_boxes, resize
from aploss.plotting.plots import BLUE, MUTED, PALETTE, VARIANT_STYLES, LineStyle, class_colour, loss_label
from aploss.reports import page
from aploss.reports.run_files import RunFiles, read_run

logger = logging.getLogger(__name__)

MAX_MATRIX = 12  # classes of a confusion matrix; of more, the most frequent errors are listed

TRUTH_COLOUR = "#ffffff"
MAX_CAPTIONS = 8  # more captions would hide the picture
MAX_PER_IMAGE = 2

Entry = Mapping[str, Any]  # an object or a detection in COCO's format
Rows = Sequence[Mapping[str, Any]]


def write_run_report(run_folder: str | Path, *, images: str | Path | None = None) -> Path:
    """Writes ``report.html`` and its plots as ``plots/*.svg`` into a run folder; returns the path of the page.

    Content that is not in the folder is omitted with a note, so an interrupted run has a page, too.

    Args:
        run_folder: such as ``runs/demo``; ``docs/reports.md`` lists the files that are read.
        images: folder of the dataset, for the pictures. Image files elsewhere are not opened: a run folder may be
            untrusted, and its page shows the files it opens.

    Raises:
        RunError: if it is not a run folder.
    """
    run = read_run(run_folder, images=images)
    sections = [_section(title, run) for title in SECTIONS]
    figures = [block.figures for section in sections for block in section.blocks if isinstance(block, page.Figures)]
    for figure in (one for group in figures for one in group if isinstance(one, page.SvgFigure)):
        write_text(run.folder / "plots" / f"{figure.name}.svg", figure.svg)
    subtitle = "This run has no summary yet."
    if summary := {key: value for key, value in run.summary.items() if value is not None}:
        subtitle = f"{summary.get('detector', 'a detector')} trained with {loss_label(str(summary.get('loss', '?')))}"
        for key, text in (("data", " on {}"), ("seed", ", seed {}"), ("split", "; evaluated on {}")):
            subtitle += text.format(summary[key]) if key in summary else ""
        sizes = [f"{run.metrics[key]} {key}" for key in ("images", "objects") if key in run.metrics]
        if sizes and "split" in summary:
            subtitle += f" ({', '.join(sizes)})"
    return page.write_page(run.folder / "report.html", run.folder.resolve().name, sections, subtitle=subtitle)


def _section(title: str, run: RunFiles) -> page.Section:
    """A section; invalid content in a file must not prevent the page of a long training."""
    try:
        return page.Section(title, SECTIONS[title](run))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        logger.warning("section %r of the report is omitted", title, exc_info=True)
        return page.Section(title, [_missing(f"This section could not be made ({type(error).__name__}: {error}).")])


def _missing(text: str) -> page.Text:
    return page.Text(text, missing=True)


def _absent(file: str, consequence: str) -> page.Text:
    return _missing(f"{consequence} `{file}` is not in the run folder.")


def _result(run: RunFiles) -> list[page.Block]:
    summary, matrix = run.summary, run.confusion_matrix
    values = {**run.metrics, **{key: value for key, value in summary.items() if value is not None}}
    blocks: list[page.Block] = [_missing(problem) for problem in run.problems]
    if not summary and not run.metrics:
        return [*blocks, _absent("summary.json", "The run has not ended, or was not evaluated.")]
    names = [*HEADLINE_METRICS, *(["voc_AP50"] if values.get("voc_AP50") is not None else [])]
    facts = [(name.replace("voc_", "VOC "), page.percent(values.get(name), " %"), METRICS[name]) for name in names]
    rates = {} if matrix is None else _rates(matrix)
    note = f"score ≥ {run.threshold:.2f}"
    facts += [(name.capitalize(), page.percent(rate, " %"), note) for name, rate in rates.items()]
    return [*blocks, page.Facts(facts, lead=True), page.Text(_story(run))]


def _rates(matrix: np.ndarray, label: int | None = None) -> dict[str, float | None]:
    """Precision, recall and F1 of a class, or of all, from a confusion matrix; None where they are undefined."""
    chosen = slice(None, -1) if label is None else slice(label, label + 1)
    correct = int(matrix.diagonal()[chosen].sum())
    detected, objects = int(matrix[:, chosen].sum()), int(matrix[chosen].sum())
    return {
        "precision": correct / detected if detected else None,
        "recall": correct / objects if objects else None,
        "F1": 2 * correct / (detected + objects) if detected + objects else None,
    }


def _confusions(run: RunFiles) -> list[page.Block]:
    names, matrix = run.class_names, run.confusion_matrix
    if matrix is None:
        return [_missing("The outcomes of the detections are unknown.")]
    annotated, detected = [*names, "background"], [*names, "not detected"]
    if len(names) > MAX_MATRIX:
        places = [(int(matrix[row, column]), row, column) for row, column in np.ndindex(matrix.shape) if row != column]
        rows: list[list[Any]] = [
            [annotated[row], detected[column], n] for n, row, column in sorted(places)[:-21:-1] if n
        ]
        columns, caption = ["annotated", "detected as", "count"], "The most frequent errors."
        return [page.Table(columns=columns, rows=rows, caption=caption)]
    rows = [
        [name, *(page.Cell(int(n), strong=column == row) for column, n in enumerate(matrix[row]))]
        for row, name in enumerate(annotated)
    ]
    rows[-1][-1] = None
    text = f"Rows: annotated objects. Columns: detections with a score of at least {run.threshold:.2f}, at IoU 0.5."
    return [page.Text(text), page.Table(columns=["annotated", *detected], rows=rows, stack=False)]


def _story(run: RunFiles) -> str:
    """The selected weights, why the training stopped, and what was left out, in words."""
    summary, parts = run.summary, []
    if summary.get("best_step") is not None and summary["best_step"] != summary.get("steps"):
        parts.append(f"The weights are from step {summary['best_step']}, the best on validation.")
    if ignored := run.metrics.get("ignored_objects"):
        parts.append(f"{ignored} object(s) of classes that the detector does not know were ignored.")
    reasons = {"patience": "AP stopped improving", "minutes": "the time limit was reached"}
    if summary.get("stopped_by") in reasons:
        parts.append(f"Training stopped early because {reasons[summary['stopped_by']]}.")
    if summary.get("bad_steps"):
        parts.append(f"{summary['bad_steps']} step(s) with NaN or Inf were skipped.")
    if unreadable := summary.get("unreadable_images"):
        names = listed([Path(str(path)).name for path in unreadable])
        parts.append(f"{len(unreadable)} image(s) could not be read and were skipped: {names}.")
    if changes := summary.get("resume_changes"):
        parts.append(f"When the run was resumed, something had changed: {'; '.join(map(str, changes))}.")
    return " ".join(parts)


def _training(run: RunFiles) -> list[page.Block]:
    figures, values = [], run.summary
    texts = {"steps": "{} steps", "epochs": "{:.1f} epochs", "minutes": "{:.1f} minutes"}
    texts["images_per_second"] = "{:.1f} images per second"
    effort = ", ".join(text.format(values[key]) for key, text in texts.items() if values.get(key) is not None)
    percents = {"factor": 100, "y_label": "AP (%)", "y_range": (0, 100)}
    losses = {"loss": "total", "classification": "classification", "box": "box"}
    plotted: list[tuple[str, Rows, Mapping[str, str], dict[str, Any]]] = [
        ("AP on validation", run.validation, {name: name for name in HEADLINE_METRICS}, percents),
        ("Training loss", run.training, losses, {"y_range": (0, None)}),
        ("Gradient norm", run.training, {"gradient_norm": "norm"}, {"log_y": True}),
    ]
    for title, logged, keys, frame in plotted:
        if any(row.get(key) is not None for row in logged for key in keys):
            svg = curve_plot(logged, keys, title=title, **frame)
            figures.append(page.SvgFigure(svg, label=title, name=next(iter(keys))))
    if not figures:
        return [_absent("metrics.jsonl", "There are no curves.")]
    return [page.Text(effort and f"{effort}."), page.Figures(figures)]


def _classes(run: RunFiles) -> list[page.Block]:
    per_class = run.metrics.get("per_class") or run.summary.get("per_class") or {}
    if not per_class:
        return [_absent("evaluation/metrics.json", "AP per class is unknown.")]
    rates: dict[str, dict[str, float | None]] = {}
    overall: dict[str, Any] = {**run.summary, **run.metrics}
    if (matrix := run.confusion_matrix) is not None:
        rates = {name: _rates(matrix, label) for label, name in enumerate(run.class_names)}
        overall |= _rates(matrix)
    table = {name: {**row, **rates.get(name, {})} for name, row in per_class.items()}
    keys = [*METRICS, "precision", "recall", "F1", "objects"]
    keys = [key for key in keys if any(row.get(key) is not None for row in table.values())]
    rows = [
        [page.Cell(name, colour=class_colour(place)), *_class_values(row, keys)]
        for place, (name, row) in enumerate(table.items())
    ]
    rows.append([page.Cell(one, strong=True) for one in ("all", *_class_values(overall, keys))])
    explained = "; ".join(f"{key}: {METRICS[key]}" for key in keys if key in METRICS and key not in HEADLINE_METRICS)
    caption = f"In percent. {explained}." if explained else "In percent."
    return [page.Table(columns=["class", *keys], rows=rows, caption=caption)]


def _class_values(row: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Metrics in percent, and the number of objects."""
    return [page.show(row.get(key)) if key == "objects" else page.percent(row.get(key)) for key in keys]


def _scores(run: RunFiles) -> list[page.Block]:
    text = page.Text(
        "A ranking loss orders detections but leaves the scale of their scores open. After calibration, a score of 0.7 "
        "means about 70 % precision. The order of the detections, and hence AP, is unchanged."
    )
    figures = []
    stored = run.metrics.get("precision_recall") or {}
    if curves := {name: SimpleNamespace(**curve) for name, curve in stored.items() if len(curve["recall"])}:
        svg = plots.precision_recall_plot(curves)
        figures.append(page.SvgFigure(svg, "The legend shows AP50.", "Precision over recall", "precision-recall"))
    before, after = (run.calibration.get(key) or {} for key in ("before", "after"))
    if not (before.get("bins") or after.get("bins")):
        return [page.Figures(figures), text, _absent("evaluation/calibration.json", "There is no reliability plot.")]
    fitted, measured = run.calibration.get("fitted_on"), run.calibration.get("measured_on")
    note = "Larger markers stand for more detections."
    if fitted and measured:
        note += f" The calibration was fitted on {fitted} and measured on {measured}"
        note += ", which is optimistic." if fitted == measured else "."
    figures.append(page.SvgFigure(reliability_plot(before, after), note, "Precision over score", "reliability"))
    return [page.Figures(figures), text]


def _settings(run: RunFiles) -> list[page.Block]:
    blocks: list[page.Block] = []
    if command := run.summary.get("command") or run.environment.get("command"):
        text = command if isinstance(command, str) else " ".join(map(str, command))
        blocks.append(page.Code(text, "Command of this run"))
    blocks.append(page.Code(f"aploss predict {run.folder} IMAGES...", "Use the model"))
    environment = json.dumps(run.environment, indent=2, ensure_ascii=False) if run.environment else ""
    for what, file, text in (
        ("All settings", "config.yaml", run.config),
        ("Versions and hardware", "environment.json", environment),
    ):
        code = page.Section(f"{what} (`{file}`)", [page.Code(text)])
        blocks.append(code if text else _absent(file, f"{what} are unknown."))
    return blocks


# --- pictures: a sample of the split, missed objects and false positives ---


class PictureSource:
    """The images of a run with their objects and detections.

    ``unreadable`` collects the images that could not be opened: id → reason.
    """

    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self.unreadable: dict[int, str] = {}
        truth = run.ground_truth
        self.images: dict[int, Mapping[str, Any]] = {image["id"]: image for image in truth.get("images", [])}
        self.class_names: dict[int, str] = {entry["id"]: str(entry["name"]) for entry in truth.get("categories", [])}
        self.colours = {number: class_colour(label) for label, number in enumerate(self.class_names)}
        self.objects: list[Entry] = list(truth.get("annotations", []))
        self.objects_of = _by_image(self.objects)
        self.detections_of = _by_image(run.detections)

    @property
    def legend(self) -> list[tuple[str, str]]:
        """(colour, name) of each class; empty if there are more classes than colours."""
        names = [(self.colours[number], name) for number, name in self.class_names.items()]
        return names if len(names) <= len(PALETTE) else []

    def open(self, image_id: int) -> Image.Image | None:
        """Reads an image as training does; None if it is unreadable."""
        entry = self.images.get(image_id, {})
        path = self.run.folder / str(entry.get("path") or entry.get("file_name") or "")
        width, height = entry.get("width"), entry.get("height")
        try:
            folders = filter(None, (self.run.folder, self.run.images))  # a symbolic link may lead elsewhere
            if not any(path.resolve().is_relative_to(folder.resolve()) for folder in folders):
                raise ValueError(f"{path} is outside the folder of the images; pass that folder as images=")
            pixels = read_image(path, size=(width, height) if width and height else None)
            return Image.fromarray(pixels.permute(1, 2, 0).numpy())
        except (ImageError, OSError, ValueError) as error:
            self.unreadable[image_id] = str(error)
            return None

    def file_name(self, image_id: int) -> str:
        """The name of an image file without its folders."""
        entry = self.images.get(image_id, {})
        return Path(str(entry.get("file_name") or entry.get("path") or image_id)).name

    def class_name(self, entry: Entry) -> str:
        """The name of the class of an object or detection."""
        return self.class_names.get(entry["category_id"], f"class {entry['category_id']}")

    def caption(self, row: int) -> str:
        """Class and score of a detection."""
        return f"{self.class_name(self.run.detections[row])} {self.run.scores[row]:.2f}"

    def drawn(self, image_id: int) -> list[int]:
        """Indices of the detections above the threshold, weakest first."""
        rows = [row for row in self.detections_of[image_id] if self.run.scores[row] >= self.run.threshold]
        return sorted(rows, key=self.run.scores.__getitem__)

    def draw(
        self,
        image_id: int,
        caption: str,
        rows: Sequence[int],
        *,
        around: Entry | None = None,
        missed: int | None = None,
    ) -> page.Picture | None:
        """Draws the objects of an image (dashed) and some detections (in the colours of their classes).

        ``around`` crops the picture to the surroundings of an object or detection, ``missed`` is the index of an object
        that is marked as missed. None if the image is unreadable.
        """
        image, corner, longest = self.open(image_id), (0, 0), 420
        if image is None:
            return None
        if around is not None:
            (image, corner), longest = crop_around(image, _xyxy([around])[0]), 240
        factor = min(longest / max(image.size), 3.0)
        objects = self.objects_of[image_id]
        entries = [*(self.run.detections[row] for row in rows), *(self.objects[place] for place in objects)]
        names = [f"missed: {self.class_name(self.objects[place])}" if place == missed else "" for place in objects]
        captions = map(self.caption, rows) if len(rows) <= MAX_CAPTIONS else [""] * len(rows)
        colours = [self.colours.get(entry["category_id"], PALETTE[0]) for entry in entries[: len(rows)]]
        picture = outline_boxes(
            resize(image, factor),
            (_xyxy(entries) - np.tile(corner, 2)) * factor,
            captions=[*captions, *names],
            colours=[*colours, *[TRUTH_COLOUR] * len(objects)],
            dashed=[place >= len(rows) for place in range(len(entries))],
        )
        return page.Picture(data_uri(picture), caption)

    def evenly_spaced(self, count: int) -> list[int]:
        """Ids of images with objects, evenly spaced through the split; of any images if none has objects."""
        usable = [number for number in self.images if self.objects_of[number]] or list(self.images)
        places = np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int)
        return [usable[place] for place in np.unique(places)]


def gallery(source: PictureSource, count: int = 6) -> list[page.Picture]:
    """Images evenly spaced through the split, not selected by their result."""
    pictures = []
    for image_id in source.evenly_spaced(count):
        rows, outcomes = source.drawn(image_id), source.run.outcomes
        caption = f"{source.file_name(image_id)}: objects {len(source.objects_of[image_id])}, detections {len(rows)}"
        caption += "" if outcomes is None else f", wrong {(outcomes[rows] == 0).sum()}"
        pictures.append(source.draw(image_id, caption, rows))
    return list(filter(None, pictures))


def side_by_side(runs: Mapping[str, RunFiles], count: int = 6) -> page.Figures:
    """The same images as detected by several runs (name → run, a column each), as in Figure 6 of the paper."""
    sources = {name: PictureSource(run) for name, run in runs.items()}
    first = next(iter(sources.values()))
    pictures: list[page.Picture] = []
    for image_id in first.evenly_spaced(count):
        row = [
            source.draw(image_id, f"{loss_label(name)}: {source.file_name(image_id)}", source.drawn(image_id))
            for name, source in sources.items()
        ]
        pictures += [picture for picture in row if picture is not None and all(row)]  # skip incomplete rows
    return page.Figures(pictures, columns=len(sources), legend=first.legend)


def misses(source: PictureSource, count: int = 12) -> list[page.Picture]:
    """Objects that no drawn detection found: undetected objects first, then by ascending score."""
    found_by = source.run.matches.get("ground_truth", {})
    ranked = []
    for place, entry in enumerate(source.objects):
        row = found_by.get(str(entry["id"]))
        score = -1.0 if row is None else float(source.run.scores[row])
        if score < source.run.threshold and not (entry.get("iscrowd") or entry.get("difficult")):
            ranked.append((score, -float(np.prod(entry["bbox"][2:])), place))
    scores = {place: score for score, _, place in sorted(ranked)}

    def draw(place: int) -> page.Picture | None:
        entry, score = source.objects[place], scores[place]
        note = "not detected" if score < 0 else f"score {score:.3f}"
        caption = f"{source.class_name(entry)}, {note}: {source.file_name(entry['image_id'])}"
        return source.draw(entry["image_id"], caption, source.drawn(entry["image_id"]), around=entry, missed=place)

    return _draw_first(scores, source.objects, draw, count)


def false_positives(source: PictureSource, count: int = 12) -> list[page.Picture]:
    """The wrong detections with the highest scores."""
    outcomes, scores = source.run.outcomes, source.run.scores
    wrong = np.flatnonzero(outcomes == 0) if outcomes is not None else np.zeros(0, int)

    def draw(row: int) -> page.Picture | None:
        entry = source.run.detections[row]
        caption = f"{source.caption(row)}: {source.file_name(entry['image_id'])}"
        return source.draw(entry["image_id"], caption, [row], around=entry)

    ranked = wrong[np.argsort(-scores[wrong], kind="stable")].tolist()
    return _draw_first(ranked, source.run.detections, draw, count)


def _draw_first(
    ranked: Iterable[int], entries: Sequence[Entry], draw: Callable[[int], page.Picture | None], count: int
) -> list[page.Picture]:
    """The first ``count`` pictures, at most two per image."""
    seen: Counter[int] = Counter()
    chosen = []
    for place in ranked:
        seen[entries[place]["image_id"]] += 1
        if seen[entries[place]["image_id"]] <= MAX_PER_IMAGE:
            chosen.append(place)
    return list(islice(filter(None, map(draw, chosen)), count))


def _xyxy(entries: Sequence[Entry]) -> np.ndarray:
    """The COCO boxes (x, y, width, height) of entries as (x1, y1, x2, y2), float64 [n, 4]."""
    boxes = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return boxes


def _by_image(entries: Iterable[Entry]) -> defaultdict[int, list[int]]:
    """Image id → the indices of its entries."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for place, entry in enumerate(entries):
        groups[entry["image_id"]].append(place)
    return groups


def _pictures(
    choose: Callable[[PictureSource], list[page.Picture]], text: str, run: RunFiles, *, sample: bool = False
) -> list[page.Block]:
    """Pictures chosen from a run: a sample of the split, or mistakes, which need the matches."""
    if not run.ground_truth.get("images"):
        return [_absent("evaluation/ground_truth.json", "There are no pictures.")]
    if not sample and run.outcomes is None:
        return [_absent("evaluation/matches.json", "The outcomes of the detections are unknown.")]
    source = PictureSource(run)
    pictures = choose(source)
    blocks: list[page.Block] = [page.Text(text.format(run.threshold) if pictures else "There are none.")]
    if pictures:
        figures = page.Figures(pictures, 280, legend=source.legend) if sample else page.Figures(pictures, 150)
        blocks.append(figures)
    if source.unreadable:
        first = next(iter(source.unreadable.values()))
        blocks.append(_missing(f"{len(source.unreadable)} image(s) could not be read, the first: {first}"))
    return blocks


# --- the page ---

SAMPLE = (
    "Images evenly spaced through the split, not selected by their result. Dashed white: annotated objects. Solid, in "
    "the colour of the class: detections with a score of at least {:.2f}."
)
MISSED = (
    "Annotated objects without a detection of score {:.2f} or more (IoU 0.5), by ascending score of the best one below "
    "it; at most two per image."
)
FALSE = "The wrong detections with the highest scores, at most two per image. Some may be objects without annotation."
SECTIONS: Mapping[str, Callable[[RunFiles], list[page.Block]]] = {
    "Result": _result,
    "Example detections": partial(_pictures, gallery, SAMPLE, sample=True),
    "Classes": _classes,
    "Confusion matrix": _confusions,
    "Missed objects": partial(_pictures, misses, MISSED),
    "False positives": partial(_pictures, false_positives, FALSE),
    "Precision and scores": _scores,
    "Training": _training,
    "Settings": _settings,
}


def curve_plot(rows: Rows, keys: Mapping[str, str], factor: float = 1, **frame: Any) -> str:
    """Plots columns of logged rows (key → name in the legend), times a factor, against the step."""
    series = []
    for (key, name), style in zip(keys.items(), VARIANT_STYLES, strict=False):
        known = [row for row in rows if row.get("step") is not None and row.get(key) is not None]
        x, y = plots.numbers([row["step"] for row in known]), factor * plots.numbers([row[key] for row in known])
        x, y = plots.thin_out(x, np.where(y > 0, y, np.nan) if frame.get("log_y") else y)
        if len(x):
            series.append(plots.Series(name=name, x=x, y=y, style=style, markers=len(x) <= 40))
    return plots.line_plot(series, x_label="step", whole_x=True, **frame)


def reliability_plot(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Plots the precision of detections over their score, before and after calibration.

    Both have ``bins`` with ``confidence``, ``precision`` and ``count``, which sets the size of a marker.
    """
    styles = {"before calibration": (before, VARIANT_STYLES[1]), "after": (after, LineStyle(BLUE, "-", "o"))}
    frame: Any = {"x_label": "score", "y_label": "precision (IoU 0.5)", "height": 3.4}
    with plots.new_plot("Precision over score", **frame) as plot:
        plot.axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=plots.DOTTED)
        entries = {"ideal": LineStyle(MUTED, plots.DOTTED)}
        for name, (document, style) in styles.items():
            bins = [one for one in document.get("bins", []) if one.get("count")]
            if not bins:
                continue
            x, y, counts = (plots.numbers([one[key] for one in bins]) for key in ("confidence", "precision", "count"))
            sizes = 14 + 130 * counts / counts.sum()
            plot.axes.plot(x, y, color=style.colour, linestyle=style.dashes, linewidth=1.4)
            plot.axes.scatter(x, y, sizes, color=style.colour, marker=style.marker, alpha=0.85, clip_on=False)
            entries[f"{name} (error {page.percent(document.get('expected_calibration_error'), ' %')})"] = style
        plot.axes.set(xlim=(0, 1), ylim=(0, 1))
        plots.add_legend(plot, entries)
    return plot.svg
