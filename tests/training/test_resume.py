"""A run that was interrupted ends with the same bits as one that was not."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aploss.errors import RunError
from aploss.training.config import TrainConfig
from aploss.training.loop_state import TrainingInterruptedError
from aploss.training.metrics_log import read_rows
from aploss.training.run import train
from aploss.training.signals import StopSignals

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

        patch.setattr("aploss.training.checkpoint.Checkpoints.save_best", crash)
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
    monkeypatch.setattr("aploss.training.signals.time.monotonic", lambda: clock[0])
    with StopSignals() as signals:
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
