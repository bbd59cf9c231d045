"""Each kind of annotation fault is planted in a clean set, found, and its file named."""

import json
import shutil
from pathlib import Path

import pytest

from aploss.data import check_dataset

XML = "Annotations/a.xml"
JSON = "annotations/instances_train2017.json"
TXT = "labels/train/a.txt"
CAT_BOX = "<xmin>5</xmin><ymin>6</ymin><xmax>20</xmax><ymax>25</ymax>"


def replace(folder: Path, file: str, old: str, new: str) -> None:
    text = (folder / file).read_text()
    assert old in text, f"{old} is not in {text}"
    (folder / file).write_text(text.replace(old, new, 1))


def append(folder: Path, file: str, text: str) -> None:
    with (folder / file).open("a") as opened:
        opened.write(text)


def edit_json(change):
    def plant(folder: Path) -> None:
        content = json.loads((folder / JSON).read_text())
        change(content)
        (folder / JSON).write_text(json.dumps(content))

    return plant


def annotation(**changes):
    """Changes the first annotation; None removes the field."""

    def change(content: dict) -> None:
        entry = content["annotations"][0] | changes
        content["annotations"][0] = {k: v for k, v in entry.items() if v is not None}

    return edit_json(change)


def xml(old: str, new: str):
    return lambda folder: replace(folder, XML, old, new)


def row(text: str):
    return lambda folder: append(folder, TXT, f"{text}\n")


def yaml(text: str):
    return lambda folder: (folder / "data.yaml").write_text(text)


def copy(old: str, new: str):
    return lambda folder: shutil.copy(folder / old, folder / new)


