"""Faults around a run: folders in the way, workers that die, saves that fail, and records of what ran."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_runs import SETTINGS, assert_equal, outcome

from aploss.cli.main import main
from aploss.errors import RunError
from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig, merge
from aploss.training.distributed import emulates_bfloat16
from aploss.training.run import train

pytestmark = pytest.mark.usefixtures("no_page")
MakeConfig = Callable[..., TrainConfig]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "files",
    [
        ["thesis.txt"],
        ["checkpoints/last.pt"],
        ["evaluation/detections.json"],
        ["checkpoints/best.pt", "environment.json", ".lock"],
        ["config.yaml", "checkpoints/best.pt"],
        ["config.yaml", "evaluation/metrics.json"],
    ],
    ids=" and ".join,
)
@pytest.mark.regression("33a370e")
def test_other_files_and_the_rest_of_a_run_are_not_overwritten(make_config: MakeConfig, files: list[str]) -> None:
    config = make_config(schedule={"length": 1})
    folder = Path(str(config.out))
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    before = contents(folder)
    with pytest.raises(RunError):
        train(config)
    assert contents(folder) == before


@pytest.mark.parametrize("while_", ["training", "validating"])
@pytest.mark.regression("33a370e")
def test_a_killed_data_loader_worker_ends_a_run_that_is_saved(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, while_: str
) -> None:
    """Like one that the system has killed for lack of memory."""
    settings: dict[str, Any] = {
        "schedule": {"length": 8},
        "validation": {"every": 2 if while_ == "validating" else 8},
        "checkpoint_minutes": None,
        "batches": {"workers": 1},
    }
    whole, killed = make_config("whole", **settings), make_config("killed", **settings)

    def kill_worker(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                name = Path(f"/proc/{child}/cmdline").read_bytes()
                if b"resource_tracker" not in name and b"forkserver" not in name:
                    os.kill(int(child), signal.SIGKILL)

    with pytest.raises(RunError, match=r"everything is saved; resume with: aploss train --resume --out") as error:
        train(killed, callbacks=[kill_worker])
    assert "\n" not in str(error.value)
    saved = torch.load(Path(str(killed.out)) / "checkpoints/last.pt", weights_only=True)["training"]["step"]
    assert 2 <= saved < 8
    train(killed, resume=True)
    train(whole)
    assert_equal(outcome(whole.out), outcome(killed.out))


@pytest.mark.regression("33a370e")
def test_after_a_failed_save_the_checkpoint_before_it_is_whole_and_the_only_one(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, save, calls = make_config(schedule={"length": 4}, checkpoint_steps=1), torch.save, []

    def full_disk(record: Any, file: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        save(record, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        with pytest.raises(RunError, match="No space left"):
            train(config)
    folder = Path(str(config.out)) / "checkpoints"
    inodes = [path.stat().st_ino for path in folder.iterdir()]
    assert len(inodes) == len({*inodes})
    assert torch.load(folder / "last.pt", weights_only=True)["training"]["step"] == 2
    assert train(config, resume=True).steps == 4


@pytest.mark.parametrize(("given", "expected"), [([], 2), (["--schedule.warmup-steps", "10"], 10)])
@pytest.mark.regression("33a370e")
def test_a_short_run_reaches_its_learning_rate_and_records_its_warmup(
    rectangles: Path, tmp_path: Path, given: list[str], expected: int
) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    schedule = {"length": 1000, "warmup_steps": 60, "kind": "milestones", "warmup_factor": 0.1}
    changes = {"splits": {"validation": "none"}, "optimizer": {"learning_rate": 0.001}, "schedule": schedule}
    recipe.write_text(yaml.safe_dump(merge(SETTINGS, changes)))
    words = ["--recipe", recipe, "--data", rectangles, "--out", run, "--steps", 20, "--tracker", "none", *given]
    assert main(["train", "--quiet", *map(str, words)]) == 0
    rates = [row["lr"] for row in read_json_lines(run / "metrics.jsonl")]
    assert [rate == 0.001 for rate in rates] == [step >= expected for step in range(20)]
    assert yaml.safe_load((run / "config.yaml").read_text())["schedule"]["warmup_steps"] == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx2 avx512f", True), ("fpu avx512_bf16", False), ("amx_bf16 avx2", False), ("asimd bf16", False)],
)
def test_cpus_without_bfloat16_are_recognised(tmp_path: Path, flags: str, expected: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    assert emulates_bfloat16(torch.device("cpu"), tmp_path / "cpuinfo") == expected
    assert not emulates_bfloat16(torch.device("meta"), tmp_path / "cpuinfo")
    assert not emulates_bfloat16(torch.device("cpu"), tmp_path / "missing")


@pytest.mark.regression("33a370e")
def test_bfloat16_without_native_support_is_reported_at_the_start_with_the_remedy(
    make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make_config(precision="bfloat16", schedule={"length": 1}))
    warned = "--precision float32" in capsys.readouterr().err
    assert warned == emulates_bfloat16(torch.device("cpu"))


def test_the_summary_of_an_older_version_is_read(make_config: MakeConfig) -> None:
    summary = train(make_config(schedule={"length": 1}))
    file = Path(summary.folder) / "summary.json"
    values = json.loads(file.read_text())
    del values["resume_changes"], values["oLRP"]
    file.write_text(json.dumps(values))
    assert type(summary).read(file) == replace(summary, oLRP=None)
