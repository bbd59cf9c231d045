"""The page and table of a comparison, means, deviations and intervals, against scipy and numbers worked by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from aploss.reports.comparison import (
    Comparison,
    Difference,
    Entry,
    TrainingCurve,
    comparison_markdown,
    comparison_table,
    curve_plot,
    mean_and_band,
    paired_difference,
    write_comparison_report,
)


def test_the_table_has_means_deviations_and_the_paper_beside_them() -> None:
    table = comparison_table(
        Comparison(
            title="T",
            entries=[
                # mean 0.72, deviation sqrt(((-0.02)^2 + 0 + 0.02^2) / 2) = 0.02
                Entry(name="ap", values={"AP": [0.70, 0.72, 0.74]}, paper={"AP": 0.586},
                      minutes=[1.0, 2.0, 3.0]),
                Entry(name="focal", values={"AP": [0.5]}),
            ],
            metrics=("AP",),
        )
    )  # fmt: skip
    assert table.markdown().splitlines() == [
        "| loss | AP | AP, paper | seeds | minutes |",
        "|:---|---:|---:|---:|---:|",
        "| AP-loss | 72.0 ± 2.0 | 58.6 | 3 | 2.0 |",
        "| Focal loss | 50.0 | \u2013 | 1 | \u2013 |",
    ]


def test_only_a_row_that_the_intervals_put_first_is_bold() -> None:
    sharp, wide = [0.50, 0.51, 0.52], [0.30, 0.51, 0.70]
    for first, bold in ((sharp, [True, False]), (wide, [False, False])):
        entries = [Entry(name="ap", values={"AP": first}), Entry(name="focal", values={"AP": [0.40, 0.41, 0.42]})]
        table = comparison_table(Comparison(title="T", entries=entries, metrics=("AP",)))
        assert [row[1].strong for row in table.rows] == bold


def test_a_row_without_numbers_is_shown_as_dashes() -> None:
    comparison = Comparison(
        title="T",
        entries=[Entry(name="ap", values={"AP": []}), Entry(name="auc", values={"AP": [np.nan]})],
        metrics=("AP", "AP50"),
    )
    assert comparison_table(comparison).markdown().count("\u2013") == 4


def test_page_and_table_are_written(comparison: Comparison, tmp_path: Path) -> None:
    page = write_comparison_report(comparison, tmp_path / "table2")
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "table.md", "table.tex"]
    text = page.read_text(encoding="utf-8")
    table = (page.parent / "table.md").read_text()
    for expected in (comparison.command, "AP-loss \N{MINUS SIGN} Focal loss", "does not hold", "PASCAL VOC 2007 test"):
        assert expected in text
        assert expected in table
    assert f"| AP-loss \N{MINUS SIGN} Focal loss | AP | {100 * comparison.differences[1].mean:+.1f} |" in table
    assert "- commit: 0123abc" in table


def test_a_single_validation_of_each_run_draws_no_empty_curves(tmp_path: Path) -> None:
    curves = [TrainingCurve(steps=[400], values=[0.5], minutes=[minutes]) for minutes in (1.5, 2.0)]
    entries = [Entry(name="ap", values={"AP": [0.5, 0.5]}, curves=curves)]
    assert (
        "Training curves" not in write_comparison_report(Comparison(title="T", entries=entries), tmp_path).read_text()
    )


def test_a_difference_of_one_seed_has_no_interval(tmp_path: Path) -> None:
    one = Difference(name="ap", baseline="focal", values=[0.02], mean=0.02, low=math.nan, high=math.nan)
    entry = Entry(name="ap", values={"AP": [0.5, None]})
    comparison = Comparison(title="T", entries=[entry], differences=[one])
    assert "| +2.0 | \u2013 | 1 |" in comparison_markdown(comparison)
    assert "Focal loss" in write_comparison_report(comparison, tmp_path).read_text()


def test_a_row_without_curves_leaves_the_colours_of_the_others_as_they_are() -> None:
    curve = TrainingCurve(steps=[1, 2], values=[0.1, 0.2])
    entries = [Entry(name=f"delta {k}", values={}, curves=[curve] if k else []) for k in range(2)]
    svg = curve_plot(entries)
    assert comparison_table(Comparison(title="T", entries=entries)).rows[1][0].colour in svg


def test_bands_are_means_and_deviations_where_all_seeds_are_known() -> None:
    x, mean, deviation = mean_and_band([([0, 2, 4], [0.0, 2.0, 4.0]), ([1, 3, 5], [3.0, 5.0, 7.0]), ([], [])])
    np.testing.assert_array_equal(x, [1, 2, 3, 4])
    np.testing.assert_allclose(mean, [2, 3, 4, 5])  # of x and x + 2
    np.testing.assert_allclose(deviation, np.std([0, 2], ddof=1))


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
