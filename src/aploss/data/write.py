"""Writers of the three formats: annotation files, split lists, and where the images go."""

import json
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import yaml

from aploss.data.dataset import DetectionDataset

__all__ = ["Written", "write_coco", "write_voc", "write_yolo"]

Parts = dict[str, DetectionDataset]


class Written(NamedTuple):
    """Where images belong, and what had to be left out."""

    image_folder: str
    lost_boxes: int = 0
    losses: tuple[str, ...] = ()  # in words


def write_coco(folder: Path, parts: Parts, places: dict[Path, str]) -> Written:
    """Writes ``annotations/instances_SPLIT.json``, for images in ``images`` or ``images/SPLIT``.

    Args:
        folder: The new dataset; it does not exist.
        parts: Split name → dataset.
        places: Image file → its new place below the image folder.
    """
    (folder / "annotations").mkdir(parents=True)
    for split, part in parts.items():
        content = part.to_coco()
        for index, image in enumerate(content["images"]):
            image["file_name"] = posixpath.basename(places[part.image_path(index)])
        file = folder / "annotations" / f"instances_{split}.json"
        file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return Written("images")


def write_voc(folder: Path, parts: Parts, places: dict[Path, str]) -> Written:
    """Writes ``Annotations/NAME.xml``, ``ImageSets/Main/SPLIT.txt`` and ``labels.txt``, for images
    in ``JPEGImages``; arguments as in :func:`write_coco`."""
    for name in ("Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    for split, part in parts.items():
        listed = [_stem(places[part.image_path(i)]) + "\n" for i in range(len(part))]
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(listed), "utf-8")
    lost = 0
    for part, index in _each_image_once(parts):
        name = places[part.image_path(index)]
        sides = part.boxes(index)[:, 2:] - part.boxes(index)[:, :2]
        thin = sides.min(axis=1, initial=np.inf) <= 1
        lost += int(thin.sum())
        tree = ElementTree.ElementTree(_voc_annotation(part, index, name, ~thin))
        ElementTree.indent(tree)
        tree.write(folder / "Annotations" / f"{_stem(name)}.xml", encoding="utf-8")
    class_names = next(iter(parts.values())).class_names
    (folder / "labels.txt").write_text("".join(f"{name}\n" for name in class_names), "utf-8")
    losses = [f"{lost} boxes of one pixel's width or height or less"] if lost else []
    losses += _outlines(parts)
    return Written("JPEGImages", lost, tuple(losses))


def write_yolo(folder: Path, parts: Parts, places: dict[Path, str]) -> Written:
    """Writes ``data.yaml`` and one label file an image; arguments as in :func:`write_coco`.

    Images are in ``images/SPLIT``; where splits share images, in ``images``, with a list of its
    images for each split.
    """
    folder.mkdir(parents=True)
    everything = list(_each_image_once(parts))
    shared = len(everything) < sum(map(len, parts.values()))
    for part, index in everything:
        label_file = folder / "labels" / f"{_stem(places[part.image_path(index)])}.txt"
        label_file.parent.mkdir(parents=True, exist_ok=True)
        label_file.write_text("".join(_yolo_rows(part, index)), "utf-8")
    class_names = next(iter(parts.values())).class_names
    description: dict[str, object] = {}
    for split, part in parts.items():
        description[split] = f"{split}.txt" if shared else f"images/{split}"
        if shared:
            lines = [f"./images/{places[part.image_path(i)]}\n" for i in range(len(part))]
            (folder / f"{split}.txt").write_text("".join(lines), "utf-8")
    description["names"] = dict(enumerate(class_names))
    text = yaml.safe_dump(description, sort_keys=False, allow_unicode=True)
    (folder / "data.yaml").write_text(text, "utf-8")
    losses = []
    for flag in ("difficult", "crowd"):
        count = sum(int(getattr(part, flag)(index).sum()) for part, index in everything)
        losses += [f"{count} '{flag}' marks"] if count else []
    losses += _outlines(parts)
    return Written("images", losses=tuple(losses))


def _each_image_once(parts: Parts) -> Iterator[tuple[DetectionDataset, int]]:
    seen = set()
    for part in parts.values():
        for index in range(len(part)):
            path = part.image_path(index)
            if path not in seen:
                seen.add(path)
                yield part, index


def _voc_annotation(
    part: DetectionDataset, index: int, name: str, kept: np.ndarray
) -> ElementTree.Element:
    root = ElementTree.Element("annotation")
    _add(root, "filename", name)
    size = ElementTree.SubElement(root, "size")
    for side, value in zip(("width", "height"), part.image_size(index), strict=True):
        _add(size, side, str(value))
    _add(size, "depth", "3")
    boxes = part.boxes(index)[kept].astype(np.float64)
    boxes[:, :2] += 1  # VOC's first pixel is 1
    flags = zip(part.difficult(index)[kept], part.crowd(index)[kept], strict=True)
    labels = part.labels(index)[kept].tolist()
    for box, label, (difficult, crowd) in zip(boxes.tolist(), labels, flags, strict=True):
        item = ElementTree.SubElement(root, "object")
        _add(item, "name", part.class_names[label])
        _add(item, "difficult", str(int(difficult)))
        if crowd:  # not in VOC, but no reader minds it
            _add(item, "crowd", "1")
        corners = ElementTree.SubElement(item, "bndbox")
        for tag, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True):
            _add(corners, tag, str(int(value)) if value.is_integer() else repr(value))
    return root


def _add(parent: ElementTree.Element, tag: str, text: str) -> None:
    ElementTree.SubElement(parent, tag).text = text


def _yolo_rows(part: DetectionDataset, index: int) -> Iterator[str]:
    """Rows with as many digits as it takes to read the same pixels back."""
    width, height = part.image_size(index)
    labels = part.labels(index).tolist()
    for label, (x1, y1, x2, y2) in zip(labels, part.boxes(index).tolist(), strict=True):
        values = (
            (x1 + x2) / 2 / width,
            (y1 + y2) / 2 / height,
            (x2 - x1) / width,
            (y2 - y1) / height,
        )
        yield f"{label} {' '.join(map(repr, values))}\n"


def _outlines(parts: Parts) -> list[str]:
    """COCO's areas are those of outlines; the other formats know boxes alone."""
    for part, index in _each_image_once(parts):
        boxes = part.boxes(index)
        own = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        if not np.allclose(own, part.areas(index), rtol=1e-3):
            return ["the areas of objects' outlines (a box's own area is read instead)"]
    return []


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]
