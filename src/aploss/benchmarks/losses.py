"""AP-loss against focal loss, BCE, a plain loop of Algorithm 1, and memory itself.

All are measured forward and backward in one process, in turns, and the best of several repeats
counts: times differ from machine to machine and from hour to hour, ratios within a run do not.
Memory is kept between the repeats: otherwise losses that allocate much are charged for page faults,
which a training that allocates the same in every step does not have. The yardstick is one fused
pass that reads two arrays and writes a third.
"""

import ctypes
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aploss.benchmarks.memory import can_measure_peak, peak_bytes, restart_peak
from aploss.losses import ap_loss, use_backend

__all__ = ["memory_factor", "plot", "run", "table"]

# Scores, positives and how far positives are drawn above the negatives, as late in training.
CASES = (
    (10**2, 10, 0.0), (10**3, 100, 0.0), (10**4, 500, 0.0), (10**5, 500, 0.0), (10**6, 10, 0.0),
    (10**6, 500, 0.0), (10**6, 500, 4.0), (10**6, 5000, 0.0), (5 * 10**6, 500, 0.0),
    (2 * 10**7, 500, 0.0), (2 * 10**7, 500, 4.0),
)  # fmt: skip
QUICK_CASES = ((10**3, 100, 0.0), (10**4, 500, 0.0), (10**4, 500, 4.0))
LOOP_UP_TO = 10**6
SECONDS_PER_CASE = 1.5
SECONDS_PER_TURN = 0.01


