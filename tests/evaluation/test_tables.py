"""Ground truth and detections as tables: round trips, files, an error for every broken entry."""

import copy
import json

import numpy as np
import pytest
import torch

from aploss.errors import DataError
from aploss.evaluation import (
    DetectionTable,
    GroundTruth,
    as_detections,
    as_ground_truth,
    coco_metrics,
    read_detections,
    read_ground_truth,
)

GOOD = {
    "images": [{"id": 9}, {"id": 4}],
    "categories": [{"id": 7, "name": "dust"}, {"id": 2, "name": "cell"}],
    "annotations": [
        {"image_id": 9, "category_id": 2, "bbox": [1, 2, 3, 4], "area": 10.5, "iscrowd": 1},
        {"image_id": 4, "category_id": 7, "bbox": [0.5, 0, 2, 2.5], "difficult": 1},
        {"image_id": 4, "category_id": 7, "bbox": [0, 0, 1, 1], "area": None},
    ],
}


def changed(**annotation):
    document = copy.deepcopy(GOOD)
    document["annotations"][1].update(annotation)
    return document


def lacking(section, index, key):
    document = copy.deepcopy(GOOD)
    del document[section][index][key]
    return document


def test_arrays_follow_the_annotations():
    truth = GroundTruth.from_coco(GOOD)
    assert len(truth) == 3
    assert truth.images.tolist() == [4, 9]
    assert truth.categories == {2: "cell", 7: "dust"}
    assert list(truth.categories) == [2, 7]
    assert truth.boxes.tolist() == [[1, 2, 4, 6], [0.5, 0, 2.5, 2.5], [0, 0, 1, 1]]
    assert truth.areas.tolist() == [10.5, 5, 1]
    assert truth.crowd.tolist() == [True, False, False]
    assert truth.difficult.tolist() == [False, True, False]
    assert truth.counted.tolist() == [False, False, True]
    assert as_ground_truth(truth) is truth


def test_categories_without_a_name_or_with_the_same_one_stay_apart():
    document = {**GOOD, "categories": [{"id": 2, "name": "cell"}, {"id": 7, "name": "cell"}, {"id": 8}]}
    names = GroundTruth.from_coco(document).categories
    assert names == {2: "cell", 7: "cell (id 7)", 8: "category 8"}


BROKEN_TRUTH = {
    "not a dict": ([], "not a COCO dict"),
    "no images": ({"annotations": [], "categories": []}, "no 'images'"),
    "no annotations": ({"images": [], "categories": []}, "no 'annotations'"),
    "no categories": ({"images": [], "annotations": []}, "no 'categories'"),
    "images not a list": ({**GOOD, "images": {}}, "'images' is a dict, expected a list"),
    "an image without id": ({**GOOD, "images": [{"id": 4}, {}]}, "images[1] has no 'id'"),
    "the same image twice": ({**GOOD, "images": [{"id": 9}, {"id": 4}, {"id": 9}]}, "images[2] repeats id 9"),
    "the same category twice": ({**GOOD, "categories": [{"id": 2}, {"id": 2}]}, "categories[1] repeats id 2"),
    "unknown image": (changed(image_id=77), "annotations[1]: image_id 77 is not in"),
    "unknown category": (changed(category_id=77), "annotations[1]: category_id 77 is not in"),
    "no box": (lacking("annotations", 1, "bbox"), "annotations[1] has no 'bbox'"),
    "no image id": (lacking("annotations", 1, "image_id"), "annotations[1] has no 'image_id'"),
    "NaN area": (changed(area=float("nan")), "annotations[1]: 'area' is nan"),
    "text for an area": (changed(area="big"), "annotations[1]: 'area' is 'big'"),
    "negative width": (changed(bbox=[5, 5, -1, 2]), "annotations[1]: 'bbox' has a negative width"),
    "crowd that is no flag": (changed(iscrowd="yes"), "annotations[1]: 'iscrowd' is 'yes'"),
    "difficult that is no flag": (changed(difficult=3), "annotations[1]: 'difficult' is 3"),
    "a list for an annotation": (
        {**GOOD, "annotations": [GOOD["annotations"][0], []]},
        "annotations[1] is [], expected an object",
    ),
}


@pytest.mark.parametrize("case", BROKEN_TRUTH)
def test_broken_ground_truth_is_refused_in_one_line(case):
    document, message = BROKEN_TRUTH[case]
    with pytest.raises(DataError) as caught:
        GroundTruth.from_coco(document)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def row(**changes):
    return {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5, **changes}


def without(key):
    return {name: value for name, value in row().items() if name != key}


