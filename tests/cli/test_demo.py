"""``aploss demo``: its folder, settings and result."""

from pathlib import Path
from typing import Any

import pytest

from aploss.cli.main import main
from aploss.training import RunFolder, TrainConfig, load_config


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The configs passed to training, which does nothing."""
    monkeypatch.chdir(tmp_path)
    configs: list[TrainConfig] = []

    def remember(config: TrainConfig, options: Any, *, resume: bool) -> int:
        assert resume
        configs.append(config)
        return 0

    monkeypatch.setattr("aploss.cli.train.run_training", remember)
    return configs


def test_the_demo_is_the_demo_recipe_in_runs_demo(asked: list[TrainConfig]) -> None:
    assert main(["demo"]) == 0
    assert asked == [load_config("demo", {"out": "runs/demo"})]
    assert asked[0].data == "builtin"
    assert asked[0].loss == "ap"


def test_a_finished_demo_is_kept_and_an_unfinished_one_is_resumed(asked: list[TrainConfig]) -> None:
    folder = RunFolder("runs/demo")
    folder.create(load_config("demo", {"out": "runs/demo"}))
    main(["demo"])
    assert asked[-1].out == "runs/demo"  # unfinished
    main(["demo", "--loss", "focal"])
    assert asked[-1].out == "runs/demo-2"  # another one
    folder.summary_file.write_text("{}")
    main(["demo"])
    assert asked[-1].out == "runs/demo-2"
    main(["demo", "--out", "elsewhere", "--seed", "3"])
    assert (asked[-1].out, asked[-1].seed) == ("elsewhere", 3)


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
