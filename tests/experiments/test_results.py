"""Rows, differences, verdicts and the page of a comparison, with an invented trainer."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from aploss.experiments.compare import compare, comparison_plan
from aploss.experiments.plan import Plan, Tuning


def plan_of(*losses: str, seeds: int = 2, tuning: Tuning | None = None) -> Plan:
    return comparison_plan(losses, recipe="demo", seeds=range(seeds), tuning=tuning)


def results_in(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


class TestPage:
    def test_numbers_of_the_page_are_those_of_the_runs(self, fake_training, tmp_path: Path) -> None:
        compare(plan_of("ap", "focal", seeds=3), tmp_path / "page", command="aploss compare x")
        found = results_in(tmp_path / "page")
        row = found["rows"][0]
        # Levels of the invented trainer: 0.74, 0.75 + 0.002, 0.76 + 0.004.
        values = [0.74, 0.752, 0.764]
        assert row["values"]["AP"] == pytest.approx(values)
        assert row["mean"]["AP"] == pytest.approx(np.mean(values))
        assert row["standard_deviation"]["AP"] == pytest.approx(np.std(values, ddof=1))
        table = (tmp_path / "page/table.md").read_text()
        assert "| AP-loss | **75.2 ± 1.2** |" in table
        assert "aploss compare x" in table
        assert "0123abc" in table

    def test_differences_are_paired_with_the_first_loss(self, fake_training, tmp_path: Path) -> None:
        results = compare(plan_of("ap", "focal", "auc", seeds=3), tmp_path / "page")
        (to_focal, to_auc) = results.differences("ap")
        assert (to_focal.baseline, to_auc.baseline) == ("focal", "auc")
        # The invented losses differ by the same in every seed: no spread, a sharp interval.
        assert to_focal.values == pytest.approx([0.08] * 3)
        assert to_focal.low == pytest.approx(0.08)
        assert to_focal.high == pytest.approx(0.08)

    def test_one_seed_has_no_interval(self, fake_training, tmp_path: Path) -> None:
        results = compare(plan_of("ap", "focal", seeds=1), tmp_path / "page")
        assert results.differences("ap") == []
        assert "One seed shows no spread" in (tmp_path / "page/table.md").read_text()

    def test_curves_are_over_steps_and_time(self, fake_training, tmp_path: Path) -> None:
        results = compare(plan_of("ap", "focal"), tmp_path / "page")
        (curve, _) = results.entries(["AP"])[0].curves
        assert list(curve.steps) == [120 * k for k in range(1, 11)]
        assert curve.minutes[-1] == pytest.approx(2.0)
        page = (tmp_path / "page/report.html").read_text()
        assert "AP on validation against steps" in page
        assert "AP on validation against time" in page

    def test_every_loss_has_its_own_colour(self, fake_training, tmp_path: Path) -> None:
        compare(plan_of("ap", "focal"), tmp_path / "page")
        page = (tmp_path / "page/report.html").read_text()
        for colour in ("#0072b2", "#d55e00"):
            assert colour in page

    def test_results_file_has_no_nan(self, fake_training, tmp_path: Path) -> None:
        fake_training.diverges_from = 0.001
        compare(plan_of("ap", seeds=1), tmp_path / "page")

        def refuse(text: str) -> None:
            raise AssertionError(text)

        json.loads((tmp_path / "page/results.json").read_text(), parse_constant=refuse)


@pytest.mark.usefixtures("no_page")
class TestVerdicts:
    def test_a_claim_holds_where_the_interval_is_above_zero(self, fake_training, tmp_path: Path) -> None:
        results = compare(plan_of("ap", "focal", seeds=3), tmp_path / "page")
        assert results.is_ahead("ap", "focal", by=0.01) is True
        assert results.is_ahead("ap", "focal", by=0.1) is False
        assert results.is_ahead("focal", "ap") is False
        holds, claim = results.verdict("ap", "focal", by=0.01)
        assert holds is True
        assert claim == "AP-loss is above Focal loss by at least 1: +8.0 AP [+8.0, +8.0]"

    def test_what_seeds_do_not_decide_is_not_decided(self, fake_training, tmp_path: Path) -> None:
        results = compare(plan_of("ap", "focal", seeds=1), tmp_path / "page")
        assert results.is_ahead("ap", "focal") is None
        assert results.verdict("ap", "focal")[1].endswith("one seed")

    def test_an_unfinished_comparison_decides_nothing(self, fake_training, tmp_path: Path) -> None:
        results = compare(plan_of("ap", "focal", seeds=3), tmp_path / "page")
        del results.runs["focal", 2]
        assert results.is_ahead("ap", "focal") is None
        assert math.isnan(compare(plan_of("auc"), tmp_path / "page", max_minutes=0).mean("auc"))