def test_results_come_back_unchanged_through_json(simulate):
    _, results = simulate(0)
    assert DetectionTable.from_results(json.loads(json.dumps(results))).to_results() == results


def test_corners_are_left_top_right_bottom():
    assert DetectionTable.from_results([row()]).boxes.tolist() == [[1, 2, 4, 6]]


def predictions(convert):
    return [
        {
            "boxes": convert(np.array([[0.1, 0.2, 10.3, 20.7]], dtype=np.float32)),
            "scores": convert(np.array([0.3], dtype=np.float32)),
            "labels": convert(np.array([2])),
        },
        {
            "boxes": convert(np.zeros((0, 4), dtype=np.float32)),
            "scores": convert(np.zeros(0, dtype=np.float32)),
            "labels": convert(np.zeros(0, dtype=np.int64)),
        },
        {
            "boxes": convert(np.array([[0, 0, 5, 5], [1, 1, 2, 2]], dtype=np.float32)),
            "scores": convert(np.array([0.9, 0.8], dtype=np.float32)),
            "labels": convert(np.array([0, 1])),
        },
    ]


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_predictions_of_a_detector_are_gathered(convert):
    table = DetectionTable.from_predictions([4, 9, 2], predictions(convert))
    assert table.image_ids.tolist() == [4, 2, 2]
    assert table.category_ids.tolist() == [3, 1, 2]  # label + 1
    assert table.scores.astype(np.float32).tolist() == np.float32([0.3, 0.9, 0.8]).tolist()
    boxes = np.concatenate([entry["boxes"] for entry in predictions(np.asarray)])
    assert np.array_equal(table.boxes, boxes.astype(np.float64))  # exactly, not approximately


def test_tensors_with_gradient_and_half_precision_are_read():
    half = [
        {
            "boxes": torch.tensor([[0, 0, 5, 5.0]], dtype=torch.bfloat16, requires_grad=True),
            "scores": torch.tensor([0.5], dtype=torch.float16),
            "labels": torch.tensor([0]),
        }
    ]
    assert DetectionTable.from_predictions([1], half).boxes.tolist() == [[0, 0, 5, 5]]


def test_labels_can_have_their_own_categories():
    table = DetectionTable.from_predictions([4, 9, 2], predictions(np.asarray), category_ids=[18, 44, 90])
    assert table.category_ids.tolist() == [90, 18, 44]


def test_no_predictions_make_an_empty_table():
    for table in (
        DetectionTable.from_predictions([], []),
        DetectionTable.from_predictions([1], predictions(np.asarray)[1:2]),
        DetectionTable.from_results([]),
    ):
        assert len(table) == 0
        assert table.boxes.shape == (0, 4)
        assert table.to_results() == []


def test_predictions_that_do_not_fit_together_are_refused():
    good = predictions(np.asarray)
    with pytest.raises(DataError, match="2 image ids for 3 predictions"):
        DetectionTable.from_predictions([1, 2], good)
    with pytest.raises(DataError, match="not finite"):
        DetectionTable.from_predictions([1], [{**good[0], "scores": np.array([np.nan])}])
    with pytest.raises(DataError, match="1 boxes, 1 scores, 2 labels"):
        DetectionTable.from_predictions([1], [{**good[0], "labels": np.array([0, 1])}])


BROKEN_DETECTION = {
    "no image_id": (without("image_id"), "detections[1] has no 'image_id'"),
    "no category_id": (without("category_id"), "detections[1] has no 'category_id'"),
    "no bbox": (without("bbox"), "detections[1] has no 'bbox'"),
    "no score": (without("score"), "detections[1] has no 'score'"),
    "list for an id": (row(image_id=["a.jpg"]), "'image_id' is ['a.jpg'], expected an integer or text"),
    "fraction for an id": (row(category_id=1.5), "'category_id' is 1.5, expected an integer"),
    "infinite id": (row(image_id=float("inf")), "'image_id' is inf, expected an integer"),
    "huge id": (row(image_id=2**70), "expected an integer"),
    "huge score": (row(score=10**400), "expected a finite number"),
    "NaN score": (row(score=float("nan")), "'score' is nan, expected a finite number"),
    "infinite score": (row(score=float("inf")), "'score' is inf, expected a finite number"),
    "text for a score": (row(score="0.5"), "'score' is '0.5', expected a finite number"),
    "null score": (row(score=None), "'score' is None, expected a finite number"),
    "list for a score": (row(score=[0.5]), "'score' is [0.5], expected a finite number"),
    "three numbers": (row(bbox=[1, 2, 3]), "'bbox' is [1, 2, 3], expected [x, y, width, height]"),
    "text in a box": (row(bbox=[1, 2, 3, "4"]), "expected [x, y, width, height]"),
    "a number for a box": (row(bbox=7), "'bbox' is 7, expected [x, y, width, height]"),
    "NaN in a box": (row(bbox=[1, 2, float("nan"), 4]), "expected four finite numbers"),
    "negative width": (row(bbox=[9, 2, -3, 4]), "negative width or height: [9, 2, -3, 4]"),
    "negative height": (row(bbox=[9, 2, 3, -4]), "negative width or height"),
    "not an object": ([1, 2], "detections[1] is [1, 2], expected an object with keys"),
    "text": ("row", "detections[1] is 'row', expected an object with keys"),
}


