"""AP-loss against focal loss and a plain loop of Algorithm 1: seconds, ratios and memory.

All are measured forward and backward in one process, in turns, and the best of several repeats
counts: times differ from machine to machine and from hour to hour, ratios within a run do not.
"""

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

from aploss.benchmarks.memory import can_measure_peak, peak_bytes, restart_peak
from aploss.losses import ap_loss, reference, use_backend

SIZES = (10**5, 10**6, 5 * 10**6, 2 * 10**7)
QUICK_SIZES = (10**4, 10**5)
POSITIVES = 500
STAGES = {"early": 0.0, "late, 3 apart": 3.0, "late, 4 apart": 4.0}
SECONDS_PER_CASE = 1.5


def run(progress: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Measures every size and stage of training; see :func:`table` for what comes out."""
    rows = []
    for size in QUICK_SIZES if quick else SIZES:
        for stage, separation in STAGES.items():
            progress(f"{size:,} scores, {stage}")
            rows.append(_measure(size, stage, separation, quick))
    memory_size = QUICK_SIZES[-1] if quick else SIZES[-1]
    progress(f"memory at {memory_size:,} scores")
    return {
        "positives": POSITIVES,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "memory_factor": memory_factor(memory_size),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """The result as text: milliseconds, and how ours compares."""
    head = (
        f"{'scores':>12} {'stage':<14} {'AP-loss':>9} {'torch ops':>9} {'focal':>9} {'loop':>10} "
        f"{'/ focal':>8} {'loop /':>8}"
    )
    lines = [
        f"{result['positives']} positives, {result['threads']} threads; milliseconds, forward + "
        "backward, best of several",
        head,
    ]
    for row in result["rows"]:
        ms = {k: 1e3 * row[k] for k in ("ap_loss", "torch_operations", "focal_loss", "loop")}
        lines.append(
            f"{row['scores']:>12,} {row['stage']:<14} {ms['ap_loss']:>9.2f} "
            f"{ms['torch_operations']:>9.1f} {ms['focal_loss']:>9.2f} {ms['loop']:>10.1f} "
            f"{row['ap_loss'] / row['focal_loss']:>8.2f} {row['loop'] / row['ap_loss']:>7.0f}x"
        )
    if result["memory_factor"] is not None:
        lines.append(f"extra memory of AP-loss: {result['memory_factor']:.2f} x the score tensor")
    return "\n".join(lines)


def plot(result: dict[str, Any]) -> str:
    """Time against the number of scores early in training, both logarithmic, as SVG."""
    from aploss.plotting.plots import Series, line_plot

    labels = {
        "loop": "loop of Algorithm 1",
        "torch_operations": "AP-loss, torch operations",
        "focal_loss": "focal loss",
        "ap_loss": "AP-loss",
    }
    early = [row for row in result["rows"] if row["stage"] == "early"]
    sizes = [row["scores"] for row in early]
    return line_plot(
        [Series(name=label, x=sizes, y=[row[key] for row in early], markers=True) for key, label in labels.items()],
        x_label="scores in the batch",
        y_label="seconds, forward + backward",
        log_x=True,
        log_y=True,
    )


def make_boxes(size: int, separation: float) -> tuple[Tensor, Tensor]:
    """Scores and targets; positives are drawn that far above the negatives.

    The targets are floats, because torchvision's focal loss takes no others.
    """
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(size, generator=random)
    targets = torch.zeros(size)
    targets[torch.randperm(size, generator=random)[:POSITIVES]] = 1
    return scores + separation * targets, targets


def _measure(size: int, stage: str, separation: float, quick: bool) -> dict[str, Any]:
    from torchvision.ops import sigmoid_focal_loss

    scores, targets = make_boxes(size, separation)
    scores.requires_grad_()

    def focal() -> Tensor:
        loss: Tensor = sigmoid_focal_loss(scores, targets, reduction="sum")
        return loss / POSITIVES

    seconds = SECONDS_PER_CASE / 10 if quick else SECONDS_PER_CASE
    cases = {
        "ap_loss": lambda: _step(scores, lambda: ap_loss(scores, targets)),
        "focal_loss": lambda: _step(scores, focal),
        "torch_operations": lambda: _step(scores, lambda: _by_torch(scores, targets)),
    }
    best = _best_in_turns(cases, seconds)
    start = time.perf_counter()
    reference.ap_loss(scores.detach(), targets) if quick else _loop(scores.detach(), targets)
    return {"scores": size, "stage": stage, **best, "loop": time.perf_counter() - start}


def _step(scores: Tensor, loss: Callable[[], Tensor]) -> None:
    scores.grad = None
    loss().backward()  # type: ignore[no-untyped-call]


def _by_torch(scores: Tensor, targets: Tensor) -> Tensor:
    """AP-loss as on a device without compiled kernels."""
    with use_backend("torch"):
        return ap_loss(scores, targets)


def _best_in_turns(cases: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """The best time of each case. They take turns, so that all see the same machine."""
    best = dict.fromkeys(cases, float("inf"))
    for case in cases.values():
        case()
    stop = time.perf_counter() + seconds * len(cases)
    rounds = 0
    while rounds < 3 or time.perf_counter() < stop:
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            best[name] = min(best[name], time.perf_counter() - start)
        rounds += 1
    return best


def _loop(scores: Tensor, targets: Tensor, delta: float = 1.0) -> Tensor:
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
    script = f"from aploss.benchmarks import losses; print(losses._peak_of_one_step({size}))"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return float(json.loads(output.stdout))


def _peak_of_one_step(size: int) -> float:
    # What is compiled, imported and allocated once does not count: warm up on a small batch.
    warm_up, warm_targets = make_boxes(10_000, 0.0)
    _step(warm_up.requires_grad_(), lambda: ap_loss(warm_up, warm_targets))
    scores, targets = make_boxes(size, 0.0)
    scores.requires_grad_()
    before = restart_peak()
    _step(scores, lambda: ap_loss(scores, targets))
    return (peak_bytes() - before) / (scores.numel() * scores.element_size())
