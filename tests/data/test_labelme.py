"""LabelMe files: shapes, the images they name, splits and classes."""

import json

import pytest

from aploss.cli.main import main
from aploss.data import convert_dataset, dataset_splits, load_dataset
from aploss.data.check import check_dataset
from aploss.data.labelme import shape_corners
from aploss.errors import DataError

# (label, kind, points) and the box worked out by hand; images are 64 x 48
SHAPES = [
    ("dog", "rectangle", [[30, 40.25], [60.5, 10]], [30, 10, 60.5, 40.25]),  # drawn from below
    ("cat", "polygon", [[10, 5], [20, 15], [12, 25], [4, 14]], [4, 5, 20, 25]),
    ("cat", "circle", [[20, 20], [23, 24]], [15, 15, 25, 25]),  # radius 5 = sqrt(3² + 4²)
    ("dog", "mask", [[1, 2], [3, 4]], [1, 2, 3, 4]),
]


def document(name="a.png", shapes=SHAPES, **more):
    rows = [{"label": s[0], "points": s[2], "shape_type": s[1], "group_id": None, "flags": {}} for s in shapes]
    picture = {"imagePath": name, "imageData": None, "imageHeight": 48, "imageWidth": 64}
    return {"version": "5.5.0", "flags": {}, "shapes": rows, **picture, **more}


@pytest.fixture
def folder(tmp_path, picture):
    """Two images, one of them with all shapes."""
    folder = tmp_path / "set"
    for name, shapes in {"a": SHAPES, "b": []}.items():
        picture(folder / f"{name}.png")
        (folder / f"{name}.json").write_text(json.dumps(document(f"{name}.png", shapes)))
    return folder


def kinds(dataset):
    return [problem.kind for problem in dataset.problems]


def test_shapes_give_the_boxes_that_enclose_them(folder):
    assert dataset_splits(folder) == ("all",)
    dataset = load_dataset(folder)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.boxes(0).tolist() == [shape[3] for shape in SHAPES]
    assert dataset.labels(0).tolist() == [1, 0, 0, 1]
    assert (len(dataset), dataset.num_boxes, dataset.problems) == (2, 4, [])
    assert check_dataset(folder).exit_code == 0


def test_a_conversion_to_coco_keeps_every_box(folder, tmp_path):
    convert_dataset(folder, tmp_path / "coco", to="coco")
    again = load_dataset(tmp_path / "coco")
    assert again.boxes(0).tolist() == [shape[3] for shape in SHAPES]
    assert again.class_names == ("cat", "dog")


def test_it_is_read_and_not_written(folder, tmp_path, capsys):
    assert main(["data", "convert", str(folder), "--to", "labelme", "--out", str(tmp_path / "new")]) == 2
    assert "can be read, but not written; choose one of coco, " in capsys.readouterr().err


def test_folders_called_as_splits_are_splits(folder, picture):
    for split in ("train", "val"):
        picture(folder / split / "images" / "x.png")
        (folder / split / "json").mkdir()
        content = document("..\\images\\x.png", SHAPES[:1])
        (folder / split / "json" / "x.json").write_text(json.dumps(content))
    assert dataset_splits(folder) == ("train", "val", "unsplit")
    assert load_dataset(folder, "val").boxes(0).tolist() == [SHAPES[0][3]]
    assert len(load_dataset(folder)) == 4


def test_labels_txt_gives_the_classes(folder):
    (folder / "labels.txt").write_text("__ignore__\n_background_\ndog\n")
    dataset = load_dataset(folder)
    assert dataset.class_names == ("dog",)
    assert set(kinds(dataset)) == {"unknown-class"}
    assert dataset.num_boxes == 2


def test_flags_mark_difficult_objects(folder):
    content = document()
    content["shapes"][1]["flags"] = {"difficult": True}
    (folder / "a.json").write_text(json.dumps(content))
    assert load_dataset(folder).difficult(0).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    "shape",
    [
        {"shape_type": "line", "points": [[1, 2], [3, 4]]},
        {"shape_type": "point", "points": [[1, 2]]},
        {"shape_type": "rectangle", "points": [[1, 2]]},
        {"shape_type": "polygon", "points": [[1, 2], [3, "x"]]},
        {"shape_type": "polygon", "points": [[1, 2, 3], [4, 5, 6]]},
        {"shape_type": "circle", "points": [[1, 2], [3, 4], [5, 6]]},
        {"points": None},
    ],
)
def test_a_shape_without_a_box_is_dropped_with_its_number(folder, shape):
    with pytest.raises(ValueError, match=r"box|points|number"):
        shape_corners(shape)
    content = document()
    content["shapes"].insert(1, {"label": "cat", **shape})
    (folder / "a.json").write_text(json.dumps(content))
    dataset = load_dataset(folder)
    assert kinds(dataset) == ["missing-box"]
    assert dataset.problems[0].message.startswith("shape 2: ")
    assert dataset.num_boxes == 4


@pytest.mark.parametrize("named", ["/home/me/photos/a.png", "C:\\photos\\a.png", "../../a.png", "a.jpg", None])
def test_the_image_beside_a_file_stands_in_for_a_path_of_another_machine(folder, named):
    (folder / "a.json").write_text(json.dumps(document(named)))
    dataset = load_dataset(folder)
    assert dataset.relative_path(0) == "a.png"
    assert dataset.num_boxes == 4


def test_an_image_that_is_elsewhere_is_never_read(folder, tmp_path, picture):
    picture(tmp_path / "secret.png")
    (folder / "c.json").write_text(json.dumps(document("../secret.png")))
    with pytest.raises(DataError, match=r"c\.json: .*outside the dataset's folder"):
        load_dataset(folder)


def test_missing_images_damaged_files_and_wrong_entries_are_named(folder, picture):
    (folder / "c.json").write_text(json.dumps(document("gone.png")))
    (folder / "d.json").write_text(json.dumps(document("a.png")))
    picture(folder / "e.png")
    (folder / "e.json").write_text('{"shapes": [')
    (folder / "b.json").write_text(json.dumps({**document("b.png"), "shapes": [5, {"label": "", "points": []}]}))
    dataset = load_dataset(folder)
    problems = [(problem.file, problem.kind) for problem in dataset.problems]
    assert problems == [
        ("b.json", "bad-entry"),
        ("b.json", "missing-class"),
        ("c.json", "missing-image"),
        ("d.json", "duplicate-image"),
        ("e.json", "unreadable-annotation"),
    ]
    picture(folder / "f.png")
    found = {(one.problem.file, one.problem.kind) for one in check_dataset(folder).findings}
    assert ("f.png", "image-without-annotation") in found


def test_other_json_files_are_no_labelme_dataset(coco_folder, tmp_path):
    assert dataset_splits(coco_folder) == ("train2017", "val2017")
    (tmp_path / "settings.json").write_text('{"shape": 1}')
    with pytest.raises(DataError, match=r"looked for .*LabelMe"):
        load_dataset(tmp_path, format="labelme")
