"""``aploss train``: settings from recipe, file and options; errors of one line; exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from aploss.cli.main import main
from aploss.training import TrainConfig, TrainingInterruptedError, load_config
from aploss.training.config import config_from_dict


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A COCO data set of eight images of 96x64 pixels with one white square each."""
    folder = tmp_path_factory.mktemp("squares")
    (folder / "annotations").mkdir()
    for split in ("train", "val"):
        (folder / split).mkdir()
        images, annotations = [], []
        for number in range(1, 9):
            picture = Image.new("RGB", (96, 64))
            picture.paste("white", (8 * number, 20, 8 * number + 20, 40))
            picture.save(folder / split / f"{number}.png")
            images.append({"id": number, "file_name": f"{number}.png", "width": 96, "height": 64})
            box = [8 * number, 20, 20, 20]
            annotations.append(
                {"id": number, "image_id": number, "category_id": 1, "bbox": box, "area": 400,
                 "iscrowd": 0}
            )  # fmt: skip
        document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "square"}]}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["train", *arguments, "--print_config"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    config_from_dict(values)  # what is printed can be used as a config file
    return dict(values)


def test_a_run_needs_nothing_but_data(
    squares: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APLOSS_CACHE", str(tmp_path / "cache"))  # of the features
    code = main(["train", "--data", str(squares), "--schedule.length", "2", "--out", "here"])
    captured = capsys.readouterr()
    output = captured.out
    assert code == 0
    assert "recipe    any-cpu, as none was given: retinanet-lite0 on 160x96 pixels" in output
    assert "8 images to train on, 8 for validation (val)" in output
    assert "report: here/report.html" in output
    assert "square" in output
    assert "finished: all 2 steps are done" in output
    assert "next: aploss predict here PHOTOS --out found" in captured.err
    assert Path("here/report.html").stat().st_size > 10_000
    assert len(Path("here/metrics.csv").read_text().splitlines()) == 3  # a head, one row of training and one of AP,
    assert Path("here/plots/loss.svg").is_file()  # and there are charts all the same
    assert "There are no curves" not in Path("here/report.html").read_text()
    # Again without --resume is refused, with it the result is only shown.
    assert main(["train", "--data", str(squares), "--out", "here"]) == 2
    assert "already holds a run; add --resume" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", "here"]) == 0
    assert "report: here/report.html" in capsys.readouterr().out


def test_options_win_over_the_file_and_the_file_over_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("batches: {size: 6, image_size: 96}\nloss: focal\n")
    values = printed_config(capsys, "--recipe", "demo", "--config", "mine.yaml", "--batches.size", "2")
    assert values["loss"] == "focal"
    assert values["batches"]["size"] == 2
    assert values["batches"]["image_size"] == 96
    assert values["schedule"]["length"] == load_config("demo").schedule.length


def test_the_loss_given_chooses_its_section_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    values = printed_config(capsys, "--recipe", "voc-ssd512", "--loss", "focal")
    assert values["criterion"]["options"] == {"alpha": 0.25, "gamma": 1.0}


def test_values_of_all_kinds_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    values = printed_config(
        capsys, "--recipe", "demo",
        "--max-minutes", "0.5", "--checkpoint-minutes", "0.05", "--checkpoint_steps", "7",
        "--batches.image_size", "[64, 96]", "--optimizer.clip_norm", "null",
        "--optimizer.learning_rate", "1e-3", "--model.frozen", '["backbone.*"]',
        "--model.options.anchors_per_cell", "9", "--criterion.options", "{delta: 0.5}",
    )  # fmt: skip
    assert (values["max_minutes"], values["checkpoint_minutes"]) == (0.5, 0.05)
    assert values["checkpoint_steps"] == 7
    assert values["batches"]["image_size"] == [64, 96]
    assert values["optimizer"]["clip_norm"] is None
    assert values["optimizer"]["learning_rate"] == 0.001
    assert values["model"]["frozen"] == ["backbone.*"]
    assert values["model"]["options"] == {"anchors_per_cell": 9, "test_size": [128, 128]}
    assert values["criterion"]["options"] == {"delta": 0.5}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no data: give --data"),
        (["--data", "nowhere"], "nowhere: no such file or folder"),
        (["--recipe", "demoo"], "no recipe 'demoo'"),
        (["--recipe", "demo", "--loss", "foo"], "no loss 'foo'"),
        (["--recipe", "demo", "--detector", "yolo"], "no detector 'yolo'"),
        (["--recipe", "demo", "--optimizer.learning_rate", "-1"], "optimizer.learning_rate"),
        (["--recipe", "demo", "--config", "wrong.yaml"], "wrong.yaml: unknown key 'batchs'"),
        (["--recipe", "demo", "--config", "none.yaml"], "none.yaml cannot be read"),
        (["--resume", "--out", "nothing"], "nothing holds no run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    Path("wrong.yaml").write_text("batchs: {size: 2}\n")
    assert main(["train", "--quiet", *arguments]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.count("\n") == 1


FAMILIAR = ["--lr", "1e-3", "--batch-size", "4", "--image-size", "64x96"]


def test_familiar_names_are_short_for_settings(capsys: pytest.CaptureFixture[str]) -> None:
    values = printed_config(capsys, "--recipe", "demo", "--steps", "30", *FAMILIAR)
    assert (values["schedule"]["length"], values["schedule"]["unit"]) == (30, "steps")
    assert (values["optimizer"]["learning_rate"], values["batches"]["size"]) == (0.001, 4)
    assert values["batches"]["image_size"] == [64, 96]
    assert values["model"]["options"]["test_size"] == [64, 96]  # 128x128 before, of images of 128x128


def test_milestones_keep_their_share_of_a_shorter_training(capsys: pytest.CaptureFixture[str]) -> None:
    whole = printed_config(capsys, "--recipe", "voc-retinanet-r50")["schedule"]
    assert (whole["length"], whole["unit"], whole["milestones"]) == (160, "epochs", [110.0, 140.0])
    for option, unit in (("--epochs", "epochs"), ("--steps", "steps")):
        short = printed_config(capsys, "--recipe", "voc-retinanet-r50", option, "16")["schedule"]
        assert (short["length"], short["unit"], short["milestones"]) == (16, unit, [11.0, 14.0])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--lr", "1", "--optimizer.learning-rate", "2"], "--lr and --optimizer.learning-rate are the same setting"),
        (["--batch-size", "1", "--batches.size", "2"], "--batch-size and --batches.size"),
        (["--image-size", "64", "--batches.image_size", "32"], "--image-size and --batches.image-size"),
        (["--epochs", "1", "--schedule.length", "2"], "--epochs and --schedule.length"),
        (["--steps", "1", "--schedule.unit", "epochs"], "--steps and --schedule.unit"),
        (["--epochs", "1", "--steps", "2"], "--epochs or --steps, not both"),
        (["--image-size", "big"], "--image-size big: write 320, or 240x320"),
        (["builtin", "--data", "elsewhere"], "two data sets, builtin and --data elsewhere"),
    ],
)
def test_two_names_of_a_setting_are_not_given_together(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert main(["train", "--recipe", "demo", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_bare_word_is_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_config(capsys, "somewhere", "--recipe", "any-cpu")["data"] == "somewhere"


def test_underscores_are_taken_for_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (
        printed_config(capsys, "--recipe", "demo", f"--max{sign}minutes=3", f"--batches.image{sign}size", "96")
        for sign in "_-"
    )
    assert old == new
    assert (old["max_minutes"], old["batches"]["image_size"]) == (3.0, 96)


@pytest.mark.parametrize("arguments", [["--batches.sise", "3"], ["--batches.size", "many"], ["--schedule.kind", "x"]])
def test_an_option_that_does_not_exist_or_fit_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["train", "--recipe", "demo", *arguments]) == 2
    told = capsys.readouterr().err
    assert arguments[0] in told
    assert told.count("\n") == 1


def test_help_shows_examples_settings_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())  # lines are broken anywhere
    assert "aploss train --resume --out" in text
    assert "--optimizer.learning-rate" in text
    assert "(default: 0.003)" in text
    for name in ("--epochs", "--steps", "--lr", "--batch-size", "--image-size", "rank-sort", "ssdlite", "bccd-cpu"):
        assert name in text


def test_an_interruption_says_how_to_go_on_and_exits_with_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise TrainingInterruptedError("stopped at step 3; go on with: aploss train --resume")

    monkeypatch.setattr("aploss.training.train", interrupted)
    assert main(["train", "--recipe", "demo"]) == 130
    assert capsys.readouterr().err == "stopped at step 3; go on with: aploss train --resume\n"


def test_the_size_that_is_given_is_the_one_that_is_told(
    squares: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TrainConfig] = []

    def interrupted(config: TrainConfig, **options: Any) -> None:
        asked.append(config)
        raise TrainingInterruptedError("stopped")

    monkeypatch.setattr("aploss.training.train", interrupted)
    assert main(["train", str(squares), "--image-size", "64x96", "--device", "cpu"]) == 130
    assert "retinanet-lite0 on 96x64 pixels" in capsys.readouterr().out
    assert (asked[0].data, asked[0].batches.image_size) == (str(squares), (64, 96))


def test_only_the_main_process_talks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from aploss.errors import RunError

    def fails(*arguments: Any, **options: Any) -> None:
        raise RunError("the folder is taken")

    monkeypatch.setattr("aploss.training.train", fails)
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--recipe", "demo"]) == 2
    assert capsys.readouterr().err == ""
