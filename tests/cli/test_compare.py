"""``aploss compare`` as typed, with an invented trainer."""

import json
from pathlib import Path
from typing import Any

import pytest

from aploss.cli import main as cli
from aploss.errors import RunError
from aploss.training import Summary, TrainConfig, TrainingInterruptedError, load_config

NUMBERS = {"ap": 0.74, "focal": 0.71, "ce-ohem": 0.72, "auc": 0.55}
EMPTY: dict[str, Any] = dict.fromkeys(
    ("voc_AP50", "APs", "APm", "APl", "calibration_error", "calibration_error_drawn",
     "calibration_split", "calibration_held_out", "draw_threshold", "commit")
)  # fmt: skip


class Trainer:
    """Invents a result at once; what it was asked for is in ``configs``."""

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
    """The invented trainer in place, in a folder of its own."""
    trainer = Trainer()
    monkeypatch.setattr("aploss.training.train", trainer)
    monkeypatch.chdir(tmp_path)
    return trainer


def test_compare_prints_the_table_and_where_the_page_is(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--losses", "ap,focal", "--seeds", "2", "--steps", "5"]) == 0
    shown = capsys.readouterr().out
    assert "run 4 of 4: Focal loss, seed 1" in shown
    assert "| AP-loss | **74.5 ± 0.7** |" in shown
    assert "| AP-loss \N{MINUS SIGN} Focal loss | AP | +3.0 | [+3.0, +3.0] | 2 |" in shown
    page = Path("runs/compare-builtin-retinanet-tiny-ap-focal/report.html")
    assert f"report: {page}" in shown
    assert page.is_file()
    assert {config.schedule.length for config in trainer.configs} == {5}
    assert all(Path(config.out).parent == Path("runs/cache") for config in trainer.configs)


def test_settings_of_a_run_apply_to_all_losses(trainer: Trainer) -> None:
    words = ["--losses", "ap,auc", "--seeds", "4,", "--detector", "ssdlite", "--quiet"]
    words += ["--batches.size", "2", "--optimizer.weight_decay", "0.5", "--validations", "3"]
    assert cli.main(["compare", *words]) == 0
    for config in trainer.configs:
        assert (config.batches.size, config.optimizer.weight_decay) == (2, 0.5)
        assert (config.detector, config.seed) == ("ssdlite", 4)
        assert config.batches.image_size == 128  # the rest of the recipe stays
        assert config.validation.every == round(load_config("demo").schedule.length / 3)


def test_variants_are_rows_with_names_and_learning_rates_of_their_own(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--losses", "ap,ap:delta=0.5,focal:gamma=1:alpha=0.5", "--seeds", "1", "--tune", "--tune-steps", "3"]
    assert cli.main(["compare", *words]) == 0
    shown = capsys.readouterr().out
    assert "trial 8 of 12: AP-loss (delta 0.5), learning rate 0.009" in shown
    page = Path("runs/compare-builtin-retinanet-tiny-ap-ap-delta0.5-focal-gamma1-alpha0.5")
    assert "Focal loss (gamma 1, alpha 0.5)" in (page / "report.html").read_text()
    rows = json.loads((page / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["ap", "ap:delta=0.5", "focal:gamma=1:alpha=0.5"]
    assert len({row["runs"][0]["folder"] for row in rows}) == 3


def test_losses_may_be_bare_words_and_settings_have_their_familiar_names(trainer: Trainer) -> None:
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
    words = ["compare", "--losses", "ap", "--data", data, "--device", "cpu", "--seeds", "1"]
    assert cli.main([*words, "--quiet"]) == 0
    (config,) = trainer.configs
    assert config.schedule.length == load_config("any-cpu").schedule.length
    assert config.batches.image_size == (160, 160)  # of the images


def test_learning_rates_are_searched_when_asked(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--losses", "ap", "--seeds", "1", "--tune", "--tune-steps", "3"]
    assert cli.main(["compare", *words]) == 0
    lengths = [config.schedule.length for config in trainer.configs]
    assert lengths == [3, 3, 3, 3, load_config("demo").schedule.length]
    assert "trial 4 of 4: AP-loss, learning rate 0.009" in capsys.readouterr().out


def test_after_ctrl_c_it_says_how_to_go_on(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.error = TrainingInterruptedError("go on with: aploss train ...")
    assert cli.main(["compare", "--quiet"]) == 130
    error = capsys.readouterr().err
    assert error == "stopped, everything is saved; the same command goes on\n"


def test_out_of_time_it_says_so(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--max-minutes", "0"]) == 0
    assert "not finished: the same command goes on" in capsys.readouterr().err
    assert trainer.configs == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["compare", "--losses", "ap,fokal"], "fokal"),
        (["compare", "--losses", ","], "rows"),
        (["compare", "--losses", "ap:detla=1"], "did you mean 'delta'"),
        (["compare", "--vary", "lerning_rate=1,2"], "did you mean 'optimizer.learning_rate'"),
        (["compare", "--vary", "batches.size"], "--vary batches.size=4,8"),
        (["compare", "--vary", "batches.size=4,x"], "batches.size must be a whole number"),
        (["compare", "--vary", "batches.size=4,8", "--batches.size", "2"], "leave one out"),
        (["compare", "--vary", "optimizer.learning_rate=1,2", "--tune"], "leave one out"),
        (["compare", "--vary", "schedule.length=1,2", "--steps", "2"], "leave one out"),
        (["compare", "--vary", "batches.size=4,8", "--batch-size", "2"], "leave one out"),
        (["compare", "ap", "--losses", "focal"], "given twice"),
        (["compare", "--tune", "--lr", "1"], "leave out --lr"),
        (["compare", "--seeds", "none"], "--seeds"),
        (["compare", "--seeds", "999999999999"], "--seeds"),
        (["compare", "--data", "x" * 300], "File name too long"),
        (["compare", "--steps", "0"], "--steps"),
        (["compare", "--tune-steps", "5"], "--tune"),
        (["compare", "--tune-over", "criterion.box_weight=1,3"], "--tune-over goes with --tune"),
        (["compare", "--tune", "--tune-over", "criterion.box_wieght=1"], "did you mean"),
        (["compare", "--tune", "--tune-over", "criterion.box_weight=-1"], "criterion.box_weight must be"),
        (["compare", "--tune", "--tune-over", "criterion.box_weight="], "give the values"),
        (["compare", "--tune", "--tune-over", "focla:gamma=1"], "focal"),
        (["compare", "--tune", "--tune-over", "focal:gama=1"], "gama"),
        (["compare", "--tune", "--losses", "ap", "--tune-over", "focal:gamma=1,2"], "no row has the loss focal"),
        (["compare", "--tune", "--losses", "ap,focal:gamma=1", "--tune-over", "focal:gamma=1,2"], "of its own"),
        (["compare", "--recipe", "fast"], "fast"),
        (["compare", "--data", "no/such/place"], "no/such/place"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line_and_exit_2(
    trainer: Trainer, capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert part in error
    assert trainer.configs == []


def test_an_error_of_the_training_is_one_line(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.error = RunError("the disk is full")
    assert cli.main(["compare", "--quiet"]) == 2
    assert capsys.readouterr().err == "aploss compare: the disk is full\n"
