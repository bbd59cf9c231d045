"""Matching against pycocotools, and hand-worked cases."""

import numpy as np
import pytest

from aploss.evaluation import match_detections

CASES = {
    "plain": {},
    "equal overlaps": {"grid": 20},
    "equal scores": {"score_steps": 5, "grid": 10},
    "crowds": {"crowds": 0.4, "grid": 10},
}


@pytest.mark.parametrize("iou", [0.5, 0.75])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
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


def truth_of(*boxes, **flags):
    return {
        "images": [{"id": 1}, {"id": 2}],
        "categories": [{"id": 1, "name": "cell"}, {"id": 2, "name": "dust"}],
        "annotations": [
            {
                "image_id": 1,
                "category_id": 1,
                "bbox": list(box),
                **{name: int(index in chosen) for name, chosen in flags.items()},
            }
            for index, box in enumerate(boxes)
        ],
    }


def found(*rows, **changes):
    return [
        {"image_id": 1, "category_id": 1, "bbox": list(box), "score": score, **changes}
        for box, score in rows
    ]


LEFT, RIGHT = (0, 0, 10, 10), (3, 0, 10, 10)


def test_a_detection_whose_best_object_is_taken_gets_the_next_best():
    # the second overlaps the first object by 9/11 and the free one by 8/12
    matches = match_detections(truth_of(LEFT, RIGHT), found((LEFT, 0.9), ((1, 0, 10, 10), 0.8)))
    assert matches.objects.tolist() == [0, 1]
    assert matches.overlaps == pytest.approx([1, 8 / 12])


def test_duplicates_misses_and_background_are_told_apart():
    truth = truth_of(LEFT, (50, 50, 10, 10))
    matches = match_detections(truth, found((LEFT, 0.4), (LEFT, 0.9), ((90, 90, 5, 5), 0.7)))
    assert matches.correct.tolist() == [False, True, False]
    assert matches.wrong.tolist() == [True, False, True]
    assert matches.overlaps.tolist() == [1, 1, 0]
    assert matches.missed.tolist() == [False, True]
    assert matches.order.tolist() == [1, 2, 0]


@pytest.mark.parametrize("changes", [{"image_id": 2}, {"category_id": 2}])
def test_another_image_or_class_does_not_match(changes):
    matches = match_detections(truth_of(LEFT), found((LEFT, 0.9), **changes))
    assert matches.wrong.tolist() == [True]
    assert matches.overlaps.tolist() == [0]


def test_difficult_objects_are_ignored_and_not_missed():
    matches = match_detections(truth_of(LEFT, difficult=[0]), found((LEFT, 0.9), (LEFT, 0.8)))
    assert matches.ignored.tolist() == [True, False]
    assert matches.missed.tolist() == [False]


def test_an_object_that_counts_is_preferred_to_a_nearer_difficult_one():
    truth = truth_of(LEFT, (2, 0, 10, 10), difficult=[0])
    matches = match_detections(truth, found((LEFT, 0.9)))  # IoU 1 and 8/12
    assert matches.objects.tolist() == [1]
    assert matches.correct.tolist() == [True]


def test_a_crowd_ignores_every_detection_inside_it():
    truth = truth_of((0, 0, 100, 100), iscrowd=[0])
    matches = match_detections(truth, found((LEFT, 0.9), (RIGHT, 0.8)))
    assert matches.ignored.tolist() == [True, True]


@pytest.mark.parametrize("boxes", [(), (LEFT,)])
def test_nothing_found_and_nothing_to_find(boxes):
    matches = match_detections(truth_of(*boxes), [])
    assert matches.correct.shape == (0,)
    assert matches.missed.sum() == len(boxes)
    empty = match_detections(truth_of(), found((LEFT, 0.9)))
    assert empty.wrong.tolist() == [True]
