"""``aploss reproduce`` up to the training."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aploss.cli import main as cli
from aploss.experiments.paper import REPRODUCTIONS
from aploss.experiments.plan import Plan


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Plan, Path, Any]]:
    """What would be trained: (plan, folder, options) of each reproduction that was asked for."""
    found: list[tuple[Plan, Path, Any]] = []

    def compare(plan: Plan, out: Path, page_of: Any, **options: Any) -> Any:
        found.append((plan, out, options))
        out.mkdir(parents=True)
        (out / "table.md").write_text("# A table\n")
        return SimpleNamespace(complete=True)

    monkeypatch.setattr("aploss.experiments.reproduce.compare", compare)
    monkeypatch.setattr("aploss.experiments.plan.measure_step", lambda config: (5.0, 0.0))
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_a_name_alone_is_enough(name: str, carried_out: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", name]) == 0
    ((plan, out, _),) = carried_out
    assert out == Path(f"runs/{name}-small-builtin")
    assert plan.variants[0].config.data == "builtin"
    assert capsys.readouterr().out == f"# A table\n\nreport: runs/{name}-small-builtin/report.html\n"


def test_options_reach_the_plan(carried_out: list[Any]) -> None:
    words = ["--data", "data/bccd", "--seeds", "2", "--steps", "70", "--no-tune", "--device", "cpu"]
    words += ["--cache", "kept", "--out", "page", "--quiet", "--seeds-until-decided", "4"]
    assert cli.main(["reproduce", "table2", *words]) == 0
    ((plan, out, options),) = carried_out
    config = plan.variants[0].config
    assert (config.data, config.device, config.schedule.length) == ("data/bccd", "cpu", 70)
    assert (config.batches.image_size, config.evaluation.split) == ((240, 320), "test")  # of bccd-cpu
    assert (plan.seeds, plan.looks, plan.search, out) == ((0, 1, 2, 3), (2, 3, 4), None, Path("page"))
    assert (options["cache"], options["quiet"]) == (Path("kept"), True)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("table2 --scale paper --steps 4", "--scale small"),
        ("table2 --scale paper --tune-steps 4", "--tune-steps"),
        ("table1a --benchmark coco", "voc"),
        ("table2 --scale paper --yes --device cpu", "--data"),
        ("table5", "table2"),
    ],
)
def test_options_that_do_not_fit_are_named(
    words: str, part: str, carried_out: list[Any], refused: Callable[..., str]
) -> None:
    assert part in refused("reproduce", *words.split())
    assert carried_out == []


def test_the_papers_scale_is_refused_on_a_cpu(carried_out: list[Any], refused: Callable[..., str]) -> None:
    words = ["reproduce", "table4", "--scale", "paper", "--data", "VOCdevkit", "--device", "cpu"]
    assert "--yes" in refused(*words)
    assert carried_out == []
    assert cli.main([*words, "--yes"]) == 0
    assert carried_out[0][1] == Path("runs/table4-paper-VOCdevkit")


def test_the_plan_is_shown_without_training(carried_out: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "table2", "--scale", "paper", "--plan", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    # 4 losses x 160 epochs x 16551 images x 5 s = 52,963,200 s = 613 days
    assert "4 trainings of retinanet-r50, about 613 days on this cpu" in shown
    assert "milestones:\n  - 110.0\n  - 140.0\n" in shown
    assert "focal: loss = focal; criterion.options = {'alpha': 0.25, 'gamma': 2.0}" in shown
    assert carried_out == []
