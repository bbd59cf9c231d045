"""Annotation files with every kind of fault, in the three formats: told by name, never taken for absent, never a crash.

Every set has three training images, three boxes in them and a validation split, which is left alone. What is left of
the training split is checked against the clean one, so that nothing is invented.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_datasets import HEIGHT, SPLITS, WIDTH, write_coco, write_voc, write_yolo

from aploss.data import dataset_splits, load_dataset
from aploss.errors import AplossError

WRITERS = {"voc": write_voc, "coco": write_coco, "yolo": write_yolo}
FILES = {"voc": "Annotations/a.xml", "coco": "annotations/instances_train2017.json", "yolo": "labels/train/a.txt"}
BOXES = [np.array(box, dtype=float) for boxes in SPLITS["train"].values() for _, *box in boxes]

Plant = Callable[[Path], object]


# --- files, whatever the format ---------------------------------------------------------------


def of_bytes(change: Callable[[bytes], bytes]) -> Plant:
    return lambda file: file.write_bytes(change(file.read_bytes()))


def instead(make: Callable[[Path], object]) -> Plant:
    """Something else in the place of the file."""

    def plant(file: Path) -> None:
        file.unlink()
        make(file)

    return plant


def outside(file: Path) -> None:
    elsewhere = file.parents[3] / "elsewhere"
    shutil.copy(file, elsewhere)
    file.unlink()
    file.symlink_to(elsewhere)


FILE_FAULTS: dict[str, Plant] = {
    "UTF-16": of_bytes(lambda data: data.decode().encode("utf-16")),
    "zeros": of_bytes(lambda data: bytes(len(data))),
    "not UTF-8": of_bytes(lambda data: b"\xff\xfe\xfa" + data),
    "noise": of_bytes(lambda data: np.random.default_rng(0).bytes(300)),
    "cut in half": of_bytes(lambda data: data[: len(data) // 2 + 3]),
    "junk at the end": of_bytes(lambda data: data + b"\n}}<<junk"),
    "junk at the beginning": of_bytes(lambda data: b"junk>> {" + data),
    "a picture": of_bytes(lambda data: b"\x89PNG\r\n\x1a\n" + bytes(range(200))),
    "a zip": of_bytes(lambda data: b"PK\x03\x04" + bytes(range(200))),
    "JSON of another kind": of_bytes(lambda data: b"[1, 2, 3]"),
    "a number": of_bytes(lambda data: b"5"),
    "deeply nested": of_bytes(lambda data: b"[" * 100_000 + b"<a>" * 10_000),
    "a pipe": instead(os.mkfifo),
    "a folder": instead(Path.mkdir),
    "a link to itself": instead(lambda file: file.symlink_to(file)),
    "a link to nothing": instead(lambda file: file.symlink_to(file.with_name("gone"))),
    "a link outside": outside,
    "a device": instead(lambda file: file.symlink_to("/dev/zero")),
}
HARMLESS_FILES: dict[str, Plant] = {
    "byte order mark": of_bytes(lambda data: b"\xef\xbb\xbf" + data),
    "Windows lines": of_bytes(lambda data: data.replace(b"\n", b"\r\n")),
    "a megabyte of spaces": of_bytes(lambda data: data + b" " * 1_000_000),
}


# --- values -----------------------------------------------------------------------------------


def xml(old: str, new: str) -> Plant:
    def plant(file: Path) -> None:
        text = file.read_text()
        assert re.search(old, text)
        file.write_text(re.sub(old, lambda match: new, text, count=1), encoding="utf-8")

    return plant


def coordinate(text: str) -> Plant:
    return xml(r"<xmin>\d+</xmin>", f"<xmin>{text}</xmin>")


def changed(part: str, **changes: Any) -> Plant:
    """COCO: the first entry of a part with other values; ``...`` takes one away."""

    def plant(file: Path) -> None:
        content = json.loads(file.read_text())
        entry = content[part][0] | changes
        content[part][0] = {key: value for key, value in entry.items() if value is not ...}
        file.write_text(json.dumps(content))

    return plant


def top(**changes: Any) -> Plant:
    def plant(file: Path) -> None:
        content = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return plant


def more(part: str, entry: Any) -> Plant:
    def plant(file: Path) -> None:
        content = json.loads(file.read_text())
        content[part].append(content[part][0] if entry is ... else entry)
        file.write_text(json.dumps(content))

    return plant


def row(text: str) -> Plant:
    """YOLO: another first row."""
    return lambda file: file.write_text("\n".join([text, *file.read_text().splitlines()[1:]]), encoding="utf-8")


def settings(text: str) -> Plant:
    return lambda file: (file.parents[2] / "data.yaml").write_text(text, encoding="utf-8")


def names(text: str) -> Plant:
    return settings(f"train: images/train\nval: images/val\nnames: {text}\n")


VALUE_FAULTS: dict[str, dict[str, Plant]] = {
    "voc": {
        "NaN": coordinate("nan"), "infinite": coordinate("inf"), "text": coordinate("left"), "empty": coordinate(""),
        "1e30": coordinate("1e30"), "20 digits": coordinate("9" * 20), "400 digits": coordinate("9" * 400),
        "hexadecimal": coordinate("0x10"), "two numbers": coordinate("1 2"), "Arabic letters": coordinate("س"),
        "no width": coordinate("20"), "corners swapped": coordinate("60"), "left of the image": coordinate("-30"),
        "wholly outside": xml(r"<xmin>5</xmin><ymin>6</ymin><xmax>20</xmax>",
                              "<xmin>900</xmin><ymin>6</ymin><xmax>950</xmax>"),
        "coordinate missing": xml("<xmin>5</xmin>", ""), "box missing": xml(r"<bndbox>.*?</bndbox>", ""),
        "class missing": xml("<name>cat</name>", ""), "class empty": xml("<name>cat</name>", "<name> </name>"),
        "width inf": xml("<width>64</width>", "<width>inf</width>"),
        "width 1e30": xml("<width>64</width>", "<width>1e30</width>"),
        "width of 20 digits": xml("<width>64</width>", f"<width>{'9' * 20}</width>"),
        "width 0": xml("<width>64</width>", "<width>0</width>"),
        "width negative": xml("<width>64</width>", "<width>-64</width>"),
        "another size": xml("<width>64</width>", "<width>65</width>"),
        "entity": xml("<annotation>", '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/hostname">]><annotation>'),
        "billion laughs": xml("<annotation>", '<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;">]><annotation>'),
        "file name outside": xml("<filename>a.png", "<filename>../../../etc/hostname"),
        "file name absolute": xml("<filename>a.png", "<filename>/etc/hostname"),
        "flag": xml("<difficult>0", "<difficult>maybe"), "the same box twice": lambda file: file.write_text(
            re.sub(r"(<object>.*?</object>)", r"\1\1", file.read_text(), count=1)),
    },
    "coco": {
        "NaN": changed("annotations", bbox=[float("nan"), 5, 16, 20]),
        "infinite": changed("annotations", bbox=[4, 5, float("inf"), 20]),
        "text": changed("annotations", bbox=["left", 5, 16, 20]), "empty": changed("annotations", bbox=[]),
        "1e30": changed("annotations", bbox=[1e30, 5, 16, 20]),
        "20 digits": changed("annotations", bbox=[int("9" * 20), 5, 16, 20]),
        "400 digits": changed("annotations", bbox=[int("9" * 400), 5, 16, 20]),
        "too many": changed("annotations", bbox=[4, 5, 16, 20, 1]),
        "null": changed("annotations", bbox=None), "no width": changed("annotations", bbox=[4, 5, 0, 20]),
        "corners swapped": changed("annotations", bbox=[20, 5, -16, 20]),
        "left of the image": changed("annotations", bbox=[-10, 5, 30, 20]),
        "wholly outside": changed("annotations", bbox=[900, 5, 16, 20]),
        "box missing": changed("annotations", bbox=...), "class missing": changed("annotations", category_id=...),
        "class unknown": changed("annotations", category_id=99),
        "class of text": changed("annotations", category_id="3"),
        "image unknown": changed("annotations", image_id=99), "image of text": changed("annotations", image_id="ten"),
        "id of 30 digits": changed("images", id=10**30),
        "id of 400 digits": changed("images", id=int("9" * 400)),
        "class of 400 digits": changed("annotations", category_id=int("9" * 400)),
        "id of 1e999": lambda file: file.write_text(file.read_text().replace('"image_id": 10', '"image_id": 1e999')),
        "id of 5000 digits": lambda file: file.write_text(
            file.read_text().replace('"category_id": 3', f'"category_id": {"9" * 5000}')),
        "id missing": changed("images", id=...),
        "width inf": changed("images", width=float("inf")), "width 1e30": changed("images", width=1e30),
        "width 0": changed("images", width=0), "another size": changed("images", width=65),
        "file name outside": changed("images", file_name="../../../etc/hostname"),
        "file name absolute": changed("images", file_name="/etc/hostname"),
        "file name of NUL": changed("images", file_name="a\0.png"),
        "file name missing": changed("images", file_name=...),
        "file name of a surrogate": changed("images", file_name="a\ud800.png"),
        "image twice": more("images", ...), "entry null": more("annotations", None),
        "entry a number": more("images", 5),
        "no images": top(images=...), "no categories": top(categories=...),
        "annotations an object": top(annotations={}),
        "images null": top(images=None), "class twice": more("categories", {"id": 9, "name": "cat"}),
        "class without name": more("categories", {"id": 9}),
        "class id twice": more("categories", {"id": 3, "name": "cow"}),
        "flag": changed("annotations", iscrowd="maybe"),
    },
    "yolo": {
        "NaN": row("0 nan 0.3 0.2 0.4"), "infinite": row("0 0.2 inf 0.2 0.4"), "text": row("0 left 0.3 0.2 0.4"),
        "1e30": row("0 1e30 0.3 0.2 0.4"), "20 digits": row(f"0 {'9' * 20} 0.3 0.2 0.4"),
        "400 digits": row(f"0 {'9' * 400} 0.3 0.2 0.4"), "hexadecimal": row("0 0x1 0.3 0.2 0.4"),
        "too few": row("0 0.2 0.3 0.2"), "too many": row("0 0.2 0.3 0.2 0.4 0.9"), "commas": row("0,0.2,0.3,0.2,0.4"),
        "no width": row("0 0.2 0.3 0 0.4"), "negative width": row("0 0.2 0.3 -0.2 0.4"),
        "left of the image": row("0 0.01 0.3 0.2 0.4"), "wholly outside": row("0 5.2 0.3 0.2 0.4"),
        "pixels": row("0 12 15 16 20"), "class unknown": row("9 0.2 0.3 0.2 0.4"),
        "class negative": row("-1 0.2 0.3 0.2 0.4"), "class of text": row("cat 0.2 0.3 0.2 0.4"),
        "class of 30 digits": row(f"{10**30} 0.2 0.3 0.2 0.4"), "class 0.5": row("0.5 0.2 0.3 0.2 0.4"),
        "class missing": row("0.2 0.3 0.2 0.4"), "polygon of two points": row("0 0.1 0.1 0.2 0.2"[:-4]),
        "the same box twice": lambda file: file.write_text(file.read_text().splitlines()[0] + "\n" + file.read_text()),
        "names a number": names("5"), "names empty": names("[]"), "names null": names(""),
        "names of numbers": names("[1, [2]]"), "a name twice": names("[cat, cat]"), "a name fewer": names("[cat]"),
        "train null": settings("train:\nval: images/val\nnames: [cat, dog]\n"),
        "train empty": settings("train: []\nval: images/val\nnames: [cat, dog]\n"),
        "train a number": settings("train: 5\nval: images/val\nnames: [cat, dog]\n"),
        "train an object": settings("train: {}\nval: images/val\nnames: [cat, dog]\n"),
        "train outside": settings("train: ../../../etc\nval: images/val\nnames: [cat, dog]\n"),
        "train absolute": settings("train: /etc\nval: images/val\nnames: [cat, dog]\n"),
        "train elsewhere": settings("train: images/gone\nval: images/val\nnames: [cat, dog]\n"),
        "a tag that runs code": settings("train: !!python/object/apply:os.system ['true']\nnames: [cat, dog]\n"),
        "tabs": settings("train:\timages/train\n\tval: x\n"), "count differs": settings(
            "train: images/train\nval: images/val\nnc: 7\nnames: [cat, dog]\n"),
        "aliases without end": settings("a: &a [1]\nb: &b [*a,*a]\nc: &c [*b,*b]\ntrain: *c\nnames: [cat, dog]\n"),
    },
}  # fmt: skip
NAMES = {
    "markup": "<script>alert(1)</script>", "quotes": "a'b\"c", "1,000 letters": "c" * 1000,
    "right to left": "\u202ecat", "emoji": "🐈", "percent": "%s {0} $x", "line break": "cat\ndog", "control": "cat\x07",
    "surrogate": "cat\ud800",
}  # fmt: skip


def named(format: str, name: str) -> Plant:
    """Another name for the class of the cat."""
    if format == "coco":
        return lambda file: file.write_text(file.read_text().replace('"cat"', json.dumps(name)))
    if format == "yolo":
        return names(json.dumps([name, "dog"]))
    safe = name.replace("&", "&amp;").replace("<", "&lt;")
    return lambda file: file.write_bytes(
        file.read_text().replace("<name>cat<", f"<name>{safe}<").encode("utf-8", "surrogatepass")
    )


# --- what must hold ---------------------------------------------------------------------------


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, Plant], Path]:
    """Makes a set of a format with a fault in it."""

    def make(format: str, plant: Plant) -> Path:
        made = WRITERS[format](tmp_path / "in" / "data")
        plant(made / FILES[format])
        return made

    return make


def assert_nothing_invented(folder: Path) -> int:
    """What loads of the training split is inside its images, and of the clean set; gives the number of boxes."""
    try:
        splits = dataset_splits(folder)
        data = load_dataset(folder, "train")
    except AplossError:
        return 0
    assert [split for split in splits if split.startswith("train")], splits  # never another split in its place
    boxes = data.all_boxes()
    assert np.isfinite(boxes).all()
    for index in range(len(data)):
        width, height = data.image_size(index)
        own = data.boxes(index)
        assert (own >= 0).all()
        assert (own <= [width, height, width, height]).all()
        assert (own[:, 2:] > own[:, :2]).all()
    assert ((data.all_labels() >= 0) & (data.all_labels() < len(data.class_names))).all()
    return len(boxes)


@pytest.mark.parametrize("fault", FILE_FAULTS)
@pytest.mark.parametrize("format", WRITERS)
def test_a_file_that_cannot_be_read_is_a_problem_never_absent(call_cli, folder, format: str, fault: str):
    if (format, fault) == ("voc", "UTF-16"):
        pytest.skip("XML may be UTF-16, and is read")
    data = folder(format, FILE_FAULTS[fault])
    done = call_cli("data", "check", data)
    done.assert_no_traceback()
    assert done.code in (1, 2)
    assert Path(FILES[format]).name in done.stdout + done.stderr
    assert_nothing_invented(data)
    if "unreadable-annotation (" in done.stdout:  # of one image, whose objects are not known
        left = load_dataset(data, "train")
        assert [left.image_path(index).stem for index in range(len(left))] == ["b", "c"]


@pytest.mark.parametrize("fault", HARMLESS_FILES)
@pytest.mark.parametrize("format", WRITERS)
def test_a_file_that_is_only_unusual_is_read(call_cli, folder, format: str, fault: str):
    data = folder(format, HARMLESS_FILES[fault])
    assert call_cli("data", "check", data).code == 0
    assert assert_nothing_invented(data) == len(BOXES)


@pytest.mark.parametrize("format", ["voc", "coco"])
def test_an_empty_file_is_a_problem(call_cli, folder, format: str):
    """Of YOLO it is an image without objects, which is as it should be."""
    data = folder(format, of_bytes(lambda data: b""))
    done = call_cli("data", "check", data)
    assert done.code in (1, 2)
    assert Path(FILES[format]).name in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("format", "fault"), [(one, fault) for one, faults in VALUE_FAULTS.items() for fault in faults]
)
def test_a_value_that_cannot_be_is_told(call_cli, folder, format: str, fault: str):
    data = folder(format, VALUE_FAULTS[format][fault])
    done = call_cli("data", "check", data, "--json")
    done.assert_no_traceback()
    told = done.code == 2 and done.stderr
    # A split that is taken for absent leaves a class without boxes: that does not tell the fault.
    assert told or {one["kind"] for one in json.loads(done.stdout)["problems"]} - {"class-without-boxes"}, done.stdout
    assert_nothing_invented(data)


@pytest.mark.parametrize(
    ("format", "fault"),
    [("coco", fault) for fault in ("a file without a byte", "UTF-16", "zeros", "JSON of another kind")]
    + [("yolo", f"train {value}") for value in ("null", "empty", "a number", "an object")],
)
def test_nothing_is_trained_on_in_the_place_of_a_split_that_cannot_be_read(
    call_cli, folder, tmp_path: Path, format: str, fault: str
):
    """Above all not the validation split, which is whole."""
    faults = {**VALUE_FAULTS[format], **FILE_FAULTS, "a file without a byte": of_bytes(lambda data: b"")}
    data = folder(format, faults[fault])
    name = Path(FILES[format]).name if format == "coco" else "data.yaml"
    call_cli("train", "--data", data, "--steps", 1, "--out", tmp_path / "run").assert_refused(name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("format", WRITERS)
def test_a_strange_class_name_is_kept_or_told(call_cli, folder, format: str, kind: str):
    data = folder(format, named(format, NAMES[kind]))
    done = call_cli("data", "check", data)
    done.assert_no_traceback()
    done.stdout.encode("utf-8")  # what is printed can be printed
    assert assert_nothing_invented(data) in (len(BOXES), len(BOXES) - 2, len(BOXES) - 1, 0)


def test_the_clean_sets_have_no_problems(call_cli, folder, tmp_path: Path):
    """Otherwise the cases above would show nothing."""
    for format in WRITERS:
        data = folder(format, lambda file: None)
        assert call_cli("data", "check", data, "--format", format).code == 0
        assert assert_nothing_invented(data) == len(BOXES)
        assert load_dataset(data, "train").image_size(0) == (WIDTH, HEIGHT)
        shutil.rmtree(data)
