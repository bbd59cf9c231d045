"""The images of a run, with what was annotated and what was detected drawn on them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from aploss.reporting.pictures import draw_boxes, thumbnail
from aploss.reporting.run_files import RunFiles
from aploss.reporting.style import PALETTE, class_colour

__all__ = ["PictureSource", "overlaps", "xyxy"]

TRUTH_COLOUR = "#ffffff"
MOST_LONG_CAPTIONS = 6
MOST_CAPTIONS = 24


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
        """Rows of the detections above the threshold, the weakest first."""
        rows = self.detections_of.get(image_id, [])
        chosen = [row for row in rows if self.scores[row] >= self.run.threshold]
        return sorted(chosen, key=lambda row: float(self.scores[row]))

    def caption(self, row: int) -> str:
        return f"{self.class_name(self.run.detections[row])} {self.scores[row]:.2f}"

    def captions(self, rows: Sequence[int]) -> list[str]:
        """Captions for all boxes of one picture: the more there are, the less they say.

        Few boxes have class and score, more only the score (colours tell the class, if there are
        not too many), and a crowd has none, since nobody could read them.
        """
        if len(rows) > MOST_CAPTIONS:
            return [""] * len(rows)
        if len(rows) > MOST_LONG_CAPTIONS and self.colours_differ:
            return [f"{self.scores[row]:.2f}" for row in rows]
        return [self.caption(row) for row in rows]

    @property
    def colours_differ(self) -> bool:
        """Whether every class has a colour of its own."""
        return len(self.class_names) <= len(PALETTE)

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
        named: Mapping[int, str] | None = None,
        corner: tuple[int, int] = (0, 0),
        longest: int = 420,
    ) -> Image.Image:
        """The image with its objects dashed and the given detections in their class's colour.

        Args:
            image: the image, or the part of it that begins at ``corner``.
            image_id: its id.
            rows: detections to draw, the most important last.
            named: position of an object → its caption; the others have none.
            corner: (x, y) of the part.
            longest: longer side of the result.
        """
        small, factor = thumbnail(image, longest)
        shift = np.array([*corner, *corner], dtype=np.float64)

        def scaled(entries: list[Mapping[str, Any]]) -> np.ndarray:
            boxes = np.array([xyxy(entry["bbox"]) for entry in entries]).reshape(-1, 4)
            return (boxes - shift) * factor

        objects = [self.objects[place] for place in self.objects_of.get(image_id, [])]
        drawn = draw_boxes(small, scaled(objects), colours=TRUTH_COLOUR, dashed=True)
        found = [self.run.detections[row] for row in rows]
        drawn = draw_boxes(
            drawn,
            scaled(found),
            captions=self.captions(rows),
            colours=[self.colour(entry) for entry in found],
        )
        texts = named or {}
        chosen = [self.objects[place] for place in texts]
        return draw_boxes(
            drawn, scaled(chosen), captions=[*texts.values()], colours=TRUTH_COLOUR, dashed=True
        )


def _group(image_ids: Iterable[int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for position, image_id in enumerate(image_ids):
        groups.setdefault(image_id, []).append(position)
    return groups


def xyxy(box: Sequence[float]) -> list[float]:
    """A COCO box (x, y, width, height) as (x1, y1, x2, y2)."""
    x, y, width, height = (float(value) for value in box)
    return [x, y, x + width, y + height]


def overlaps(entry: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """IoU of a box with each of the others, float64 [n].

    Example:
        >>> others = [{"bbox": [0, 0, 10, 5]}, {"bbox": [20, 0, 5, 5]}]
        >>> overlaps({"bbox": [0, 0, 10, 10]}, others)
        array([0.5, 0. ])
    """
    box = np.array(xyxy(entry["bbox"]))
    boxes = np.array([xyxy(one["bbox"]) for one in others]).reshape(-1, 4)
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    common = np.clip(sides, 0, None).prod(axis=1)
    union = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) + (box[2:] - box[:2]).prod() - common
    iou: np.ndarray = common / np.maximum(union, 1e-9)
    return iou


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit and float images scaled to 8 bits; PIL's own conversion would cut them off."""
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image, dtype=np.float64)
    top = max(float(values.max(initial=0.0)), 1e-9)
    scale = 255 / (65535 if image.mode != "F" and top > 255 else top)
    return Image.fromarray(np.clip(values * scale, 0, 255).astype(np.uint8))
