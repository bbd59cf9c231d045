"""Interruptions, and images that cannot be read.

Signals, kills and exact resumption are in ``tests/faults``.
"""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_runs import CrashError, assert_equal, crash_at, outcome

from aploss.detectors.checkpoint import Checkpoint
from aploss.errors import DataError, RunError
from aploss.training.config import TrainConfig, merge
from aploss.training.distributed import StopSignals, TrainingInterruptedError
from aploss.training.run import train

MakeConfig = Callable[..., TrainConfig]
pytestmark = pytest.mark.usefixtures("no_page")

# An epoch is 4 steps: the checkpoints at 3 and 6 are in the middle of one. The rows are means over
# 2 steps, so that a checkpoint at step 3 is also in the middle of a row.
SETTINGS: dict[str, Any] = {
    "schedule": {"length": 6},
    "validation": {"every": 4},
    "checkpoint_steps": 3,
    "log_steps": 2,
    "model": {"ema": 0.99},
}


def whole(make_config: MakeConfig, **settings: Any) -> Any:
    """The outcome of an uninterrupted run."""
    config = make_config("whole", **settings)
    train(config)
    return outcome(config.out)


def test_a_kill_between_the_two_checkpoints_changes_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """best.pt has the new best step already, last.pt is still the old one."""
    config, write = make_config(**SETTINGS), Checkpoint.write

    def crash(checkpoint: Checkpoint, file: Path) -> None:
        if file.with_name("best.pt").is_file():
            raise CrashError
        write(checkpoint, file)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "write", crash)
        with pytest.raises(CrashError):
            train(config)
    steps = {name: Checkpoint.read(Path(str(config.out)) / f"checkpoints/{name}.pt").step for name in ("best", "last")}
    assert steps == {"best": 4, "last": 3}
    train(config, resume=True)
    assert_equal(whole(make_config, **SETTINGS), outcome(config.out))


def test_a_second_ctrl_c_interrupts_at_once_unless_it_is_an_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("aploss.training.distributed.time.monotonic", lambda: clock[0])
    with StopSignals() as signals, signals.deferred():
        signal.raise_signal(signal.SIGINT)
        assert signals.requested
        signal.raise_signal(signal.SIGINT)  # torchrun passes on what the terminal has sent
        clock[0] = 2.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


# --- images that cannot be read, or are others on resume ---


@pytest.fixture
def own_data(rectangles: Path, tmp_path: Path) -> Path:
    """A copy of the data set, to be damaged."""
    return Path(shutil.copytree(rectangles, tmp_path / "own-data"))


IMAGES: dict[str, Any] = {**SETTINGS, "batches": {"max_unreadable": 0.3}}
TWO_EPOCHS = {"schedule": {"length": 8}}  # where every image has to come up again


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_replaced_counted_and_named(
    make_config: MakeConfig, own_data: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    """One of each split; another image replaces the one of training, the others are left out."""
    for split in ("train", "val", "test"):
        (own_data / split / f"{split}-3.png").write_bytes(b"no image at all")
    settings = merge(IMAGES, {"data": str(own_data), "batches": {"workers": workers}, **TWO_EPOCHS})
    summary = train(make_config(**settings))
    named = {Path(path).name: reason for path, reason in summary.unreadable_images.items()}
    assert set(named) == {"train-3.png", "val-3.png", "test-3.png"}
    assert all("not an image" in reason for reason in named.values())
    assert (summary.steps, summary.stopped_by) == (8, "length")
    folder = Path(summary.folder)
    warned = capsys.readouterr().err
    assert all(warned.count(f"{split}-3.png") == 1 for split in ("train", "val", "test"))
    truth = json.loads((folder / "evaluation/ground_truth.json").read_text())
    assert [image["id"] for image in truth["images"]] == [1, 2, 4, 5, 6]


def test_a_run_with_damaged_images_is_resumed_to_the_same_bits(make_config: MakeConfig, own_data: Path) -> None:
    for number in (3, 7):
        (own_data / "train" / f"train-{number}.png").write_bytes(b"")
    settings = merge(IMAGES, {"data": str(own_data)})
    broken = make_config("broken", **settings)
    for crash in (crash_at(4), crash_at(6)):
        with pytest.raises(CrashError):
            train(broken, resume=True, callbacks=[crash])
    train(broken, resume=True)
    assert_equal(whole(make_config, **settings), outcome(broken.out))


def test_too_many_unreadable_images_stop_a_run_that_can_be_resumed_when_they_are_back(
    make_config: MakeConfig, own_data: Path, rectangles: Path
) -> None:
    files = sorted((own_data / "train").iterdir())[:6]
    for file in files:
        file.unlink()
        file.mkdir()  # listed, but not an image
    config = make_config(**merge(SETTINGS, {"data": str(own_data)}))
    with pytest.raises(DataError, match=r"training images cannot be read.*is saved.*--resume"):
        train(config)
    assert (Path(str(config.out)) / "checkpoints/last.pt").is_file()
    for file in files:
        file.rmdir()
        shutil.copy(rectangles / "train" / file.name, file)
    with pytest.raises(RunError, match="split train: other files"):
        train(config, resume=True)
    summary = train(replace(config, splits=replace(config.splits, accept_changed=True)), resume=True)
    assert summary.steps == 6
    assert len(summary.resume_changes) == 1


def test_a_checkpoint_of_an_earlier_version_is_resumed_to_the_same_bits(make_config: MakeConfig) -> None:
    old = make_config("old", **SETTINGS)
    with pytest.raises(CrashError):
        train(old, callbacks=[crash_at(4)])
    folder = Path(str(old.out))
    content = torch.load(folder / "checkpoints/last.pt", weights_only=True)
    assert content["format"] == 1
    for name in ("data", "processes", "changes", "unreadable"):
        del content["training"][name]
    content["training"]["image_names"] = []
    torch.save(content, folder / "checkpoints/last.pt")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    del config["batches"]["max_unreadable"], config["schedule"]["exact_warmup"], config["splits"]["accept_changed"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    train(old, resume=True)
    assert_equal(whole(make_config, **SETTINGS), outcome(old.out))


def test_a_split_that_only_measured_the_calibration_in_an_earlier_version_is_not_missed(
    make_config: MakeConfig,
) -> None:
    old = make_config(**SETTINGS, evaluation={"split": "val"})
    with pytest.raises(CrashError):
        train(old, callbacks=[crash_at(4)])
    last = Path(str(old.out)) / "checkpoints/last.pt"
    content = torch.load(last, weights_only=True)
    content["training"]["data"]["test"] = {"images": 6}
    torch.save(content, last)
    assert train(old, resume=True).resume_changes == []


def test_a_signal_in_the_last_step_is_not_forgotten(make_config: MakeConfig) -> None:
    config = make_config(schedule={"length": 2})

    def stop(row: dict[str, Any]) -> None:
        if (row["step"], row["kind"]) == (2, "train"):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(TrainingInterruptedError, match=r"training is finished.*--resume --out"):
        train(config, callbacks=[stop])
    steps: list[int] = []
    summary = train(config, resume=True, callbacks=[lambda row: steps.append(row["step"])])
    assert (summary.steps, summary.stopped_by) == (2, "length")
    assert {*steps} <= {2}  # at most the validation that the signal came before
