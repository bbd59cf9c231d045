"""A resumed run ends with the same bits as an uninterrupted one; other data or settings are mapped or refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image, ImageOps
from tiny_runs import (
    CrashError,
    assert_equal,
    config_values,
    crash_at,
    edit_annotations,
    keep_objects,
    outcome,
    start_two,
)

from aploss.cli.main import main
from aploss.errors import AplossError
from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig, config_to_dict, merge
from aploss.training.run import train

pytestmark = pytest.mark.usefixtures("no_page")

# An epoch is 4 steps: a checkpoint at step 3 is in the middle of one. The rows are means over 2 steps, so that it is
# also in the middle of a row.
SETTINGS: dict[str, Any] = {
    "schedule": {"length": 8},
    "validation": {"every": 4},
    "checkpoint_steps": 3,
    "log_steps": 2,
}
Crashes = list[Callable[[dict[str, Any]], None]]
slow = pytest.mark.slow_fault


@pytest.mark.parametrize(
    ("changes", "crashes"),
    [
        pytest.param({}, [crash_at(4)], id="in the middle of an epoch", marks=slow),
        # Before any checkpoint, in the middle of an epoch, in a validation, right after a resume.
        pytest.param(
            {"model": {"ema": 0.99}},
            [crash_at(2), crash_at(6), crash_at(4, "validation"), crash_at(8)],
            id="with EMA, four times",
        ),
        pytest.param(
            {"precision": "float16", "model": {"ema": 0.9}}, [crash_at(4)], id="with float16 and its loss scale"
        ),
        pytest.param(
            {"batches": {"workers": 2}, "evaluation": {"checkpoint": "last"}},
            [crash_at(4)],
            id="with workers and an evaluation of the last weights",
            marks=slow,
        ),
        pytest.param(
            {"loss": "rank-sort", "precision": "bfloat16", "batches": {"accumulate": 2}, "model": {"ema": 0.9}},
            [crash_at(4), crash_at(6)],
            id="with everything at once",
            marks=slow,
        ),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    make_config: Callable[..., TrainConfig], changes: dict[str, Any], crashes: Crashes
) -> None:
    whole, broken = (make_config(name, **merge(SETTINGS, changes)) for name in ("whole", "broken"))
    train(whole)
    for crash in crashes:
        with pytest.raises(CrashError):
            train(broken, resume=True, callbacks=[crash])
    train(broken, resume=True)
    assert_equal(outcome(whole.out), outcome(broken.out))


# All trainings in one process group; the signal of rank 0 is all ranks' reason to stop.
TWO_PROCESSES = """
os.environ |= values["environment"]
import signal
import torch.distributed as dist
from aploss.training.config import config_from_dict
from aploss.training.distributed import TrainingInterruptedError
from aploss.training.run import train

def stop_at(step):
    def on_progress(row):
        if (row["kind"], row["step"]) == ("train", step):
            signal.raise_signal(signal.SIGTERM)
    return on_progress

dist.init_process_group("gloo")
whole, broken = map(config_from_dict, values["configs"])
train(whole)
for step in values["stops"]:
    try:
        train(broken, resume=True, callbacks=[stop_at(step)])
    except TrainingInterruptedError as stop:
        print(stop)
train(broken, resume=True)
"""


@pytest.mark.slow_fault
@pytest.mark.parametrize("ranked", [False, True], ids=["ranked alone", "ranked over processes"])
def test_two_processes_resume_to_the_same_bits(
    make_config: Callable[..., TrainConfig], spawn: Callable[..., BaseProcess], tmp_path: Path, ranked: bool
) -> None:
    changes = {"log_steps": 1, "criterion": {"rank_over_processes": ranked}}
    whole, broken = (make_config(name, **merge(SETTINGS, changes)) for name in ("whole", "broken"))
    configs = [config_to_dict(config) for config in (whole, broken)]
    processes = start_two(spawn, TWO_PROCESSES, tmp_path, configs=configs, stops=[2, 5])
    for process in processes:
        process.join(timeout=300)
    logs = "\n".join((tmp_path / f"{rank}.log").read_text() for rank in (0, 1))
    assert [process.exitcode for process in processes] == [0, 0], logs
    assert logs.count("everything is saved") == 4, logs
    assert len(read_json_lines(Path(str(broken.out)) / "metrics.jsonl")) == 10
    assert_equal(outcome(whole.out), outcome(broken.out))


# --- the resume matrix ---

MATRIX: dict[str, Any] = {"schedule": {"length": 4, "warmup_steps": 1}, "checkpoint_steps": 1}


@pytest.fixture(scope="module")
def whole(config_in: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outcome of the run of the matrix without any interruption."""
    config = config_in(tmp_path_factory.mktemp("matrix") / "whole", **MATRIX)
    train(config)
    return outcome(config.out)


