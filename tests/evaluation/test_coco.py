"""COCO metrics against pycocotools and hand-worked cases; the metrics as JSON and as a table."""

import copy
import json
import math

import numpy as np
import pytest
from hand_made import results_of, truth_of

from aploss.errors import ConfigError
from aploss.evaluation import Metrics, coco_metrics, read_ground_truth, voc_metrics

SUMMARY = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR", "ARs", "ARm", "ARl")
CASES = {
    "plain": {},
    "one class": {"classes": 1},
    "equal overlaps": {"grid": 20},
    "equal scores": {"score_steps": 8},
    "all scores equal": {"score_steps": 1},
    "crowds": {"crowds": 0.3},
    "only crowds": {"crowds": 1.0},
    "everything at once": {"grid": 10, "crowds": 0.25, "score_steps": 10, "classes": 5},
    "empty images": {"objects": 0.4, "images": 25},
    "crowded images": {"objects": 25.0, "detections": 150, "images": 4, "classes": 2},
}


def same(ours: float, theirs: float) -> bool:
    """pycocotools writes -1 where we write NaN."""
    return abs(ours - theirs) <= 1e-10 if theirs > -1 else math.isnan(ours)


def assert_equal_to_pycocotools(truth, results, oracle, **options):
    metrics = coco_metrics(truth, results, **options)
    for name, value in zip(SUMMARY, oracle.stats, strict=True):
        assert same(getattr(metrics, name), value), name
    precision, recall = oracle.eval["precision"], oracle.eval["recall"]
    for index, values in enumerate(metrics.per_class.values()):
        assert same(values["AP"], mean(precision[:, :, index, 0, 2]))
        assert same(values["AP50"], mean(precision[0, :, index, 0, 2]))
        assert same(values["APs"], mean(precision[:, :, index, 1, 2]))
        assert same(values["AR10"], mean(recall[:, index, 0, 1]))


def mean(values: np.ndarray) -> float:
    defined = values[values > -1]
    return defined.mean() if defined.size else -1.0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_numbers_equal_those_of_pycocotools(case, seed, simulate, pycocotools_evaluation):
    truth, results = simulate(seed, **CASES[case])
    assert_equal_to_pycocotools(truth, results, pycocotools_evaluation(truth, results))


@pytest.mark.parametrize("limit", [1, 5, 10, 30])
def test_other_detection_limits_equal_pycocotools(limit, simulate, pycocotools_evaluation):
    truth, results = simulate(3, detections=60, classes=2, score_steps=12)
    oracle = pycocotools_evaluation(truth, results, (1, min(10, limit), limit))
    metrics = coco_metrics(truth, results, max_detections=limit)
    assert same(metrics.AP, mean(oracle.eval["precision"][:, :, :, 0, 2]))
    assert same(metrics.AR1, mean(oracle.eval["recall"][:, :, 0, 0]))
    assert same(metrics.AR10, mean(oracle.eval["recall"][:, :, 0, 1]))
    assert same(metrics.AR, mean(oracle.eval["recall"][:, :, 0, 2]))


def test_one_iou_equals_pycocotools_at_that_threshold(simulate, pycocotools_evaluation):
    truth, results = simulate(4)
    oracle = pycocotools_evaluation(truth, results)
    metrics = coco_metrics(truth, results, iou=0.6)
    assert same(metrics.AP, mean(oracle.eval["precision"][2, :, :, 0, 2]))
    assert same(metrics.AP50, oracle.stats[1])
    assert same(metrics.AP75, oracle.stats[2])
    assert metrics.iou == "0.60"


def test_evaluation_is_silent_repeatable_and_leaves_its_input_unchanged(simulate, capfd):
    truth, results = simulate(6, crowds=0.2, difficult=0.2)
    before = copy.deepcopy((truth, results))
    arrays = read_ground_truth(truth)
    expected = coco_metrics(truth, results).as_dict()
    assert coco_metrics(arrays, results[::2]).as_dict() != expected
    assert coco_metrics(arrays, results).as_dict() == expected
    assert (truth, results) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("images", [[], [{"id": 1}, {"id": 2}]])
def test_ground_truth_without_objects_has_no_value(images):
    metrics = coco_metrics({**truth_of(), "images": images}, [])
    assert math.isnan(metrics.AP)
    assert metrics.objects == 0


def test_a_difficult_object_is_ignored_once():
    first, difficult = (0, 0, 10, 10), (100, 0, 10, 10)
    truth = truth_of(first, difficult, difficult=[1])
    # the difficult object costs no recall when missed ...
    assert pytest.approx(1) == coco_metrics(truth, results_of((first, 0.9))).AP50
    # ... and no precision when found: ranking (ignored, right) has AP 1
    assert pytest.approx(1) == coco_metrics(truth, results_of((difficult, 0.95), (first, 0.9))).AP50
    # found twice, the second is wrong: ranking (ignored, wrong, right) has precision 1/2
    twice = results_of((difficult, 0.95), (difficult, 0.94), (first, 0.9))
    assert pytest.approx(1 / 2) == coco_metrics(truth, twice).AP50
    assert coco_metrics(truth, twice).objects == 1


@pytest.mark.parametrize(
    ("measure", "options"),
    [
        (coco_metrics, {"iou": 0.0}),
        (coco_metrics, {"iou": 1.5}),
        (coco_metrics, {"max_detections": 0}),
        (voc_metrics, {"iou": 0.0}),
        (voc_metrics, {"year": 1999}),
    ],
)
def test_settings_out_of_range_are_refused(measure, options):
    with pytest.raises(ConfigError):
        measure(truth_of((0, 0, 10, 10)), [], **options)


def test_json_has_null_for_undefined_values(simulate):
    document = json.loads(json.dumps(voc_metrics(*simulate(0)).as_dict(), allow_nan=False))
    assert document["APs"] is None
    assert document["per_class"]["class 3"]["AP"] is None
    assert 0 < document["AP"] < 1
    assert document["metric"] == "voc12"


def test_the_table_has_aligned_rows_for_classes_and_mean(simulate):
    metrics = coco_metrics(*simulate(1))
    lines = metrics.table().splitlines()
    assert len(lines) == 2 + 4 + 2  # header, ruler, classes, ruler, mean
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["class", "objects", "detections", *SUMMARY[:6], "oLRP", "AR"]
    assert lines[-1].split()[3] == f"{metrics.AP:.3f}"
    assert lines[5].split()[4:] == ["-"] * 8  # the class without objects
    # undefined columns are omitted
    assert voc_metrics(*simulate(2)).table().splitlines()[0].split()[3:] == ["AP", "AP50", "AP75"]
    empty = Metrics(metric="coco", iou="0.50:0.95", images=0, objects=0, detections=0)
    assert empty.table().splitlines()[-1].split() == ["mean", "0", "0"]