def run(progress: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Measures every case, on a GPU if there is one; see :func:`table` for what comes out."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = _keep_memory()
    rows = []
    for size, positives, separation in QUICK_CASES if quick else CASES:
        progress(f"{size:,} scores, {positives} positives, {separation:g} apart")
        rows.append(_measure(size, positives, separation, quick, device))
    memory_size = (QUICK_CASES if quick else CASES)[-1][0]
    progress(f"memory at {memory_size:,} scores")
    return {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "memory_kept": kept,
        "memory_factor": memory_factor(memory_size),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """The result as text: milliseconds, and how ours compares."""
    names = ("ap_loss", "torch_operations", "focal_loss", "bce", "read_read_write", "loop")
    heads = ("AP-loss", "torch ops", "focal", "BCE", "memory", "loop")
    lines = [
        f"{result['device']}, {result['threads']} threads; milliseconds, forward + backward, best "
        f"of several; memory {'kept' if result['memory_kept'] else 'given back'} between repeats",
        f"{'scores':>12} {'positives':>9} {'apart':>5} "
        + " ".join(f"{head:>9}" for head in heads)
        + f" {'/ focal':>8} {'/ BCE':>7} {'/ memory':>8}",
    ]
    for row in result["rows"]:
        times = [f"{1e3 * row[name]:>9.3f}" if row[name] else f"{'':>9}" for name in names]
        ratios = [row["ap_loss"] / row[name] for name in ("focal_loss", "bce", "read_read_write")]
        lines.append(
            f"{row['scores']:>12,} {row['positives']:>9,} {row['separation']:>5g} "
            + " ".join(times)
            + f" {ratios[0]:>8.2f} {ratios[1]:>7.2f} {ratios[2]:>8.1f}"
            + (f"  {row['gpu']}" if row["gpu"] else "")
        )
    if result["memory_factor"] is not None:
        lines.append(f"extra memory of AP-loss: {result['memory_factor']:.2f} x the score tensor")
    return "\n".join(lines)


def plot(result: dict[str, Any]) -> str:
    """Time against the number of scores early in training, both logarithmic, as SVG."""
    from aploss.reporting.plots import Series, line_plot

    labels = {
        "torch_operations": "AP-loss, torch operations",
        "focal_loss": "focal loss",
        "ap_loss": "AP-loss",
        "bce": "binary cross-entropy",
        "read_read_write": "read, read, write",
    }
    most = max(row["positives"] for row in result["rows"] if row["separation"] == 0)
    early = [
        row for row in result["rows"] if row["separation"] == 0 and row["positives"] in (most, 500)
    ]
    early = list({row["scores"]: row for row in early}.values())
    sizes = [row["scores"] for row in early]
    return line_plot(
        [
            Series(name=label, x=sizes, y=[row[key] for row in early], markers=True)
            for key, label in labels.items()
        ],
        x_label="scores in the batch",
        y_label="seconds, forward + backward",
        log_x=True,
        log_y=True,
    )


def make_boxes(size: int, positives: int, separation: float) -> tuple[Tensor, Tensor]:
    """Scores and targets; positives are drawn that far above the negatives.

    The targets are floats, because torchvision's focal loss takes no others.
    """
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(size, generator=random)
    targets = torch.zeros(size)
    targets[torch.randperm(size, generator=random)[:positives]] = 1
    return scores + separation * targets, targets


def _measure(
    size: int, positives: int, separation: float, quick: bool, device: torch.device
) -> dict[str, Any]:
    from torchvision.ops import sigmoid_focal_loss

    scores, targets = (t.to(device) for t in make_boxes(size, positives, separation))
    scores.requires_grad_()
    out = torch.empty_like(targets)

    def focal() -> Tensor:
        loss: Tensor = sigmoid_focal_loss(scores, targets, reduction="sum")
        return loss / positives

    cases = {
        "ap_loss": lambda: _step(scores, lambda: ap_loss(scores, targets)),
        "focal_loss": lambda: _step(scores, focal),
        "bce": lambda: _step(scores, lambda: F.binary_cross_entropy_with_logits(scores, targets)),
        "torch_operations": lambda: _step(scores, lambda: by_torch(scores, targets)),
        "read_read_write": lambda: torch.add(scores.detach(), targets, out=out),
    }
    best = _best_in_turns(cases, SECONDS_PER_CASE / (10 if quick else 1), device)
    loop_seconds = None
    if size <= LOOP_UP_TO:
        start = time.perf_counter()
        algorithm_1(scores.detach(), targets)
        loop_seconds = time.perf_counter() - start
    gpu = _on_gpu(scores, targets, best["ap_loss"]) if device.type == "cuda" else ""
    case = {"scores": size, "positives": positives, "separation": separation}
    return {**case, **best, "loop": loop_seconds, "gpu": gpu}


def _step(scores: Tensor, loss: Callable[[], Tensor]) -> None:
    scores.grad = None
    loss().backward()  # type: ignore[no-untyped-call]


def by_torch(scores: Tensor, targets: Tensor) -> Tensor:
    """AP-loss as on a device without compiled kernels."""
    with use_backend("torch"):
        return ap_loss(scores, targets)


def _keep_memory() -> bool:
    """Lets the C library keep what is freed. Returns whether it could be asked to (glibc)."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # M_... of malloc.h
    limit = 2**31 - 1
    return all(mallopt(option, limit) for option in (trim_threshold, mmap_threshold)) and bool(
        mallopt(top_pad, 1 << 26)
    )


def _on_gpu(scores: Tensor, targets: Tensor, seconds: float) -> str:
    """Host reads, launches and bandwidth of a step on a GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _step(scores, lambda: ap_loss(scores, targets))
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    launches = sum("LaunchKernel" in name for name in names)
    reads = sum("DtoH" in name for name in names)
    gigabytes = 3 * scores.numel() * scores.element_size() / seconds / 1e9
    return f"{reads} host reads, {launches} launches, {gigabytes:.0f} GB/s of scores"


def _best_in_turns(
    cases: dict[str, Callable[[], Any]], seconds: float, device: torch.device
) -> dict[str, float]:
    """The best time of each case. They take turns, so that all see the same machine."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else bool
    best = dict.fromkeys(cases, float("inf"))
    for case in cases.values():
        case()
    stop = time.perf_counter() + seconds * len(cases)
    rounds = 0
    while rounds < 3 or time.perf_counter() < stop:
        for name, case in cases.items():
            end_of_turn = time.perf_counter() + SECONDS_PER_TURN
            while True:  # small cases several times, so that a turn does not start cold
                start = time.perf_counter()
                case()
                wait()
                now = time.perf_counter()
                best[name] = min(best[name], now - start)
                if now > end_of_turn:
                    break
        rounds += 1
    return best


def algorithm_1(scores: Tensor, targets: Tensor, delta: float = 1.0) -> Tensor:
    """Algorithm 1 as it is usually written: a Python loop over the positives, in float32."""
    positive, negative = scores[targets == 1], scores[targets == 0]
    gradient = torch.zeros_like(negative)
    highest = scores.new_zeros(())
    for score in positive.sort().values:
        steps = ((negative - score) / (2 * delta) + 0.5).clamp_(0, 1)
        others = ((positive - score) / (2 * delta) + 0.5).clamp_(0, 1)
        total = steps.sum()
        rank = 0.5 + others.sum() + total
        precision = 1 - total / rank
        steps /= rank
        if precision < highest:
            steps *= (1 - highest) / (1 - precision)
        highest = torch.maximum(highest, precision)
        gradient += steps
    return gradient


def memory_factor(size: int) -> float | None:
    """Peak memory of one forward and backward pass beyond its inputs, in units of the scores.

    None where the system does not tell the peak of a process (it needs Linux's /proc).
    """
    if not can_measure_peak():
        return None
    script = f"from aploss.benchmarks import losses; print(losses.peak_of_one_step({size}))"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    return float(json.loads(output.stdout))


def peak_of_one_step(size: int) -> float:
    """See :func:`memory_factor`; for a process of its own."""
    # What is compiled, imported and allocated once does not count: warm up on a small batch.
    warm_up, warm_targets = make_boxes(10_000, 500, 0.0)
    _step(warm_up.requires_grad_(), lambda: ap_loss(warm_up, warm_targets))
    scores, targets = make_boxes(size, 500, 0.0)
    scores.requires_grad_()
    before = restart_peak()
    _step(scores, lambda: ap_loss(scores, targets))
    return (peak_bytes() - before) / (scores.numel() * scores.element_size())
