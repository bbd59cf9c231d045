"""The ranking losses against focal loss, binary cross-entropy and a plain copy.

All are measured forward and backward in one process, in turns, and the best of many repeats counts: times vary between
machines and hours, ratios within a run do not. The process keeps freed memory, as in a training that allocates the same
tensors at every step; otherwise large tensors measure page faults.
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
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from aploss.benchmarks import can_measure_peak, peak_bytes, restart_peak
from aploss.losses import alrp_loss, ap_loss, auc_loss, rank_sort_loss, use_backend

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000, 5_000_000, 20_000_000)
QUICK_SIZES = (1_000, 10_000)
POSITIVES = 500  # or a tenth of the scores, where they are few
MANY_POSITIVES = (10, 500, 2000, 5000)
STAGES = {"early": 0.0, "late": 4.0}  # how far positives lie above negatives
MAX_LOOP_SCORES = 1_000_000  # beyond it the plain loop of Algorithm 1 takes too long
SECONDS_PER_CASE = 1.0
Case = Callable[[], Any]


def run(progress: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Measures every size, stage of training and number of positives; :func:`table` shows the result."""
    keep_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = QUICK_SIZES if quick else SIZES
    seconds = SECONDS_PER_CASE / 10 if quick else SECONDS_PER_CASE
    rows, positives = [], []
    for size in sizes:
        for stage, separation in STAGES.items():
            progress(f"{size:,} scores, {stage}")
            rows.append({"scores": size, "stage": stage, **_compare(size, separation, seconds, device)})
    size = sizes[-1] if quick else 1_000_000
    for count in (count for count in MANY_POSITIVES if count < size):
        progress(f"{size:,} scores, {count} positives, all ranking losses")
        positives.append({"positives": count, **best_in_turns(_ranking_losses(size, count, device), seconds)})
    progress("memory")
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "memory_factor": memory_factor(sizes[-1]),
        "rows": rows,
        "scores_of_positives": size,
        "many_positives": positives,
    }


def table(result: dict[str, Any]) -> str:
    """The result as text: milliseconds, and ratios to the others."""
    lines = [
        f"{result['device']}, {result['threads']} threads; milliseconds, forward + backward, best of many, memory kept",
        f"{'scores':>12} {'stage':<6} {'AP-loss':>9} {'torch ops':>9} {'focal':>9} {'BCE':>9} {'copy':>9} {'loop':>9} "
        f"{'/ focal':>8} {'/ BCE':>8} {'/ copy':>8}",
    ]
    for row in result["rows"]:
        ours, loop = row["ap_loss"], row["loop"]
        times = "".join(
            f" {1e3 * row[key]:>9.3f}" for key in ("ap_loss", "torch_operations", "focal_loss", "bce", "copy")
        )
        ratios = "".join(f" {ours / row[key]:>8.2f}" for key in ("focal_loss", "bce", "copy"))
        loops = f"{1e3 * loop:>9.1f}" if loop else f"{'-':>9}"
        lines.append(f"{row['scores']:>12,} {row['stage']:<6}{times} {loops}{ratios}")
    lines.append(f"\n{result['scores_of_positives']:,} scores with more positives, milliseconds")
    for row in result["many_positives"]:
        times = ", ".join(f"{name} {1e3 * row[name]:.1f}" for name in ("ap", "auc", "rank-sort", "alrp"))
        lines.append(f"{row['positives']:>12,} positives: {times}")
    if result["memory_factor"] is not None:
        lines.append(f"extra memory of AP-loss: {result['memory_factor']:.2f} x the score tensor")
    lines.append("copy: one operation that reads two tensors of the scores' size and writes a third")
    return "\n".join(lines)


def plot(result: dict[str, Any]) -> str:
    """Time against the number of scores early in training, both logarithmic, as SVG."""
    from aploss.plotting.plots import Series, line_plot

    labels = {
        "loop": "loop of Algorithm 1",
        "torch_operations": "AP-loss, torch operations",
        "focal_loss": "focal loss",
        "bce": "binary cross-entropy",
        "ap_loss": "AP-loss",
    }
    early = [row for row in result["rows"] if row["stage"] == "early"]
    series = []
    for key, label in labels.items():
        points = [(row["scores"], row[key]) for row in early if row[key]]
        series.append(Series(name=label, x=[x for x, _ in points], y=[y for _, y in points], markers=True))
    return line_plot(
        series, x_label="scores in the batch", y_label="seconds, forward + backward", log_x=True, log_y=True
    )


