"""COCO JSON in the usual layouts, and its decoding."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_datasets import edit_json

from aploss.data.check import check_dataset, check_report
from aploss.data.coco import ANNOTATION_KINDS, CocoFormat, parse_json, read_entries
from aploss.data.formats import find_source, load_dataset
from aploss.errors import DataError

TRAIN = "annotations/instances_train2017.json"


def test_one_file_is_read_with_its_image_ids_which_are_shifted_to_start_at_one(
    coco_folder, expected_boxes, found_boxes
):
    train = load_dataset(coco_folder / TRAIN)
    assert found_boxes(train) == expected_boxes["train"]
    assert train.image_ids.tolist() == [10, 20, 30]

    def shift(content: dict) -> None:
        for entry, key in [(e, "id") for e in content["images"]] + [(e, "image_id") for e in content["annotations"]]:
            entry[key] = entry[key] // 10 - 1

    edit_json(coco_folder / TRAIN, shift)
    dataset = load_dataset(coco_folder, "train")
    assert dataset.image_ids.tolist() == [1, 2, 3]
    assert (dataset.num_boxes, dataset.problems) == (3, [])


@pytest.mark.parametrize("change", [float, str])
@pytest.mark.parametrize(("section", "kind"), [("images", "bad-image-entry"), ("categories", "bad-categories")])
def test_ids_that_are_not_integers_are_refused_in_one_line(coco_folder, section, kind, change):
    edit_json(coco_folder / TRAIN, lambda content: [one.update(id=change(one["id"])) for one in content[section]])
    with pytest.raises(DataError, match=rf"{section}\[0\]: .*int.*{change.__name__}") as caught:
        load_dataset(coco_folder, "train")
    assert "\n" not in str(caught.value)
    assert kind in {problem.kind for problem in check_dataset(coco_folder).problems}


def test_crowd_difficult_and_area_are_kept(coco_folder):
    changes = [{"iscrowd": 1, "area": 77.5}, {"difficult": 1, "segmentation": [[1, 2, 3, 4, 5, 6]]}, {}]
    edit_json(coco_folder / TRAIN, lambda content: list(map(dict.update, content["annotations"], changes)))
    dataset = load_dataset(coco_folder, "train")
    assert dataset.target(0)["crowd"].tolist() == [True, False]
    assert dataset.target(0)["difficult"].tolist() == [False, True]
    assert dataset.annotations.areas[:2].tolist() == [77.5, 30.5 * 30.25]


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
    assert find_source(root).splits == ("train",)
    assert found_boxes(load_dataset(root, "train")) == expected_boxes["train"]


def test_files_of_other_tasks_and_of_other_programs_are_ignored(coco_folder, tmp_path):
    shutil.copy(coco_folder / TRAIN, coco_folder / "annotations" / "captions_train2017.json")
    (coco_folder / "package.json").write_text('{"name": "something else"}')
    (coco_folder / "results.json").write_text('[{"image_id": 1}]')
    assert find_source(coco_folder).splits == ("train2017", "val2017")
    (tmp_path / "a.json").write_text("{}")
    assert CocoFormat.find(tmp_path) is None


def test_a_missing_size_is_read_from_the_image_and_file_names_may_contain_folders(coco_folder):
    def change(content: dict) -> None:
        del content["images"][0]["width"]
        for image in content["images"]:
            image["file_name"] = f"train2017/{image['file_name']}"

    edit_json(coco_folder / TRAIN, change)
    dataset = load_dataset(coco_folder, "train")
    assert dataset.image_size(0) == (64, 48)
    assert [problem.kind for problem in dataset.problems] == []


def test_splits_with_different_class_lists_get_one_when_joined(coco_folder):
    classes = [{"id": 3, "name": "cat"}, {"id": 9, "name": "fox"}]
    edit_json(coco_folder / "annotations/instances_val2017.json", lambda content: content.update(categories=classes))
    joined = load_dataset(coco_folder, "train+val")
    assert joined.class_names == ("cat", "dog", "fox")
    assert joined.target(3)["labels"].tolist() == [0]


# --- decoding -----------------------------------------------------------------------------------

values = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3)
json_values = st.recursive(values, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner))


@given(st.lists(json_values, max_size=4), st.sampled_from(["", "\ufeff"]), st.booleans())
def test_entries_of_any_kind_are_read_or_reported(entries, mark, ascii_only):
    box = {"image_id": 1, "category_id": 2, "bbox": [1, 2.5, 3, 4]}
    text = mark + json.dumps([*entries, box], ensure_ascii=ascii_only)
    problems = []
    section = parse_json(text.encode("utf-8", "surrogatepass"))
    found = read_entries(section, ANNOTATION_KINDS, "annotations", lambda kind, message: problems.append(message))
    assert [one.bbox for one in found.values()] == [tuple(box["bbox"])]
    assert len(problems) == len(entries)
    assert all(message.startswith("annotations[") for message in problems)


sides = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
objects_of_any_value = st.fixed_dictionaries(
    {"image_id": st.integers(-(2**63), 2**63), "category_id": st.integers(0, 9), "bbox": st.lists(sides, max_size=5)},
    optional={"id": st.integers(0, 2**63), "area": sides | st.none(), "iscrowd": st.sampled_from([0, 1, True, 2])},
)


@given(st.lists(objects_of_any_value, max_size=3), st.booleans())
def test_entries_are_the_same_together_one_by_one_and_as_plain_values(entries, plain):
    """A list without an invalid entry is decoded at once, one with an invalid entry is not."""

    def read(content: object) -> tuple:
        problems = []
        found = read_entries(parse_json(content), ANNOTATION_KINDS, "x", lambda *problem: problems.append(problem[0]))
        return found, problems

    more = [*entries, "not an object"]
    together, reported = read(json.dumps(entries).encode())
    one_by_one, also_reported = read(more if plain else json.dumps(more).encode())
    assert [*reported, "bad-entry"] == also_reported
    assert together == one_by_one


@pytest.mark.parametrize("content", [b"", b'{"images": [1, 2', b"{}", b'{"images": 1, "annotations": {}}'])
@pytest.mark.parametrize("file", [TRAIN, "train2017/_annotations.coco.json", "annotations/train2017.json"])
def test_an_unreadable_file_in_the_place_of_annotations_is_a_problem(coco_folder, content, file):
    (coco_folder / TRAIN).unlink()
    (coco_folder / file).write_bytes(content)
    assert find_source(coco_folder).splits == ("train2017", "val2017")
    result = check_dataset(coco_folder)
    assert result.exit_code == 2
    assert (file, "split unusable") in {(f.file, f.effect.value) for f in result.problems}


def test_an_unpaired_surrogate_can_be_printed(coco_folder):
    def change(content: dict) -> None:
        content["categories"][0]["name"] = content["images"][0]["file_name"] = "\ud800"

    edit_json(coco_folder / TRAIN, change)
    result = check_dataset(coco_folder)
    assert (r"train2017/\ud800", "missing-image") in {(f.file, f.kind) for f in result.problems}
    assert r"\ud800" in result.class_names
    assert check_report(result).encode()
