"""The page and table of a comparison, against means and deviations computed by hand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from aploss.reporting.blocks import Section, Text
from aploss.reporting.comparison_report import (
    Comparison,
    Difference,
    Entry,
    comparison_markdown,
    comparison_table,
    write_comparison,
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
    page = write_comparison(tmp_path / "table2", comparison)
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
    page = write_comparison(tmp_path, Comparison(title="Empty", entries=[]))
    assert "Nothing was recorded" in page.read_text()


def test_one_seed_has_no_spread_and_more_sections_follow(
    comparison: Comparison, tmp_path: Path
) -> None:
    single = [
        dataclasses.replace(
            entry,
            values={key: values[:1] for key, values in entry.values.items()},
            curves=entry.curves[:1],
        )
        for entry in comparison.entries
    ]
    one = dataclasses.replace(
        comparison, entries=single, differences=(), sections=[Section("Pictures", [Text("Side.")])]
    )
    text = write_comparison(tmp_path, one).read_text()
    assert "Spread over seeds" not in text
    assert text.index('id="while-training"') < text.index('id="pictures"')
    assert text.index('id="pictures"') < text.index('id="how-it-was-made"')


def test_a_difference_is_named_by_its_losses() -> None:
    one = Difference(name="ap", baseline="batch size 1", values=[], mean=0, low=0, high=0)
    assert one.label == "AP-loss \N{MINUS SIGN} batch size 1"
