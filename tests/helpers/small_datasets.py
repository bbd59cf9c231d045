"""Small clean datasets of all three formats, for tests to load or to damage."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 64, 48
CLASS_NAMES = ("cat", "dog")
# split → image name → boxes (class, x1, y1, x2, y2) with the first pixel at 0
SPLITS = {
    "train": {"a": [("cat", 4, 5, 20, 25), ("dog", 30, 10, 60.5, 40.25)], "b": [("dog", 0, 0, 64, 48)], "c": []},
    "val": {"d": [("cat", 10, 10, 30, 30)]},
}


def write_picture(path: Path, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Path:
    """Writes a picture of noise that no other path gives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(path.as_posix()))
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def voc_object(name: str, x1: float, y1: float, x2: float, y2: float, extra: str = "") -> str:
    return (
        f"<object><name>{name}</name><difficult>0</difficult>{extra}<bndbox><xmin>{x1 + 1}</xmin>"
        f"<ymin>{y1 + 1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
    )


def voc_xml(name: str, objects: Iterable[str], size: tuple[int, int] = (WIDTH, HEIGHT)) -> str:
    return (
        f"<annotation><filename>{name}.png</filename><size><width>{size[0]}</width>"
        f"<height>{size[1]}</height><depth>3</depth></size>{''.join(objects)}</annotation>"
    )


def write_voc(folder: Path) -> Path:
    for split, images in SPLITS.items():
        for name, boxes in images.items():
            write_picture(folder / "JPEGImages" / f"{name}.png")
            xml = folder / "Annotations" / f"{name}.xml"
            xml.parent.mkdir(parents=True, exist_ok=True)
            xml.write_text(voc_xml(name, (voc_object(*box) for box in boxes)))
        listing = folder / "ImageSets" / "Main" / f"{split}.txt"
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text("".join(f"{name}\n" for name in images))
    return folder


def coco_annotation(number: int, image: int, category: int, box: list[float]) -> dict:
    """An object that is not a crowd; its box is x, y, width and height."""
    entry = {"id": number, "image_id": image, "category_id": category, "bbox": box}
    return {**entry, "area": box[2] * box[3], "iscrowd": 0}


def coco_content(split: str) -> dict:
    """A COCO dict whose ids are not simply 1, 2, 3: images 10, 20, ..., categories 3 and 7."""
    images, annotations = [], []
    for number, (name, boxes) in enumerate(SPLITS[split].items(), start=1):
        size = {"width": WIDTH, "height": HEIGHT}
        images.append({"id": 10 * number, "file_name": f"{name}.png", **size})
        for label, x1, y1, x2, y2 in boxes:
            category = {"cat": 3, "dog": 7}[label]
            box = [x1, y1, x2 - x1, y2 - y1]
            annotations.append(coco_annotation(len(annotations) + 1, 10 * number, category, box))
    categories = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
    return {"images": images, "annotations": annotations, "categories": categories}


def write_coco(folder: Path) -> Path:
    (folder / "annotations").mkdir(parents=True)
    for split, images in SPLITS.items():
        for name in images:
            write_picture(folder / f"{split}2017" / f"{name}.png")
        file = folder / "annotations" / f"instances_{split}2017.json"
        file.write_text(json.dumps(coco_content(split)))
    return folder


def edit_json(file: Path, change: Callable[[dict], object]) -> None:
    """Changes the content of a JSON file in place."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def write_yolo(folder: Path) -> Path:
    for split, images in SPLITS.items():
        for name, boxes in images.items():
            write_picture(folder / "images" / split / f"{name}.png")
            rows = [
                f"{CLASS_NAMES.index(label)} {(x1 + x2) / 2 / WIDTH} {(y1 + y2) / 2 / HEIGHT} "
                f"{(x2 - x1) / WIDTH} {(y2 - y1) / HEIGHT}\n"
                for label, x1, y1, x2, y2 in boxes
            ]
            labels = folder / "labels" / split / f"{name}.txt"
            labels.parent.mkdir(parents=True, exist_ok=True)
            labels.write_text("".join(rows))
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat, dog]\n")
    return folder
