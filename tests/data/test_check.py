"""Counts, histograms, exit codes and the text of a check."""

import json
import shutil
from pathlib import Path

import pytest
from small_datasets import edit_json

from aploss.data import check_dataset
from aploss.data.check import check_report


@pytest.mark.parametrize("format", ["voc", "coco", "yolo"])
def test_counts_are_those_of_the_files(clean_folders, format):
    result = check_dataset(clean_folders[format])
    assert (result.problems, result.exit_code) == ([], 0)
    train = next(iter(result.splits.values()))
    assert (train.images, train.empty_images, train.boxes) == (3, 1, 3)
    assert train.boxes_of_class == {"cat": 1, "dog": 2}
    assert (result.total.images, result.total.boxes) == (4, 4)
    assert result.total.boxes_of_class == {"cat": 2, "dog": 2}
    # √area: 16·20 → 17.9, 30.5·30.25 → 30.4, 64·48 → 55.4, 20·20 → 20
    assert {k: v for k, v in result.total.box_sizes.items() if v} == {"16-32": 3, "32-64": 1}
    assert result.total.image_sizes == "64x48"


def test_a_problem_in_two_splits_is_one_finding(voc_folder):
    shutil.copy(voc_folder / "ImageSets/Main/train.txt", voc_folder / "ImageSets/Main/trainval.txt")
    xml = voc_folder / "Annotations/a.xml"
    xml.write_text(xml.read_text().replace("<xmax>20<", "<xmax>5<"))
    (problem,) = check_dataset(voc_folder).problems
    assert problem.splits == ("train", "trainval")
    assert problem.file == "Annotations/a.xml"


def test_a_validation_split_inside_the_training_split_is_reported(yolo_folder):
    (yolo_folder / "data.yaml").write_text("train: images/train\nval: images/train\nnames: [cat, dog]\n")
    problems = check_dataset(yolo_folder).problems
    assert {f.kind for f in problems} == {"image-in-two-splits"}
    assert len(problems) == 3


@pytest.mark.parametrize(
    ("lists", "code"),
    [({"train": "a\nb\n", "val": ""}, 1), ({"train": "", "val": "d\n"}, 2), ({"val": "d\n"}, 0)],
    ids=["no validation", "no training", "validation alone"],
)
def test_an_unusable_split_is_worse_when_it_is_the_training_split(voc_folder, lists, code):
    shutil.rmtree(voc_folder / "ImageSets/Main")
    (voc_folder / "ImageSets/Main").mkdir()
    for name, text in lists.items():
        (voc_folder / f"ImageSets/Main/{name}.txt").write_text(text)
    assert check_dataset(voc_folder).exit_code == code


def test_a_dataset_without_any_usable_box_cannot_be_used(coco_folder):
    for file in (coco_folder / "annotations").iterdir():
        edit_json(file, lambda content: content.update(annotations=[]))
    result = check_dataset(coco_folder)
    assert result.exit_code == 2
    assert "no-boxes" in {problem.kind for problem in result.problems}


def test_findings_name_image_and_box(coco_folder):
    boxes = [[5, 5, 0, 9], [4, 5, float("nan"), 9], [20, 5, 9, 1], [10, 10, 20, 20]]
    more = [{"id": k + 2, "image_id": 10, "category_id": 3, "bbox": box} for k, box in enumerate(boxes)]
    edit_json(coco_folder / "annotations/instances_val2017.json", lambda content: content["annotations"].extend(more))
    shutil.copy(coco_folder / "val2017/d.png", coco_folder / "train2017/a.png")
    result = check_dataset(coco_folder)
    found = {(f.kind, f.image, f.box) for f in result.problems}
    assert found == {
        ("degenerate-box", "val2017/d.png", (5, 5, 5, 14)),
        ("bad-box", "val2017/d.png", None),
        ("tiny-box", "val2017/d.png", (20, 5, 29, 6)),
        ("repeated-box", "val2017/d.png", (10, 10, 30, 30)),
        ("image-in-two-splits", "val2017/d.png", None),
    }
    assert result.copies == [("train2017/a.png", "val2017/d.png")]
    assert all((Path(result.root) / f.image).is_file() for f in result.problems)
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    counts = {"exit_code": 1, "images_dropped": 0, "boxes_dropped": 2, "boxes_clipped": 0}
    assert {key: plain[key] for key in counts} == counts
    assert {problem["effect"] for problem in plain["problems"]} == {"box dropped", "kept"}


def test_the_text_fits_on_a_screen_however_many_classes_and_problems(coco_folder):
    wrong = [[5, 5, 0, 9], [0.1, 0.2, 0.3, 0.4], [60, 5, 30, 9], [5, 5, 9, 1], [1, 2, 3], None]

    def add(content: dict) -> None:
        content["categories"] += [{"id": 100 + k, "name": f"class {k}"} for k in range(200)]
        content["annotations"] += [
            {"id": 50 + k, "image_id": 10, "category_id": 100 + k, "bbox": wrong[k % 6]} for k in range(120)
        ]

    for file in (coco_folder / "annotations").iterdir():
        edit_json(file, add)
    result = check_dataset(coco_folder)
    assert len(result.to_dict()["problems"]) > 100
    text = check_report(result)
    assert len(text.splitlines()) <= 48
    assert "instances_train2017.json: annotation" in text
    assert "Dropped: 0 images and 160 boxes. Clipped: 40 boxes." in text  # of every 6 boxes, 4 and 1