# (what, kind, file to be named, format, how to plant it)
FAULTS = [
    # VOC
    ("corners that coincide", "degenerate-box", XML, "voc",
     xml("<xmax>20<", "<xmax>5<")),
    ("a box beyond the border", "out-of-bounds-box", XML, "voc",
     xml("<xmax>20<", "<xmax>90<")),
    ("a box outside the image", "outside-box", XML, "voc",
     xml(CAT_BOX, "<xmin>70</xmin><ymin>6</ymin><xmax>90</xmax><ymax>25</ymax>")),
    ("text for a number", "non-numeric-coordinate", XML, "voc",
     xml("<xmin>5<", "<xmin>left<")),
    ("NaN", "non-finite-coordinate", XML, "voc",
     xml("<xmin>5<", "<xmin>nan<")),
    ("a missing corner", "missing-coordinate", XML, "voc",
     xml("<ymax>25</ymax>", "")),
    ("an object without box", "missing-box", XML, "voc",
     xml(f"<bndbox>{CAT_BOX}</bndbox>", "")),
    ("an object without class", "missing-class", XML, "voc",
     xml("<name>cat</name>", "<name> </name>")),
    ("a class that is not in the list", "unknown-class", XML, "voc",
     lambda folder: ((folder / "labels.txt").write_text("cat\ndog\n"),
                     replace(folder, XML, ">cat<", ">cta<"))),
    ("a flag that is no flag", "bad-flag", XML, "voc",
     xml("<difficult>0<", "<difficult>maybe<")),
    ("the same box twice", "duplicate-box", XML, "voc",
     xml("</annotation>",
         f"<object><name>cat</name><bndbox>{CAT_BOX}</bndbox></object></annotation>")),
    ("no image size", "missing-size", XML, "voc",
     xml("<width>64</width>", "")),
    ("another image's name", "file-name-mismatch", XML, "voc",
     xml("a.png", "zebra.png")),
    ("coordinates from 0", "zero-based-box", XML, "voc",
     xml("<xmin>5<", "<xmin>0<")),
    ("broken XML", "unreadable-annotation", XML, "voc",
     xml("</annotation>", "")),
    ("no XML for a listed image", "missing-annotation", "ImageSets/Main/train.txt", "voc",
     lambda folder: (folder / XML).unlink()),
    ("a listed name that does not exist", "missing-annotation", "ImageSets/Main/train.txt", "voc",
     lambda folder: append(folder, "ImageSets/Main/train.txt", "ghost\n")),
    ("an image listed twice", "duplicate-image", XML, "voc",
     lambda folder: append(folder, "ImageSets/Main/train.txt", "a\n")),
    ("an annotation in no list", "unlisted-annotation", "Annotations/e.xml", "voc",
     lambda folder: (copy(XML, "Annotations/e.xml")(folder),
                     copy("JPEGImages/a.png", "JPEGImages/e.png")(folder))),
    ("an empty list", "empty-split", "val", "voc",
     lambda folder: (folder / "ImageSets/Main/val.txt").write_text("\n")),
    ("an image in two splits", "image-in-two-splits", "JPEGImages/a.png", "voc",
     lambda folder: append(folder, "ImageSets/Main/val.txt", "a\n")),
    ("a class spelt in two ways", "similar-class-names", "voc", "voc",
     xml(">cat<", ">Cat <")),
    # COCO
    ("no width", "degenerate-box", JSON, "coco", annotation(bbox=[4, 5, 0, 9])),
    ("negative height", "degenerate-box", JSON, "coco", annotation(bbox=[4, 5, 9, -3])),
    ("three numbers", "missing-coordinate", JSON, "coco", annotation(bbox=[4, 5, 9])),
    ("a word", "non-numeric-coordinate", JSON, "coco", annotation(bbox=[4, 5, 9, "x"])),
    ("NaN in JSON", "non-finite-coordinate", JSON, "coco",
     annotation(bbox=[4, 5, float("nan"), 9])),
    ("no bbox", "missing-box", JSON, "coco", annotation(bbox=None)),
    ("an image id that is not there", "unknown-image", JSON, "coco", annotation(image_id=999)),
    ("a category that is not there", "unknown-class", JSON, "coco", annotation(category_id=55)),
    ("no category", "missing-class", JSON, "coco", annotation(category_id=None)),
    ("iscrowd 2", "bad-flag", JSON, "coco", annotation(iscrowd=2)),
    ("an annotation id twice", "duplicate-annotation-id", JSON, "coco", annotation(id=2)),
    ("an entry that is no object", "bad-entry", JSON, "coco",
     edit_json(lambda content: content["annotations"].append("what?"))),
    ("an image id twice", "duplicate-image-id", JSON, "coco",
     edit_json(lambda content: content["images"][1].update(id=10))),
    ("a file twice", "duplicate-image", JSON, "coco",
     edit_json(lambda content: content["images"][1].update(file_name="a.png"))),
    ("an image without name", "bad-image-entry", JSON, "coco",
     edit_json(lambda content: content["images"][1].pop("file_name"))),
    ("a category name twice", "bad-categories", JSON, "coco",
     edit_json(lambda content: content["categories"][1].update(name="dog"))),
    ("no categories", "no-classes", JSON, "coco",
     edit_json(lambda content: content["categories"].clear())),
    ("no list of annotations", "missing-section", JSON, "coco",
     edit_json(lambda content: content.pop("annotations"))),
    ("a file cut in two", "unreadable-annotations", JSON, "coco",
     lambda folder: (folder / JSON).write_text((folder / JSON).read_text()[:-40])),
    ("a class that is never used", "class-without-boxes", "coco", "coco",
     edit_json(lambda content: content["categories"].append({"id": 9, "name": "fox"}))),
    ("another class list in a split", "class-lists-differ", "coco", "coco",
     edit_json(lambda content: content["categories"].append({"id": 9, "name": "fox"}))),
    # YOLO
    ("four columns", "bad-row", TXT, "yolo", row("0 0.5 0.5 0.1")),
    ("a class that is no number", "bad-row", TXT, "yolo", row("cat 0.5 0.5 0.1 0.1")),
    ("a class id too high", "unknown-class", TXT, "yolo", row("2 0.5 0.5 0.1 0.1")),
    ("pixels for fractions", "not-normalised", TXT, "yolo", row("0 320 240 64 48")),
    ("a row with NaN", "non-finite-coordinate", TXT, "yolo", row("0 0.5 nan 0.1 0.1")),
    ("a row without height", "degenerate-box", TXT, "yolo", row("0 0.5 0.5 0.1 0")),
    ("a row beyond the border", "out-of-bounds-box", TXT, "yolo", row("0 0.98 0.5 0.3 0.1")),
    ("a row outside", "outside-box", TXT, "yolo", row("0 -0.5 0.5 0.1 0.1")),
    ("a label file that is no text", "unreadable-annotation", TXT, "yolo",
     lambda folder: (folder / TXT).write_bytes(b"\xff\xfe\x00\x80")),
    ("no names", "no-classes", "data.yaml", "yolo", yaml("train: images/train\n")),
    ("names with a gap", "bad-categories", "data.yaml", "yolo",
     yaml("train: images/train\nnames: {0: cat, 2: dog}\n")),
    ("a folder that is not there", "missing-folder", "data.yaml", "yolo",
     lambda folder: append(folder, "data.yaml", "test: images/absent\n")),
    ("a label file without image", "annotation-without-image", "labels/train/ghost.txt", "yolo",
     copy(TXT, "labels/train/ghost.txt")),
    ("an image without label file", "image-without-annotation", "images/train/a.png", "yolo",
     lambda folder: (folder / TXT).unlink()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "file", "format", "plant"),
    [fault[1:] for fault in FAULTS],
    ids=[f"{fault[3]}: {fault[0]}" for fault in FAULTS],
)
def test_a_planted_fault_is_found_and_its_file_named(clean_folders, kind, file, format, plant):
    folder = clean_folders[format]
    plant(folder)
    result = check_dataset(folder)
    found = {(finding.problem.kind, finding.problem.file) for finding in result.findings}
    assert (kind, file) in found
    severe = {f.problem.effect.value for f in result.findings} - {"kept"}
    assert result.exit_code == 0 if not severe else result.exit_code in (1, 2)
    for counts in result.splits.values():
        assert counts.boxes <= 4  # nothing is invented


def test_every_annotation_without_image_is_named(voc_folder):
    for name in "xyz":
        shutil.copy(voc_folder / XML, voc_folder / f"Annotations/{name}.xml")
    found = check_dataset(voc_folder).findings
    orphans = [f.problem.file for f in found if f.problem.kind == "annotation-without-image"]
    assert orphans == [f"Annotations/{name}.xml" for name in "xyz"]


@pytest.mark.parametrize("format", ["voc", "coco", "yolo"])
def test_a_clean_set_gives_no_finding_at_all(clean_folders, format):
    result = check_dataset(clean_folders[format])
    assert result.findings == []
    assert result.exit_code == 0
