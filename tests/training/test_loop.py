"""A run that was interrupted ends with the same bits as one that was not.

Four ``kill -9`` by default; ``APLOSS_KILLS=50`` for the long version.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from aploss.errors import RunError
from aploss.training.config import TrainConfig, config_to_dict
from aploss.training.distributed import StopSignals, TrainingInterruptedError
from aploss.training.run import train
from aploss.training.run_folder import RunFolder, read_rows

MakeConfig = Callable[..., TrainConfig]
WALL_CLOCK = ("seconds", "images_per_second")
pytestmark = pytest.mark.usefixtures("no_page")

# An epoch is 4 steps: the checkpoints at 3 and 6 are in the middle of one. The rows are means over
# 2 steps, so that a checkpoint at step 3 is also in the middle of a row.
SETTINGS: dict[str, Any] = {
    "schedule": {"length": 8},
    "validation": {"every": 4},
    "checkpoint_steps": 3,
    "log_steps": 2,
    "model": {"ema": 0.99},
}


class CrashError(Exception):
    """What stands for a kill, inside this process."""


def crash_at(step: int, kind: str = "train") -> Callable[[dict[str, Any]], None]:
    def on_progress(row: dict[str, Any]) -> None:
        if row["step"] >= step and row["kind"] == kind:
            raise CrashError

    return on_progress


def outcome(config: TrainConfig) -> dict[str, Any]:
    """Everything of a run that must not depend on interruptions."""
    folder = Path(str(config.out))
    last = torch.load(folder / "checkpoints/last.pt", weights_only=True)
    best = torch.load(folder / "checkpoints/best.pt", weights_only=True)
    rows = [
        {key: value for key, value in row.items() if key not in WALL_CLOCK}
        for row in read_rows(folder / "metrics.jsonl")
    ]
    lines = (folder / "metrics.csv").read_text().splitlines()
    training = {key: value for key, value in last["training"].items() if key != "seconds"}
    return {
        "detector": last["detector"],
        "training": training,
        "best": best,
        "rows": rows,
        "csv": [line.split(",")[:-2] for line in lines],
        "detections": json.loads((folder / "evaluation/detections.json").read_text()),
        "calibration": json.loads((folder / "evaluation/calibration.json").read_text()),
    }


def assert_equal(first: Any, second: Any, where: str = "") -> None:
    """Bit for bit, through dicts, lists and tensors."""
    assert type(first) is type(second), where
    if isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            assert_equal(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_equal(one, other, f"{where}[{index}]")
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    else:
        assert first == second, where


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(make_config: MakeConfig) -> None:
    whole = make_config("whole", **SETTINGS)
    train(whole)
    broken = make_config("broken", **SETTINGS)
    # Before any checkpoint, in the middle of an epoch, in a validation, right after a resume.
    for crash in (crash_at(2), crash_at(6), crash_at(4, "validation"), crash_at(8)):
        with pytest.raises(CrashError):
            train(broken, resume=True, on_progress=crash)
    train(broken, resume=True)
    assert_equal(outcome(whole), outcome(broken))


def test_a_kill_between_the_two_checkpoints_is_mended(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """last.pt has the new best step already, best.pt is still the old one, or not there."""
    config = make_config(**SETTINGS)
    with monkeypatch.context() as patch:

        def crash(*arguments: Any, **options: Any) -> None:
            raise CrashError

        patch.setattr("aploss.training.run_folder.Checkpoints.save_best", crash)
        with pytest.raises(CrashError):
            train(config)
    folder = Path(str(config.out)) / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["last.pt"]
    with pytest.raises(CrashError):
        train(config, resume=True, on_progress=crash_at(6))
    best = torch.load(folder / "best.pt", weights_only=True)
    assert best["step"] == 4
    assert best["metrics"]["AP"] is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_says_how_to_go_on(
    make_config: MakeConfig, number: signal.Signals
) -> None:
    whole = make_config("whole", schedule={"length": 4}, validation={"every": 2})
    train(whole)
    stopped = make_config("stopped", schedule={"length": 4}, validation={"every": 2})
    handler = signal.getsignal(number)

    def stop(row: dict[str, Any]) -> None:
        if row["step"] == 2 and row["kind"] == "train":
            signal.raise_signal(number)

    with pytest.raises(TrainingInterruptedError, match=r"step 2 of 4.*--resume --out .*stopped"):
        train(stopped, on_progress=stop)
    assert signal.getsignal(number) is handler
    # Interrupted before the validation of step 2: the resumed run makes up for it.
    assert [row["kind"] for row in read_rows(Path(str(stopped.out)) / "metrics.jsonl")] == [
        "train",
        "train",
    ]
    train(stopped, resume=True)
    assert_equal(outcome(whole), outcome(stopped))


def test_a_second_ctrl_c_interrupts_at_once_unless_it_is_an_echo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("aploss.training.distributed.time.monotonic", lambda: clock[0])
    with StopSignals() as signals, signals.deferred():
        signal.raise_signal(signal.SIGINT)
        assert signals.requested
        signal.raise_signal(signal.SIGINT)  # torchrun passes on what the terminal has sent
        clock[0] = 2.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_resume_without_a_run_starts_one(make_config: MakeConfig) -> None:
    summary = train(make_config(schedule={"length": 1}), resume=True)
    assert summary.steps == 1


def test_a_kill_while_measuring_only_measures_again(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(schedule={"length": 2})
    with monkeypatch.context() as patch:

        def crash(*arguments: Any, **options: Any) -> None:
            raise CrashError

        patch.setattr("aploss.training.run.evaluate_run", crash)
        with pytest.raises(CrashError):
            train(config)
    steps: list[int] = []
    summary = train(config, resume=True, on_progress=lambda row: steps.append(row["step"]))
    assert steps == []
    assert (summary.steps, summary.stopped_by) == (2, "length")


def test_a_damaged_or_foreign_checkpoint_is_an_error_that_names_it(make_config: MakeConfig) -> None:
    config = make_config(schedule={"length": 2})
    with pytest.raises(CrashError):
        train(config, on_progress=crash_at(2, "validation"))
    last = Path(str(config.out)) / "checkpoints" / "last.pt"
    last.write_bytes(b"PK broken")
    with pytest.raises(RunError, match=r"last\.pt cannot be read"):
        train(config, resume=True)
    torch.save({"weights": 1}, last)
    with pytest.raises(RunError, match=r"last\.pt is not a checkpoint"):
        train(config, resume=True)


def test_other_training_images_are_noticed(make_config: MakeConfig) -> None:
    config = make_config(schedule={"length": 3}, checkpoint_steps=1)
    with pytest.raises(CrashError):
        train(config, on_progress=crash_at(2))
    folder = Path(config.data)
    moved = folder.parent / "fewer"
    if not moved.exists():
        import shutil

        shutil.copytree(folder, moved)
        path = moved / "annotations" / "instances_train.json"
        document = json.loads(path.read_text())
        document["images"] = document["images"][:8]
        document["annotations"] = [a for a in document["annotations"] if a["image_id"] <= 8]
        path.write_text(json.dumps(document))
    changed = make_config(schedule={"length": 3}, checkpoint_steps=1, data=str(moved))
    with pytest.raises(RunError, match="16 training images, but the data now has 8"):
        train(changed, resume=True)


# --- kill -9 ---

KILLS = int(os.environ.get("APLOSS_KILLS", "4"))
KILL_SETTINGS: dict[str, Any] = {
    "schedule": {"length": 6 * KILLS, "warmup_steps": 2},
    "validation": {"every": 5},
    "checkpoint_steps": 1,
}
PROGRAM = """
from aploss.training.config import config_from_dict
from aploss.training.run import train
train(config_from_dict(values["config"]), resume=True)
"""


def checkpoint_step(folder: Path) -> int:
    """The step of last.pt, which must be readable at every moment; -1 before the first."""
    last = folder / "checkpoints" / "last.pt"
    if not last.is_file():
        return -1
    return int(torch.load(last, weights_only=True)["training"]["step"])


def test_two_processes_cannot_train_in_one_folder(
    make_config: Callable[..., TrainConfig], spawn: Callable[..., BaseProcess], tmp_path: Path
) -> None:
    config = make_config("shared", schedule={"length": 100_000}, checkpoint_steps=1)
    process = spawn(PROGRAM, log=tmp_path / "log", config=config_to_dict(config))
    while checkpoint_step(tmp_path / "shared") < 1:
        assert process.is_alive(), (tmp_path / "log").read_text()
        time.sleep(0.02)
    with pytest.raises(RunError, match="another process is training in"):
        train(config, resume=True)
    process.kill()
    process.join()
    with RunFolder(tmp_path / "shared").locked():
        pass  # the lock went with the process


def test_killed_runs_always_go_on_and_end_with_the_same_bits(
    make_config: Callable[..., TrainConfig], spawn: Callable[..., BaseProcess], tmp_path: Path
) -> None:
    killed = make_config("killed", **KILL_SETTINGS)
    folder = tmp_path / "killed"
    moments = random.Random(0)
    kills_in_training = 0
    for number in range(KILLS):
        before = checkpoint_step(folder)
        process = spawn(PROGRAM, log=tmp_path / f"{number}.log", config=config_to_dict(killed))
        # Every kill hits a run that has got going; every other one after one more step.
        while process.is_alive() and checkpoint_step(folder) <= before + number % 2:
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.15))
        process.kill()
        process.join()
        assert checkpoint_step(folder) > before, (tmp_path / f"{number}.log").read_text()
        kills_in_training += not (folder / "summary.json").is_file()
    assert kills_in_training == KILLS
    train(killed, resume=True)
    whole = make_config("whole", **KILL_SETTINGS)
    train(whole)
    for name in ("last", "best"):
        expected, found = (
            torch.load(tmp_path / run / "checkpoints" / f"{name}.pt", weights_only=True)["detector"]
            for run in ("whole", "killed")
        )
        assert expected["state"].keys() == found["state"].keys()
        for key, value in expected["state"].items():
            assert torch.equal(value, found["state"][key]), (name, key)
    rows = [
        [(row["kind"], row["step"], row.get("loss"), row.get("AP")) for row in read_rows(file)]
        for file in (tmp_path / "whole/metrics.jsonl", tmp_path / "killed/metrics.jsonl")
    ]
    assert rows[0] == rows[1]
    assert not list(folder.rglob("*.unfinished"))
