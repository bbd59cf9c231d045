"""Every claim of the theory pages, and the parts they are made of, checked by hand or literally."""

import json
import re

import numpy as np
import pytest
import torch

from aploss.cli import main as cli
from aploss.losses import ap_loss, reference
from aploss.reports.page import SvgFigure, Verdict
from aploss.theory import STUDIES, convergence, inseparable, smoothed_failure, write_study
from aploss.theory.study import Study


@pytest.fixture(scope="module", params=STUDIES)
def study(request):
    return STUDIES[request.param](0)


def test_every_claim_holds(study):
    assert study.verdicts
    for verdict in study.verdicts:
        assert verdict.holds is True, verdict.claim


def test_a_study_becomes_a_page_and_a_file_of_numbers(study, tmp_path):
    page = write_study(study, tmp_path)
    text = page.read_text()
    assert study.title in text
    assert text.count("<svg") >= len(study.figures)
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert [v["holds"] for v in numbers["verdicts"]] == [True] * len(study.verdicts)


def test_a_claim_that_fails_fails_the_command(monkeypatch, tmp_path, capsys):
    def failing(seed):
        return Study(
            name="consistency", title="t", place="p", text="x", numbers={},
            figures=[SvgFigure("<svg></svg>")], verdicts=[Verdict(False, "pigs fly")],
        )  # fmt: skip

    monkeypatch.setitem(STUDIES, "consistency", failing)
    assert cli.main(["theory", "consistency", "--out", str(tmp_path)]) == 1
    assert "does not hold: pigs fly" in capsys.readouterr().out
    assert not (tmp_path / "index.html").exists()  # of one study its page is enough


def test_all_studies_are_linked_from_an_index(monkeypatch, tmp_path, capsys):
    def holding(name):
        verdicts = [Verdict(True, f"{name} is true")]
        figures = [SvgFigure("<svg></svg>")]
        return Study(name=name, title=f"On {name}", place="p", text="x", numbers={}, figures=figures, verdicts=verdicts)

    for name in STUDIES:
        monkeypatch.setitem(STUDIES, name, lambda seed, name=name: holding(name))
    assert cli.main(["theory", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "index.html").read_text()
    links = re.findall(r'<a href="([^#"]+)"', page)
    assert links == [f"{name}/report.html" for name in STUDIES]
    assert all((tmp_path / link).is_file() for link in links)
    assert all(f"{name} is true" in page for name in STUDIES)
    assert f"{len(STUDIES)} of {len(STUDIES)} claims hold" in page
    captured = capsys.readouterr()
    assert str(tmp_path / "index.html") in captured.out
    assert captured.err == f"next: python -m webbrowser {tmp_path / 'index.html'}\n"
    assert cli.main(["theory", "--out", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_the_step_bound_is_that_of_appendix_1():
    # One sample, M = 2 boxes at 2 and -1 on a line, theta* = 1: margin 3, distance 3.
    # c = 3 / (2 * 1), C = 2² * 3²: C / c² = 36 / 2.25 = 16.
    problem = convergence.SeparableProblem(
        features=[torch.tensor([[2.0], [-1.0]])],
        labels=[torch.tensor([1, 0])],
        direction=torch.tensor([1.0]),
        margin=3.0,
    )
    assert convergence.step_bound(problem) == pytest.approx(16)


def test_an_inseparable_problem_does_not_converge():
    problem = convergence.SeparableProblem(
        features=[torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)],
        labels=[torch.tensor([0, 1, 0])],
        direction=torch.tensor([1.0], dtype=torch.float64),
        margin=-1.0,
    )
    curve = convergence.run_to_zero(problem, torch.Generator().manual_seed(0), max_steps=50)
    assert len(curve) == 50
    assert min(curve) > 0


def test_the_drawn_field_is_the_smoothed_loss_of_the_library():
    grid = np.array([-1.0, 0.5, 4.0])
    field, _ = smoothed_failure.smoothed_field(grid)
    for row, second in enumerate(grid):
        for column, first in enumerate(grid):
            theta = torch.tensor([first, second], dtype=torch.float64)
            value, _ = smoothed_failure.smoothed_loss(theta)
            assert field[row, column] == pytest.approx(value, abs=1e-12)


def test_the_modified_update_is_the_one_of_appendix_3():
    random = np.random.default_rng(3)
    features = random.normal(size=(9, 3))
    differences, sizes = features[None, :] - features[:, None], (4, 5)
    theta = random.normal(size=3)
    loss, gradient = inseparable.surrogate_step(theta, differences, sizes)

    scores = torch.tensor(features @ theta)
    targets = torch.tensor([1] * 4 + [0] * 5)
    expected_loss, _ = reference.ap_loss(scores, targets, delta=0, interpolated=False)
    assert loss == pytest.approx(expected_loss.item(), abs=1e-12)
    expected = np.zeros(3)
    for i in range(4):
        rank = 1 + sum(scores[k] >= scores[i] for k in range(9) if k != i)
        for j in range(4, 9):
            step = min(max(float(scores[j] - scores[i]) / 2 + 0.5, 0), 1)
            expected += step / float(rank) * (features[j] - features[i]) / 4
    assert gradient == pytest.approx(expected, abs=1e-12)


def test_the_surrogate_lies_above_the_ap_loss_by_delta_over_4():
    # l(x, x) >= delta/4 * L_AP, because Q(x) >= delta/4 where H(x) = 1.
    x = np.linspace(0, 5, 100)
    assert (inseparable.step_integral(x) >= inseparable.DELTA / 4).all()
    slope = np.gradient(inseparable.step_integral(x), x)
    assert slope[1:-1] == pytest.approx(inseparable.piecewise_step(x)[1:-1], abs=0.02)


def test_separability_is_decided_by_a_linear_program():
    def separable(*features):  # two positives, then two negatives, on a line
        line = np.array(features)[:, None]
        return inseparable.is_separable(line[None, :] - line[:, None], (2, 2))

    assert separable(2.0, 3.0, 0.0, 1.0)
    assert separable(0.0, 1.0, 2.0, 3.0)
    assert not separable(0.0, 2.0, 1.0, 3.0)


def test_easy_negatives_change_no_average_precision():
    scores, targets = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1, 0, 1])
    more = torch.cat([scores, torch.full((50,), -9.0)])
    more_targets = torch.cat([targets, torch.zeros(50, dtype=torch.int64)])
    assert ap_loss(more, more_targets) == ap_loss(scores, targets)
