"""A training step of RetinaNet with AP-loss against the same step with torchvision's focal loss.

The network is torchvision's RetinaNet with ResNet-50; forward, loss, backward and an SGD step are timed. The steps take
turns and the best of several rounds counts: times vary between machines and hours, ratios within a run do not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from aploss.benchmarks import Progress, best_in_turns
from aploss.environment import describe_environment

FULL: dict[str, Any] = {"size": 512, "images": 2, "classes": 80, "seconds": 20.0}
QUICK: dict[str, Any] = {"size": 96, "images": 1, "classes": 3, "seconds": 0.0}
OBJECTS_PER_IMAGE = 8
BASELINE = "focal loss"
SWAPPED = "AP-loss"
Step = Callable[[], None]


def run(progress: Progress, *, quick: bool = False) -> dict[str, Any]:
    """Measures the steps; :func:`table` shows the result."""
    settings = QUICK if quick else FULL
    torch.manual_seed(0)
    images = torch.rand(settings["images"], 3, settings["size"], settings["size"])
    targets = [_target(settings["size"], settings["classes"]) for _ in range(settings["images"])]
    progress("building the networks")
    models = _models(settings)
    progress("steps")
    times = best_in_turns(
        {name: _training_step(model, images, targets) for name, model in models.items()}, settings["seconds"]
    )
    rows = [{"name": name, "best": best, "ratio": best / times[BASELINE]} for name, best in times.items()]
    return {**settings, **describe_environment(), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The result as text: seconds, and the ratio to torchvision's focal loss."""
    network = "RetinaNet, ResNet-50, {size} px, batch {images}, {classes} classes, {torch_threads} threads"
    return "\n".join(
        [
            f"{network.format(**result)}; seconds, best of several in turns",
            f"{'step with':<12} {'best':>8} {'/ focal':>8}",
            *("{name:<12} {best:>8.3f} {ratio:>8.3f}".format(**row) for row in result["rows"]),
        ]
    )


def _models(settings: dict[str, Any]) -> dict[str, nn.Module]:
    """The same network twice, with torchvision's focal loss and with AP-loss."""
    from torchvision.models.detection import retinanet_resnet50_fpn

    from aploss.integrations import use_loss
    from aploss.losses import APLoss

    sizes = {"num_classes": settings["classes"], "min_size": settings["size"], "max_size": settings["size"]}
    focal, ap = (retinanet_resnet50_fpn(weights=None, weights_backbone=None, **sizes) for _ in range(2))
    ap.load_state_dict(focal.state_dict())
    return {BASELINE: focal, SWAPPED: use_loss(ap, APLoss(), score_thresh=0)}


def _training_step(model: nn.Module, images: Tensor, targets: list[dict[str, Tensor]]) -> Step:
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
