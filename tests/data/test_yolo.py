"""YOLO label files, with data.yaml and without."""

import shutil

import pytest

from aploss.data.check import check_dataset
from aploss.data.formats import find_source, load_dataset
from aploss.data.yolo import parse_row
from aploss.errors import DataError


def describe(folder, text: str) -> None:
    (folder / "data.yaml").write_text(text)


def test_the_description_may_have_any_name(yolo_folder):
    (yolo_folder / "data.yaml").rename(yolo_folder / "pets.yaml")
    assert len(load_dataset(yolo_folder / "pets.yaml")) == 4


DESCRIPTIONS = {
    "names as a dict": "train: images/train\nval: images/val\nnames: {0: cat, 1: dog}\n",
    "a path": "path: images\ntrain: train\nval: val\nnc: 2\nnames: [cat, dog]\n",
    "a path of another computer": "path: /data/pets\ntrain: images/train\nval: images/val\nnames: [cat, dog]\n",
    "Roboflow": "train: ../images/train\nval: ../images/val\nnames: [cat, dog]\n",
    "windows paths": "train: .\\images\\train\nval: .\\images\\val\nnames: [cat, dog]\n",
    "lists of folders": "train: [images/train]\nval: [images/val]\nnames: [cat, dog]\n",
}


@pytest.mark.parametrize("text", DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_paths_follow_the_rules_of_ultralytics_and_roboflow(yolo_folder, text, expected_boxes, found_boxes):
    describe(yolo_folder, text)
    for split, expected in expected_boxes.items():
        dataset = load_dataset(yolo_folder, split)
        assert found_boxes(dataset) == expected
        assert dataset.problems == []


@pytest.mark.parametrize("place", ["/content/pets/images/train", "C:\\pets\\images\\train", "images/gone"])
def test_any_other_path_is_refused_with_the_path_that_was_found(yolo_folder, place):
    describe(yolo_folder, f"train: {place}\nval: images/val\nnames: [cat, dog]\n")
    with pytest.raises(DataError, match=r"data\.yaml: ") as caught:
        load_dataset(yolo_folder, "train")
    assert repr(place) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_split_may_be_a_text_file_of_images(yolo_folder, expected_boxes, found_boxes):
    (yolo_folder / "train.txt").write_text("./images/train/c.png\nimages/train/a.png\nimages/train/b.png\n")
    describe(yolo_folder, "train: train.txt\nval: images/val\nnames: [cat, dog]\n")
    dataset = load_dataset(yolo_folder, "train")
    assert found_boxes(dataset) == expected_boxes["train"]
    assert dataset.image_path(0).name == "c.png"  # in the list's order


def test_labels_may_lie_beside_the_images(yolo_folder, expected_boxes, found_boxes):
    for labels in (yolo_folder / "labels/train").iterdir():
        shutil.move(labels, yolo_folder / "images/train")
    (yolo_folder / "images/train").rename(yolo_folder / "photos")
    describe(yolo_folder, "train: photos\nnames: [cat, dog]\n")
    assert found_boxes(load_dataset(yolo_folder, "train")) == expected_boxes["train"]


def test_other_splits_than_the_usual_ones_count_if_they_exist(yolo_folder):
    shutil.copytree(yolo_folder / "images/val", yolo_folder / "images/night")
    describe(yolo_folder, "train: images/train\nnight: images/night\nurl: http://nowhere\nnames: [cat, dog]\n")
    assert find_source(yolo_folder).splits == ("train", "night")


def test_a_polygon_gives_its_enclosing_box():
    class_id, box = parse_row("1 0.25 0.5 0.5 0.25 0.75 0.75", (64, 48), where=("a", 1))
    assert (class_id, box) == (1, (16, 12, 48, 36))


def test_given_names_replace_missing_ones_and_select_from_existing_ones(yolo_folder):
    chosen = load_dataset(yolo_folder, "train", class_names=["dog"])
    assert chosen.annotations.category_ids.tolist() == [1, 1]
    assert [problem.kind for problem in chosen.problems] == ["unknown-class"]
    describe(yolo_folder, "train: images/train\nval: images/val\n")
    with pytest.raises(DataError, match="no class names"):
        load_dataset(yolo_folder, "train")
    assert load_dataset(yolo_folder, "train", class_names=["x", "y"]).class_names == ("x", "y")


@pytest.mark.parametrize(
    ("names", "named"),
    [("{1: cat, 2: dog}", "0, 1, 2"), ("[cat, ox, cat]", r"\['cat', 'cat'\]"), ("5", "5"), ("[]", "no class"),
     ("[cat, [dog]]", r"\[\['dog'\]\]"), ("[cat, '']", r"\[''\]")],
)  # fmt: skip
def test_unusable_names_are_an_error_that_names_the_file_and_them(yolo_folder, names, named):
    describe(yolo_folder, f"train: images/train\nval: images/val\nnames: {names}\n")
    with pytest.raises(DataError, match=rf"data\.yaml: .*{named}"):
        load_dataset(yolo_folder, "train")


@pytest.mark.parametrize("value", ["null", "[]", "5", "{}", "''", "[[images/train]]"])
def test_a_split_without_images_is_a_problem_not_absent(yolo_folder, value):
    describe(yolo_folder, f"train: {value}\nval: images/val\ntest:\nnames: [cat, dog]\n")
    assert find_source(yolo_folder).splits == ("train", "val")  # an empty test split is ignored: many files have one
    with pytest.raises(DataError, match=r"data\.yaml: 'train' must be a folder"):
        load_dataset(yolo_folder, "train")
    result = check_dataset(yolo_folder)
    assert result.exit_code == 2
    assert ("missing-folder", ("train",)) in {(problem.kind, problem.splits) for problem in result.problems}
