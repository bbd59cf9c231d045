"""Each kind of fault is planted in a clean set, found, and its file named."""

import shutil
from pathlib import Path

import pytest
from PIL import Image
from small_datasets import edit_json

from aploss.data import check_dataset

XML = "Annotations/a.xml"
JSON = "annotations/instances_train2017.json"
TXT = "labels/train/a.txt"
IMAGE = "train2017/a.png"
CAT_BOX = "<xmin>5</xmin><ymin>6</ymin><xmax>20</xmax><ymax>25</ymax>"


def replace(folder: Path, file: str, old: str, new: str) -> None:
    text = (folder / file).read_text()
    assert old in text, f"{old} is not in {text}"
    (folder / file).write_text(text.replace(old, new, 1))


def append(folder: Path, file: str, text: str) -> None:
    with (folder / file).open("a") as opened:
        opened.write(text)


def edit(change):
    return lambda folder: edit_json(folder / JSON, change)


def annotation(**changes):
    """Changes the first annotation; None removes the field."""

    def change(content: dict) -> None:
        entry = content["annotations"][0] | changes
        content["annotations"][0] = {k: v for k, v in entry.items() if v is not None}

    return edit(change)


def xml(old: str, new: str):
    return lambda folder: replace(folder, XML, old, new)


def row(text: str):
    return lambda folder: append(folder, TXT, f"{text}\n")


def image(make):
    """Something else in the place of an image."""

    def plant(folder: Path) -> None:
        (folder / IMAGE).rename(folder.parent / "moved.png")
        make(folder / IMAGE, (folder.parent / "moved.png").read_bytes())

    return plant


