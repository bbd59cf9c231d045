"""``aploss train`` and ``aploss demo``: settings from recipe, file and options; the result; exit codes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from aploss.cli.main import main
from aploss.errors import RunError
from aploss.training import TrainConfig, TrainingInterruptedError, load_config
from aploss.training.config import config_from_dict


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["train", *arguments, "--print_config"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    config_from_dict(values)  # the output is a valid config file
    return dict(values)


def test_a_run_needs_nothing_but_data(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    refused: Callable[..., str],
) -> None:  # fmt: skip
    monkeypatch.setenv("APLOSS_CACHE", str(tmp_path / "cache"))  # of the features
    assert main(["train", "--data", str(shapes), "--schedule.length", "2", "--out", "here"]) == 0
    captured = capsys.readouterr()
    assert "any-cpu (chosen for this machine): retinanet-lite0" in captured.out
    assert "report: here/report.html" in captured.out
    assert Path("here/report.html").stat().st_size > 10_000
    assert len(Path("here/metrics.jsonl").read_text().splitlines()) == 2  # one row of training, one of AP
    assert "--resume" in refused("train", "--data", shapes, "--out", "here", "--quiet")
    assert main(["train", "--resume", "--out", "here"]) == 0  # only prints the result
    assert "report: here/report.html" in capsys.readouterr().out


def test_options_override_the_file_and_the_file_overrides_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("extends: demo\nbatches: {size: 6, image_size: 96}\nloss: focal\n")
    values = printed_config(capsys, "--recipe", "mine.yaml", "--batches.size", "2")
    assert (values["loss"], values["batches"]["size"], values["batches"]["image_size"]) == ("focal", 2, 96)
    assert values["schedule"]["length"] == load_config("demo").schedule.length


def test_values_of_all_types_are_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    values = printed_config(
        capsys, "--data", "somewhere", "--recipe", "demo", "--max_minutes=0.5", "--checkpoint-steps", "7",
        "--batches.image_size", "[64, 96]", "--optimizer.clip-norm", "null", "--deterministic", "true",
        "--optimizer.learning_rate", "1e-3", "--model.frozen", '["backbone.*"]',
        "--model.options.anchors_per_cell", "9", "--criterion.options", "{delta: 0.5}",
    )  # fmt: skip
    assert (values["data"], values["max_minutes"], values["checkpoint_steps"]) == ("somewhere", 0.5, 7)
    assert (values["batches"]["image_size"], values["deterministic"]) == ([64, 96], True)
    assert (values["optimizer"]["clip_norm"], values["optimizer"]["learning_rate"]) == (None, 0.001)
    assert values["model"]["frozen"] == ["backbone.*"]
    assert values["model"]["options"] == {"anchors_per_cell": 9, "test_size": [128, 128]}
    assert values["criterion"]["options"] == {"delta": 0.5}


def test_shorthands_change_the_settings_they_stand_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--steps", "30", "--lr", "1e-3", "--batch-size", "4", "--image-size", "64x96"]
    values = printed_config(capsys, "--recipe", "demo", *words)
    assert (values["schedule"]["length"], values["schedule"]["unit"]) == (30, "steps")
    assert (values["optimizer"]["learning_rate"], values["batches"]["size"]) == (0.001, 4)
    assert values["batches"]["image_size"] == values["model"]["options"]["test_size"] == [64, 96]


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_milestones_keep_their_share_of_a_shorter_training(capsys: pytest.CaptureFixture[str], unit: str) -> None:
    assert load_config("voc-retinanet-r50").schedule.milestones == (110, 140)  # of 160 epochs
    short = printed_config(capsys, "--recipe", "voc-retinanet-r50", f"--{unit}", "16")["schedule"]
    assert (short["length"], short["unit"], short["milestones"]) == (16, unit, [11.0, 14.0])


def test_an_interruption_prints_how_to_resume_and_exits_with_130(
    shapes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[TrainConfig] = []

    def interrupted(config: TrainConfig, **options: Any) -> None:
        configs.append(config)
        raise TrainingInterruptedError("stopped; resume with: aploss train --resume")

    monkeypatch.setattr("aploss.training.train", interrupted)
    assert main(["train", "--data", str(shapes), "--image-size", "64x96", "--device", "cpu"]) == 130
    captured = capsys.readouterr()
    assert captured.err == "stopped; resume with: aploss train --resume\n"
    assert (configs[0].data, configs[0].batches.image_size) == (str(shapes), (64, 96))


def test_only_the_main_process_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise RunError("the folder is taken")

    monkeypatch.setattr("aploss.training.train", fails)
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--recipe", "demo"]) == 2
    assert capsys.readouterr().err == ""


def test_the_demo_is_the_demo_recipe_in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TrainConfig] = []

    def remember(config: TrainConfig, options: Any, *, resume: bool) -> int:
        asked.append(config)
        return int(resume)

    monkeypatch.setattr("aploss.cli.train.run_training", remember)
    assert main(["demo"]) == 0
    assert asked == [load_config("demo", {"data": "builtin", "loss": "ap", "out": "runs/demo"})]
    Path("runs/demo").mkdir(parents=True)
    for words in ([], ["--out", "elsewhere", "--seed", "3", "--loss", "focal"]):
        assert main(["demo", *words]) == 0
    assert [(one.out, one.seed, one.loss) for one in asked[1:]] == [("runs/demo-2", 0, "ap"), ("elsewhere", 3, "focal")]
