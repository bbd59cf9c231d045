"""`aploss data convert`: what it writes and says."""

import json
from pathlib import Path

import pytest
from PIL import Image

from aploss.cli.main import main
from aploss.data import load_dataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
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


def test_it_says_what_was_written_left_out_and_lost(folder, tmp_path, capsys):
    out = tmp_path / "new"
    assert main(["data", "convert", str(folder), "--to", "yolo", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert f"{out}: 1 images, 1 boxes, splits train" in printed.out
    assert "1 degenerate-box (box dropped): train.json" in printed.err
    assert "yolo cannot hold, and so lost: 1 'crowd' marks" in printed.err
    assert load_dataset(out, "train").boxes(0).tolist() == [[1, 2, 11, 14]]


def test_a_folder_in_use_is_refused_with_one_line(folder, tmp_path, capsys):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").touch()
    arguments = ["data", "convert", str(folder), "--to", "voc", "--out", str(tmp_path / "used")]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "not an empty folder" in error
    assert error.count("\n") == 1
