"""The ranking losses against focal loss and binary cross-entropy.

All are measured forward and backward in one process, in turns, and the best of many repeats counts: times vary between
machines and hours, ratios within a run do not. The process keeps freed memory, as in a training that allocates the same
tensors at every step; otherwise large tensors measure page faults.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from aploss.benchmarks import Progress, best_in_turns
from aploss.environment import describe_environment
from aploss.losses import alrp_loss, ap_loss, auc_loss, rank_sort_loss, use_backend
from aploss.training.distributed import keep_freed_memory

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000, 5_000_000, 20_000_000)
QUICK_SIZES = (1_000, 10_000)
POSITIVES = 500  # or a tenth of the scores if there are few
MANY_POSITIVES = (10, 500, 2000, 5000)
STAGES = {"early": 0.0, "late": 4.0}  # mean distance of positives and negatives
MANY_SCORES = 1_000_000  # ranked with many positives, in groups and densely
GROUPS = 1_000
DENSE_SHARE = 0.3  # positives of a dense problem, such as segmentation
SECONDS_PER_CASE = 1.0
NAMES = ("ap_loss", "torch_operations", "focal_loss", "bce")
Cases = dict[str, Callable[[], Any]]


def run(progress: Progress, *, quick: bool = False) -> dict[str, Any]:
    """Measures every size and stage of training, then many positives, groups and a dense problem."""
    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, seconds = (QUICK_SIZES, SECONDS_PER_CASE / 10) if quick else (SIZES, SECONDS_PER_CASE)
    rows, positives = [], []
    for size in sizes:
        for stage, separation in STAGES.items():
            progress(f"{size:,} scores, {stage}")
            times = best_in_turns(_cases(size, separation, min(POSITIVES, size // 10), device), seconds)
            rows.append({"scores": size, "stage": stage, **times})
    size = sizes[-1] if quick else MANY_SCORES
    for count in (count for count in MANY_POSITIVES if count < size):
        progress(f"{size:,} scores, {count} positives, all ranking losses")
        positives.append({"positives": count, **best_in_turns(_ranking_losses(size, count, device), seconds)})
    progress(f"{size:,} scores in {GROUPS} groups")
    groups = best_in_turns(_grouped_cases(size, device), seconds)
    progress(f"{size:,} scores, dense")
    dense = best_in_turns(_cases(size, 0.0, round(DENSE_SHARE * size), device), seconds)
    return {
        **describe_environment(),
        "rows": rows,
        "many_scores": size,
        "many_positives": positives,
        "groups": groups,
        "dense": dense,
    }


def table(result: dict[str, Any]) -> str:
    """The result as text: milliseconds, and ratios to focal loss and binary cross-entropy."""
    columns = "".join(f" {name:>10}" for name in ("AP-loss", "torch ops", "focal", "BCE", "/ focal", "/ BCE"))
    lines = [
        f"{', '.join(result['devices']) or result['cpu']}, {result['torch_threads']} threads; milliseconds, forward + "
        "backward, best of many, memory kept",
        f"{'scores':>12} {'stage':<6}{columns}",
    ]
    for row in result["rows"]:
        times = "".join(f" {1e3 * row[name]:>10.3f}" for name in NAMES)
        ratios = "".join(f" {row['ap_loss'] / row[name]:>10.2f}" for name in ("focal_loss", "bce"))
        lines.append(f"{row['scores']:>12,} {row['stage']:<6}{times}{ratios}")
    lines.append(f"\n{result['many_scores']:,} scores, milliseconds")
    for row in result["many_positives"]:
        times = ", ".join(f"{name} {1e3 * row[name]:.1f}" for name in ("ap", "auc", "rank-sort", "alrp"))
        lines.append(f"{row['positives']:>12,} positives: {times}")
    groups, dense = result["groups"], result["dense"]
    lines.append(
        f"{GROUPS:>12,} groups: {1e3 * groups['groups']:.1f}, one ranking of all: {1e3 * groups['one_ranking']:.1f}"
    )
    lines.append(f"{DENSE_SHARE:>12.0%} positives: " + ", ".join(f"{name} {1e3 * dense[name]:.1f}" for name in NAMES))
    return "\n".join(lines)


def make_scores(size: int, separation: float, positives: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Scores that require a gradient, with the positives ``separation`` above the negatives on average, and targets.

    The targets are floats, because torchvision's focal loss requires it.
    """
    random = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(size, generator=random), torch.zeros(size)
    targets[torch.randperm(size, generator=random)[:positives]] = 1
    return (scores + separation * targets).to(device).requires_grad_(), targets.to(device)


def by_torch(scores: Tensor, targets: Tensor) -> Tensor:
    """AP-loss by torch operations, as on a device without compiled kernels."""
    with use_backend("torch"):
        return ap_loss(scores, targets)


def _cases(size: int, separation: float, positives: int, device: torch.device) -> Cases:
    from torchvision.ops import sigmoid_focal_loss

    scores, targets = make_scores(size, separation, positives, device)
    return {
        "ap_loss": _step(scores, lambda: ap_loss(scores, targets)),
        "torch_operations": _step(scores, lambda: by_torch(scores, targets)),
        "focal_loss": _step(scores, lambda: sigmoid_focal_loss(scores, targets, reduction="sum") / positives),
        "bce": _step(scores, lambda: binary_cross_entropy_with_logits(scores, targets)),
    }


def _ranking_losses(size: int, positives: int, device: torch.device) -> Cases:
    scores, targets = make_scores(size, 0.0, positives, device)
    random = torch.Generator().manual_seed(1)
    soft = targets.clone()
    soft[targets == 1] = torch.rand(positives, generator=random).clamp(min=0.01).to(device)
    box_losses = torch.rand(positives, generator=random).to(device).requires_grad_()
    return {
        "ap": _step(scores, lambda: ap_loss(scores, targets)),
        "auc": _step(scores, lambda: auc_loss(scores, targets)),
        "rank-sort": _step(scores, lambda: torch.stack(rank_sort_loss(scores, soft)).sum()),
        "alrp": _step(scores, lambda: torch.stack(alrp_loss(scores, targets, box_losses)).sum()),
    }


def _grouped_cases(size: int, device: torch.device) -> Cases:
    """One ranking per row against one ranking of all rows, ten positives in each on average."""
    scores, targets = make_scores(size, 0.0, min(10 * GROUPS, size // 10), device)
    shape = (GROUPS, size // GROUPS)
    return {
        "groups": _step(scores, lambda: ap_loss(scores.view(shape), targets.view(shape), groups=0)),
        "one_ranking": _step(scores, lambda: ap_loss(scores, targets)),
    }


def _step(scores: Tensor, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A forward and backward pass to be measured."""

    def step() -> None:
        scores.grad = None
        loss().backward()  # type: ignore[no-untyped-call]

    return step
