"""oLRP against a literal version of its definition: every score is tried as threshold, with a matching of its own."""

import json
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from hand_made import results_of, truth_of
from torch import float64, tensor
from torchvision.ops import box_convert, box_iou

from aploss.cli.main import main
from aploss.detectors import load
from aploss.errors import ConfigError
from aploss.evaluation import calibrate_detections, coco_metrics, match_detections, optimal_lrp
from aploss.training.run import train


def literal_lrp(objects, found, tau):
    """LRP, its parts (Oksuz et al., Eqs. 1 to 4) of the detections of one class, matched best first."""
    free, errors, false_positives = list(objects), [], 0
    for one in sorted(found, key=lambda row: -row["score"]):
        same_image = [other for other in free if other["image_id"] == one["image_id"]]
        boxes = box_convert(tensor([row["bbox"] for row in [one, *same_image]], dtype=float64), "xywh", "xyxy")
        overlaps = box_iou(boxes[:1], boxes[1:])[0].tolist()
        if overlaps and max(overlaps) >= tau:
            errors.append(1 - max(overlaps))
            free.remove(same_image[overlaps.index(max(overlaps))])
        else:
            false_positives += 1
    true, missed = len(errors), len(free)
    value = (sum(errors) / (1 - tau) + false_positives + missed) / (true + false_positives + missed)
    return value, sum(errors) / max(1, true), false_positives / max(1, len(found)), missed / len(objects)


def literal_optimum(truth, results, category, tau):
    objects = [row for row in truth["annotations"] if row["category_id"] == category]
    found = [row for row in results if row["category_id"] == category]
    thresholds = {row["score"] for row in found}
    tried = {score: literal_lrp(objects, [row for row in found if row["score"] >= score], tau) for score in thresholds}
    return min(tried.values()), tried


def assert_literal(truth, results, tau=0.5):
    measured = optimal_lrp(truth, results, matches=match_detections(truth, results, tau))
    for category in truth["categories"]:
        found = measured[category["name"]]
        if not any(row["category_id"] == category["id"] for row in truth["annotations"]):
            assert all(map(isnan, found))
            continue
        expected, tried = literal_optimum(truth, results, category["id"], tau)
        assert found.oLRP == pytest.approx(expected[0], abs=1e-9)
        if isnan(found.lrp_threshold):
            assert found.oLRP == 1
            continue
        kept = min(score for score in tried if score >= found.lrp_threshold)
        assert found[:4] == pytest.approx(tried[kept], abs=1e-9)
    return measured


@pytest.mark.parametrize("tau", [0.5, 0.75])
@pytest.mark.parametrize("options", [{}, {"score_steps": 6}, {"separation": 0.0, "near": 0.2}])
def test_random_detections(simulate, options, tau):
    measured = assert_literal(*simulate(3, **options), tau)
    assert any(0 < one.oLRP < 1 for one in measured.values())


def test_detections_of_a_trained_run_and_its_thresholds(config_in, tmp_path, no_page):
    folder = tmp_path / "run"
    train(config_in(folder, schedule={"length": 60}, validation={"every": 60}))
    truth, results = (
        json.loads((folder / f"evaluation/{name}.json").read_text()) for name in ("ground_truth", "detections")
    )
    measured = assert_literal(truth, results)
    metrics = json.loads((folder / "evaluation/metrics.json").read_text())
    assert metrics["oLRP"] == pytest.approx(np.nanmean([one.oLRP for one in measured.values()]))
    assert json.loads((folder / "summary.json").read_text())["oLRP"] == metrics["oLRP"]
    detector = load(folder)
    thresholds = detector.calibration.class_thresholds
    assert len(thresholds) == len(detector.class_names)
    images = sorted(Path(image["path"]) for image in truth["images"])
    everything, kept = (detector.predict(images, threshold=one) for one in (0.0, "lrp"))
    for all_found, found in zip(everything, kept, strict=True):
        above = all_found.scores >= tensor(thresholds)[all_found.labels]
        assert found.scores.tolist() == all_found.scores[above].tolist()
    assert sum(map(len, kept)) < sum(map(len, everything))
    assert main(["predict", str(folder), *map(str, images), "--out", str(tmp_path / "out"), "--threshold", "lrp"]) == 0
    assert len(json.loads((tmp_path / "out/detections.json").read_text())) == sum(map(len, kept))
    detector.calibration = None
    with pytest.raises(ConfigError):
        detector.predict(images, threshold="lrp")


def test_metrics_have_the_mean_and_the_threshold_of_each_class(simulate):
    truth, results = simulate(0, difficult=0.3, crowds=0.2)
    metrics, measured = coco_metrics(truth, results), optimal_lrp(truth, results)
    for part in ("oLRP", "oLRP_loc", "oLRP_fp", "oLRP_fn"):
        known = [getattr(one, part) for one in measured.values() if not isnan(getattr(one, part))]
        assert getattr(metrics, part) == pytest.approx(np.mean(known))
    assert metrics.as_dict()["per_class"]["class 3"]["lrp_threshold"] is None  # has no object
    assert metrics.per_class["class 0"]["lrp_threshold"] == measured["class 0"].lrp_threshold
    calibration, threshold = calibrate_detections(truth, results)
    expected = [calibration([one.lrp_threshold])[0] for one in measured.values() if not isnan(one.oLRP)]
    assert calibration.class_thresholds == pytest.approx((*expected, threshold))


def test_perfect_and_useless_detections():
    box = (0, 0, 10, 10)
    truth = truth_of(box)
    assert optimal_lrp(truth, results_of((box, 0.4)))["cell"] == (0, 0, 0, 0, 0.2)
    for useless in ([], results_of(((50, 50, 10, 10), 0.4))):
        assert optimal_lrp(truth, useless)["cell"].oLRP == 1
