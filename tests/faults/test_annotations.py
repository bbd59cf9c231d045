"""Unreadable annotation files in the three formats: reported by file, never ignored or fatal.

Every dataset has three training images with three boxes, and an intact validation split. The loaded boxes are compared
with the clean ones, so that nothing is invented. Wrong values are planted in tests/data/test_check_faults.py.
"""

import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from small_datasets import SPLITS, write_coco, write_voc, write_yolo

from aploss.data import check_dataset, find_source, load_dataset
from aploss.errors import AplossError

WRITERS = {"voc": write_voc, "coco": write_coco, "yolo": write_yolo}
FILES = {"voc": "Annotations/a.xml", "coco": "annotations/instances_train2017.json", "yolo": "labels/train/a.txt"}
BOXES = [tuple(map(float, box)) for boxes in SPLITS["train"].values() for _, *box in boxes]

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


FILE_FAULTS: dict[str, Plant] = {
    "UTF-16": of_bytes(lambda data: data.decode().encode("utf-16")),
    "zeros": of_bytes(lambda data: bytes(len(data))),
    "empty": of_bytes(lambda data: b""),
    "not UTF-8": of_bytes(lambda data: b"\xff\xfe\xfa" + data),
    "cut in half": of_bytes(lambda data: data[: len(data) // 2 + 3]),
    "junk at the end": of_bytes(lambda data: data + b"\n}}<<junk"),
    "JSON of another kind": of_bytes(lambda data: b"[1, 2, 3]"),
    "deeply nested": of_bytes(lambda data: b"[" * 100_000 + b"<a>" * 10_000),
    "a pipe": instead(os.mkfifo),
    "a folder": instead(Path.mkdir),
    "a link to itself": instead(lambda file: file.symlink_to(file)),
    "a device": instead(lambda file: file.symlink_to("/dev/zero")),
}
HARMLESS_FILES: dict[str, Plant] = {
    "byte order mark": of_bytes(lambda data: b"\xef\xbb\xbf" + data),
    "Windows lines": of_bytes(lambda data: data.replace(b"\n", b"\r\n")),
    "a megabyte of spaces": of_bytes(lambda data: data + b" " * 1_000_000),
}


# --- what must hold ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str, Plant], Path]:
    """Makes a set of a format with a fault in it."""

    def make(format: str, plant: Plant) -> Path:
        made = WRITERS[format](tmp_path / "in" / "data")
        plant(made / FILES[format])
        return made

    return make


def assert_nothing_invented(folder: Path) -> int:
    """What loads of the training split is inside its images, and of the clean set; gives the number of boxes."""
    try:
        splits = find_source(folder).splits
        data = load_dataset(folder, "train")
    except AplossError:
        return 0
    assert [split for split in splits if split.startswith("train")], splits  # never another split in its place
    assert set(map(tuple, data.annotations.boxes.tolist())) <= set(BOXES)
    return data.num_boxes


VALID = {("voc", "UTF-16"), ("yolo", "empty")}  # XML may be UTF-16; an empty label file is an image without objects


@pytest.mark.parametrize(
    ("format", "fault"), sorted({(one, fault) for one in WRITERS for fault in FILE_FAULTS} - VALID)
)
def test_a_file_that_cannot_be_read_is_a_problem_never_absent(call_cli, folder, format: str, fault: str):
    data = folder(format, FILE_FAULTS[fault])
    done = call_cli("data", "check", data, "--out", data.parent / "check.html")
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
    assert call_cli("data", "check", data, "--out", data.parent / "check.html").code == 0
    assert assert_nothing_invented(data) == len(BOXES)


@pytest.mark.parametrize("fault", ["UTF-16", "zeros", "JSON of another kind"])
def test_nothing_is_trained_on_instead_of_an_unreadable_split(call_cli, folder, tmp_path: Path, fault: str):
    """Above all not the intact validation split."""
    data = folder("coco", FILE_FAULTS[fault])
    name = Path(FILES["coco"]).name
    call_cli("train", "--data", data, "--steps", 1, "--out", tmp_path / "run").assert_refused(name)
    assert not (tmp_path / "run").exists()


LISTS = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 2)}]" for i in range(1, 40)]
MERGES = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 9)]


@pytest.mark.parametrize(
    "text",
    ["names: !!python/object/apply:os.mkdir [made]", "a0: &a0 [x]", "a0: &a0 {x: 1, y: 2}", "names: &a [*a]"],
    ids=["objects", "nested aliases", "merge keys", "an alias in itself"],
)
@pytest.mark.regression("33a370e")
def test_yaml_makes_no_objects_and_aliases_are_not_multiplied(call_cli, folder, tmp_path: Path, monkeypatch, text: str):
    monkeypatch.chdir(tmp_path)
    levels = {"a0: &a0 [x]": LISTS, "a0: &a0 {x: 1, y: 2}": MERGES}.get(text, [])
    bomb = "\n".join([text, *levels, "train: images/train"])
    assert len(bomb) < 1000
    data = folder("yolo", lambda file: None)
    (data / "data.yaml").write_text(bomb)
    call_cli("data", "check", data).assert_refused("data.yaml: not valid YAML")
    (tmp_path / "config.yaml").write_text(bomb)
    call_cli("train", "--recipe", tmp_path / "config.yaml").assert_refused("config.yaml is not valid YAML")
    assert not (tmp_path / "made").exists()


@pytest.mark.slow_fault
@pytest.mark.regression("33a370e")
def test_a_tenth_of_coco_is_checked_in_six_seconds(tmp_path: Path):
    """Without decoding pixels; all files have the same size, which is the worst case for finding copies."""
    images, boxes = 11_800, 86_000
    png = io.BytesIO()
    Image.new("1", (640, 480)).save(png, "PNG")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "train2017").mkdir()
    for number in range(images):
        (tmp_path / "train2017" / f"{number}.png").write_bytes(png.getvalue() + b"%08d" % number)
    size = {"width": 640, "height": 480}
    content = {
        "images": [{"id": k + 1, "file_name": f"{k}.png", **size} for k in range(images)],
        "annotations": [
            {"id": k + 1, "image_id": k % images + 1, "category_id": 1 + k % 80, "bbox": [k % 500, k % 400, 30, 40.5]}
            for k in range(boxes)
        ],
        "categories": [{"id": k, "name": f"class {k}"} for k in range(1, 81)],
    }
    (tmp_path / "annotations" / "instances_train2017.json").write_text(json.dumps(content))
    begun = time.process_time()
    result = check_dataset(tmp_path)
    assert time.process_time() - begun < 6
    assert (result.total.images, result.total.boxes, result.exit_code) == (images, boxes, 0)
    assert result.copies == []
