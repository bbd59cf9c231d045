"""The benchmarks of ``aploss bench``.

The cases of a benchmark run in one process and take turns, and the best of many repeats counts: times vary between
machines and hours, ratios within a run do not.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from aploss.environment import describe_environment
from aploss.losses import APLoss, alrp_loss, ap_loss, auc_loss, rank_sort_loss, use_backend
from aploss.training.distributed import keep_freed_memory

Progress = Callable[[str], None]  # called with a description of each measurement
Cases = dict[str, Callable[[], Any]]
SECONDS_PER_TURN = 1e-3


def best_in_turns(cases: Cases, seconds: float) -> dict[str, float]:
    """The best time of each case; they take turns for ``seconds`` per case, so that all have the same conditions.

    A turn starts with a call that is not timed and lasts a millisecond at least, so that no case pays for the caches
    that another one has filled.
    """
    best = dict.fromkeys(cases, float("inf"))
    synchronize: Callable[[], Any] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    stop, rounds = time.perf_counter() + seconds * len(cases), 0
    while rounds < 3 or time.perf_counter() < stop:
        for name, case in cases.items():
            case()
            synchronize()
            now = time.perf_counter()
            turn = now + SECONDS_PER_TURN
            while now < turn:
                start = now
                case()
                synchronize()
                now = time.perf_counter()
                best[name] = min(best[name], now - start)
        rounds += 1
    return best


# --- the ranking losses against focal loss and binary cross-entropy, forward and backward -------------

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


def measure_losses(progress: Progress, *, quick: bool = False) -> dict[str, Any]:
    """Measures every size and stage of training, then many positives, groups and a dense problem.

    The process keeps freed memory, as in a training that allocates the same tensors at every step; otherwise large
    tensors measure page faults.
    """
    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, seconds = (QUICK_SIZES, SECONDS_PER_CASE / 10) if quick else (SIZES, SECONDS_PER_CASE)
    rows, positives = [], []
    for size in sizes:
        for stage, separation in STAGES.items():
            progress(f"{size:,} scores, {stage}")
            times = best_in_turns(_loss_cases(size, separation, min(POSITIVES, size // 10), device), seconds)
            rows.append({"scores": size, "stage": stage, **times})
    size = sizes[-1] if quick else MANY_SCORES
    for count in [count for count in MANY_POSITIVES if count < size]:
        progress(f"{size:,} scores, {count} positives, all ranking losses")
        positives.append({"positives": count, **best_in_turns(_ranking_losses(size, count, device), seconds)})
    progress(f"{size:,} scores in {GROUPS} groups")
    groups = best_in_turns(_grouped_loss_cases(size, device), seconds)
    progress(f"{size:,} scores, dense")
    dense = best_in_turns(_loss_cases(size, 0.0, round(DENSE_SHARE * size), device), seconds)
    result = {"rows": rows, "many_scores": size, "many_positives": positives, "groups": groups, "dense": dense}
    return {**describe_environment(), **result}


def losses_table(result: dict[str, Any]) -> str:
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


def _loss_cases(size: int, separation: float, positives: int, device: torch.device) -> Cases:
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


def _grouped_loss_cases(size: int, device: torch.device) -> Cases:
    """One ranking per row against one ranking of all rows, ten positives in each on average."""
    scores, targets = make_scores(size, 0.0, min(10 * GROUPS, size // 10), device)
    shape = (GROUPS, size // GROUPS)
    return {
        "groups": _step(scores, lambda: ap_loss(scores.view(shape), targets.view(shape), groups=0)),
        "one_ranking": _step(scores, lambda: ap_loss(scores, targets)),
    }


def _step(scores: Tensor, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A forward and backward pass."""

    def step() -> None:
        scores.grad = None
        loss().backward()  # type: ignore[no-untyped-call]

    return step


# --- a training step of torchvision's RetinaNet with AP-loss and with focal loss ----------------------

FULL: dict[str, Any] = {"size": 512, "images": 2, "classes": 80, "seconds": 20.0}
QUICK: dict[str, Any] = {"size": 96, "images": 1, "classes": 3, "seconds": 0.0}
OBJECTS_PER_IMAGE = 8
BASELINE = "focal loss"
SWAPPED = "AP-loss"


def measure_training_step(progress: Progress, *, quick: bool = False) -> dict[str, Any]:
    """Measures forward, loss, backward and an SGD step of both networks."""
    settings = QUICK if quick else FULL
    torch.manual_seed(0)
    images = torch.rand(settings["images"], 3, settings["size"], settings["size"])
    targets = [_target(settings["size"], settings["classes"]) for _ in range(settings["images"])]
    progress("building the networks")
    models = _models(settings)
    progress("steps")
    steps = {name: _training_step(model, images, targets) for name, model in models.items()}
    times = best_in_turns(steps, settings["seconds"])
    rows = [{"name": name, "best": best, "ratio": best / times[BASELINE]} for name, best in times.items()]
    return {**settings, **describe_environment(), "rows": rows}


def training_step_table(result: dict[str, Any]) -> str:
    """The result as text: seconds, and the ratio to torchvision's focal loss."""
    network = "RetinaNet, ResNet-50, {size} px, batch {images}, {classes} classes, {torch_threads} threads"
    lines = [
        f"{network.format(**result)}; seconds, best of several in turns",
        f"{'step with':<12} {'best':>8} {'/ focal':>8}",
    ]
    return "\n".join(lines + ["{name:<12} {best:>8.3f} {ratio:>8.3f}".format(**row) for row in result["rows"]])


def _models(settings: dict[str, Any]) -> dict[str, nn.Module]:
    """The same network twice, with torchvision's focal loss and with AP-loss."""
    from torchvision.models.detection import retinanet_resnet50_fpn

    from aploss.integrations import use_loss

    sizes = {"num_classes": settings["classes"], "min_size": settings["size"], "max_size": settings["size"]}
    focal, ap = (retinanet_resnet50_fpn(weights=None, weights_backbone=None, **sizes) for _ in range(2))
    ap.load_state_dict(focal.state_dict())
    return {BASELINE: focal, SWAPPED: use_loss(ap, APLoss(), score_thresh=0)}


def _training_step(model: nn.Module, images: Tensor, targets: list[dict[str, Tensor]]) -> Callable[[], None]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        losses = model(list(images), targets)
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _target(size: int, classes: int) -> dict[str, Tensor]:
    corner = torch.rand(OBJECTS_PER_IMAGE, 2) * size * 0.7
    extent = (0.05 + 0.25 * torch.rand(OBJECTS_PER_IMAGE, 2)) * size
    return {
        "boxes": torch.cat([corner, corner + extent], dim=1),
        "labels": torch.randint(0, classes, (OBJECTS_PER_IMAGE,)),
    }


BENCHMARKS = {"losses": (measure_losses, losses_table), "training-step": (measure_training_step, training_step_table)}
