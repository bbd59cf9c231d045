"""VOC metrics against hand-worked cases and the development kit's procedure written out slowly."""

import math

import numpy as np
import pytest
from hand_made import results_of, truth_of

from aploss.evaluation import match_voc, voc_metrics

CASES = {
    "plain": {},
    "equal overlaps": {"grid": 20},
    "equal scores": {"score_steps": 6, "grid": 10},
    "all scores equal": {"score_steps": 1},
    "difficult": {"difficult": 0.4, "grid": 10},
    "all difficult": {"difficult": 1.0},
    "empty images": {"objects": 0.4, "images": 25},
    "crowded images": {"objects": 20.0, "detections": 60, "images": 4, "classes": 2},
}


def devkit_overlap(first, second) -> float:
    """Of two boxes of inclusive pixels, counted from 1, with the kit's "+1"."""
    width = min(first[2], second[2]) - max(first[0], second[0]) + 1
    height = min(first[3], second[3]) - max(first[1], second[1]) + 1
    if width <= 0 or height <= 0:
        return 0.0
    area = (first[2] - first[0] + 1) * (first[3] - first[1] + 1)
    other = (second[2] - second[0] + 1) * (second[3] - second[1] + 1)
    return width * height / (area + other - width * height)


def devkit_box(bbox):
    """x, y, width, height from 0 → first and last pixel counted from 1."""
    left, top, width, height = bbox
    return [left + 1, top + 1, left + width, top + height]


def devkit_recall_precision(truth, results, category, iou):
    """The kit's loop: best score first, the object of largest overlap, one detection each."""
    objects = [one for one in truth["annotations"] if one["category_id"] == category]
    positives = sum(not one["difficult"] for one in objects)
    used = [False] * len(objects)
    chosen = [row for row in results if row["category_id"] == category]
    true, false = [], []
    for row in sorted(chosen, key=lambda row: -row["score"]):  # sorted() keeps the order of ties
        largest, nearest = -math.inf, None
        for index, one in enumerate(objects):
            if one["image_id"] == row["image_id"]:
                overlap = devkit_overlap(devkit_box(row["bbox"]), devkit_box(one["bbox"]))
                if overlap > largest:
                    largest, nearest = overlap, index
        hit = miss = 0
        if largest >= iou:
            if not objects[nearest]["difficult"]:
                if not used[nearest]:
                    hit, used[nearest] = 1, True
                else:
                    miss = 1
        else:
            miss = 1
        true.append(hit)
        false.append(miss)
    recall, precision, right, wrong = [], [], 0, 0
    for hit, miss in zip(true, false, strict=True):
        right, wrong = right + hit, wrong + miss
        if hit or miss:  # before the first of either the kit's precision is 0 / 0
            recall.append((right, positives))
            precision.append(right / (right + wrong))
    return recall, precision, positives


def devkit_average_precision(recall, precision, positives, year):
    if positives == 0:
        return math.nan
    if year == 2007:
        total = 0.0
        for step in range(11):
            reached = [value for (right, of), value in zip(recall, precision, strict=True) if 10 * right >= step * of]
            total += max(reached, default=0.0) / 11
        return total
    recalls = [0.0, *(right / of for right, of in recall), 1.0]
    precisions = [0.0, *precision, 0.0]
    for index in range(len(precisions) - 2, -1, -1):
        precisions[index] = max(precisions[index], precisions[index + 1])
    return sum(
        (recalls[index] - recalls[index - 1]) * precisions[index]
        for index in range(1, len(recalls))
        if recalls[index] != recalls[index - 1]
    )


@pytest.mark.parametrize("year", [2007, 2012])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_numbers_equal_the_kits_procedure(year, case, seed, simulate):
    truth, results = simulate(seed, **CASES[case])
    for iou in (0.5, 0.7):
        metrics = voc_metrics(truth, results, year=year, iou=iou)
        expected = {
            category["name"]: devkit_average_precision(
                *devkit_recall_precision(truth, results, category["id"], iou), year
            )
            for category in truth["categories"]
        }
        for name, value in expected.items():
            assert metrics.per_class[name]["AP"] == pytest.approx(value, abs=1e-12, nan_ok=True)
        defined = [value for value in expected.values() if not math.isnan(value)]
        mean = np.mean(defined) if defined else math.nan
        assert pytest.approx(mean, abs=1e-12, nan_ok=True) == metrics.AP


def test_recall_that_is_exactly_a_step_reaches_it():
    truth = truth_of(*((20 * index, 0, 10, 10) for index in range(10)))
    results = results_of(*(((20 * index, 0, 10, 10), 0.9) for index in range(3)))
    # recall 3 of 10 reaches 0, .1, .2 and .3
    assert pytest.approx(4 / 11, abs=1e-12) == voc_metrics(truth, results, year=2007).AP


def test_a_detection_is_compared_with_its_nearest_object_alone():
    # the second detection overlaps the first object by 9/11 and the free one by 8/12 = 2/3:
    # COCO gives it the free one, VOC calls it a duplicate
    truth = truth_of((0, 0, 10, 10), (3, 0, 10, 10))
    results = results_of(((0, 0, 10, 10), 0.9), ((1, 0, 10, 10), 0.8))
    matches = match_voc(truth, results)
    assert matches.correct.tolist() == [True, False]
    assert matches.overlaps == pytest.approx([1, 9 / 11])
    assert pytest.approx(1 / 2, abs=1e-12) == voc_metrics(truth, results).AP


def test_ap_at_other_ious_is_given_too(simulate):
    truth, results = simulate(1)
    metrics = voc_metrics(truth, results, iou=0.7)
    assert metrics.AP50 == voc_metrics(truth, results, iou=0.5).AP
    assert metrics.AP75 == voc_metrics(truth, results, iou=0.75).AP
    assert metrics.AP50 > metrics.AP > metrics.AP75
    assert math.isnan(metrics.APs)