# (what, kind, file to be named, format, how to plant it)
FAULTS = [
    # VOC
    ("corners that coincide", "degenerate-box", XML, "voc", xml("<xmax>20<", "<xmax>5<")),
    ("a box beyond the border", "out-of-bounds-box", XML, "voc", xml("<xmax>20<", "<xmax>90<")),
    ("text for a number", "bad-box", XML, "voc", xml("<xmin>5<", "<xmin>left<")),
    ("an object without box", "bad-box", XML, "voc", xml(f"<bndbox>{CAT_BOX}</bndbox>", "")),
    ("an object without class", "unknown-class", XML, "voc", xml("<name>cat</name>", "<name> </name>")),
    ("a class that is not in the list", "unknown-class", XML, "voc",
     lambda folder: ((folder / "labels.txt").write_text("cat\ndog\n"),
                     replace(folder, XML, ">cat<", ">cta<"))),
    ("no XML for a listed image", "unreadable-annotation", XML, "voc", lambda folder: (folder / XML).unlink()),
    ("NUL in a list", "unreadable-annotation", r"Annotations/b\x00.xml", "voc",
     lambda folder: append(folder, "ImageSets/Main/train.txt", "b\0\n")),
    ("an image listed twice", "duplicate-image", XML, "voc",
     lambda folder: append(folder, "ImageSets/Main/train.txt", "a\n")),
    ("an empty list", "empty-split", "val", "voc",
     lambda folder: (folder / "ImageSets/Main/val.txt").write_text("\n")),
    ("an image in two splits", "image-in-two-splits", "JPEGImages/a.png", "voc",
     lambda folder: append(folder, "ImageSets/Main/val.txt", "a\n")),
    # COCO
    ("no width", "degenerate-box", JSON, "coco", annotation(bbox=[4, 5, 0, 9])),
    ("three numbers", "bad-box", JSON, "coco", annotation(bbox=[4, 5, 9])),
    ("NaN in JSON", "bad-box", JSON, "coco", annotation(bbox=[4, 5, float("nan"), 9])),
    ("no bbox", "bad-box", JSON, "coco", annotation(bbox=None)),
    ("an image id that is not there", "bad-entry", JSON, "coco", annotation(image_id=999)),
    ("a category that is not there", "unknown-class", JSON, "coco", annotation(category_id=55)),
    ("no category", "unknown-class", JSON, "coco", annotation(category_id=None)),
    ("an entry that is no object", "bad-entry", JSON, "coco",
     edit(lambda content: content["annotations"].append("what?"))),
    ("an image id twice", "duplicate-image", JSON, "coco", edit(lambda content: content["images"][1].update(id=10))),
    ("a file twice", "duplicate-image", JSON, "coco",
     edit(lambda content: content["images"][1].update(file_name="a.png"))),
    ("an image without name", "bad-image-entry", JSON, "coco",
     edit(lambda content: content["images"][1].pop("file_name"))),
    ("a category name twice", "bad-categories", JSON, "coco",
     edit(lambda content: content["categories"][1].update(name="dog"))),
    ("no categories", "bad-categories", JSON, "coco", edit(lambda content: content["categories"].clear())),
    ("another class list in a split", "class-lists-differ", "coco", "coco",
     edit(lambda content: content["categories"].append({"id": 9, "name": "fox"}))),
    # YOLO
    ("fractions in COCO", "fraction-box", JSON, "coco", annotation(bbox=[0.1, 0.2, 0.25, 0.4])),
    ("corners as fractions", "fraction-box", JSON, "coco", annotation(bbox=[0.6, 0.7, 0.9, 0.95])),
    ("a box twice", "repeated-box", "images/train/a.png", "yolo",
     row("1 0.70703125 0.5234375 0.4765625 0.630208333333")),
    ("four columns", "bad-box", TXT, "yolo", row("0 0.5 0.5 0.1")),
    ("a class that is no number", "bad-box", TXT, "yolo", row("cat 0.5 0.5 0.1 0.1")),
    ("a class id too high", "unknown-class", TXT, "yolo", row("2 0.5 0.5 0.1 0.1")),
    ("pixels for fractions", "bad-box", TXT, "yolo", row("0 320 240 64 48")),
    ("a row without height", "degenerate-box", TXT, "yolo", row("0 0.5 0.5 0.1 0")),
    ("a row outside", "degenerate-box", TXT, "yolo", row("0 -0.5 0.5 0.1 0.1")),
    ("a folder that is not there", "missing-folder", "data.yaml", "yolo",
     lambda folder: append(folder, "data.yaml", "test: images/absent\n")),
    ("an image without label file", "image-without-annotation", "images/train/a.png", "yolo",
     lambda folder: (folder / TXT).unlink()),
    # images
    ("no image", "missing-image", IMAGE, "coco", image(lambda path, data: None)),
    ("a link to nothing", "missing-image", IMAGE, "coco", image(lambda path, data: path.symlink_to("nothing"))),
    ("an empty image", "unreadable-image", IMAGE, "coco", image(lambda path, data: path.touch())),
    ("an image cut in two", "unreadable-image", IMAGE, "coco",
     image(lambda path, data: path.write_bytes(data[: len(data) // 2]))),
    ("a folder for an image", "unreadable-image", IMAGE, "coco", image(lambda path, data: path.mkdir())),
    ("another size", "size-mismatch", IMAGE, "coco",
     image(lambda path, data: Image.effect_noise((48, 64), 60).save(path))),
    ("a copy in another split", "image-in-two-splits", "val2017/d.png", "coco",
     lambda folder: shutil.copy(folder / IMAGE, folder / "val2017/d.png")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "file", "format", "plant"),
    [fault[1:] for fault in FAULTS],
    ids=[f"{fault[3]}: {fault[0]}" for fault in FAULTS],
)
@pytest.mark.regression("33a370e")
def test_a_planted_fault_is_found_and_its_file_named(clean_folders, kind, file, format, plant):
    folder = clean_folders[format]
    plant(folder)
    result = check_dataset(folder, pixels=True)
    found = {(problem.kind, problem.file) for problem in result.problems}
    assert (kind, file) in found
    severe = {f.effect.value for f in result.problems} - {"kept"}
    assert result.exit_code == 0 if not severe else result.exit_code in (1, 2)
    assert (result.exit_code == 2) >= ("refused" in severe)
    for counts in result.splits.values():
        assert counts.boxes <= 4  # nothing is invented


def test_images_are_decoded_on_demand(coco_folder):
    (coco_folder / IMAGE).write_bytes((coco_folder / IMAGE).read_bytes()[:-400])
    assert check_dataset(coco_folder, pixels=True).exit_code == 1
    assert check_dataset(coco_folder).exit_code == 0
    (coco_folder / IMAGE).write_bytes(b"")
    assert check_dataset(coco_folder).exit_code == 1
