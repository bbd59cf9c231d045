"""Rows, differences, verdicts and the page of a comparison, with a fake trainer."""

import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest

from aploss.experiments.compare import compare, comparison_page, comparison_plan
from aploss.experiments.plan import Plan
from aploss.experiments.results import Results, is_decided
from aploss.reports.comparison import comparison_table

ROOT = Path(__file__).resolve().parents[2]


def plan_of(*losses: str, seeds: int = 2) -> Plan:
    return comparison_plan(losses, recipe="demo", seeds=range(seeds))


class TestPage:
    def test_the_page_has_the_numbers_and_curves_of_the_runs(self, fake_training, tmp_path: Path) -> None:
        results = compare(plan_of("ap", "focal", seeds=3), tmp_path / "page")
        row = json.loads((tmp_path / "page/results.json").read_text())["rows"][0]
        # Levels of the fake trainer: 0.74, 0.75 + 0.002, 0.76 + 0.004.
        values = [0.74, 0.752, 0.764]
        assert row["values"]["AP"] == pytest.approx(values)
        assert row["mean"]["AP"] == pytest.approx(np.mean(values))
        assert row["standard_deviation"]["AP"] == pytest.approx(np.std(values, ddof=1))
        table = (tmp_path / "page/table.md").read_text()
        assert "| AP-loss | **75.2 ± 1.2** |" in table
        assert "0123abc" in table
        curve, *_ = comparison_page(results).entries[0].curves
        assert list(curve.steps) == [120 * k for k in range(1, 11)]
        assert curve.minutes[-1] == pytest.approx(2.0)
        (to_focal, _) = results.differences("ap", ["AP", "AP50"])
        assert to_focal.values == pytest.approx([0.08] * 3)  # the same distance for every seed


class FixedResults(Results):
    """Finished results with given values of each row."""

    def __init__(self, **rows: list[float]) -> None:
        super().__init__(plan_of(*rows, seeds=len(next(iter(rows.values())))))
        self.rows = rows

    @property
    def complete(self) -> bool:
        return True

    def values(self, name: str, metric: str) -> list[float | None]:
        return [*self.rows[name]]


class TestVerdicts:
    # The paired differences have a mean of 0.02 and a 95 % interval of 0.02 ± 4.303 * 0.002 / sqrt(3) = ± 0.00497.
    SHARP = FixedResults(ap=[0.518, 0.520, 0.522], focal=[0.5, 0.5, 0.5])
    # A mean of 0.02, too, and ± 4.303 * 0.01 / sqrt(3) = ± 0.0248.
    WIDE = FixedResults(ap=[0.51, 0.52, 0.53], focal=[0.5, 0.5, 0.5])

    def test_a_margin_is_tested_against_the_interval(self) -> None:
        outcomes = [self.SHARP.is_ahead("ap", "focal", by=by) for by in (0.0, 0.015, 0.019, 0.021, 0.026)]
        assert outcomes == [True, True, None, None, False]
        # The mean exceeds 1 point, but the interval includes it.
        assert self.WIDE.is_ahead("ap", "focal", by=0.01) is None
        # A negative mean within the noise is not decided.
        assert [one.is_ahead("focal", "ap") for one in (self.SHARP, self.WIDE)] == [False, None]
        verdict = self.SHARP.verdict("ap", "focal", by=0.01)
        assert verdict.holds is True
        assert verdict.claim == "AP-loss is above Focal loss by at least 1: +2.0 AP [+1.5, +2.5], 3 seeds"

    def test_a_pair_is_ahead_behind_tied_or_has_too_few_seeds(self) -> None:
        # 0.001 ± 4.303 * 0.001 / sqrt(3) = ± 0.0025: includes zero, certainly closer than a point
        tie = FixedResults(ap=[0.5, 0.501, 0.502], focal=[0.5, 0.5, 0.5])
        cases = [
            (self.SHARP, "ap", "focal"),
            (self.SHARP, "focal", "ap"),
            (tie, "ap", "focal"),
            (FixedResults(ap=[0.5, 0.6], focal=[0.5, 0.6]), "ap", "focal"),  # the same numbers: an interval [0, 0]
            (self.WIDE, "ap", "focal"),
        ]
        verdicts = [results.pair_verdict(*pair) for results, *pair in cases]
        assert [one.word for one in verdicts] == ["ahead", "behind", "tie", "tie", "too few seeds"]
        assert [is_decided(one) for one in verdicts] == [True, True, True, True, False]

    def test_a_row_with_the_lower_error_is_ahead(self) -> None:
        assert self.SHARP.is_ahead("focal", "ap", metric="oLRP") is True
        assert self.SHARP.is_ahead("ap", "focal", metric="oLRP") is False
        page = comparison_page(self.SHARP)
        bold = [[cell.strong for cell in row] for row in comparison_table(page).cells]
        assert page.metrics == ("AP", "AP50", "AP75", "oLRP")
        assert [row[1:5] for row in bold] == [[True, True, True, False], [False, False, False, True]]

    def test_a_level_is_tested_against_the_interval(self) -> None:
        ranges = [(0.51, 0.53), (0.519, 0.53), (0.53, 0.6), (0.4, 0.51)]
        assert [self.SHARP.is_between("ap", *one) for one in ranges] == [True, None, False, False]

    def test_one_seed_or_missing_runs_decide_nothing(self, fake_training, no_page: None, tmp_path: Path) -> None:
        single = FixedResults(ap=[0.7], focal=[0.5])
        assert single.is_ahead("ap", "focal", by=0.5) is None
        assert single.is_between("ap", 0.0, 0.1) is None
        assert single.differences("ap") == []
        results = compare(plan_of("ap", "focal", seeds=3), tmp_path / "page")
        assert results.is_ahead("ap", "focal") is True
        del results.runs["focal", 2]
        assert results.is_ahead("ap", "focal") is None
        assert math.isnan(Results(plan_of("auc")).mean("auc"))


def test_mean_ranks_of_the_study_of_classifiers_and_their_critical_difference() -> None:
    mean_ranks = runpy.run_path(str(ROOT / "tools/rare_positives.py"))["mean_ranks"]
    # Demsar 2006, Table 5b: q = 2.569 for 4 classifiers; over 14 data sets CD = 2.569 sqrt(4 * 5 / (6 * 14)) = 1.25
    rows = ["a", "b", "c", "d"]
    tables = [dict(zip(rows, values, strict=True)) for values in [(0.4, 0.3, 0.2, 0.1), (0.4, 0.3, 0.1, 0.1)] * 7]
    ranks, critical = mean_ranks(tables)
    assert ranks == {"a": 1.0, "b": 2.0, "c": 3.25, "d": 3.75}
    assert critical == pytest.approx(1.25, abs=0.005)
