"""The page and table of a comparison, against means and deviations computed by hand."""

import dataclasses
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from aploss.reports.comparison import (
    Comparison,
    Difference,
    Entry,
    TrainingCurve,
    comparison_markdown,
    comparison_table,
    curve_plot,
    difference_plot,
    mean_and_band,
    spread_plot,
    write_comparison_report,
)
from aploss.reports.page import Section, Text


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
        "| AP-loss | **72.0 ± 2.0** | 58.6 | 3 | 2.0 |",
        "| Focal loss | 50.0 | \u2013 | 1 | \u2013 |",
    ]


def test_values_in_percent_are_refused() -> None:
    with pytest.raises(ValueError, match="ap: values are between 0 and 1, got 58"):
        Entry(name="ap", values={}, paper={"AP": 58.6})


def test_a_row_without_numbers_is_shown_as_dashes() -> None:
    comparison = Comparison(
        title="T",
        entries=[Entry(name="ap", values={"AP": []}), Entry(name="auc", values={"AP": [np.nan]})],
        metrics=("AP", "AP50"),
    )
    assert comparison_table(comparison).markdown().count("\u2013") == 4


def test_page_and_table_are_written(comparison: Comparison, tmp_path: Path) -> None:
    page = write_comparison_report(comparison, tmp_path / "table2")
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "table.md"]
    text = page.read_text(encoding="utf-8")
    for expected in (
        comparison.command, "AP-loss \N{MINUS SIGN} Focal loss", "does not hold", "0123abc",
        "PASCAL VOC 2007 test", "AP against time", "95% confidence interval",
    ):  # fmt: skip
        assert expected in text, expected
    assert (page.parent / "table.md").read_text() == comparison_markdown(comparison)


def test_the_document_for_readers_has_table_differences_and_command(comparison: Comparison) -> None:
    text = comparison_markdown(comparison)
    one = comparison.differences[1]
    assert f"| AP-loss \N{MINUS SIGN} Focal loss | AP | {100 * one.mean:+.1f} |" in text
    assert f"```\n{comparison.command}\n```" in text
    assert "- does not hold: AUC-loss is last" in text
    assert "- commit: 0123abc" in text


def test_a_comparison_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    page = write_comparison_report(Comparison(title="Empty"), tmp_path)
    assert "Nothing was recorded" in page.read_text()


def test_one_seed_has_no_spread_and_more_sections_follow(comparison: Comparison, tmp_path: Path) -> None:
    single = [
        dataclasses.replace(
            entry, values={key: values[:1] for key, values in entry.values.items()}, curves=entry.curves[:1]
        )
        for entry in comparison.entries
    ]
    one = dataclasses.replace(
        comparison, entries=single, differences=(), sections=[Section("Pictures", [Text("Side.")])]
    )
    text = write_comparison_report(one, tmp_path).read_text()
    assert "Spread over seeds" not in text
    assert text.index('id="while-training"') < text.index('id="pictures"')
    assert text.index('id="pictures"') < text.index('id="how-it-was-made"')


def test_a_difference_is_named_by_its_losses() -> None:
    one = Difference(name="ap", baseline="batch size 1", values=[], mean=0, low=0, high=0)
    assert one.label == "AP-loss \N{MINUS SIGN} batch size 1"


def test_a_difference_of_one_seed_has_no_interval(tmp_path: Path) -> None:
    one = Difference(name="ap", baseline="focal", values=[0.02], mean=0.02, low=math.nan, high=math.nan)
    assert not one.is_clear
    entry = Entry(name="ap", values={"AP": [0.5, None]})
    comparison = Comparison(title="T", entries=[entry], differences=[one])
    assert "| +2.0 | \u2013 | 1 |" in comparison_markdown(comparison)
    assert "Paired differences" not in write_comparison_report(comparison, tmp_path).read_text()


@pytest.mark.parametrize(("low", "high", "clear"), [(0.1, 0.2, True), (-0.1, 0.2, False)])
def test_a_difference_is_clear_when_zero_is_outside(low: float, high: float, clear: bool) -> None:
    one = Difference(name="a", baseline="b", values=[0.1, 0.2], mean=0.1, low=low, high=high)
    assert one.is_clear == clear


PLOTS = {
    "steps": lambda comparison: curve_plot(comparison.entries),
    "minutes": lambda comparison: curve_plot(comparison.entries, against="minutes"),
    "spread": lambda comparison: spread_plot(comparison.entries, "AP50"),
    "differences": lambda comparison: difference_plot(comparison.differences),
}


@pytest.mark.parametrize("name", PLOTS)
def test_every_plot_is_one_well_formed_file_and_the_same_each_time(comparison: Comparison, name: str) -> None:
    svg = PLOTS[name](comparison)
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert "AP-loss" in svg
    assert PLOTS[name](comparison) == svg


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


def test_curves_are_interpolated_where_they_have_no_point() -> None:
    x, mean, deviation = mean_and_band([([0, 2], [0, 2]), ([0, 1, 2], [2, 3, 4])])
    assert (x.tolist(), mean.tolist()) == ([0, 1, 2], [1, 2, 3])
    np.testing.assert_allclose(deviation, np.sqrt(2))


def test_one_seed_has_no_band() -> None:
    _, mean, deviation = mean_and_band([([1, 2], [0.5, None])])
    np.testing.assert_array_equal(mean, [0.5])
    np.testing.assert_array_equal(deviation, [0.0])