@pytest.mark.parametrize("case", BROKEN_DETECTION)
def test_a_broken_entry_is_named_in_one_line(case):
    entry, message = BROKEN_DETECTION[case]
    with pytest.raises(DataError) as caught:
        DetectionTable.from_results([row(), entry, row()])
    assert message in str(caught.value)
    assert "detections[1]" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_of_unusual_kinds_are_read():
    table = DetectionTable.from_results([row(image_id=3.0), row(score=2**70, bbox=[0, 0, 2**70, 1])])
    assert table.image_ids.tolist() == [3, 1]
    assert table.scores.tolist() == [0.5, 2.0**70]
    assert table.xywh[1].tolist() == [0, 0, 2.0**70, 1]


@pytest.mark.parametrize("document", [{"annotations": []}, "text", None])
def test_what_is_no_list_is_refused(document):
    with pytest.raises(DataError, match="expected a list of COCO results"):
        DetectionTable.from_results(document)


def test_detections_of_unknown_images_and_categories_are_refused(simulate):
    truth, results = simulate(1)
    for key in ("image_id", "category_id"):
        broken = [dict(entry) for entry in results]
        broken[5][key] = broken[7][key] = 999
        with pytest.raises(DataError, match=rf"detections\[5\]: {key} 999 .*and 1 more"):
            coco_metrics(truth, broken)


def test_scores_can_be_replaced_but_not_their_number(simulate):
    truth, results = simulate(2)
    table = as_detections(results, GroundTruth.from_coco(truth))
    assert table.with_scores(table.scores / 2).scores.tolist() == (table.scores / 2).tolist()
    with pytest.raises(DataError, match="scores for"):
        table.with_scores(table.scores[1:])


def test_files_are_read(tmp_path, simulate):
    truth, results = simulate(0)
    (tmp_path / "gt.json").write_text(json.dumps(truth))
    (tmp_path / "dets.json").write_text(json.dumps(results))
    assert len(read_ground_truth(tmp_path / "gt.json")) == len(truth["annotations"])
    assert len(read_detections(tmp_path / "dets.json")) == len(results)


CONTENTS = {
    "not there": (None, "no such file"),
    "empty": (b"", "not JSON"),
    "cut off": (b'[{"image_id": 1,', ("not JSON", "the ground truth is not")),
    "binary": (b"\xff\xfe\x00\x9c", "not JSON"),
    "too deep": (b'{"images": ' + b"[" * 100_000, ("not JSON", "the detections are not")),
    "the other kind": (b'"text"', "the "),
}


@pytest.mark.parametrize("read", [read_ground_truth, read_detections])
@pytest.mark.parametrize("case", CONTENTS)
def test_a_file_that_cannot_be_used_is_named(case, read, tmp_path):
    content, message = CONTENTS[case]
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path)
    messages = [message] if isinstance(message, str) else message
    assert str(caught.value).startswith(tuple(f"{path}: {one}" for one in messages))
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_detections(tmp_path)


def test_a_text_and_a_number_are_two_ids():
    truth = {"images": [{"id": "7"}, {"id": 7}], "categories": [{"id": "c"}, {"id": 1, "name": "cell"}]}
    objects = [{"image_id": "7", "category_id": "c", "bbox": [0, 0, 9, 9]}]
    table = GroundTruth.from_coco({**truth, "annotations": objects})
    assert list(table.categories.values()) == ["category 'c'", "cell"]
    assert (table.image_ids == table.images[0]).all()  # texts come before numbers
    found = {"category_id": 1, "bbox": [0, 0, 9, 9], "score": 0.5}
    with pytest.raises(DataError, match=r"detections\[1\]: image_id '8' is not in the annotations' list"):
        as_detections([{**found, "image_id": 7}, {**found, "image_id": "8"}], table)
    with pytest.raises(DataError, match=r"categories.1. repeats id 'c'"):
        GroundTruth.from_coco({**truth, "categories": [{"id": "c"}, {"id": "c"}], "annotations": objects})
