"""The example plugin for LabelMe files: loaded with --plugin, checked, read and converted."""

import json
from pathlib import Path

import pytest
from tiny_runs import run_commands

PLUGIN = Path(__file__).parents[2] / "examples" / "labelme_plugin.py"
# (label, kind, points) and the box worked out by hand; images are 64 x 48
SHAPES = [
    ("dog", "rectangle", [[30, 40.25], [60.5, 10]], [30, 10, 60.5, 40.25]),  # drawn from below
    ("cat", "polygon", [[10, 5], [20, 15], [12, 25], [4, 14]], [4, 5, 20, 25]),
    ("cat", "circle", [[20, 20], [23, 24]], [15, 15, 25, 25]),  # radius 5 = sqrt(3² + 4²)
    ("dog", "line", [[1, 2], [3, 4]], None),
]


@pytest.fixture
def folder(tmp_path, picture) -> Path:
    """Two images, one of them with all shapes and the path of another computer."""
    for name, shapes in {"a": SHAPES, "b": []}.items():
        picture(tmp_path / "set" / "train" / f"{name}.png")
        rows = [{"label": label, "points": points, "shape_type": kind} for label, kind, points, _ in shapes]
        content = {"shapes": rows, "imagePath": f"C:\\photos\\{name}.png", "imageData": None}
        (tmp_path / "set" / "train" / f"{name}.json").write_text(json.dumps(content))
    return tmp_path / "set"


def test_shapes_give_the_boxes_that_enclose_them(folder, tmp_path):
    plugin = ["--plugin", str(PLUGIN)]  # in processes of their own: a plugin stays registered
    checked = run_commands(tmp_path, ["data", "check", "set", "--json", *plugin])
    assert checked.returncode == 1, checked.stderr
    result = json.loads(checked.stdout)
    assert (result["format"], result["class_names"], result["total"]["images"]) == ("labelme", ["cat", "dog"], 2)
    assert [(p["kind"], p["file"]) for p in result["problems"]] == [("bad-box", "train/a.json")]
    converted = run_commands(tmp_path, ["data", "convert", "set", "--to", "coco", "--out", "coco", *plugin])
    assert converted.returncode == 0, converted.stderr
    content = json.loads((tmp_path / "coco" / "annotations" / "instances_train.json").read_text())
    boxes = [[x, y, x + w, y + h] for x, y, w, h in (entry["bbox"] for entry in content["annotations"])]
    assert boxes == [shape[3] for shape in SHAPES[:3]]
