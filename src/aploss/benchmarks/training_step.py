"""A training step of RetinaNet with AP-loss against the same step with torchvision's focal loss.

The network is torchvision's RetinaNet with ResNet-50; forward, loss, backward and an SGD step are timed. The
competitors take turns and the best of several rounds counts: times differ from machine to machine and from hour to
hour, ratios within a run do not.
"""

import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FULL: dict[str, Any] = {"depth": 50, "size": 512, "images": 2, "classes": 80, "rounds": 8}
QUICK: dict[str, Any] = {"depth": 18, "size": 96, "images": 1, "classes": 3, "rounds": 1}
OBJECTS_PER_IMAGE = 8
ANCHORS_PER_CELL = 9
BASELINE = "torchvision, focal loss"
SWAPPED = "torchvision, AP-loss"
OURS = "retinanet-r{depth}, AP-loss"
Step = Callable[[], None]


def run(progress: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Measures whole steps, and the losses alone; see :func:`table` for what comes out."""
    settings = QUICK if quick else FULL
    torch.manual_seed(0)
    images = torch.rand(settings["images"], 3, settings["size"], settings["size"])
    targets = [_target(settings["size"], settings["classes"]) for _ in range(settings["images"])]
    progress("building the networks")
    models = _models(settings)
    steps = {name: _training_step(model, images, targets) for name, model in models.items()}
    step_times = _in_turns(steps, settings["rounds"], progress, "whole step")
    losses = {name: _loss_step(models[name], images, targets) for name in (BASELINE, SWAPPED)}
    loss_times = _in_turns(losses, 3 * settings["rounds"], progress, "loss alone")
    return {
        **settings,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "rows": _rows("whole step", step_times) + _rows("loss alone", loss_times),
    }


def table(result: dict[str, Any]) -> str:
    """The result as text: seconds, and the ratio to torchvision's focal loss."""
    network = "RetinaNet, ResNet-{depth}, {size} px, batch {images}, {classes} classes, {threads} threads"
    line = "{what:<12} {name:<26} {best:>8.3f} {median:>8.3f} {ratio_of_best:>8.3f} {median_ratio:>8.3f}"
    return "\n".join(
        [
            f"{network.format(**result)}; seconds, best of {result['rounds']} rounds in turns",
            f"{'what':<12} {'with':<26} {'best':>8} {'median':>8} {'/ focal':>8} {'median':>8}",
            *(line.format(**row) for row in result["rows"]),
        ]
    )


def _models(settings: dict[str, Any]) -> dict[str, nn.Module]:
    """The same network three times: torchvision's, with the loss swapped, and ours."""
    from torchvision.models import resnet
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    from aploss.detectors.build import build_detector
    from aploss.integrations import use_loss
    from aploss.losses import APLoss

    ours = build_detector(
        f"retinanet-r{settings['depth']}",
        class_names=[str(index) for index in range(settings["classes"])],
        norm="batch",
        anchors_per_cell=ANCHORS_PER_CELL,
        anchor_grid="torchvision",
    )

    def torchvisions() -> Any:
        body = getattr(resnet, f"resnet{settings['depth']}")(weights=None)
        channels = [body.inplanes // 4, body.inplanes // 2, body.inplanes]
        layers = {"layer2": "0", "layer3": "1", "layer4": "2"}
        backbone = BackboneWithFPN(body, layers, channels, 256, LastLevelP6P7(256, 256))
        model = RetinaNet(backbone, settings["classes"], min_size=settings["size"], max_size=settings["size"])
        model.load_state_dict(ours.state_dict())
        return model

    return {
        BASELINE: torchvisions(),
        SWAPPED: use_loss(torchvisions(), APLoss(), score_thresh=0),
        OURS.format(**settings): ours,
    }


def _training_step(model: nn.Module, images: Tensor, targets: list[dict[str, Tensor]]) -> Step:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        losses = model(list(images), targets)
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _loss_step(model: Any, images: Tensor, targets: list[dict[str, Tensor]]) -> Step:
    """Labels, losses and their gradients, on what the heads gave once."""
    from torchvision.models.detection.image_list import ImageList

    with torch.no_grad():
        features = list(model.backbone(images).values())
        outputs = {key: value.requires_grad_() for key, value in model.head(features).items()}
        sizes = [(images.shape[-2], images.shape[-1])] * len(images)
        anchors = model.anchor_generator(ImageList(images, sizes), features)

    def step() -> None:
        losses = model.compute_loss(targets, outputs, anchors)
        torch.autograd.grad(torch.stack(list(losses.values())).sum(), list(outputs.values()))

    return step


def _in_turns(
    steps: dict[str, Step], rounds: int, progress: Callable[[str], None], what: str
) -> dict[str, list[float]]:
    """Seconds of every step in every round; the order turns round, so that none is always first."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = deque(steps)
    for name in order:
        progress(f"{what}: warming up, {name}")
        steps[name]()
    for index in range(rounds):
        progress(f"{what}: round {index + 1} of {rounds}")
        for name in order:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
        order.rotate(-1)
    return times


def _rows(what: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    baseline = times[BASELINE]
    return [
        {
            "what": what,
            "name": name,
            "best": min(seconds),
            "median": statistics.median(seconds),
            "ratio_of_best": min(seconds) / min(baseline),
            "median_ratio": statistics.median(one / other for one, other in zip(seconds, baseline, strict=True)),
        }
        for name, seconds in times.items()
    ]


def _target(size: int, classes: int) -> dict[str, Tensor]:
    corner = torch.rand(OBJECTS_PER_IMAGE, 2) * size * 0.7
    extent = (0.05 + 0.25 * torch.rand(OBJECTS_PER_IMAGE, 2)) * size
    return {
        "boxes": torch.cat([corner, corner + extent], dim=1),
        "labels": torch.randint(0, classes, (OBJECTS_PER_IMAGE,)),
    }
