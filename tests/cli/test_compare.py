"""``aploss compare`` with a fake trainer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from fake_training import FakeTraining

from aploss.cli import main as cli
from aploss.training import TrainingInterruptedError, load_config
from aploss.training.config import config_to_dict


@pytest.fixture
def trainer(fake_training: FakeTraining, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTraining:
    """The fake trainer, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return fake_training


def test_compare_prints_the_table_and_where_the_page_is(
    trainer: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "ap", "focal", "--seeds", "2", "--steps", "5", "--no-tune"]) == 0
    shown, warning = capsys.readouterr()
    assert "finished  Focal loss, seed 1: AP 67.2" in shown
    assert shown.index("- ahead: AP-loss against Focal loss: +8.0 AP") < shown.index("| AP-loss | **74.6 ± 0.8** |")
    assert "| AP-loss \N{MINUS SIGN} Focal loss | AP | +8.0 | **[+8.0, +8.0]** | 2 |" in shown
    assert "--seeds 3" in warning
    page = Path("runs/compare-builtin-retinanet-tiny-ap-focal/report.html")
    assert f"report: {page}" in shown
    assert page.is_file()
    assert {config.schedule.length for config in trainer.configs} == {5}
    assert all(Path(config.out).parent == Path("runs/cache") for config in trainer.configs)
    for config in trainer.configs:
        Path(config.out, "config.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
    assert cli.main(["compare", "--runs", *(config.out for config in trainer.configs)]) == 0
    assert "report: runs/compare-runs/report.html" in capsys.readouterr().out


def test_settings_and_shorthands_apply_to_all_losses(trainer: FakeTraining) -> None:
    words = ["ap", "auc", "--seeds", "4,", "--detector", "ssdlite", "--quiet", "--epochs", "2", "--lr", "0.01"]
    words += ["--batches.size", "2", "--optimizer.weight_decay", "0.5", "--validations", "4"]
    assert cli.main(["compare", *words]) == 0
    assert [config.loss for config in trainer.configs] == ["ap", "auc"]
    for config in trainer.configs:
        assert (config.batches.size, config.optimizer.weight_decay, config.optimizer.learning_rate) == (2, 0.5, 0.01)
        assert (config.detector, config.seed) == ("ssdlite", 4)
        assert config.batches.image_size == 128  # the rest of the recipe stays
        assert (config.schedule.length, config.schedule.unit) == (2, "epochs")
        assert (config.validation.every, config.validation.unit) == (0.5, "epochs")


def test_variants_are_rows_and_each_has_its_learning_rate_searched(
    trainer: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "ap", "ap:delta=0.50", "--seeds", "1", "--tune-steps", "3"]) == 0
    assert "finished  AP-loss (delta 0.5), trial of learning rate 0.009" in capsys.readouterr().out
    lengths = [config.schedule.length for config in trainer.configs]
    assert lengths == [3] * 6 + [load_config("demo").schedule.length] * 2
    page = Path("runs/compare-builtin-retinanet-tiny-ap-ap-delta0.5")
    rows = json.loads((page / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["ap", "ap:delta=0.5"]


def test_any_setting_can_vary(trainer: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--vary", "optimizer.learning_rate=1e-3,0.003", "--vary=batches.size=4", "--seeds", "1", "--quiet"]
    assert cli.main(["compare", *words]) == 0
    assert [(one.optimizer.learning_rate, one.batches.size) for one in trainer.configs] == [(0.001, 4), (0.003, 4)]
    assert "| row | AP |" in (table := capsys.readouterr().out)
    assert "| learning rate 0.001, batches.size 4 |" in table
    assert cli.main(["compare", *words]) == 0
    assert len(trainer.configs) == 2  # the second time they are there


def test_other_data_takes_a_recipe_for_the_hardware(trainer: FakeTraining, tmp_path: Path) -> None:
    from aploss.data.builtin import builtin_folder

    data = str(builtin_folder(cache=tmp_path / "data", image_size=160, counts=(2, 1, 1)))
    words = ["compare", "ap", "--data", data, "--device", "cpu", "--seeds", "1", "--no-tune"]
    assert cli.main([*words, "--quiet"]) == 0
    (config,) = trainer.configs
    assert config.schedule.length == load_config("any-cpu").schedule.length
    assert config.batches.image_size == (160, 160)  # of the images


def test_an_interruption_prints_how_to_resume(trainer: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.errors[1] = TrainingInterruptedError("resume with: aploss train ...")
    assert cli.main(["compare", "ap", "--quiet"]) == 130
    error = capsys.readouterr().err
    assert "the same command resumes" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("", "aploss compare ap focal"),
        ("--vary batches.size", "--vary"),
        ("--vary batches.size=4,8 --batches.size 2", "--vary batches.size"),
        ("ap --lr 1 --tune-steps 5", "--tune-steps"),
        ("--vary schedule.length=1,2 --steps 2", "--vary schedule.length"),
        ("ap --no-tune --tune-over criterion.box_weight=1,3", "--tune-over"),
        ("ap --gpus-per-run 1", "--workers"),
        ("ap --workers 2 --ray auto", "--ray"),
        ("ap --seeds 3 --seeds-until-decided 3", "--seeds-until-decided"),
        ("--runs nowhere", "nowhere"),
        ("ap --tune-over criterion.box_weight=", "--tune-over"),
        ("ap --tune-over focla:gamma=1", "focal"),
        ("ap --tune-over focal:gamma=1,2", "focal"),
        ("ap focal:gamma=1 --tune-over focal:gamma=1,2", "gamma"),
    ],
)
def test_options_that_do_not_fit_are_named(
    trainer: FakeTraining, refused: Callable[..., str], words: str, part: str
) -> None:
    assert part in refused("compare", *words.split())
    assert trainer.configs == []


def test_the_plan_is_printed_without_training(trainer: FakeTraining, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "ap", "focal", "--steps", "5", "--seeds-until-decided", "5", "--plan"]) == 0
    shown = capsys.readouterr().out
    assert "14 trainings of retinanet-tiny" in shown  # 2 x (5 seeds + 3 rates - 1)
    assert "until decided after 3, 5 of them" in shown
    assert trainer.configs == []
