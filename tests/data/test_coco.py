"""COCO JSON in the usual layouts, and its decoding."""

import json
import shutil

import msgspec
import pytest
from pycocotools.coco import COCO

from aploss.data.check import check_dataset, check_report
from aploss.data.coco import CocoDocument, CocoFormat, decode_json
from aploss.data.convert import convert_dataset
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


def write_text_ids(coco_folder, image_ids=("c", "b", "a")):
    """The training split with ids of text; images 10, 20, 30 get these, the categories the initials of their names."""
    content = json.loads((coco_folder / TRAIN).read_text())
    text_of = dict(zip((10, 20, 30), image_ids, strict=True))
    for image in content["images"]:
        image["id"] = text_of[image["id"]]
    for category in content["categories"]:
        category["id"] = {3: "x-cat", 7: "a-dog"}[category["id"]]
    for row in content["annotations"]:
        row |= {"id": f"box {row['id']}", "image_id": text_of[row["image_id"]]}
        row["category_id"] = {3: "x-cat", 7: "a-dog"}[row["category_id"]]
    (coco_folder / TRAIN).write_text(json.dumps(content))
    return content


def test_ids_of_text_are_read_in_their_order(coco_folder, expected_boxes, found_boxes):
    write_text_ids(coco_folder)
    dataset = load_dataset(coco_folder, "train", class_names=("cat", "dog"))
    assert found_boxes(dataset) == expected_boxes["train"]
    assert dataset.problems == []
    assert [dataset.image_id(i) for i in range(3)] == [3, 2, 1]  # of the texts c, b, a
    assert load_dataset(coco_folder, "train").class_names == ("dog", "cat")
    assert check_dataset(coco_folder).exit_code == 0


@pytest.mark.parametrize("image_ids", [("c", "b", "a"), ("c", 5, 0)], ids=["text", "mixed"])
def test_ids_of_text_survive_a_conversion_and_fit_pycocotools(coco_folder, tmp_path, image_ids):
    write_text_ids(coco_folder, image_ids)
    convert_dataset(coco_folder, tmp_path / "new", to="coco")
    new = tmp_path / "new" / "annotations" / "instances_train2017.json"
    assert [image["id"] for image in json.loads(new.read_text())["images"]] == list(image_ids)
    for image_id in image_ids:  # the same boxes for the same id
        boxes = [[row["bbox"] for row in file.imgToAnns[image_id]] for file in (COCO(coco_folder / TRAIN), COCO(new))]
        assert boxes[0] == boxes[1]


def test_unknown_ids_of_text_are_problems_with_their_text(coco_folder):
    content = write_text_ids(coco_folder)
    content["annotations"][0]["image_id"] = "nowhere"
    content["annotations"][1]["category_id"] = 7  # not the text that it was
    content["images"].append({"id": None, "file_name": "e.png"})
    (coco_folder / TRAIN).write_text(json.dumps(content))
    problems = {problem.kind: problem.message for problem in load_dataset(coco_folder, "train").problems}
    assert "no image has id 'nowhere'" in problems["unknown-image"]
    assert "category_id 7 is not among the categories" in problems["unknown-class"]
    assert "'id' is None, expected an integer or text" in problems["bad-image-entry"]


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
def test_other_layouts_are_recognised(tmp_path, coco_folder, file, images, expected_boxes, found_boxes):
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
    assert CocoFormat.find(tmp_path) is None


def test_splits_with_different_class_lists_get_one_when_joined(coco_folder):
    file = coco_folder / "annotations/instances_val2017.json"
    content = json.loads(file.read_text())
    content["categories"] = [{"id": 3, "name": "cat"}, {"id": 9, "name": "fox"}]
    file.write_text(json.dumps(content))
    joined = load_dataset(coco_folder, "train+val")
    assert joined.class_names == ("cat", "dog", "fox")
    assert joined.labels(3).tolist() == [0]


# --- decoding -----------------------------------------------------------------------------------

CONTENT = {
    "info": {"text": 'quotes " and braces }, { and "segmentation": [1] inside', "é": "✓"},
    "images": [{"id": i, "nested": {"a": [1, {"b": 2}]}} for i in range(20)],
    "empty": [],
    "number": -12.5e-3,
    "annotations": [{"id": i, "bbox": [i / 7, 1e-9, 3, 1e300], "rle": {"counts": "a},{b"}} for i in range(50)],
    "mixed": [1, "two", None, [3], {}, True, 1e300],
    "last": 123456,
}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_content_equals_that_of_the_json_module(indent, mark, ascii_only):
    text = mark + json.dumps(CONTENT, indent=indent, ensure_ascii=ascii_only)
    assert decode_json(text.encode()) == CONTENT


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), "half \ud800 a pair", "a pair 😀"])
def test_what_python_writes_beyond_json_is_read(value):
    assert decode_json(json.dumps({"a": [value, 1]}).encode()) == {"a": [value, 1]}


def test_nan_is_read():
    assert str(decode_json(b'{"a": [NaN]}')) == "{'a': [nan]}"


