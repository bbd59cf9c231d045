"""Which detection found which object, and the curves that follow from it."""

import json

import numpy as np
import pytest
from hand_made import results_of, truth_of

from aploss.evaluation import coco_metrics, match_detections, precision_recall_curves

CASES = {
    "plain": {},
    "equal overlaps": {"grid": 20},
    "equal scores": {"score_steps": 5, "grid": 10},
    "crowds": {"crowds": 0.4, "grid": 10},
}


@pytest.mark.parametrize("iou", [0.5, 0.75])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_outcomes_equal_those_of_pycocotools(case, seed, iou, simulate, pycocotools_evaluation):
    truth, results = simulate(seed, **CASES[case])
    oracle = pycocotools_evaluation(truth, results)
    threshold = round((iou - 0.5) / 0.05)
    objects = np.full(len(results), -1)
    ignored = np.zeros(len(results), dtype=bool)
    for image in oracle.evalImgs:
        if image is None or image["aRng"] != [0, 1e10]:
            continue
        rows = np.array(image["dtIds"], dtype=int) - 1
        objects[rows] = image["dtMatches"][threshold].astype(int) - 1  # annotation ids from 1
        ignored[rows] = image["dtIgnore"][threshold]
    matches = match_detections(truth, results, iou)
    assert matches.objects.tolist() == objects.tolist()
    assert matches.ignored.tolist() == ignored.tolist()
    assert matches.correct.tolist() == ((objects >= 0) & ~ignored).tolist()
    assert set(np.flatnonzero(matches.found)) == set(objects[objects >= 0])


LEFT = (0, 0, 10, 10)


def test_duplicates_misses_and_background_are_told_apart():
    truth = truth_of(LEFT, (50, 50, 10, 10))
    matches = match_detections(truth, results_of((LEFT, 0.4), (LEFT, 0.9), ((90, 90, 5, 5), 0.7)))
    assert matches.correct.tolist() == [False, True, False]
    assert matches.overlaps.tolist() == [1, 1, 0]
    assert matches.found.tolist() == [True, False]
    assert matches.order.tolist() == [1, 2, 0]


def test_an_object_that_counts_is_preferred_to_a_nearer_difficult_one():
    truth = truth_of(LEFT, (2, 0, 10, 10), difficult=[0])
    matches = match_detections(truth, results_of((LEFT, 0.9)))  # IoU 1 and 8/12
    assert matches.objects.tolist() == [1]
    assert matches.correct.tolist() == [True]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("iou", [0.5, 0.75])
def test_the_mean_of_a_curve_is_the_ap_of_its_class(seed, iou, simulate):
    truth, results = simulate(seed, grid=10, score_steps=9, crowds=0.2, difficult=0.2)
    per_class = coco_metrics(truth, results, iou=iou).per_class
    curves = precision_recall_curves(truth, results, matches=match_detections(truth, results, iou))
    assert curves.keys() == {name for name, row in per_class.items() if row["objects"]}
    for name, curve in curves.items():
        assert curve.average_precision == pytest.approx(per_class[name]["AP"], abs=1e-12)


TRUTH = truth_of(LEFT, (20, 0, 10, 10))
RESULTS = results_of((LEFT, 0.9), ((80, 0, 10, 10), 0.8), ((80, 0, 10, 10), 0.7))


def test_a_curve_worked_out_by_hand():
    curve = precision_recall_curves(TRUTH, RESULTS)["cell"]
    # right, wrong, wrong of 2 objects: precision 1 up to recall 0.5, which score 0.9 reaches
    assert curve.precision.tolist() == [1.0] * 51 + [0.0] * 50
    assert curve.scores[:51].tolist() == [0.9] * 51
    assert np.isnan(curve.scores[51:]).all()
    assert curve.objects == 2
    document = json.loads(json.dumps(curve.as_dict()))
    assert (document["recall"][50], document["score"][-1]) == (0.5, None)
    assert document["average_precision"] == pytest.approx(51 / 101)


def test_without_detections_precision_is_zero():
    assert precision_recall_curves(TRUTH, [])["cell"].precision.tolist() == [0.0] * 101
