"""`aploss data`: what check, convert and show print, write and refuse."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aploss.cli.main import main
from aploss.data import load_dataset
from aploss.data.builtin import builtin_folder


@pytest.fixture
def yolo_folder(tmp_path: Path) -> Path:
    """A clean YOLO set of two images."""
    for number, split in enumerate(("train", "val")):
        for part in ("images", "labels"):
            (tmp_path / "set" / part / split).mkdir(parents=True)
        picture = Image.effect_noise((32, 32), 40 + number)
        picture.save(tmp_path / "set" / "images" / split / f"{split}.png")
        labels = tmp_path / "set" / "labels" / split / f"{split}.txt"
        labels.write_text("0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "set" / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cell]\n")
    return tmp_path / "set"


def test_a_clean_set_is_counted_and_gives_zero(yolo_folder, capsys):
    assert main(["data", "check", str(yolo_folder)]) == 0
    output, told = capsys.readouterr()
    assert told.endswith(f"next: aploss train --data {yolo_folder}\n")
    assert "yolo dataset, 1 class" in output
    assert "no problems found" in output


def test_a_dropped_box_gives_one_and_its_file(yolo_folder, capsys):
    (yolo_folder / "labels/train/train.txt").write_text("0 0.5 0.5 0 0.5\n0 0.5 0.5 0.2 0.5\n")
    assert main(["data", "check", str(yolo_folder)]) == 1
    output = capsys.readouterr().out
    assert "labels/train/train.txt: line 1" in output
    assert "degenerate-box" in output


def test_a_set_that_cannot_be_used_gives_two(yolo_folder, capsys):
    (yolo_folder / "images/train/train.png").unlink()
    assert main(["data", "check", str(yolo_folder)]) == 2
    assert "cannot be used" in capsys.readouterr().out


def test_no_set_at_all_gives_two_and_one_line(tmp_path, capsys):
    assert main(["data", "check", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("aploss data check: ")
    assert error.count("\n") == 1


def test_json_is_one_object_with_the_same_findings(yolo_folder, capsys):
    (yolo_folder / "labels/val/val.txt").write_text("5 0.5 0.5 0.2 0.5\n")
    assert main(["data", "check", str(yolo_folder), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["format"] == "yolo"
    assert content["exit_code"] == 1
    assert content["splits"]["train"]["boxes_of_class"] == {"cell": 1}
    assert [(p["kind"], p["file"]) for p in content["problems"]] == [("unknown-class", "labels/val/val.txt")]


def test_classes_limit_and_fast_reach_the_check(yolo_folder, capsys):
    (yolo_folder / "labels/train/train.txt").write_text("0 0.5 0.5 0.2 0.5\n7 1 1 1 1\n8 1 1 1 1\n")
    assert main(["data", "check", str(yolo_folder), "--limit", "1"]) == 1
    assert "and 1 more" in capsys.readouterr().out
    assert main(["data", "check", str(yolo_folder), "--classes", "cell, nucleus"]) == 1
    assert "no box of class 'nucleus'" in capsys.readouterr().out
    image = yolo_folder / "images/val/val.png"
    image.write_bytes(image.read_bytes()[:-400])
    assert main(["data", "check", str(yolo_folder), "--json"]) == 1
    assert "truncated-image" in capsys.readouterr().out
    main(["data", "check", str(yolo_folder), "--json", "--fast"])
    assert "truncated-image" not in capsys.readouterr().out


@pytest.fixture
def coco_folder(tmp_path: Path) -> Path:
    """A COCO set of one image with a crowd and a degenerate box."""
    (tmp_path / "coco").mkdir()
    Image.effect_noise((32, 24), 40).save(tmp_path / "coco" / "a.png")
    common = {"image_id": 1, "category_id": 1}
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 32, "height": 24}],
        "annotations": [
            {"id": 1, **common, "bbox": [1, 2, 10, 12], "iscrowd": 1},
            {"id": 2, **common, "bbox": [1, 2, 0, 12]},
        ],
        "categories": [{"id": 1, "name": "cell"}],
    }
    (tmp_path / "coco" / "train.json").write_text(json.dumps(content))
    return tmp_path / "coco"


def test_it_says_what_was_written_left_out_and_lost(coco_folder, tmp_path, capsys):
    out = tmp_path / "new"
    assert main(["data", "convert", str(coco_folder), "--to", "yolo", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert f"{out}: 1 images, 1 boxes, splits train" in printed.out
    assert printed.err.endswith(f"next: aploss data check {out}\n")
    assert "1 degenerate-box (box dropped): train.json" in printed.err
    assert "yolo cannot hold, and so lost: 1 'crowd' marks" in printed.err
    assert load_dataset(out, "train").target(0)["boxes"].tolist() == [[1, 2, 11, 14]]


def test_a_folder_in_use_is_refused_with_one_line(coco_folder, tmp_path, capsys):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").touch()
    arguments = ["data", "convert", str(coco_folder), "--to", "voc", "--out", str(tmp_path / "used")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "not an empty folder" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"), [(["--to", "labelme"], "labelme"), (["--to", "voc", "--format", "x"], "unknown format 'x'")]
)
def test_formats_that_do_not_exist_are_refused_with_one_line(coco_folder, tmp_path, capsys, words, message):
    out = tmp_path / "new"
    assert main(["data", "convert", str(coco_folder), "--out", str(out), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "yolo" in error  # the formats there are
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> str:
    cache = tmp_path_factory.mktemp("cache")
    return str(builtin_folder(cache=cache, image_size=64, counts=(6, 2, 2)))


def show(folder: str, out: Path, *options: str) -> np.ndarray:
    assert main(["data", "show", folder, "--out", str(out), *options]) == 0
    with Image.open(out) as sheet:
        return np.asarray(sheet.convert("RGB"))


def test_sheet_shows_the_asked_number_of_images_of_the_split(
    shapes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = show(shapes, tmp_path / "new" / "sheet.png", "--split", "train", "--count", "4")
    assert sheet.shape[1] == 2 * 308 + 8
    line = capsys.readouterr().out
    assert "sheet.png" in line
    assert "4 of 6 images" in line
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sheet.png"]
    show(shapes, tmp_path / "all.png", "--split", "val", "--count", "99")
    assert "2 of 2 images" in capsys.readouterr().out


def test_augmented_sheets_differ_from_plain_ones_and_repeat_by_seed(shapes: str, tmp_path: Path) -> None:
    common = ("--split", "train", "--count", "4")
    plain = show(shapes, tmp_path / "a.png", *common)
    paper = show(shapes, tmp_path / "b.png", *common, "--augment", "paper", "--size", "96")
    again = show(shapes, tmp_path / "c.png", *common, "--augment", "paper", "--size", "96")
    other = show(shapes, tmp_path / "d.png", *common, "--augment", "paper", "--size", "96", "--seed", "5")
    assert plain.shape == paper.shape
    assert (paper == again).all()
    assert (paper != plain).any()
    assert (paper != other).any()
    wide = show(shapes, tmp_path / "e.png", *common, "--augment", "light", "--size", "48x96")
    assert wide.shape[0] < plain.shape[0]  # half as high as wide


def test_a_sheet_without_a_name_goes_to_runs_and_says_so(
    shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "show", shapes, "--split", "train[:50%]", "--augment", "light", "--size", "64"]) == 0
    (sheet,) = tmp_path.rglob("*.png")
    assert sheet.parent == tmp_path / "runs"
    assert sheet.name.endswith("-train-50-light.png")
    printed = capsys.readouterr()
    assert printed.out.startswith(f"runs/{sheet.name}: ")
    assert printed.err == f"next: aploss train --data {shapes}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--count", "0"], "--count 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--size", "64"], "add --augment"),
        (["--augment", "paper", "--size", "64x"], "--size 64x: write 300"),
        (["--augment", "paper", "--size", "1x2x3"], "--size 1x2x3: write 300"),
        (["--augment", "paper", "--size", "2"], "at least 8"),
        (["--split", "nowhere"], "no split 'nowhere'"),
        (["--out", "sheet.txt"], "sheet.txt: no picture format"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(
    shapes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    out = tmp_path / "sheet.png"
    assert main(["data", "show", shapes, "--out", str(out), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_is_said_in_one_line(
    shapes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["data", "show", shapes, "--out", str(tmp_path / "file" / "sheet.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err