def test_only_what_is_needed_is_kept_of_a_document():
    entries = [
        {"id": i, "segmentation": [[1.5, 2], [3, 4]] if i % 3 else {"counts": [1, 2]}, "bbox": [1, 2, 3, 4]}
        for i in range(60)
    ]
    text = json.dumps({"annotations": [*entries, "text", None, [1]], "images": {}, "more": [1]})
    document = decode_json(text.encode(), CocoDocument)
    assert document.annotations[60:] == ["text", None, [1]]
    assert [(one.id, one.bbox) for one in document.annotations[:60]] == [(i, [1, 2, 3, 4]) for i in range(60)]
    assert not hasattr(document.annotations[0], "segmentation")
    assert document.images == {}
    assert document.categories is msgspec.UNSET


@pytest.mark.parametrize(
    "text",
    [
        "", "{", '{"a"', '{"a": [1, 2}', '{"a": [{"b": 1},]}', '{"a": 1} x', "{'a': 1}",
        '{"a": [{"b": 1} {"b": 2}]}', '{1: 2}', '{"a": ' + "[" * 100_000, '{"a": nul}',
        '{"a": NaN,}', '[' * 100_000 + "NaN",
    ],
)  # fmt: skip
def test_text_that_is_no_json_is_an_error(text):
    with pytest.raises(ValueError, match=r".") as caught:
        decode_json(text.encode())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1, 2]", "5", "null", '"text"'])
def test_a_document_that_is_no_object_is_an_error(text):
    with pytest.raises(msgspec.ValidationError):
        decode_json(text.encode(), CocoDocument)


@pytest.mark.parametrize("content", [b"\xff\xfe{\x00", b"\x00" * 100, '{"a": 1}'.encode("utf-16")])
def test_text_that_is_not_utf_8_is_an_error(content):
    with pytest.raises(ValueError, match=r"."):
        decode_json(content)


def test_a_broken_file_is_a_data_error_that_names_it(coco_folder):
    text = (coco_folder / TRAIN).read_text()
    (coco_folder / TRAIN).write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match=r"instances_train2017\.json: not valid JSON"):
        load_dataset(coco_folder, "train")


UNREADABLE = {
    "empty": b"",
    "spaces": b" \n",
    "UTF-16": '{"images": []}'.encode("utf-16"),
    "NUL": b"\x00" * 4096,
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "an object without sections": b"{}",
    "sections that are no lists": b'{"images": 1, "annotations": {}, "categories": null}',
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("file", [TRAIN, "train2017/_annotations.coco.json", "annotations/train2017.json"])
def test_a_file_in_the_place_of_annotations_that_cannot_be_read_is_a_problem(coco_folder, content, file):
    (coco_folder / TRAIN).unlink()
    (coco_folder / file).write_bytes(content)
    assert dataset_splits(coco_folder) == ("train2017", "val2017")
    with pytest.raises(DataError, match=r"\.json: "):
        load_dataset(coco_folder, "train")
    result = check_dataset(coco_folder)
    assert result.exit_code == 2
    found = {(finding.problem.file, finding.problem.effect.value) for finding in result.findings}
    assert (file, "split unusable") in found


def test_so_is_the_only_file_there_is(tmp_path):
    (tmp_path / "instances_train.json").write_bytes(b"")
    assert dataset_splits(tmp_path) == ("train",)
    with pytest.raises(DataError, match=r"instances_train\.json: not valid JSON"):
        load_dataset(tmp_path, "train")
    assert check_dataset(tmp_path).exit_code == 2


@pytest.mark.parametrize("place", ["name", "file_name", "folder"])
def test_half_a_surrogate_pair_is_one_line(coco_folder, place, capsys):
    content = json.loads((coco_folder / TRAIN).read_text())
    if place == "name":
        content["categories"][0]["name"] = "half \ud800 a pair"
    else:
        half = "\ud800/a.png" if place == "folder" else "\ud800.png"
        content["images"][0]["file_name"] = half
    (coco_folder / TRAIN).write_text(json.dumps(content))
    result = check_dataset(coco_folder)
    kind = "bad-categories" if place == "name" else "missing-image"
    told = r"that is no text (half a surrogate pair): 'half \ud800 a pair'" if place == "name" else r"\ud800"
    (finding, *_) = [f for f in result.findings if f.problem.kind == kind]
    assert told in str(finding.problem)
    check_report(result).encode()


def test_whole_numbers_may_be_written_as_fractions(coco_folder, expected_boxes, found_boxes):
    content = json.loads((coco_folder / TRAIN).read_text())
    for entry in (*content["images"], *content["categories"], *content["annotations"]):
        entry |= {key: float(value) for key, value in entry.items() if key.endswith("id")}
    (coco_folder / TRAIN).write_text(json.dumps(content))
    dataset = load_dataset(coco_folder, "train")
    assert found_boxes(dataset) == expected_boxes["train"]
    assert dataset.problems == []
