"""COCO JSON in the usual layouts, and its piecewise reading."""

import json
import shutil

import numpy as np
import pytest

from aploss.data import json_stream
from aploss.data.coco import find_coco
from aploss.data.json_stream import iterate_entries
from aploss.data.load import dataset_splits, load_dataset
from aploss.errors import DataError

TRAIN = "annotations/instances_train2017.json"


def test_the_official_layout_is_read(coco_folder, expected_boxes, found_boxes):
    assert dataset_splits(coco_folder) == ("train2017", "val2017")
    for split, expected in expected_boxes.items():
        dataset = load_dataset(coco_folder, f"{split}2017")
        assert found_boxes(dataset) == expected
        assert dataset.class_names == ("cat", "dog")  # by category id, 3 before 7
        assert dataset.problems == []
    assert found_boxes(load_dataset(coco_folder, "train")) == expected_boxes["train"]


def test_image_ids_are_those_of_the_file(coco_folder):
    dataset = load_dataset(coco_folder, "train")
    assert [dataset.image_id(i) for i in range(3)] == [10, 20, 30]


def test_ids_from_zero_are_shifted_so_that_they_start_at_one(coco_folder):
    content = json.loads((coco_folder / TRAIN).read_text())
    for place, image in enumerate(content["images"]):
        for annotation in content["annotations"]:
            if annotation["image_id"] == image["id"]:
                annotation["image_id"] = place
        image["id"] = place
    (coco_folder / TRAIN).write_text(json.dumps(content))
    dataset = load_dataset(coco_folder, "train")
    assert [dataset.image_id(i) for i in range(3)] == [1, 2, 3]
    assert dataset.num_boxes == 3


def test_crowd_difficult_and_area_are_kept(coco_folder):
    content = json.loads((coco_folder / TRAIN).read_text())
    content["annotations"][0] |= {"iscrowd": 1, "area": 77.5}
    content["annotations"][1] |= {"difficult": 1, "segmentation": [[1, 2, 3, 4, 5, 6]]}
    (coco_folder / TRAIN).write_text(json.dumps(content))
    dataset = load_dataset(coco_folder, "train")
    assert dataset.crowd(0).tolist() == [True, False]
    assert dataset.difficult(0).tolist() == [False, True]
    assert dataset.areas(0).tolist() == [77.5, 30.5 * 30.25]


LAYOUTS = {
    "images beside a file in the split's folder": ("train/_annotations.coco.json", "train"),
    "a folder of images for each split": ("annotations/train.json", "images/train"),
    "one folder of images": ("annotations/train.json", "images"),
    "a split's own images folder": ("train/annotations.json", "train/images"),
    "everything in one folder": ("train.json", ""),
}


@pytest.mark.parametrize(("file", "images"), LAYOUTS.values(), ids=LAYOUTS)
def test_other_layouts_are_recognised(
    tmp_path, coco_folder, file, images, expected_boxes, found_boxes
):
    root = tmp_path / "other"
    (root / file).parent.mkdir(parents=True)
    shutil.copytree(coco_folder / "train2017", root / images, dirs_exist_ok=True)
    shutil.copy(coco_folder / TRAIN, root / file)
    assert dataset_splits(root) == ("train",)
    assert found_boxes(load_dataset(root, "train")) == expected_boxes["train"]


def test_a_json_file_itself_may_be_named(coco_folder, expected_boxes, found_boxes):
    dataset = load_dataset(coco_folder / TRAIN)
    assert found_boxes(dataset) == expected_boxes["train"]


def test_file_names_may_contain_folders(coco_folder, expected_boxes, found_boxes):
    content = json.loads((coco_folder / TRAIN).read_text())
    for image in content["images"]:
        image["file_name"] = f"train2017/{image['file_name']}"
    (coco_folder / TRAIN).write_text(json.dumps(content))
    assert found_boxes(load_dataset(coco_folder, "train")) == expected_boxes["train"]


def test_files_of_other_tasks_and_of_other_programs_are_left_alone(coco_folder):
    shutil.copy(coco_folder / TRAIN, coco_folder / "annotations" / "captions_train2017.json")
    (coco_folder / "package.json").write_text('{"name": "something else"}')
    (coco_folder / "results.json").write_text('[{"image_id": 1}]')
    assert dataset_splits(coco_folder) == ("train2017", "val2017")


