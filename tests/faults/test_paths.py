"""Paths and special files: names of any letters, files that are none, and ways out of the folder."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from small_datasets import write_coco, write_yolo

from aploss.detectors import build_detector, save_detector


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    detector = build_detector("retinanet-short", class_names=["cat"], test_size=(64, 64), detections_per_image=3)
    return save_detector(detector, tmp_path_factory.mktemp("paths") / "d.pt")


def write_image(folder: Path, name: bytes = b"a.png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / os.fsdecode(name)
    with path.open("wb") as file:
        Image.effect_noise((64, 48), 60).convert("RGB").save(file, format="PNG")
    return path


# --- names ------------------------------------------------------------------------------------

NAMES = {
    "not UTF-8": b"b\xff\xfe.png", "line break": b"b\nc.png", "control": b"b\x01\x1b[31m.png",
    "markup": b"<b>&amp;.png", "an option": b"--out=x.png", "a pattern": b"[b]*?.png", "percent": b"%s{0}$HOME.png",
    "emoji": "🐈.png".encode(), "255 bytes": b"b" * 251 + b".png", "backslash": b"b\\c.png",
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_the_name_of_one_image_costs_no_detections(call_cli, checkpoint, tmp_path: Path, kind: str):
    """All images have theirs, those with a strange name, too."""
    photos, out = tmp_path / "photos", tmp_path / "out"
    write_image(photos)
    strange = write_image(photos, NAMES[kind])
    done = call_cli("predict", checkpoint, photos, "--out", out)
    done.assert_no_traceback()
    images = {image["id"]: image["file_name"] for image in json.loads((out / "images.json").read_text())["images"]}
    found = [images[one["image_id"]] for one in json.loads((out / "detections.json").read_text())]
    assert found.count(str(photos / "a.png")) == 3
    assert (found.count(str(strange)), done.code) == (3, 0)


# --- files that are none ----------------------------------------------------------------------


def special(path: Path, kind: str) -> Path:
    """Something in the place of a file."""
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to({"a device": "/dev/zero", "a link to itself": path}[kind])
    return path


SPECIAL = ["a pipe", "a folder", "a device", "a link to itself"]


FILES = {
    "a detector": "x.pt", "an ONNX file": "x.onnx", "annotations": "x.json", "detections": "x.json",
    "data to check": "data.yaml", "data to train on": "data.yaml", "a recipe": "x.yaml",
}  # fmt: skip


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("role", FILES)
def test_no_special_file_is_waited_for(call_cli, tmp_path: Path, role: str, kind: str):
    path, image, found = special(tmp_path / FILES[role], kind), write_image(tmp_path), tmp_path / "found.json"
    truth = write_coco(tmp_path / "data") / "annotations/instances_val2017.json"
    found.write_text("[]")
    out = ["--out", tmp_path / "out"]
    words = {
        "a detector": ["predict", path, image, *out],
        "an ONNX file": ["predict", path, image, *out],
        "annotations": ["eval", "--annotations", path, "--detections", found],
        "detections": ["eval", "--annotations", truth, "--detections", path],
        "data to check": ["data", "check", path, "--json"],
        "data to train on": ["train", "--data", path, *out],
        "a recipe": ["train", "--recipe", path, "--data", "builtin", *out],
    }[role]
    call_cli(*words).assert_refused(*([] if role == "a recipe" else [path]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", SPECIAL)
def test_no_special_file_is_waited_for_as_an_image(call_cli, checkpoint, tmp_path: Path, kind: str):
    image, path = write_image(tmp_path), special(tmp_path / "x.png", kind)
    done = call_cli("predict", checkpoint, image, path, "--out", tmp_path / "out")
    done.assert_no_traceback()
    assert done.code == 2
    assert str(path) in done.stderr


@pytest.mark.parametrize("kind", [kind for kind in SPECIAL if kind != "a folder"])
@pytest.mark.parametrize("place", ["image", "images", "labels"])
def test_no_special_file_is_waited_for_inside_of_data(call_cli, tmp_path: Path, place: str, kind: str):
    data = write_yolo(tmp_path / "data")
    path = data / {"image": "images/train/a.png", "images": "images/train", "labels": "labels/train"}[place]
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    special(path, kind)
    done = call_cli("data", "check", data, "--out", tmp_path / "check.html")
    done.assert_no_traceback()
    assert done.code in (1, 2)


# --- places that cannot be written ------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["predict", "convert", "show", pytest.param("export", marks=pytest.mark.slow_fault)]
)
@pytest.mark.parametrize("out", ["a file", "300 letters", "nowhere"])
def test_a_place_that_cannot_be_written_is_told(call_cli, checkpoint, tmp_path: Path, command: str, out: str):
    (tmp_path / "file").write_text("in the way")
    place = tmp_path / {"a file": "file/x", "300 letters": "x" * 300, "nowhere": "/proc/x"}[out]
    data = write_coco(tmp_path / "data")
    words = {
        "predict": ["predict", checkpoint, write_image(tmp_path), "--out", place],
        "export": ["export", checkpoint, "--out", f"{place}.onnx"],
        "convert": ["data", "convert", data, "--to", "yolo", "--out", place],
        "show": ["data", "show", data, "--out", f"{place}.png"],
    }[command]
    call_cli(*words).assert_refused()
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_path_that_is_too_long_is_told(call_cli):
    call_cli("data", "check", "x" * 300).assert_refused("too long")
