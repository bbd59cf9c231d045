"""Means, deviations and intervals, against scipy and numbers worked out by hand."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from aploss.experiments.statistics import known_values, paired_difference, spread


def test_mean_and_deviation_by_hand() -> None:
    found = spread([0.70, 0.72, 0.77])
    # mean 2.19 / 3 = 0.73; squares 0.0009 + 0.0001 + 0.0016 = 0.0026; sqrt(0.0026 / 2)
    assert found.mean == pytest.approx(0.73)
    assert found.deviation == pytest.approx(math.sqrt(0.0013))
    assert found.count == 3


def test_unknown_values_do_not_count() -> None:
    assert known_values([None, 0.5, math.nan]) == [0.5]
    assert spread([None, 0.5, math.nan]).count == 1
    assert math.isnan(spread([0.5]).deviation)
    assert math.isnan(spread([]).mean)


def test_interval_by_hand() -> None:
    # differences 0.02, 0.03, 0.04: mean 0.03, deviation 0.01, t(0.975, 2) = 4.302653
    found = paired_difference([0.72, 0.75, 0.74], [0.70, 0.72, 0.70])
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert found.mean == pytest.approx(0.03)
    assert found.low == pytest.approx(0.03 - half, abs=1e-8)
    assert found.high == pytest.approx(0.03 + half, abs=1e-8)
    assert found.low > 0


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=8), st.sampled_from([0.8, 0.95, 0.99])
)
def test_interval_is_that_of_scipys_paired_test(pairs: list[tuple[float, float]], confidence: float) -> None:
    first, second = (np.array(values) for values in zip(*pairs, strict=True))
    found = paired_difference(first.tolist(), second.tolist(), confidence=confidence)
    if np.ptp(first - second) < 1e-9:
        assert found.low == pytest.approx(found.high, abs=1e-6)
        return
    expected = scipy.stats.ttest_rel(first, second).confidence_interval(confidence)
    assert found.low == pytest.approx(expected.low, abs=1e-9)
    assert found.high == pytest.approx(expected.high, abs=1e-9)


def test_pairs_count_where_both_are_known() -> None:
    found = paired_difference([0.5, None, 0.9], [0.4, 0.3, math.nan])
    assert found.values == pytest.approx((0.1,))
    assert math.isnan(found.low)


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_difference([0.1], [0.1, 0.2])
