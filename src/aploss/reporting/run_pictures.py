"""The pictures of a run's page: a fair sample, the misses, and the false alarms."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from aploss.reporting.blocks import Picture
from aploss.reporting.pictures import crop_around, data_uri, draw_boxes, thumbnail
from aploss.reporting.run_files import RunFiles
from aploss.reporting.style import class_colour

__all__ = ["PictureSource", "false_alarms", "gallery", "misses"]

TRUTH_COLOUR = "#ffffff"
MOST_PER_IMAGE = 2


@dataclass
class PictureSource:
    """The images of a run with their objects and detections, looked up by image id.

    ``unreadable`` collects the images that could not be opened.
    """

    run: RunFiles
    unreadable: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        truth = self.run.ground_truth
        self.images: dict[int, Mapping[str, Any]] = {
            image["id"]: image for image in truth.get("images", [])
        }
        self.class_names: dict[int, str] = {
            entry["id"]: str(entry["name"]) for entry in truth.get("categories", [])
        }
        self.numbers = {number: place for place, number in enumerate(self.class_names)}
        self.objects: list[Mapping[str, Any]] = list(truth.get("annotations", []))
        self.scores = self.run.scores
        self.outcomes = self.run.outcomes
        self.objects_of = _group(one["image_id"] for one in self.objects)
        self.detections_of = _group(one["image_id"] for one in self.run.detections)

    def open(self, image_id: int) -> Image.Image | None:
        """The image upright in RGB, or None (and a note) when it cannot be read."""
        entry = self.images.get(image_id, {})
        path = self.run.folder / Path(str(entry.get("path") or entry.get("file_name") or ""))
        try:
            with Image.open(path) as image:
                size = (entry.get("width"), entry.get("height"))
                upright = image if image.size == size else ImageOps.exif_transpose(image)
                return _eight_bits(upright).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            self.unreadable[image_id] = f"{path}: {error}"
            return None

    def file_name(self, image_id: int) -> str:
        entry = self.images.get(image_id, {})
        return Path(str(entry.get("file_name") or entry.get("path") or image_id)).name

    def shown(self, image_id: int) -> list[int]:
        """Rows of the detections that are drawn on an image, the weakest first."""
        rows = self.detections_of.get(image_id, [])
        chosen = [row for row in rows if self.scores[row] >= self.run.threshold]
        return sorted(chosen, key=lambda row: float(self.scores[row]))

    def caption(self, row: int) -> str:
        return f"{self.class_name(self.run.detections[row])} {self.scores[row]:.2f}"

    def class_name(self, entry: Mapping[str, Any]) -> str:
        return self.class_names.get(entry["category_id"], f"class {entry['category_id']}")

    def colour(self, entry: Mapping[str, Any]) -> str:
        return class_colour(self.numbers.get(entry["category_id"], 0))

    def draw(
        self,
        image: Image.Image,
        image_id: int,
        *,
        rows: Sequence[int],
        missed: Sequence[int] = (),
        corner: tuple[int, int] = (0, 0),
        longest: int = 420,
    ) -> Image.Image:
        """The image with its objects dashed and the given detections in their class's colour.

        Args:
            image: the image, or the part of it that begins at ``corner``.
            image_id: its id.
            rows: detections to draw.
            missed: positions of objects that get a caption.
            corner: (x, y) of the part.
            longest: longer side of the result.
        """
        small, factor = thumbnail(image, longest)
        shift = np.array([*corner, *corner], dtype=np.float64)

        def scaled(entries: list[Mapping[str, Any]]) -> np.ndarray:
            boxes = np.array([_xyxy(entry["bbox"]) for entry in entries]).reshape(-1, 4)
            return (boxes - shift) * factor

        objects = [self.objects[place] for place in self.objects_of.get(image_id, [])]
        drawn = draw_boxes(small, scaled(objects), colours=TRUTH_COLOUR, dashed=True)
        found = [self.run.detections[row] for row in rows]
        drawn = draw_boxes(
            drawn,
            scaled(found),
            captions=[self.caption(row) for row in rows],
            colours=[self.colour(entry) for entry in found],
        )
        lost = [self.objects[place] for place in missed]
        texts = [f"missed: {self.class_name(entry)}" for entry in lost]
        return draw_boxes(drawn, scaled(lost), captions=texts, colours=TRUTH_COLOUR, dashed=True)


def gallery(source: PictureSource, count: int = 12) -> list[Picture]:
    """Images evenly spaced through the split, not chosen by how well they came out."""
    usable = [number for number in source.images if source.objects_of.get(number)]
    usable = usable or list(source.images)
    places = np.unique(np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int))
    pictures = []
    for image_id in [usable[place] for place in places]:
        image = source.open(image_id)
        if image is None:
            continue
        rows = source.shown(image_id)
        objects = len(source.objects_of.get(image_id, []))
        caption = f"{source.file_name(image_id)}: {_counted(objects, 'object')}, "
        caption += _counted(len(rows), "detection")
        if source.outcomes is not None:
            caption += f", {sum(source.outcomes[row] == 0 for row in rows)} wrong"
        pictures.append(_picture(source.draw(image, image_id, rows=rows), caption))
    return pictures


def misses(source: PictureSource, count: int = 12) -> list[Picture]:
    """Objects no drawn detection found: first those without any detection, the largest first."""
    found_by = source.run.matches.get("ground_truth", {})
    threshold = source.run.threshold
    missed: list[tuple[float, float, int]] = []
    for place, entry in enumerate(source.objects):
        if entry.get("iscrowd") or entry.get("difficult"):
            continue
        row = found_by.get(str(entry["id"]))
        score = -1.0 if row is None else float(source.scores[row])
        if score < threshold:
            missed.append((score, -float(entry["bbox"][2]) * float(entry["bbox"][3]), place))
    pictures = []
    for score, _, place in _spread(sorted(missed), source.objects):
        entry = source.objects[place]
        note = "no detection at all" if score < 0 else f"found only with score {score:.3f}"
        caption = f"{source.class_name(entry)}, {note}: {source.file_name(entry['image_id'])}"
        picture = _crop(source, entry, caption, missed=[place])
        pictures.extend([picture] if picture else [])
        if len(pictures) == count:
            break
    return pictures


def false_alarms(source: PictureSource, count: int = 12) -> list[Picture]:
    """The wrong detections with the highest scores."""
    if source.outcomes is None:
        return []
    wrong = np.flatnonzero(source.outcomes == 0)
    order = wrong[np.argsort(-source.scores[wrong], kind="stable")]
    ranked = [(0.0, 0.0, int(row)) for row in order[: 20 * count]]
    pictures = []
    for _, _, row in _spread(ranked, source.run.detections):
        entry = source.run.detections[row]
        caption = f"{source.caption(row)}: {source.file_name(entry['image_id'])}"
        picture = _crop(source, entry, caption, rows=[row])
        pictures.extend([picture] if picture else [])
        if len(pictures) == count:
            break
    return pictures


def _crop(
    source: PictureSource,
    entry: Mapping[str, Any],
    caption: str,
    *,
    rows: Sequence[int] | None = None,
    missed: Sequence[int] = (),
) -> Picture | None:
    image = source.open(entry["image_id"])
    if image is None:
        return None
    part, corner = crop_around(image, _xyxy(entry["bbox"]), context=0.8)
    drawn = source.draw(
        part, entry["image_id"],
        rows=source.shown(entry["image_id"]) if rows is None else rows,
        missed=missed, corner=corner, longest=240,
    )  # fmt: skip
    return _picture(drawn, caption)


def _spread(
    ranked: Sequence[tuple[float, float, int]], entries: Sequence[Mapping[str, Any]]
) -> list[tuple[float, float, int]]:
    """The same order, but at most two of one image, so that no image fills the page."""
    seen: Counter[int] = Counter()
    chosen = []
    for item in ranked:
        image_id = entries[item[2]]["image_id"]
        seen[image_id] += 1
        if seen[image_id] <= MOST_PER_IMAGE:
            chosen.append(item)
    return chosen


def _picture(image: Image.Image, caption: str) -> Picture:
    return Picture(data_uri(image), caption)


def _group(image_ids: Iterable[int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for position, image_id in enumerate(image_ids):
        groups.setdefault(image_id, []).append(position)
    return groups


def _xyxy(box: Sequence[float]) -> list[float]:
    x, y, width, height = (float(value) for value in box)
    return [x, y, x + width, y + height]


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit and float images scaled to 8 bits; PIL's own conversion would cut them off."""
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image, dtype=np.float64)
    top = max(float(values.max(initial=0.0)), 1e-9)
    scale = 255 / (65535 if image.mode != "F" and top > 255 else top)
    return Image.fromarray(np.clip(values * scale, 0, 255).astype(np.uint8))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
