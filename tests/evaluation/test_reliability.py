"""Calibration error, its noise and the drawing threshold, worked out by hand or by brute force."""

import numpy as np
import pytest

from aploss.errors import DataError
from aploss.evaluation import (
    best_f1_threshold,
    equal_mass_edges,
    expected_calibration_error,
    expected_noise,
    reliability,
)


def test_calibration_error_worked_out_by_hand():
    probabilities = [0.05, 0.06, 0.07, 0.72, 0.78, 1.0]
    correct = [False, False, True, True, True, True]
    # bin 0: 3 of 6, claimed 0.06, true 1/3; bin 7: 2 of 6, claimed 0.75, true 1; bin 9: right
    expected = 3 / 6 * (1 / 3 - 0.06) + 2 / 6 * 0.25
    assert expected_calibration_error(probabilities, correct) == pytest.approx(expected)
    rows = reliability(probabilities, correct)
    assert [row.count for row in rows] == [3, 2, 1]
    assert [row.lower for row in rows] == pytest.approx([0, 0.7, 0.9])
    assert [row.upper for row in rows] == pytest.approx([0.1, 0.8, 1])


def test_probabilities_on_an_edge_belong_to_the_upper_bin_and_one_to_the_last():
    rows = reliability([0.0, 0.5, 1.0], [0, 0, 1], bins=2)
    assert [(row.lower, row.count) for row in rows] == [(0.0, 1), (0.5, 2)]


def test_no_detections_have_no_error():
    assert reliability([], []) == []
    assert expected_calibration_error([], []) == 0
    assert expected_noise([]) == 0
    assert equal_mass_edges([]).tolist() == [0, 1]


def test_equal_mass_bins_hold_as_many_each():
    probabilities = np.random.default_rng(0).random(1000) ** 8  # most are close to 0
    rows = reliability(probabilities, np.zeros(1000), equal_mass_edges(probabilities))
    assert [row.count for row in rows] == [100] * 10


def test_equal_probabilities_share_a_bin():
    assert equal_mass_edges([0.3] * 20).tolist() == [0, 0.3, 1]


def test_true_probabilities_show_the_expected_noise():
    generator = np.random.default_rng(0)
    probabilities = generator.uniform(0.3, 1.0, 400)
    errors = [
        expected_calibration_error(probabilities, generator.random(400) < probabilities)
        for _ in range(300)
    ]
    assert expected_noise(probabilities) == pytest.approx(np.mean(errors), rel=0.08)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("steps", [5, 1000])
def test_the_threshold_is_the_best_of_all(seed, steps):
    generator = np.random.default_rng(seed)
    scores = generator.integers(0, steps, 40) / steps
    correct = generator.random(40) < scores
    objects = int(correct.sum()) + 5
    best = best_f1_threshold(scores, correct, objects)
    tried = {}
    for threshold in np.unique(scores):
        drawn = scores >= threshold
        tried[threshold] = 2 * correct[drawn].sum() / (drawn.sum() + objects)
    drawn = scores >= best.threshold
    assert best.f1 == pytest.approx(max(tried.values()))
    assert best.f1 == pytest.approx(2 * correct[drawn].sum() / (drawn.sum() + objects))
    assert best.precision == pytest.approx(correct[drawn].mean())
    assert best.recall == pytest.approx(correct[drawn].sum() / objects)


def test_the_threshold_lies_between_two_scores():
    best = best_f1_threshold([0.8, 0.6, 0.2], [True, True, False], objects=2)
    assert best.threshold == pytest.approx(0.4)
    assert (best.f1, best.precision, best.recall) == (1, 1, 1)


@pytest.mark.parametrize("scores", [[], [0.3, 0.1]])
def test_when_nothing_is_right_the_threshold_is_a_half(scores):
    best = best_f1_threshold(scores, [False] * len(scores), objects=3)
    assert (best.threshold, best.f1) == (0.5, 0)


def test_more_right_detections_than_objects_are_refused():
    with pytest.raises(DataError, match="2 correct detections of 1"):
        best_f1_threshold([0.5, 0.4], [True, True], objects=1)


def test_lengths_that_differ_are_refused():
    with pytest.raises(DataError, match="outcomes"):
        reliability([0.5], [True, False])
