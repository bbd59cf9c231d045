"""Ground truth and detections as tables: round trips, files, an error for every broken entry."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from aploss.errors import DataError
from aploss.evaluation import DetectionTable, coco_metrics, read_detections, read_ground_truth

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


def test_arrays_follow_the_annotations():
    truth = read_ground_truth(GOOD)
    assert len(truth) == 3
    assert truth.images.tolist() == [4, 9]
    assert truth.categories == {2: "cell", 7: "dust"}
    assert list(truth.categories) == [2, 7]
    assert truth.boxes.tolist() == [[1, 2, 4, 6], [0.5, 0, 2.5, 2.5], [0, 0, 1, 1]]
    assert truth.areas.tolist() == [10.5, 5, 1]
    assert truth.crowd.tolist() == [True, False, False]
    assert truth.difficult.tolist() == [False, True, False]
    assert truth.counted.tolist() == [False, False, True]


def test_categories_without_a_name_or_with_the_same_one_stay_apart():
    document = {**GOOD, "categories": [{"id": 2, "name": "cell"}, {"id": 7, "name": "cell"}, {"id": 8}]}
    names = read_ground_truth(document).categories
    assert names == {2: "cell", 7: "cell (id 7)", 8: "category 8"}


INVALID_TRUTH = {
    "not a dict": [],
    "no images": {"annotations": [], "categories": []},
    "images not a list": {**GOOD, "images": {}},
    "an image without id": {**GOOD, "images": [{"id": 4}, {}]},
    "a repeated image": {**GOOD, "images": [{"id": 9}, {"id": 4}, {"id": 9}]},
    "a repeated category": {**GOOD, "categories": [{"id": 2}, {"id": 2}]},
    "unknown image": changed(image_id=77),
    "unknown category": changed(category_id=77),
    "NaN area": changed(area=float("nan")),
    "negative width": changed(bbox=[5, 5, -1, 2]),
    "crowd that is not a flag": changed(iscrowd="yes"),
    "a list for an annotation": {**GOOD, "annotations": [GOOD["annotations"][0], []]},
}


@pytest.mark.parametrize("case", INVALID_TRUTH)
def test_invalid_ground_truth_is_refused_in_one_line(case):
    with pytest.raises(DataError) as caught:
        read_ground_truth(INVALID_TRUTH[case])
    assert "\n" not in str(caught.value)


def row(**changes):
    return {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5, **changes}


def without(key):
    return {name: value for name, value in row().items() if name != key}


def test_files_are_read_exactly(tmp_path, simulate):
    truth, results = simulate(0)
    (tmp_path / "gt.json").write_text(json.dumps(truth))
    (tmp_path / "dets.json").write_text(json.dumps(results))
    assert read_detections(tmp_path / "dets.json").to_results() == results
    assert read_ground_truth(tmp_path / "gt.json").xywh.tolist() == [one["bbox"] for one in truth["annotations"]]


def predictions(convert):
    """Of three images: one detection, none, two."""
    boxes = ([[0.1, 0.2, 10.3, 20.7]], np.zeros((0, 4)), [[0, 0, 5, 5], [1, 1, 2, 2]])
    return [
        {
            "boxes": convert(np.array(corners, dtype=np.float32)),
            "scores": convert(np.array(scores, dtype=np.float32)),
            "labels": convert(np.array(labels, dtype=np.int64)),
        }
        for corners, scores, labels in zip(boxes, ([0.3], [], [0.9, 0.8]), ([2], [], [0, 1]), strict=True)
    ]


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_predictions_of_a_detector_are_gathered(convert):
    table = DetectionTable.from_predictions([4, 9, 2], predictions(convert))
    assert table.image_ids.tolist() == [4, 2, 2]
    assert table.category_ids.tolist() == [3, 1, 2]  # label + 1
    assert table.scores.astype(np.float32).tolist() == np.float32([0.3, 0.9, 0.8]).tolist()
    boxes = np.concatenate([entry["boxes"] for entry in predictions(np.asarray)])
    assert np.array_equal(table.boxes, boxes.astype(np.float64))  # exactly, not approximately


def test_no_predictions_make_an_empty_table():
    for table in (
        DetectionTable.from_predictions([], []),
        DetectionTable.from_predictions([1], predictions(np.asarray)[1:2]),
        read_detections([]),
    ):
        assert len(table) == 0
        assert table.boxes.shape == (0, 4)
        assert table.to_results() == []


def test_predictions_that_do_not_fit_together_are_refused():
    good = predictions(np.asarray)
    with pytest.raises(DataError):
        DetectionTable.from_predictions([1, 2], good)
    with pytest.raises(DataError):
        DetectionTable.from_predictions([1], [{**good[0], "scores": np.array([np.nan])}])
    with pytest.raises(DataError):
        DetectionTable.from_predictions([1], [{**good[0], "labels": np.array([0, 1])}])


INVALID_DETECTIONS = {
    "no image_id": without("image_id"),
    "no score": without("score"),
    "text for an id": row(image_id="a.jpg"),
    "huge id": row(image_id=2**70),
    "NaN score": row(score=float("nan")),
    "three numbers": row(bbox=[1, 2, 3]),
    "NaN in a box": row(bbox=[1, 2, float("nan"), 4]),
    "negative height": row(bbox=[9, 2, 3, -4]),
    "not an object": [1, 2],
}


@pytest.mark.parametrize("case", INVALID_DETECTIONS)
def test_an_invalid_detection_is_named_by_its_index(case):
    with pytest.raises(DataError, match=r"^detections\[1\][^\n]*$"):
        read_detections([row(), INVALID_DETECTIONS[case], row()])


def test_detections_of_unknown_images_and_categories_are_refused(simulate):
    truth, results = simulate(1)
    for key in ("image_id", "category_id"):
        broken = [dict(entry) for entry in results]
        broken[5][key] = broken[7][key] = 999
        with pytest.raises(DataError, match=rf"detections\[5\]: {key} 999 .*and 1 more"):
            coco_metrics(truth, broken)


CONTENTS = {
    "missing": None,
    "empty": b"",
    "cut off": b'[{"image_id": 1,',
    "binary": b"\xff\xfe\x00\x9c",
    "too deep": b'{"images": ' + b"[" * 100_000,
    "another type": b'"text"',
    "a folder": Path,
}


@pytest.mark.parametrize("read", [read_ground_truth, read_detections])
@pytest.mark.parametrize("case", CONTENTS)
def test_the_error_about_an_invalid_file_begins_with_its_path(case, read, tmp_path):
    path = tmp_path / "some.json"
    if CONTENTS[case] is Path:
        path.mkdir()
    elif CONTENTS[case] is not None:
        path.write_bytes(CONTENTS[case])
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
