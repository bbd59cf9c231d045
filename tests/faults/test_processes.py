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
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from processes import start_process
from tiny_runs import SETTINGS, checkpoint_step, edit_annotations, keep_objects, start_two

from aploss.cli.main import main
from aploss.losses import ALRPLoss, APLoss, AUCLoss, RankSortLoss
from aploss.training.config import merge

LONGEST = 60.0  # seconds that one process may wait for the other
slow = pytest.mark.slow_fault

# --- in the losses ---

LOSSES = {"ap": APLoss, "auc": AUCLoss, "rank-sort": RankSortLoss, "alrp": ALRPLoss}
SIZES = {"uneven": (3, 500), "one is empty": (300, 0)}
POSITIVES = {"one has no positives": (True, False), "none has positives": (False, False)}


def parts_for(fault: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scores and targets of each rank."""
    random, parts = torch.Generator().manual_seed(0), []
    sizes, keeps = SIZES.get(fault, (200, 200)), POSITIVES.get(fault, (True, True))
    for size, keep in zip(sizes, keeps, strict=True):
        scores = torch.randn(size, generator=random, dtype=torch.float64)
        targets = (torch.arange(size) % 3 == 0).long() if keep else torch.zeros(size, dtype=torch.int64)
        parts.append((scores, targets))
    return parts


def call(name: str, scores: torch.Tensor, targets: torch.Tensor, group: Any = None) -> torch.Tensor:
    boxes = [torch.full((int((targets == 1).sum()),), 0.5, dtype=torch.float64)] if name == "alrp" else []
    values = LOSSES[name](process_group=group)(scores, targets, *boxes)
    return values if isinstance(values, torch.Tensor) else sum(values)


RANK_TOGETHER = """
import runpy
rank_together = runpy.run_path(values["file"])["rank_together"]
rank_together(*(values[name] for name in ("rank", "folder", "name", "fault")))
"""


def rank_together(rank: int, folder: Path, name: str, fault: str) -> None:
    """What each process does; its result is a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=15))
    scores, targets = parts_for(fault)[rank]
    dist.barrier()
    if rank == 1 and fault in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    if rank == 1 and fault == "NaN":
        scores[5] = torch.nan
    if rank == 1 and fault == "wrong shape":
        targets = targets[:-1]
    scores.requires_grad_()
    try:
        loss = call(name, scores, targets, dist.group.WORLD)
        loss.backward()
        result: Any = (loss.item(), scores.grad)
    except (ValueError, RuntimeError) as error:
        result = (type(error).__name__, str(error))
    torch.save(result, folder / f"{rank}.pt")
    os._exit(0)  # the other one may be gone


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        pytest.param(fault, name, marks=[] if (fault, name) == ("killed", "ap") else slow)
        for name in LOSSES
        for fault in (*POSITIVES, *SIZES, "NaN", "wrong shape", "killed", "stopped")
        if name == "ap" or fault not in ("killed", "stopped")
    ],
)
def test_ranking_together_gives_one_number_or_an_error_to_all(tmp_path: Path, fault: str, name: str) -> None:
    arguments = {"file": __file__, "folder": tmp_path, "name": name, "fault": fault}
    begun = time.monotonic()
    processes = [start_process(RANK_TOGETHER, log=tmp_path / "log", rank=rank, **arguments) for rank in (0, 1)]
    processes[0].join(timeout=LONGEST)
    waited = time.monotonic() - begun
    if fault != "stopped":
        processes[1].join(timeout=LONGEST)
    for process in processes:
        process.kill()
        process.join()
    assert waited < LONGEST
    first = torch.load(tmp_path / "0.pt")
    if fault in ("killed", "stopped"):
        assert first[0] == "RuntimeError" or first[0].startswith("Dist"), first
        return
    second = torch.load(tmp_path / "1.pt")
    if fault in ("NaN", "wrong shape"):
        assert first[0] == "OtherProcessError"
        assert second[0] == ("NonFiniteScoresError" if fault == "NaN" else "ValueError"), second
        return
    parts = parts_for(fault)
    scores = torch.cat([scores for scores, _ in parts]).requires_grad_()
    loss = call(name, scores, torch.cat([targets for _, targets in parts]))
    loss.backward()
    assert [first[0], second[0]] == pytest.approx([loss.item()] * 2, abs=1e-12)
    assert torch.allclose(torch.cat([first[1], second[1]]) / 2, scores.grad, rtol=0, atol=1e-12)


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
@pytest.mark.parametrize("fault", [*POSITIVES, "uneven", "NaN", "wrong shape", "killed"])
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
