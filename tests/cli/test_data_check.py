"""`aploss data check`: output and exit codes."""

import json
from pathlib import Path

import pytest
from PIL import Image

from aploss.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clean YOLO set of two images."""
    for number, split in enumerate(("train", "val")):
        for part in ("images", "labels"):
            (tmp_path / "set" / part / split).mkdir(parents=True)
        picture = Image.effect_noise((32, 32), 40 + number)
        picture.save(tmp_path / "set" / "images" / split / f"{split}.png")
        labels = tmp_path / "set" / "labels" / split / f"{split}.txt"
        labels.write_text("0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "set" / "data.yaml").write_text(
        "train: images/train\nval: images/val\nnames: [cell]\n"
    )
    return tmp_path / "set"


def test_a_clean_set_is_counted_and_gives_zero(folder, capsys):
    assert main(["data", "check", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "yolo dataset, 1 class" in output
    assert "no problems found" in output


def test_a_dropped_box_gives_one_and_its_file(folder, capsys):
    (folder / "labels/train/train.txt").write_text("0 0.5 0.5 0 0.5\n0 0.5 0.5 0.2 0.5\n")
    assert main(["data", "check", str(folder)]) == 1
    output = capsys.readouterr().out
    assert "labels/train/train.txt: line 1" in output
    assert "degenerate-box" in output


def test_a_set_that_cannot_be_used_gives_two(folder, capsys):
    (folder / "images/train/train.png").unlink()
    assert main(["data", "check", str(folder)]) == 2
    assert "cannot be used" in capsys.readouterr().out


def test_no_set_at_all_gives_two_and_one_line(tmp_path, capsys):
    assert main(["data", "check", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("aploss data check: ")
    assert error.count("\n") == 1


def test_json_is_one_object_with_the_same_findings(folder, capsys):
    (folder / "labels/val/val.txt").write_text("5 0.5 0.5 0.2 0.5\n")
    assert main(["data", "check", str(folder), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["format"] == "yolo"
    assert content["exit_code"] == 1
    assert content["splits"]["train"]["boxes_of_class"] == {"cell": 1}
    assert [(p["kind"], p["file"]) for p in content["problems"]] == [
        ("unknown-class", "labels/val/val.txt")
    ]


def test_classes_limit_and_fast_reach_the_check(folder, capsys):
    (folder / "labels/train/train.txt").write_text("0 0.5 0.5 0.2 0.5\n7 1 1 1 1\n8 1 1 1 1\n")
    assert main(["data", "check", str(folder), "--limit", "1"]) == 1
    assert "and 1 more" in capsys.readouterr().out
    assert main(["data", "check", str(folder), "--classes", "cell, nucleus"]) == 1
    assert "no box of class 'nucleus'" in capsys.readouterr().out
    image = folder / "images/val/val.png"
    image.write_bytes(image.read_bytes()[:-400])
    assert main(["data", "check", str(folder), "--json"]) == 1
    assert "truncated-image" in capsys.readouterr().out
    main(["data", "check", str(folder), "--json", "--fast"])
    assert "truncated-image" not in capsys.readouterr().out
