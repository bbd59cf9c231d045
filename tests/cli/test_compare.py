"""``aploss compare`` with a fake trainer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aploss.cli import main as cli
from aploss.training import Summary, TrainConfig, TrainingInterruptedError, load_config

NUMBERS = {"ap": 0.74, "focal": 0.71, "ce-ohem": 0.72, "auc": 0.55}
EMPTY: dict[str, Any] = dict.fromkeys(
    ("voc_AP50", "APs", "APm", "APl", "calibration_error", "calibration_error_drawn",
     "calibration_split", "calibration_held_out", "draw_threshold", "commit")
)  # fmt: skip


class Trainer:
    """Returns a made-up result at once; ``configs`` records the calls."""

    def __init__(self) -> None:
        self.configs: list[TrainConfig] = []
        self.error: Exception | None = None

    def __call__(self, config: TrainConfig, **options: Any) -> Summary:
        self.configs.append(config)
        if self.error is not None:
            raise self.error
        assert config.out is not None
        folder, level = Path(config.out), NUMBERS[config.loss] + 0.01 * config.seed
        folder.mkdir(parents=True)
        row = {"kind": "validation", "step": 5, "seconds": 6.0, "AP": level}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        summary = Summary(
            folder=str(folder), data=config.data, split="test", detector=config.detector,
            loss=config.loss, seed=config.seed, AP=level, AP50=level, AP75=level, per_class={},
            steps=5, epochs=1.0, best_step=5, stopped_by="length", bad_steps=0, minutes=0.1,
            images_per_second=1.0, parameters=1, device="cpu", processes=1, command="", **EMPTY,
        )  # fmt: skip
        summary.write(folder / "summary.json")
        return summary


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trainer:
    """The fake trainer, in a folder of its own."""
    trainer = Trainer()
    monkeypatch.setattr("aploss.training.train", trainer)
    monkeypatch.chdir(tmp_path)
    return trainer


def test_compare_prints_the_table_and_where_the_page_is(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--losses", "ap,focal", "--seeds", "2", "--steps", "5", "--no-tune"]) == 0
    shown, warning = capsys.readouterr()
    assert "finished  Focal loss, seed 1: AP 72.0" in shown
    assert shown.index("- ahead: AP-loss against Focal loss: +3.0 AP") < shown.index("| AP-loss | **74.5 ± 0.7** |")
    assert "| AP-loss \N{MINUS SIGN} Focal loss | AP | +3.0 | **[+3.0, +3.0]** | 2 |" in shown
    assert "--seeds 3" in warning
    page = Path("runs/compare-builtin-retinanet-tiny-ap-focal/report.html")
    assert f"report: {page}" in shown
    assert page.is_file()
    assert {config.schedule.length for config in trainer.configs} == {5}
    assert all(Path(config.out).parent == Path("runs/cache") for config in trainer.configs)


def test_settings_of_a_run_apply_to_all_losses(trainer: Trainer) -> None:
    words = ["--losses", "ap,auc", "--seeds", "4,", "--detector", "ssdlite", "--quiet", "--no-tune"]
    words += ["--batches.size", "2", "--optimizer.weight_decay", "0.5", "--validations", "3"]
    assert cli.main(["compare", *words]) == 0
    for config in trainer.configs:
        assert (config.batches.size, config.optimizer.weight_decay) == (2, 0.5)
        assert (config.detector, config.seed) == ("ssdlite", 4)
        assert config.batches.image_size == 128  # the rest of the recipe stays
        assert config.validation.every == round(load_config("demo").schedule.length / 3)


def test_variants_are_rows_and_each_has_its_learning_rate_searched(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--losses", "ap,ap:delta=0.5,focal:gamma=1:alpha=0.5", "--seeds", "1", "--tune-steps", "3"]
    assert cli.main(["compare", *words]) == 0
    assert "finished  AP-loss (delta 0.5), trial of learning rate 0.009" in capsys.readouterr().out
    lengths = [config.schedule.length for config in trainer.configs]
    assert lengths == [3] * 9 + [load_config("demo").schedule.length] * 3  # equal scores: the middle is taken
    page = Path("runs/compare-builtin-retinanet-tiny-ap-ap-delta0.5-focal-gamma1-alpha0.5")
    assert "Focal loss (gamma 1, alpha 0.5)" in (page / "report.html").read_text()
    rows = json.loads((page / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["ap", "ap:delta=0.5", "focal:gamma=1:alpha=0.5"]
    assert len({row["runs"][0]["folder"] for row in rows}) == 3


def test_losses_may_be_positional_and_settings_have_shorthands(trainer: Trainer) -> None:
    assert cli.main(["compare", "ap", "focal", "--seeds", "1", "--epochs", "2", "--lr", "0.01", "--quiet"]) == 0
    assert [config.loss for config in trainer.configs] == ["ap", "focal"]
    for config in trainer.configs:
        assert (config.schedule.length, config.schedule.unit, config.optimizer.learning_rate) == (2, "epochs", 0.01)
        assert (config.validation.every, config.validation.unit) == (0.2, "epochs")  # ten points of a curve


def test_any_setting_can_vary(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--vary", "optimizer.learning_rate=1e-3,0.003", "--vary=batches.size=4", "--seeds", "1", "--quiet"]
    assert cli.main(["compare", *words]) == 0
    assert [(one.optimizer.learning_rate, one.batches.size) for one in trainer.configs] == [(0.001, 4), (0.003, 4)]
    assert "| row | AP |" in (table := capsys.readouterr().out)
    assert "| learning rate 0.001, batches.size 4 |" in table
    assert cli.main(["compare", *words]) == 0
    assert len(trainer.configs) == 2  # the second time they are there


def test_other_data_takes_a_recipe_for_the_hardware(trainer: Trainer, tmp_path: Path) -> None:
    from aploss.data.builtin import builtin_folder

    data = str(builtin_folder(cache=tmp_path / "data", image_size=160, counts=(2, 1, 1)))
    words = ["compare", "--losses", "ap", "--data", data, "--device", "cpu", "--seeds", "1", "--no-tune"]
    assert cli.main([*words, "--quiet"]) == 0
    (config,) = trainer.configs
    assert config.schedule.length == load_config("any-cpu").schedule.length
    assert config.batches.image_size == (160, 160)  # of the images


def test_an_interruption_or_the_time_limit_prints_how_to_resume(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "--max-minutes", "0"]) == 0
    assert "the same command resumes" in capsys.readouterr().err
    assert trainer.configs == []
    trainer.error = TrainingInterruptedError("resume with: aploss train ...")
    assert cli.main(["compare", "--quiet"]) == 130
    error = capsys.readouterr().err
    assert "the same command resumes" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--vary lerning_rate=1,2", "optimizer.learning_rate"),
        ("--vary batches.size", "--vary"),
        ("--vary batches.size=4,8 --batches.size 2", "--vary batches.size"),
        ("--vary optimizer.learning_rate=1,2 --tune", "--tune"),
        ("--vary schedule.length=1,2 --steps 2", "--vary schedule.length"),
        ("ap --losses focal", "--losses"),
        ("--tune --lr 1", "--lr"),
        ("--no-tune --tune-over criterion.box_weight=1,3", "--tune-over"),
        ("--gpus-per-run 1", "--workers"),
        ("--workers 2 --ray auto", "--ray"),
        ("--seeds 3 --seeds-until-decided 3", "--seeds-until-decided"),
        ("--runs nowhere", "nowhere"),
        ("--tune --tune-over criterion.box_wieght=1", "criterion.box_weight"),
        ("--tune --tune-over criterion.box_weight=-1", "criterion.box_weight"),
        ("--tune --tune-over criterion.box_weight=", "--tune-over"),
        ("--tune --tune-over focla:gamma=1", "focal"),
        ("--tune --losses ap --tune-over focal:gamma=1,2", "focal"),
        ("--tune --losses ap,focal:gamma=1 --tune-over focal:gamma=1,2", "gamma"),
    ],
)
def test_options_that_do_not_fit_are_named(
    trainer: Trainer, refused: Callable[..., str], words: str, part: str
) -> None:
    assert part in refused("compare", *words.split())
    assert trainer.configs == []


def test_the_plan_is_printed_without_training(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "ap", "focal", "--steps", "5", "--seeds-until-decided", "5", "--plan"]) == 0
    shown = capsys.readouterr().out
    assert "14 trainings of retinanet-tiny" in shown  # 2 x (5 seeds + 3 rates - 1)
    assert "until decided after 3, 5 of them" in shown
    assert trainer.configs == []
