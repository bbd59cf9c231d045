"""Calibration: what it must keep, what it must gain, and how far scores can be believed."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hand_made import results_of, truth_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from aploss.errors import DataError
from aploss.evaluation import (
    Calibration,
    calibrate_detections,
    calibration_report,
    coco_metrics,
    expected_calibration_error,
    fit_calibration,
    match_detections,
    read_detections,
    voc_metrics,
)


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.floats(-80, 20), min_size=1, max_size=60), seed=st.integers(0, 2**32 - 1), slope=st.floats(-1, 3)
)
def test_neighbouring_float32_scores_stay_apart_and_in_order(logits, seed, slope):
    generator = np.random.default_rng(seed)
    scores = (1 / (1 + np.exp(-np.array(logits)))).astype(np.float32)
    correct = generator.random(len(scores)) < 1 / (1 + np.exp(-slope * np.array(logits) - 1))
    fitted = fit_calibration(scores, correct)
    calibration = Calibration.from_dict(json.loads(json.dumps(fitted.to_dict())))  # survives JSON exactly
    spread = np.exp2(generator.uniform(-140, 0, 200))  # from the smallest float32 up to 1
    single = np.concatenate([scores, spread, [0, 1]]).astype(np.float32)
    neighbours = [np.nextafter(single, np.float32(side)) for side in (0, 1)]  # the hardest to keep apart
    assert (np.diff(calibration(np.unique([single, *neighbours]))) > 0).all()
    probabilities = calibration(scores)
    assert (probabilities > 0).all()
    assert (probabilities < 1).all()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", [{}, {"score_steps": 40}, {"crowds": 0.2, "difficult": 0.2}])
def test_ap_is_identical_before_and_after(seed, options, simulate):
    truth, results = simulate(seed, **options)
    table = read_detections(results)
    calibration, _ = calibrate_detections(truth, table)
    after = replace(table, scores=calibration(table.scores))
    assert not np.array_equal(after.scores, table.scores)
    measured = [coco_metrics(truth, one).as_dict() for one in (table, after)]
    for row in (row for metrics in measured for row in metrics["per_class"].values()):
        del row["lrp_threshold"]  # a score
    assert measured[0] == measured[1]
    for year in (2007, 2012):
        assert voc_metrics(truth, after, year=year).as_dict() == (voc_metrics(truth, table, year=year).as_dict())


def test_the_map_is_centred_isotonic_regression_and_does_not_repeat_scores():
    generator = np.random.default_rng(0)
    scores = generator.random(400).astype(np.float32)
    correct = generator.random(400) < scores**2
    padded = np.append(scores, [scores.min(), scores.max()]).astype(float)
    blocks = IsotonicRegression().fit(padded, np.append(correct, [1, 0])).predict(padded).round(9)
    values = np.unique(blocks)
    centres = [padded[blocks == value].mean() for value in values]
    inside = np.sort(scores[(centres[0] < scores) & (scores < centres[-1])])
    calibration = fit_calibration(scores, correct)
    assert calibration(inside) == pytest.approx(np.interp(inside, centres, values), abs=1e-5)
    assert len(values) < 30 < 350 < len(np.unique(calibration(scores).round(4)))
    assert abs(calibration(scores).mean() - correct.mean()) < 0.01


@pytest.mark.parametrize("seed", range(2))
def test_probabilities_come_true_on_other_images(seed, simulate):
    # like a detector trained with a ranking loss: 100 detections an image, objects at about 0.15
    options = {"images": 150, "detections": 100, "objects": 4.0, "near": 0.1, "separation": 1.6}
    held_out_truth, held_out = simulate(seed + 10, **options)
    calibration, threshold = calibrate_detections(*simulate(seed, **options))
    report = calibration_report(held_out_truth, held_out, calibration, threshold)
    before, after = report["before"], report["after"]
    assert after["expected_calibration_error"] <= 0.05
    assert before["expected_calibration_error"] > 0.5
    assert after["all"]["expected_calibration_error"] <= 0.005
    json.dumps(report, allow_nan=False)


def test_the_report_counts_what_is_drawn():
    boxes = [(20 * place, 0, 10, 10) for place in range(4)]
    # two right, one wrong above 0.5; one right below
    results = results_of((boxes[0], 0.9), (boxes[1], 0.8), ((90, 0, 10, 10), 0.7), (boxes[2], 0.2))
    report = calibration_report(truth_of(*boxes), results, Calibration(x=[0, 1], y=[0, 1]), 0.5)
    # bins .7 to .9 hold one each: (|.9 - 1| + |.8 - 1| + |.7 - 0|) / 3
    assert report["after"]["expected_calibration_error"] == pytest.approx(1 / 3)
    assert report["before"] == report["after"]


def test_all_right_all_wrong_one_and_none():
    assert fit_calibration([0.2] * 9, [True] * 9)([0.2])[0] == pytest.approx(10 / 11, abs=1e-4)
    assert fit_calibration([0.2] * 9, [False] * 9)([0.2])[0] == pytest.approx(1 / 11, abs=1e-4)
    assert fit_calibration([0.2], [True])([0.2])[0] == pytest.approx(2 / 3, abs=1e-4)
    for nothing in ([], [0.0, 0.0]):
        identity = fit_calibration(nothing, [True] * len(nothing))
        assert identity([0.0, 0.3, 1.0]).tolist() == [0.0, 0.3, 1.0]


def test_detections_on_ignored_objects_are_not_learned_from(simulate):
    truth, results = simulate(1, difficult=0.5)
    matches = match_detections(truth, results)
    judged = [row for row, skip in zip(results, matches.ignored, strict=True) if not skip]
    assert matches.ignored.any()
    fitted, _ = calibrate_detections(truth, results)
    scores = np.array([row["score"] for row in judged])
    expected = fit_calibration(scores, matches.correct[~matches.ignored])
    assert (fitted.x.tolist(), fitted.y.tolist()) == (expected.x.tolist(), expected.y.tolist())


def test_without_detections_or_objects_there_is_still_a_calibration(simulate):
    truth, results = simulate(2)
    calibration, threshold = calibrate_detections(truth, [])
    assert calibration([0.4])[0] == 0.4
    assert threshold == 0.5
    empty = {**truth, "annotations": []}
    calibration, threshold = calibrate_detections(empty, results)
    assert calibration([1.0])[0] < 0.01
    assert calibration_report(empty, [], calibration, threshold)["after"]["bins"] == []


@pytest.mark.parametrize(
    "knots",
    [
        {"x": [0, 1]},
        {"x": [0, 1], "y": [0, "high"]},
        {"x": [0, 1], "y": [0, 0.5, 1]},
        {"x": [0, 0.5, 1], "y": [0, 0.5, 0.4]},
        {"x": [0, 0.5, 1], "y": [0, float("nan"), 1]},
        {"x": [0, 1], "y": [0, 2]},
        {"x": [0, 1], "y": [0, 1], "class_thresholds": [0.5, 1.5]},
        [1, 2],
    ],
)
def test_what_is_no_increasing_map_is_refused(knots):
    with pytest.raises(DataError):
        Calibration.from_dict(knots)


def test_calibration_error_worked_out_by_hand():
    probabilities = [0.05, 0.06, 0.07, 0.72, 0.78, 1.0]
    correct = [False, False, True, True, True, True]
    # bin 0: 3 of 6, claimed 0.06, true 1/3; bin 7: 2 of 6, claimed 0.75, true 1; bin 9: right
    expected = 3 / 6 * (1 / 3 - 0.06) + 2 / 6 * 0.25
    assert expected_calibration_error(probabilities, correct) == pytest.approx(expected)
    assert expected_calibration_error([], []) == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=30), st.integers(0, 5))
def test_the_threshold_has_the_best_f1_of_all(detections, missed):
    boxes = [(20 * place, 0, 10, 10) for place in range(len(detections) + missed)]
    found = [(box, score / 20) for box, (score, _) in zip(boxes, detections, strict=False)]
    is_object = [*(flag for _, flag in detections), *[True] * missed]
    truth = truth_of(*(box for box, flag in zip(boxes, is_object, strict=True) if flag))
    calibration, threshold = calibrate_detections(truth, results_of(*found))
    scores, correct = calibration([score for _, score in found]), np.array([flag for _, flag in detections], bool)

    def f1(lowest):
        return 2 * correct[scores >= lowest].sum() / ((scores >= lowest).sum() + sum(is_object))

    if not correct.any():
        assert threshold == 0.5
    else:
        assert f1(threshold) == pytest.approx(max(map(f1, scores)))
        assert threshold not in scores  # halfway between two scores


@pytest.mark.parametrize(
    "call",
    [
        lambda: fit_calibration([0.1, 0.2], [True]),
        lambda: expected_calibration_error([0.5], [True, False]),
        lambda: fit_calibration([float("nan")], [True]),
        lambda: Calibration(x=[0, 1], y=[0, 1])([1.1]),
    ],
    ids=["lengths of a fit", "lengths of bins", "NaN", "above one"],
)
def test_invalid_input_is_refused(call):
    with pytest.raises(DataError):
        call()
