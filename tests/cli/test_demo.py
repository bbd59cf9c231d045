"""``aploss demo``: its folder, settings and result."""

from pathlib import Path
from typing import Any

import pytest

from aploss.cli.main import main
from aploss.training import TrainConfig, load_config


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The configs passed to training, which does nothing."""
    monkeypatch.chdir(tmp_path)
    configs: list[TrainConfig] = []

    def remember(config: TrainConfig, options: Any, *, resume: bool) -> int:
        assert not resume
        configs.append(config)
        return 0

    monkeypatch.setattr("aploss.cli.train.run_training", remember)
    return configs


def test_the_demo_is_the_demo_recipe_in_runs_demo(asked: list[TrainConfig]) -> None:
    assert main(["demo"]) == 0
    assert asked == [load_config("demo", {"out": "runs/demo"})]
    assert asked[0].data == "builtin"
    assert asked[0].loss == "ap"


def test_another_demo_has_a_folder_of_its_own(asked: list[TrainConfig]) -> None:
    Path("runs/demo").mkdir(parents=True)
    main(["demo"])
    assert asked[-1].out == "runs/demo-2"
    main(["demo", "--out", "elsewhere", "--seed", "3", "--loss", "focal"])
    assert (asked[-1].out, asked[-1].seed, asked[-1].loss) == ("elsewhere", 3, "focal")


def test_the_demo_trains_and_names_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """End to end on the built-in data, with three steps and 60 images."""
    monkeypatch.chdir(tmp_path)
    load = load_config

    def shortened(recipe: str, overrides: dict[str, Any]) -> TrainConfig:
        short = {"schedule": {"length": 3}, "validation": {"every": 3}, "evaluation": {"split": "val[:20%]"}}
        # Trained on a part of the test split, which would be measured as a whole otherwise.
        return load(recipe, {**overrides, **short, "splits": {"train": "test[:20%]", "validation": "val[:20%]"}})

    monkeypatch.setattr("aploss.training.config.load_config", shortened)
    assert main(["demo"]) == 0
    output = capsys.readouterr().out
    assert "AP50" in output
    assert "report: runs/demo/report.html" in output
    assert Path("runs/demo/report.html").is_file()
