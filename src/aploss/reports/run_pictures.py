"""The pictures of a run's page: a sample of the split, missed objects and false positives."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from aploss.data.images import ImageError, read_image
from aploss.plotting.pictures import crop_around, data_uri, outline_boxes, resize
from aploss.plotting.style import PALETTE, class_colour, loss_label
from aploss.reports.page import Figures, Picture
from aploss.reports.run_files import RunFiles

TRUTH_COLOUR = "#ffffff"
MAX_CAPTIONS = 8  # more captions would hide the picture
MAX_PER_IMAGE = 2

Entry = Mapping[str, Any]  # an object or a detection in COCO's format


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
            if not self.run.may_open(path):
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
    ) -> Picture | None:
        """Draws the objects of an image (dashed) and some detections (in the colours of their classes).

        Args:
            image_id: id of the image.
            caption: text below the picture.
            rows: indices of the detections.
            around: crop the picture to the surroundings of this object or detection.
            missed: index of an object that is marked as missed.

        Returns:
            The picture, or None if the image is unreadable.
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
        return Picture(data_uri(picture), caption)

    def evenly_spaced(self, count: int) -> list[int]:
        """Ids of images with objects, evenly spaced through the split; of any images if none has objects."""
        usable = [number for number in self.images if self.objects_of[number]] or list(self.images)
        places = np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int)
        return [usable[place] for place in np.unique(places)]


def gallery(source: PictureSource, count: int = 12) -> list[Picture]:
    """Images evenly spaced through the split, not selected by their result."""
    pictures = []
    for image_id in source.evenly_spaced(count):
        rows, outcomes = source.drawn(image_id), source.run.outcomes
        caption = f"{source.file_name(image_id)}: {len(source.objects_of[image_id])} objects, {len(rows)} detections"
        caption += "" if outcomes is None else f", {(outcomes[rows] == 0).sum()} wrong"
        pictures.append(source.draw(image_id, caption, rows))
    return list(filter(None, pictures))


def side_by_side(runs: Mapping[str, RunFiles], count: int = 6) -> Figures:
    """The same images as detected by several runs (name → run, a column each), as in Figure 6 of the paper."""
    sources = {name: PictureSource(run) for name, run in runs.items()}
    first = next(iter(sources.values()))
    pictures: list[Picture] = []
    for image_id in first.evenly_spaced(count):
        row = [
            source.draw(image_id, f"{loss_label(name)}: {source.file_name(image_id)}", source.drawn(image_id))
            for name, source in sources.items()
        ]
        pictures += [picture for picture in row if picture is not None and all(row)]  # skip incomplete rows
    return Figures(pictures, columns=len(sources), legend=first.legend)


def misses(source: PictureSource, count: int = 12) -> list[Picture]:
    """Objects that no drawn detection found: undetected objects first, then by ascending score."""
    found_by = source.run.matches.get("ground_truth", {})
    ranked = []
    for place, entry in enumerate(source.objects):
        row = found_by.get(str(entry["id"]))
        score = -1.0 if row is None else float(source.run.scores[row])
        if score < source.run.threshold and not (entry.get("iscrowd") or entry.get("difficult")):
            ranked.append((score, -float(np.prod(entry["bbox"][2:])), place))
    scores = {place: score for score, _, place in sorted(ranked)}

    def draw(place: int) -> Picture | None:
        entry, score = source.objects[place], scores[place]
        note = "not detected" if score < 0 else f"detected with score {score:.3f}"
        caption = f"{source.class_name(entry)}, {note}: {source.file_name(entry['image_id'])}"
        return source.draw(entry["image_id"], caption, source.drawn(entry["image_id"]), around=entry, missed=place)

    return _draw_first(scores, source.objects, draw, count)


def false_positives(source: PictureSource, count: int = 12) -> list[Picture]:
    """The wrong detections with the highest scores."""
    outcomes, scores = source.run.outcomes, source.run.scores
    wrong = np.flatnonzero(outcomes == 0) if outcomes is not None else np.zeros(0, int)

    def draw(row: int) -> Picture | None:
        entry = source.run.detections[row]
        caption = f"{source.caption(row)}: {source.file_name(entry['image_id'])}"
        return source.draw(entry["image_id"], caption, [row], around=entry)

    ranked = wrong[np.argsort(-scores[wrong], kind="stable")].tolist()
    return _draw_first(ranked, source.run.detections, draw, count)


def _draw_first(
    ranked: Iterable[int], entries: Sequence[Entry], draw: Callable[[int], Picture | None], count: int
) -> list[Picture]:
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
