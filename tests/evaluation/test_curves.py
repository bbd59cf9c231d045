"""Precision-recall curves against AP and hand-worked points."""

import json

import numpy as np
import pytest

from aploss.evaluation import (
    coco_metrics,
    curves_as_dict,
    match_voc,
    precision_recall_curves,
)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("iou", [0.5, 0.75])
def test_the_mean_of_a_curve_is_the_ap_of_its_class(seed, iou, simulate):
    truth, results = simulate(seed, grid=10, score_steps=9, crowds=0.2, difficult=0.2)
    per_class = coco_metrics(truth, results, iou=iou).per_class
    curves = precision_recall_curves(truth, results, iou=iou)
    assert curves.keys() == {name for name, row in per_class.items() if row["objects"]}
    for name, curve in curves.items():
        assert curve.average_precision == pytest.approx(per_class[name]["AP"], abs=1e-12)


TRUTH = {
    "images": [{"id": 1}],
    "categories": [{"id": 1, "name": "cell"}, {"id": 2, "name": "dust"}],
    "annotations": [
        {"image_id": 1, "category_id": 1, "bbox": [20 * place, 0, 10, 10]} for place in range(2)
    ],
}
RESULTS = [
    {"image_id": 1, "category_id": 1, "bbox": [left, 0, 10, 10], "score": score}
    for left, score in ((0, 0.9), (80, 0.8), (80, 0.7))
]


def test_a_curve_worked_out_by_hand():
    curve = precision_recall_curves(TRUTH, RESULTS)["cell"]
    # right, wrong, wrong of 2 objects: precision 1 up to recall 0.5, which score 0.9 reaches
    assert curve.precision.tolist() == [1.0] * 51 + [0.0] * 50
    assert curve.scores[:51].tolist() == [0.9] * 51
    assert np.isnan(curve.scores[51:]).all()
    assert curve.objects == 2


def test_without_detections_precision_is_zero_and_a_class_without_objects_has_no_curve():
    curves = precision_recall_curves(TRUTH, [])
    assert list(curves) == ["cell"]
    assert curves["cell"].precision.tolist() == [0.0] * 101


def test_curves_of_voc_matching_can_be_had():
    # the second detection overlaps the taken object by 9/11 and the free one by 8/12
    truth = {**TRUTH, "annotations": [
        {"image_id": 1, "category_id": 1, "bbox": [left, 0, 10, 10]} for left in (0, 3)
    ]}  # fmt: skip
    results = [{**RESULTS[0], "bbox": [left, 0, 10, 10]} for left in (0, 1)]
    coco = precision_recall_curves(truth, results)["cell"]
    voc = precision_recall_curves(truth, results, matches=match_voc(truth, results))["cell"]
    assert coco.average_precision == 1
    assert voc.average_precision == pytest.approx(51 / 101)  # recall 0.5 is reached, no more


def test_curves_are_plain_json():
    document = json.loads(json.dumps(curves_as_dict(precision_recall_curves(TRUTH, RESULTS))))
    assert document["cell"]["recall"][50] == 0.5
    assert document["cell"]["score"][-1] is None
    assert document["cell"]["average_precision"] == pytest.approx(51 / 101)