def keep_memory() -> None:
    """Makes this process keep freed memory, if its C library is glibc."""
    mmap_max, trim_threshold, top_pad = -4, -1, -2
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**28)):
        mallopt(option, value)


def make_scores(size: int, separation: float, positives: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Scores and targets, with the positives ``separation`` above the negatives on average.

    The targets are floats, because torchvision's focal loss requires it.
    """
    random = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(size, generator=random), torch.zeros(size)
    targets[torch.randperm(size, generator=random)[:positives]] = 1
    return (scores + separation * targets).to(device), targets.to(device)


def by_torch(scores: Tensor, targets: Tensor) -> Tensor:
    """AP-loss by torch operations, as on a device without compiled kernels."""
    with use_backend("torch"):
        return ap_loss(scores, targets)


def best_in_turns(cases: dict[str, Case], seconds: float) -> dict[str, float]:
    """The best time of each case. They take turns, so that all have the same conditions."""
    best = dict.fromkeys(cases, float("inf"))
    for case in cases.values():
        case()
    stop, rounds = time.perf_counter() + seconds * len(cases), 0
    while rounds < 3 or time.perf_counter() < stop:
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[name] = min(best[name], time.perf_counter() - start)
        rounds += 1
    return best


def loop(scores: Tensor, targets: Tensor, delta: float = 1.0) -> Tensor:
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
    """Peak memory of one forward and backward pass beyond its inputs, in units of the scores; None without /proc."""
    if not can_measure_peak():
        return None
    script = f"from aploss.benchmarks.losses import peak_of_one_step; print(peak_of_one_step({size}))"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return float(json.loads(output.stdout))


def peak_of_one_step(size: int) -> float:
    """The peak of one step on the CPU, in units of the scores; call it in a fresh process."""
    # Compilation, imports and one-time allocations do not count: warm up on a small batch.
    for count in (10_000, size):
        scores, targets = make_scores(count, 0.0, POSITIVES, "cpu")
        scores.requires_grad_()
        before = restart_peak()
        _step(scores, lambda scores=scores, targets=targets: ap_loss(scores, targets))  # type: ignore[misc]
    return (peak_bytes() - before) / (scores.numel() * scores.element_size())


def _compare(size: int, separation: float, seconds: float, device: torch.device) -> dict[str, float | None]:
    cases = _cases(size, separation, min(POSITIVES, size // 10), device)
    times: dict[str, float | None] = dict(best_in_turns(cases, seconds))
    times["loop"] = None
    if size <= MAX_LOOP_SCORES:
        scores, targets = make_scores(size, separation, min(POSITIVES, size // 10), device)
        start = time.perf_counter()
        loop(scores, targets)
        times["loop"] = time.perf_counter() - start
    return times


def _cases(size: int, separation: float, positives: int, device: torch.device) -> dict[str, Case]:
    from torchvision.ops import sigmoid_focal_loss

    scores, targets = make_scores(size, separation, positives, device)
    other, result = scores.clone(), scores.clone()  # uninitialised memory may hold denormal numbers, which are slow
    scores.requires_grad_()
    plain = scores.detach()
    return {
        "ap_loss": lambda: _step(scores, lambda: ap_loss(scores, targets)),
        "torch_operations": lambda: _step(scores, lambda: by_torch(scores, targets)),
        "focal_loss": lambda: _step(scores, lambda: sigmoid_focal_loss(scores, targets, reduction="sum") / positives),
        "bce": lambda: _step(scores, lambda: binary_cross_entropy_with_logits(scores, targets)),
        "copy": lambda: torch.add(plain, other, out=result),
    }


def _ranking_losses(size: int, positives: int, device: torch.device) -> dict[str, Case]:
    scores, targets = make_scores(size, 0.0, positives, device)
    scores.requires_grad_()
    random = torch.Generator().manual_seed(1)
    soft = targets.clone()
    soft[targets == 1] = torch.rand(positives, generator=random).clamp(min=0.01).to(device)
    box_losses = torch.rand(positives, generator=random).to(device).requires_grad_()
    return {
        "ap": lambda: _step(scores, lambda: ap_loss(scores, targets)),
        "auc": lambda: _step(scores, lambda: auc_loss(scores, targets)),
        "rank-sort": lambda: _step(scores, lambda: sum(rank_sort_loss(scores, soft), scores.new_zeros(()))),
        "alrp": lambda: _step(scores, lambda: sum(alrp_loss(scores, targets, box_losses), scores.new_zeros(()))),
    }


def _step(scores: Tensor, loss: Callable[[], Tensor]) -> None:
    scores.grad = None
    loss().backward()  # type: ignore[no-untyped-call]
