"""The pictures of a run's page: a fair sample, the misses and the false positives."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.ops import box_iou

from aploss.data.images import ImageError, read_image
from aploss.plotting.pictures import crop_around, data_uri, outline_boxes, thumbnail
from aploss.plotting.style import PALETTE, class_colour, loss_label
from aploss.reports.page import Picture, Pictures
from aploss.reports.run_files import RunFiles

TRUTH_COLOUR = "#ffffff"
MAX_LONG_CAPTIONS, MAX_CAPTIONS = 6, 24
MAX_PER_IMAGE = 2
TOUCHES, MATCHES = 0.1, 0.5  # IoU from which a box is near another, and from which it finds it


@dataclass
class PictureSource:
    """The images of a run with their objects and detections, looked up by image id.

    ``unreadable`` collects the images that could not be opened: id → why.
    """

    run: RunFiles
    unreadable: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        truth = self.run.ground_truth
        self.images: dict[int, Mapping[str, Any]] = {image["id"]: image for image in truth.get("images", [])}
        self.class_names: dict[int, str] = {entry["id"]: str(entry["name"]) for entry in truth.get("categories", [])}
        self.labels = {number: label for label, number in enumerate(self.class_names)}
        self.objects: list[Mapping[str, Any]] = list(truth.get("annotations", []))
        self.scores = self.run.scores
        self.outcomes = self.run.outcomes
        self.objects_of = _by_image(self.objects)
        self.detections_of = _by_image(self.run.detections)

    def open(self, image_id: int) -> Image.Image | None:
        """The image as training reads it, or None (and a note) when it cannot be read."""
        entry = self.images.get(image_id, {})
        path = self.run.folder / str(entry.get("path") or entry.get("file_name") or "")
        width, height = entry.get("width"), entry.get("height")
        try:
            if not self.run.may_open(path):
                raise ValueError(f"{path} is not below the folder of the images: name that as images=")
            pixels = read_image(path, size=(width, height) if width and height else None)
            return Image.fromarray(pixels.permute(1, 2, 0).numpy())
        except (ImageError, OSError, ValueError) as error:
            self.unreadable[image_id] = str(error)
            return None

    def file_name(self, image_id: int) -> str:
        entry = self.images.get(image_id, {})
        return Path(str(entry.get("file_name") or entry.get("path") or image_id)).name

    def shown(self, image_id: int) -> list[int]:
        """Rows of the detections above the threshold, the weakest first."""
        rows = [row for row in self.detections_of[image_id] if self.scores[row] >= self.run.threshold]
        return sorted(rows, key=self.scores.__getitem__)

    def caption(self, row: int) -> str:
        """Class and score of a detection."""
        return f"{self.class_name(self.run.detections[row])} {self.scores[row]:.2f}"

    def captions(self, rows: Sequence[int]) -> list[str]:
        """Captions for all boxes of one picture: the more there are, the less they say.

        Few boxes have class and score, more only the score (colours tell the class, if there are not too many), and a
        crowd has none, since nobody could read them.
        """
        if len(rows) > MAX_CAPTIONS:
            return [""] * len(rows)
        if len(rows) > MAX_LONG_CAPTIONS and self.colours_differ:
            return [f"{self.scores[row]:.2f}" for row in rows]
        return [self.caption(row) for row in rows]

    @property
    def colours_differ(self) -> bool:
        """Whether every class has a colour of its own."""
        return len(self.class_names) <= len(PALETTE)

    def class_name(self, entry: Mapping[str, Any]) -> str:
        """The name of the class of an object or detection."""
        return self.class_names.get(entry["category_id"], f"class {entry['category_id']}")

    def draw(
        self,
        image: Image.Image,
        image_id: int,
        caption: str,
        *,
        rows: Sequence[int],
        named: Mapping[int, str] | None = None,
        corner: tuple[int, int] = (0, 0),
        longest: int = 420,
    ) -> Picture:
        """The image with its objects dashed and the given detections in their class's colour.

        Args:
            image: the image with the id, or the part of it that begins at ``corner`` (x, y).
            caption: the line below the picture.
            rows: detections to draw, the most important last.
            named: position of an object → its caption; the others have none.
            longest: longer side of the result.
        """
        texts = named or {}
        objects = [self.objects[place] for place in self.objects_of[image_id]]
        found = [self.run.detections[row] for row in rows]
        chosen = [self.objects[place] for place in texts]
        small, factor = thumbnail(image, longest)
        colours = [class_colour(self.labels.get(one["category_id"], 0)) for one in found]
        drawn = outline_boxes(
            small,
            (_xyxy([*objects, *found, *chosen]) - np.array([*corner, *corner])) * factor,
            captions=[*[""] * len(objects), *self.captions(rows), *texts.values()],
            colours=[*[TRUTH_COLOUR] * len(objects), *colours, *[TRUTH_COLOUR] * len(chosen)],
            dashed=[*[True] * len(objects), *[False] * len(found), *[True] * len(chosen)],
        )
        return Picture(data_uri(drawn), caption)

    def draw_around(
        self, entry: Mapping[str, Any], note: str, *, rows: Sequence[int], named: Mapping[int, str] | None = None
    ) -> Picture | None:
        """The surroundings of an object or detection; see :meth:`draw`."""
        image_id = entry["image_id"]
        image = self.open(image_id)
        if image is None:
            return None
        part, corner = crop_around(image, _xyxy([entry])[0], context=0.8)
        caption = f"{note}: {self.file_name(image_id)}"
        return self.draw(part, image_id, caption, rows=rows, named=named, corner=corner, longest=240)

    def evenly_spaced(self, count: int) -> list[int]:
        """Ids of images with objects, evenly spaced; of any images where none has objects."""
        usable = [number for number in self.images if self.objects_of[number]] or list(self.images)
        places = np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int)
        return [usable[place] for place in np.unique(places)]


def gallery(source: PictureSource, count: int = 12) -> list[Picture]:
    """Images evenly spaced through the split, not chosen by how well they came out."""
    pictures = []
    for image_id in source.evenly_spaced(count):
        if (image := source.open(image_id)) is not None:
            rows = source.shown(image_id)
            counts = {"object": len(source.objects_of[image_id]), "detection": len(rows)}
            parts = [f"{number} {noun}{'s' * (number != 1)}" for noun, number in counts.items()]
            if source.outcomes is not None:
                parts.append(f"{(source.outcomes[rows] == 0).sum()} wrong")
            caption = f"{source.file_name(image_id)}: {', '.join(parts)}"
            pictures.append(source.draw(image, image_id, caption, rows=rows))
    return pictures


def side_by_side(runs: Mapping[str, RunFiles], count: int = 6) -> Pictures:
    """The same images, evenly spaced through the split, as detected by several runs (name → run, a column each), a row
    for each image, as in Figure 5."""
    sources = {name: PictureSource(run) for name, run in runs.items()}
    pictures = []
    for image_id in next(iter(sources.values())).evenly_spaced(count):
        images = [source.open(image_id) for source in sources.values()]
        for (name, source), image in zip(sources.items(), images, strict=True):
            if all(images) and image is not None:  # a row has a picture of every run, or is none
                caption = f"{loss_label(name)}: {source.file_name(image_id)}"
                pictures.append(source.draw(image, image_id, caption, rows=source.shown(image_id)))
    return Pictures(pictures, columns=len(sources))


def misses(source: PictureSource, count: int = 12) -> list[Picture]:
    """Objects no drawn detection found: first those without any detection, the largest first."""
    found_by = source.run.matches.get("ground_truth", {})
    missed: list[tuple[float, float, int]] = []
    for place, entry in enumerate(source.objects):
        if not (entry.get("iscrowd") or entry.get("difficult")):
            row = found_by.get(str(entry["id"]))
            score = -1.0 if row is None else float(source.scores[row])
            missed.append((score, -float(entry["bbox"][2]) * float(entry["bbox"][3]), place))
    scores = {place: score for score, _, place in sorted(missed) if score < source.run.threshold}

    def draw(place: int) -> Picture | None:
        entry, score = source.objects[place], scores[place]
        name = source.class_name(entry)
        note = "no detection at all" if score < 0 else f"found only with score {score:.3f}"
        shown = source.shown(entry["image_id"])
        overlaps = _overlaps(entry, [source.run.detections[row] for row in shown])
        near = [shown[k] for k in np.flatnonzero(overlaps >= TOUCHES)]
        return source.draw_around(entry, f"{name}, {note}", rows=near[-3:], named={place: f"missed: {name}"})

    return list(islice(filter(None, map(draw, _few_per_image(scores, source.objects))), count))


def false_positives(source: PictureSource, count: int = 12) -> list[Picture]:
    """The wrong detections with the highest scores."""
    if source.outcomes is None:
        return []
    wrong = np.flatnonzero(source.outcomes == 0)
    ranked = wrong[np.argsort(-source.scores[wrong], kind="stable")][: 20 * count].tolist()

    def draw(row: int) -> Picture | None:
        entry = source.run.detections[row]
        return source.draw_around(entry, f"{source.caption(row)}, {_why_wrong(source, entry)}", rows=[row])

    return list(islice(filter(None, map(draw, _few_per_image(ranked, source.run.detections))), count))


def _why_wrong(source: PictureSource, entry: Mapping[str, Any]) -> str:
    """Why a detection is wrong, from the object it overlaps most."""
    objects = [source.objects[place] for place in source.objects_of[entry["image_id"]]]
    overlaps = _overlaps(entry, objects)
    if not (overlaps >= TOUCHES).any():
        return "on no object"
    same = np.array([one["category_id"] == entry["category_id"] for one in objects])
    if (same & (overlaps >= MATCHES)).any():
        return "found twice"
    nearest = objects[int(overlaps.argmax())]
    if nearest["category_id"] == entry["category_id"]:
        return "badly placed"
    return f"annotated as {source.class_name(nearest)}"


def _overlaps(entry: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """IoU of a box with each of the others, float64 [n]."""
    boxes, other_boxes = torch.from_numpy(_xyxy([entry])), torch.from_numpy(_xyxy(others))
    overlaps: np.ndarray = box_iou(boxes, other_boxes)[0].nan_to_num().numpy()
    return overlaps


def _xyxy(entries: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The COCO boxes (x, y, width, height) of entries as (x1, y1, x2, y2), float64 [n, 4]."""
    boxes = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return boxes


def _few_per_image(ranked: Iterable[int], entries: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """The same order, but at most two of one image, so that no image fills the page."""
    seen: Counter[int] = Counter()
    for place in ranked:
        image_id = entries[place]["image_id"]
        seen[image_id] += 1
        if seen[image_id] <= MAX_PER_IMAGE:
            yield place


def _by_image(entries: Iterable[Mapping[str, Any]]) -> defaultdict[int, list[int]]:
    """Image id → the places of its entries."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for place, entry in enumerate(entries):
        groups[entry["image_id"]].append(place)
    return groups