@pytest.fixture(scope="module")
def stopped(config_in: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The same run, stopped after its second step."""
    config = config_in(tmp_path_factory.mktemp("matrix") / "stopped", **MATRIX)
    with pytest.raises(CrashError):
        train(config, callbacks=[crash_at(3)])
    return config


@pytest.fixture
def copied(stopped: TrainConfig, rectangles: Path, tmp_path: Path) -> TrainConfig:
    """The stopped run and its data as copies that can be changed."""
    data, out = shutil.copytree(rectangles, tmp_path / "data"), shutil.copytree(str(stopped.out), tmp_path / "run")
    return replace(stopped, data=str(data), out=str(out))


def exchange_class_ids(document: dict[str, Any]) -> None:
    """Objects keep their names."""
    document["categories"] = [{"id": 1, "name": "green"}, {"id": 2, "name": "red"}]
    for annotation in document["annotations"]:
        annotation["category_id"] = 3 - annotation["category_id"]


def rename_class(document: dict[str, Any]) -> None:
    document["categories"][0]["name"] = "crimson"


def move_box(document: dict[str, Any]) -> None:
    document["annotations"][0]["bbox"][0] += 1


def keep_one_image(document: dict[str, Any]) -> None:
    document["images"] = document["images"][:1]
    keep_objects(1)(document)


def in_all(change: Callable[[dict[str, Any]], None]) -> Callable[[TrainConfig], None]:
    return lambda config: [edit_annotations(config.data, split, change) for split in ("train", "val", "test")] and None


def mirror_image(config: TrainConfig) -> None:
    file = Path(config.data) / "train" / "train-5.png"
    ImageOps.mirror(Image.open(file)).save(file)


def convert(config: TrainConfig) -> None:
    """To VOC, whose boxes are the same here, in the same order."""
    data = Path(config.data)
    assert main(["data", "convert", str(data), "--out", str(data.with_name("voc")), "--to", "voc", "--quiet"]) == 0
    shutil.rmtree(data)
    data.with_name("voc").rename(data)


def settings(**changes: Any) -> Callable[[TrainConfig], TrainConfig]:
    return lambda config: config_values(config, changes)


# What is changed → how, and the outcome: the bits of an undisturbed run, the same with a line, or refused.
CHANGES: dict[str, tuple[Callable[[TrainConfig], TrainConfig | None], str]] = {
    "nothing": (lambda config: None, "identical"),
    "class order": (in_all(exchange_class_ids), "mapped"),
    "class names": (in_all(rename_class), "refused"),
    "boxes": (lambda config: edit_annotations(config.data, "train", move_box), "refused"),
    "images": (mirror_image, "refused"),
    "validation set": (lambda config: edit_annotations(config.data, "val", keep_one_image), "refused"),
    "evaluation set": (lambda config: edit_annotations(config.data, "test", move_box), "refused"),
    "format converted": (convert, "identical"),
    "batch size": (settings(batches={"size": 2}), "refused"),
    "precision": (settings(precision="bfloat16"), "refused"),
    "recipe default of the learning rate": (settings(optimizer={"learning_rate": 0.1}), "refused"),
    "recipe default of the warmup": (settings(schedule={"warmup_steps": 9, "exact_warmup": False}), "identical"),
    "place of the data": (lambda config: None, "identical"),  # the copies are elsewhere
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.regression("33a370e")
def test_a_change_before_a_resume_is_without_effect_mapped_with_a_line_or_refused(
    copied: TrainConfig, whole: Any, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, expected = CHANGES[name]
    config = change(copied) or copied
    before = (Path(str(config.out)) / "checkpoints/last.pt").read_bytes()
    if expected == "refused":
        with pytest.raises(AplossError) as error:
            train(config, resume=True, quiet=False)
        assert "\n" not in str(error.value)
        assert (Path(str(config.out)) / "checkpoints/last.pt").read_bytes() == before
        return
    summary = train(config, resume=True, quiet=False)
    assert_equal(whole, outcome(config.out))
    assert ("another order" in capsys.readouterr().out) == (expected == "mapped")
    assert summary.resume_changes == []


def test_a_recipe_changed_by_an_update_is_refused_or_not_read(
    copied: TrainConfig, whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, words = tmp_path / "recipe.yaml", ["train", "--resume", "--quiet", "--out", str(copied.out)]
    recipe.write_text(yaml.safe_dump(merge(config_to_dict(copied), {"optimizer": {"learning_rate": 0.1}})))
    assert main([*words, "--recipe", str(recipe)]) == 2
    assert "learning_rate" in capsys.readouterr().err
    assert main(words) == 0
    assert_equal(whole, outcome(copied.out))


@pytest.mark.parametrize("name", ["boxes", "images", "validation set", "evaluation set"])
def test_other_data_are_accepted_by_an_option_and_recorded(copied: TrainConfig, name: str) -> None:
    CHANGES[name][0](copied)
    split = {"validation set": "val", "evaluation set": "test"}.get(name, "train")
    accepting = config_values(copied, {"splits": {"accept_changed": True}})
    with pytest.raises(CrashError):
        train(accepting, resume=True, callbacks=[crash_at(4)])
    summary = train(copied, resume=True)  # the new data are those of the run now
    (change,) = summary.resume_changes
    assert change.startswith(f"step 2: split {split}: ")
    assert json.loads((Path(summary.folder) / "summary.json").read_text())["resume_changes"] == [change]


@pytest.mark.slow_fault
def test_another_number_of_processes_is_recorded(
    copied: TrainConfig, spawn: Callable[..., BaseProcess], tmp_path: Path
) -> None:
    words = ["train", "--resume", "--quiet", "--out", str(copied.out), "--data", copied.data]
    program = 'os.environ |= values["environment"]\nfrom aploss.cli.main import main\nsys.exit(main(values["words"]))'
    processes = start_two(spawn, program, tmp_path, words=words)
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0], (tmp_path / "0.log").read_text()
    assert "1 processes, now 2" in (tmp_path / "0.log").read_text()
    summary = json.loads((Path(str(copied.out)) / "summary.json").read_text())
    assert summary["resume_changes"] == ["step 2: 1 processes, now 2"]


def test_a_finished_run_is_extended_by_the_schedule_of_its_new_length(
    config_in: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    """Up to its old end it has the rates of the old schedule, from there on those of the new one."""
    config = config_in(tmp_path / "run", **MATRIX, splits={"validation": "none"})
    train(config)
    before = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    longer = config_values(config, {"schedule": {"length": 8}})
    with pytest.raises(CrashError):
        train(longer, resume=True, callbacks=[crash_at(6)])
    # Interrupted, it is resumed without the length being given again.
    assert main(["train", "--resume", "--quiet", "--out", str(tmp_path / "run")]) == 0
    rows = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    assert rows[:4] == before
    train(config_values(longer, {"out": str(tmp_path / "at-once")}))
    at_once = read_json_lines(tmp_path / "at-once" / "metrics.jsonl")
    assert [row["lr"] for row in rows[4:]] == [row["lr"] for row in at_once[4:]]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["resume_changes"]) == (8, ["step 4: extended to 8 steps"])
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["schedule"]["length"] == 8
    with pytest.raises(AplossError):
        train(config_values(config, {"schedule": {"length": 6}}), resume=True)
    assert (tmp_path / "run" / "summary.json").is_file()
