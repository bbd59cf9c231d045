"""Two gloo processes, one of which has nothing, something wrong, or goes: none waits over 60 seconds."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from processes import start_process
from tiny_runs import SETTINGS, checkpoint_step, edit_annotations, keep_objects, start_two

from aploss.cli.main import main
from aploss.losses import APLoss
from aploss.training.config import merge

LONGEST = 60.0  # seconds that one process may wait for the other
slow = pytest.mark.slow_fault

# --- in a loss ---

RANK_TOGETHER = """
import runpy
runpy.run_path(values["file"])["rank_together"](values["rank"], values["folder"], values["fault"])
"""


def rank_together(rank: int, folder: Path, fault: str) -> None:
    """What each process does; rank 0 writes how it ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=15))
    scores, targets = torch.randn(200), (torch.arange(200) % 3 == 0).long()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    try:
        APLoss(process_group=dist.group.WORLD)(scores, targets)
    except RuntimeError:
        (folder / "error").touch()
    os._exit(0)  # the other one is gone


@pytest.mark.parametrize("fault", ["killed", pytest.param("stopped", marks=slow)])
def test_ranking_with_a_process_that_is_gone_ends_with_an_error(tmp_path: Path, fault: str) -> None:
    arguments = {"file": __file__, "folder": tmp_path, "fault": fault}
    processes = [start_process(RANK_TOGETHER, log=tmp_path / "log", rank=rank, **arguments) for rank in (0, 1)]
    processes[0].join(timeout=LONGEST)
    for process in processes:
        process.kill()
        process.join()
    assert (tmp_path / "error").exists()


# --- in a training ---

TRAIN = """
os.environ |= values["environment"]
import aploss.training.run as run
from aploss.detectors.detector import Detector
heads, fault, is_bad = Detector.heads, values["fault"], os.environ["RANK"] == "1"

def bad_heads(self, images):
    logits, deltas = heads(self, images)
    if self.training and is_bad:
        logits = logits * float("nan") if fault == "NaN" else logits[:, :-1]
    return logits, deltas

if fault in ("NaN", "wrong shape"):
    Detector.heads = bad_heads
from aploss.cli.main import main
sys.exit(main(values["words"]))
"""
ENDLESS = {"schedule": {"length": 100_000}, "checkpoint_steps": 2, "validation": {"every": 100_000}}


def with_fault(rectangles: Path, folder: Path, fault: str) -> Path:
    """The data set, with objects in few images or none, or with an odd number of images."""
    shutil.copytree(rectangles, folder)
    kept = {"one has no positives": [5], "none has positives": [], "uneven": range(14)}.get(fault, range(99))
    edit_annotations(folder, "train", keep_objects(*kept))
    if fault == "uneven":
        edit_annotations(folder, "train", lambda document: document.update(images=document["images"][:13]))
    return folder


@slow
@pytest.mark.parametrize(
    "fault", ["one has no positives", "none has positives", "uneven", "NaN", "wrong shape", "killed"]
)
def test_a_training_of_two_processes_ends_for_both(
    spawn: Callable[..., BaseProcess], rectangles: Path, tmp_path: Path, fault: str
) -> None:
    settings = {"criterion": {"rank_over_processes": True}, "schedule": {"length": 5}, "bad_steps": 3}
    endless = ENDLESS if fault == "killed" else {}
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump(merge(merge(SETTINGS, settings), endless)))
    data = with_fault(rectangles, tmp_path / "data", fault)
    words = ["train", "--quiet", "--recipe", str(recipe), "--data", str(data), "--out", str(run)]
    processes = start_two(spawn, TRAIN, tmp_path, words=words, fault=fault)
    codes, logs, waited = _end(processes, tmp_path, run, fault)
    if fault == "killed":
        assert waited < LONGEST, logs
        assert codes[0] == 2, logs
        assert "--resume --out" in logs[0], logs
        assert "Traceback" not in logs[0], logs
        assert main(["train", "--resume", "--quiet", "--out", str(run), "--max-minutes", "0"]) == 0
    elif fault == "NaN":
        assert codes == [2, 2], logs
        assert "3 consecutive steps with NaN or Inf" in logs[0]
    elif fault == "wrong shape":
        assert codes[0] == 2, logs
        assert "step failed on another rank" in logs[0]
        assert codes[1] not in (0, None), logs
    elif fault == "none has positives":
        assert codes[0] == codes[1] in (0, 2), logs
    else:
        assert codes == [0, 0], logs
        assert json.loads((run / "summary.json").read_text())["steps"] == 5


def _end(processes: list[BaseProcess], logs: Path, run: Path, fault: str) -> tuple[list[int | None], list[str], float]:
    """Exit codes, what was printed, and the seconds that rank 0 took to end once the fault was there."""
    if fault == "killed":
        while checkpoint_step(run) < 2:
            assert all(process.is_alive() for process in processes), (logs / "0.log").read_text()
            time.sleep(0.05)
        assert processes[1].pid is not None
        os.kill(processes[1].pid, signal.SIGKILL)
    begun = time.monotonic()
    processes[0].join(timeout=300)
    waited = time.monotonic() - begun
    processes[1].join(timeout=60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        with suppress(ProcessLookupError):
            process.kill()
        process.join()
    return codes, [(logs / f"{rank}.log").read_text() for rank in (0, 1)], waited
