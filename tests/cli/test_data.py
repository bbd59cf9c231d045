"""``aploss data``: check, convert and show."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_datasets import edit_json, write_coco, write_yolo

from aploss.cli.main import main
from aploss.data import load_dataset


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and pictures without a name go to ``runs/`` of this folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def yolo_folder(tmp_path: Path) -> Path:
    return write_yolo(tmp_path / "set")


def test_a_clean_set_is_counted_on_one_screen_and_on_a_page(yolo_folder, capsys):
    assert main(["data", "check", str(yolo_folder)]) == 0
    output = capsys.readouterr().out
    assert "yolo dataset, classes: 2" in output
    assert output.count("\n") < 25
    assert output.endswith("page: runs/check-set.html\n")
    assert "cat" in Path("runs/check-set.html").read_text()


def test_a_set_that_cannot_be_used_gives_two(yolo_folder, capsys):
    for image in (yolo_folder / "images/train").iterdir():
        image.unlink()
    assert main(["data", "check", str(yolo_folder)]) == 2
    assert "cannot be used" in capsys.readouterr().out


def test_json_is_one_object_with_the_same_findings(yolo_folder, capsys):
    (yolo_folder / "labels/val/d.txt").write_text("5 0.5 0.5 0.2 0.5\n")
    assert main(["data", "check", str(yolo_folder), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["format"] == "yolo"
    assert content["exit_code"] == 1
    assert content["splits"]["train"]["boxes_of_class"] == {"cat": 1, "dog": 2}
    assert [(p["kind"], p["file"]) for p in content["problems"]] == [("unknown-class", "labels/val/d.txt")]
    assert not Path("runs").exists()


def test_classes_and_pixels_reach_the_check(yolo_folder, capsys):
    assert main(["data", "check", str(yolo_folder), "--classes", "cat, nucleus"]) == 1
    assert "nucleus" in capsys.readouterr().out
    image = yolo_folder / "images/val/d.png"
    image.write_bytes(image.read_bytes()[:-400])
    assert main(["data", "check", str(yolo_folder), "--json", "--pixels"]) == 1
    assert "unreadable-image" in capsys.readouterr().out
    main(["data", "check", str(yolo_folder), "--json"])
    assert "unreadable-image" not in capsys.readouterr().out


def test_convert_reports_what_was_written_dropped_and_lost(tmp_path, capsys, refused):
    folder = write_coco(tmp_path / "coco")

    def damage(content):
        content["annotations"][0]["bbox"][2] = 0
        content["annotations"][1]["iscrowd"] = 1

    edit_json(folder / "annotations/instances_train2017.json", damage)
    words = ["data", "convert", str(folder), "--to", "yolo", "--out", str(tmp_path / "new")]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert f"{tmp_path / 'new'}: 4 images, 3 boxes, splits train" in printed.out
    assert "degenerate-box" in printed.err
    assert "crowd" in printed.err
    assert load_dataset(tmp_path / "new", "val").annotations.boxes.tolist() == [[10, 10, 30, 30]]
    assert "not an empty folder" in refused(*words)
    assert "yolo" in refused(*words[:-1], tmp_path / "other", "--to", "x")  # lists the formats
    assert not (tmp_path / "other").exists()


def show(folder: Path, out: Path, *options: str) -> np.ndarray:
    assert main(["data", "show", str(folder), "--out", str(out), *options]) == 0
    with Image.open(out) as sheet:
        return np.asarray(sheet.convert("RGB"))


def test_sheet_shows_the_asked_number_of_images_of_the_split(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = show(shapes, tmp_path / "new" / "sheet.png", "--split", "train", "--count", "4")
    assert sheet.shape[1] == 2 * 308 + 8
    line = capsys.readouterr().out
    assert "sheet.png" in line
    assert "4 of 6 images" in line
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sheet.png"]
    show(shapes, tmp_path / "all.png", "--split", "val", "--count", "99")
    assert "2 of 2 images" in capsys.readouterr().out


def test_augmented_sheets_differ_from_plain_ones_and_repeat_by_seed(shapes: Path, tmp_path: Path) -> None:
    common = ("--split", "train", "--count", "4")
    plain = show(shapes, tmp_path / "a.png", *common)
    paper = show(shapes, tmp_path / "b.png", *common, "--augment", "paper")
    again = show(shapes, tmp_path / "c.png", *common, "--augment", "paper")
    other = show(shapes, tmp_path / "d.png", *common, "--augment", "paper", "--seed", "5")
    assert plain.shape == paper.shape
    assert (paper == again).all()
    assert (paper != plain).any()
    assert (paper != other).any()


def test_a_sheet_without_a_name_goes_to_runs(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", str(shapes), "--split", "train[:50%]", "--augment", "light"]) == 0
    (sheet,) = tmp_path.rglob("*.png")
    assert sheet.parent == tmp_path / "runs"
    assert sheet.name.endswith("-train-50-light.png")
    assert capsys.readouterr().out.startswith(f"runs/{sheet.name}: ")


def test_a_sheet_that_cannot_be_written_leaves_no_file(shapes: Path, tmp_path: Path, refused) -> None:
    Path("file").touch()
    assert "cannot be written" in refused("data", "show", shapes, "--out", "file/sheet.png")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
