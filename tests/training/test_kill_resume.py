"""``kill -9`` at random moments: no checkpoint is ever unreadable, and the end is the same.

Four kills by default; ``APLOSS_KILLS=50`` for the long version.
"""

import os
import random
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from aploss.errors import RunError
from aploss.training.config import TrainConfig, config_to_dict
from aploss.training.metrics_log import read_rows
from aploss.training.run import train
from aploss.training.run_folder import RunFolder

KILLS = int(os.environ.get("APLOSS_KILLS", "4"))
SETTINGS: dict[str, Any] = {
    "schedule": {"length": 6 * KILLS, "warmup_steps": 2},
    "validation": {"every": 5},
    "checkpoint_steps": 1,
}
PROGRAM = """
from aploss.training.config import config_from_dict
from aploss.training.run import train
from aploss.training.run_folder import RunFolder
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


@pytest.mark.usefixtures("no_page")
def test_killed_runs_always_go_on_and_end_with_the_same_bits(
    make_config: Callable[..., TrainConfig], spawn: Callable[..., BaseProcess], tmp_path: Path
) -> None:
    killed = make_config("killed", **SETTINGS)
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
    whole = make_config("whole", **SETTINGS)
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