def test_a_missing_size_is_read_from_the_image(coco_folder):
    content = json.loads((coco_folder / TRAIN).read_text())
    del content["images"][0]["width"]
    (coco_folder / TRAIN).write_text(json.dumps(content))
    dataset = load_dataset(coco_folder, "train")
    assert dataset.image_size(0) == (64, 48)
    assert [problem.kind for problem in dataset.problems] == ["missing-size"]


def test_given_class_names_decide_the_labels_and_others_are_counted_in_one_line(coco_folder):
    dataset = load_dataset(coco_folder, "train", class_names=["bird", "cat"])
    assert dataset.all_labels().tolist() == [1]
    problem = next(p for p in dataset.problems if p.kind == "unknown-class")
    assert problem.count == 2
    assert "'dog'" in problem.message


def test_a_folder_without_coco_files_is_not_coco(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    assert find_coco(tmp_path) is None


def test_splits_with_different_class_lists_get_one_when_joined(coco_folder):
    file = coco_folder / "annotations/instances_val2017.json"
    content = json.loads(file.read_text())
    content["categories"] = [{"id": 3, "name": "cat"}, {"id": 9, "name": "fox"}]
    file.write_text(json.dumps(content))
    joined = load_dataset(coco_folder, "train+val")
    assert joined.class_names == ("cat", "dog", "fox")
    assert joined.labels(3).tolist() == [0]


# --- reading piece by piece -------------------------------------------------------------------


def entries_of(content: dict) -> list:
    """What iterate_entries gives, from json.loads."""
    return [
        (key, entry)
        for key, value in content.items()
        for entry in ((value or [None]) if isinstance(value, list) else [value])
    ]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_entries_equal_those_of_the_json_module_however_the_file_is_cut(
    tmp_path, monkeypatch, chunk, indent
):
    generator = np.random.default_rng(chunk)
    content = {
        "info": {"text": 'quotes " and braces }, { and "segmentation": [1] inside', "é": "✓"},
        "images": [{"id": i, "nested": {"a": [1, {"b": 2}]}} for i in range(20)],
        "empty": [],
        "number": -12.5e-3,
        "annotations": [
            {"id": i, "bbox": generator.random(4).tolist(), "rle": {"counts": "a},{b"}}
            for i in range(50)
        ],
        "mixed": [1, "two", None, [3], {}, True, 1e300],
        "last": 123456,
    }
    file = tmp_path / "a.json"
    file.write_text(json.dumps(content, indent=indent))
    monkeypatch.setattr(json_stream, "_CHUNK", chunk)
    assert list(iterate_entries(file)) == entries_of(content)


def test_unneeded_lists_of_numbers_are_left_out_and_nothing_else(tmp_path, monkeypatch):
    entries = [
        {
            "id": i,
            "segmentation": [[1.5, 2], [3, 4]] if i % 3 else {"counts": [1, 2]},
            "box": [1, 2],
        }
        for i in range(60)
    ]
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"annotations": entries}))
    monkeypatch.setattr(json_stream, "_CHUNK", 500)
    found = [entry for _, entry in iterate_entries(file, unneeded="segmentation")]
    kept = [{k: v for k, v in entry.items() if k != "segmentation"} for entry in found]
    assert kept == [{"id": i, "box": [1, 2]} for i in range(60)]
    assert any(entry["segmentation"] == 0 for entry in found)


@pytest.mark.parametrize(
    "text",
    [
        "", "[1, 2]", "{", '{"a"', '{"a": [1, 2}', '{"a": [{"b": 1},]}', '{"a": 1} x', "{'a': 1}",
        '{"a": [{"b": 1} {"b": 2}]}', '{1: 2}', '{"a": ' + "[" * 100_000, '{"a": nul}',
    ],
)  # fmt: skip
def test_text_that_is_no_json_object_is_an_error(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="at character"):
        list(iterate_entries(file))


def test_a_broken_file_is_a_data_error_that_names_it(coco_folder):
    text = (coco_folder / TRAIN).read_text()
    (coco_folder / TRAIN).write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match=r"instances_train2017\.json: not valid JSON"):
        load_dataset(coco_folder, "train")
