"""Ranking across processes: bytes and messages of a step, and its time with 1 to 4 processes.

Gloo processes on one machine share its cores and memory. The processor time of a process, including its communication
threads, is therefore measured besides the wall-clock time: it excludes waiting for other processes or a free core. It
shows how the cost grows, not the latency of a network of many machines.
"""

import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from aploss.benchmarks import Progress, describe_machine
from aploss.benchmarks.losses import make_scores
from aploss.losses import ap_loss

PROCESSES, SCORES, POSITIVES = 4, 200_000, (100, 500, 2000)  # scores and positives of each process
QUICK_SCORES, QUICK_POSITIVES = 2_000, (20, 100)
LARGE = (16, 64, 256, 1024)  # numbers of processes for which only the traffic is computed
REPEATS = 15
STATUS_NUMBERS = 7
NUMBER = 8  # bytes of every number that is sent


def traffic(processes: int, positives: int, *, extras: int = 0) -> dict[str, int]:
    """The communication of one process in a forward pass; a backward pass has none.

    Args:
        processes: number of processes.
        positives: positives of each process.
        extras: numbers per positive besides its score: 1 for Rank & Sort and aLRP.

    Returns:
        messages: collective operations; bytes: handed in by one process.
    """
    status, columns = STATUS_NUMBERS * NUMBER, (1 + extras) * positives * NUMBER
    tallies = 2 * (2 * processes * positives + 1) * NUMBER
    return {"messages": 3, "bytes": status + columns + tallies}


def run(progress: Progress, *, quick: bool = False) -> dict[str, Any]:
    """Measures 1 to 4 processes; :func:`table` shows the result."""
    scores, positives = (QUICK_SCORES, QUICK_POSITIVES) if quick else (SCORES, POSITIVES)
    progress(f"1 to {PROCESSES} processes")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, scores, positives, 3 if quick else REPEATS)
        mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _measure, arguments, nprocs=PROCESSES, start_method=_start_method()
        )
        rows = json.loads((Path(folder) / "rows.json").read_text())
    rows += [{"processes": count, "positives": each} for count in LARGE for each in positives]
    rows = [{**row, **traffic(row["processes"], row["positives"])} for row in rows]
    return {"scores": scores, **describe_machine(), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [
        f"AP-loss across gloo processes, {result['scores']:,} scores each, {result['cores']} cores, forward + backward",
        f"{'processes':>9} {'positives each':>14} {'bytes a process':>15} {'clock, ms':>9} {'CPU, ms':>9}",
    ]
    for row in result["rows"]:
        times = (f"{1e3 * row[name]:.2f}" if name in row else "-" for name in ("clock", "seconds"))
        written = "".join(f" {text:>9}" for text in times)
        lines.append(f"{row['processes']:>9} {row['positives']:>14,} {row['bytes']:>15,}{written}")
    return "\n".join(lines)


def _start_method() -> str:
    """A fork server, which imports once for all processes, if the system has one."""
    if "forkserver" not in mp.get_all_start_methods():
        return "spawn"
    mp.get_context("forkserver").set_forkserver_preload([__name__])
    return "forkserver"


def _measure(rank: int, folder: str, scores: int, positives: tuple[int, ...], repeats: int) -> None:
    """One of the processes; rank 0 writes the times."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", PROCESSES)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=timedelta(minutes=10))
    rows = []
    for count in range(1, PROCESSES + 1):
        group = dist.new_group(list(range(count)))
        for each in positives:
            times = _best(group, rank, scores, each, repeats) if rank < count else {}
            rows.append({"processes": count, "positives": each, **times})
            dist.barrier()
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _best(group: Any, rank: int, size: int, positives: int, repeats: int) -> dict[str, float]:
    scores, targets = make_scores(size, 0.0, positives, "cpu")
    scores = scores.detach().roll(rank).requires_grad_()
    best = {"seconds": float("inf"), "clock": float("inf")}
    for _ in range(repeats):
        scores.grad = None
        dist.barrier(group)
        start = {"seconds": time.process_time(), "clock": time.perf_counter()}
        ap_loss(scores, targets, process_group=group).backward()  # type: ignore[no-untyped-call]
        now = {"seconds": time.process_time(), "clock": time.perf_counter()}
        best = {name: min(best[name], now[name] - start[name]) for name in best}
    return best
