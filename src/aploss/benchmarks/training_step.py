"""A training step of RetinaNet with AP-loss against the same step with torchvision's focal loss.

The network is torchvision's RetinaNet with ResNet-50; forward, loss, backward and an SGD step are timed. The steps take
turns and the best of several rounds counts: times vary between machines and hours, ratios within a run do not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from aploss.benchmarks import Progress, best_in_turns, describe_machine

FULL: dict[str, Any] = {"depth": 50, "size": 512, "images": 2, "classes": 80, "seconds": 20.0}
QUICK: dict[str, Any] = {"depth": 18, "size": 96, "images": 1, "classes": 3, "seconds": 0.0}
OBJECTS_PER_IMAGE = 8
ANCHORS_PER_CELL = 9
BASELINE = "torchvision, focal loss"
SWAPPED = "torchvision, AP-loss"
OURS = "retinanet-r{depth}, AP-loss"
Step = Callable[[], None]


def run(progress: Progress, *, quick: bool = False) -> dict[str, Any]:
    """Measures whole steps, and the losses alone; :func:`table` shows the result."""
    settings = QUICK if quick else FULL
    torch.manual_seed(0)
    images = torch.rand(settings["images"], 3, settings["size"], settings["size"])
    targets = [_target(settings["size"], settings["classes"]) for _ in range(settings["images"])]
    progress("building the networks")
    models = _models(settings)
    steps = {name: _training_step(model, images, targets) for name, model in models.items()}
    progress("whole steps")
    step_times = best_in_turns(steps, settings["seconds"])
    losses = {name: _loss_step(models[name], images, targets) for name in (BASELINE, SWAPPED)}
    progress("losses alone")
    loss_times = best_in_turns(losses, settings["seconds"])
    return {**settings, **describe_machine(), "rows": _rows("whole step", step_times) + _rows("loss alone", loss_times)}


def table(result: dict[str, Any]) -> str:
    """The result as text: seconds, and the ratio to torchvision's focal loss."""
    network = "RetinaNet, ResNet-{depth}, {size} px, batch {images}, {classes} classes, {threads} threads"
    return "\n".join(
        [
            f"{network.format(**result)}; seconds, best of several in turns",
            f"{'what':<12} {'with':<26} {'best':>8} {'/ focal':>8}",
            *("{what:<12} {name:<26} {best:>8.3f} {ratio:>8.3f}".format(**row) for row in result["rows"]),
        ]
    )


def _models(settings: dict[str, Any]) -> dict[str, nn.Module]:
    """The same network three times: torchvision's, the same with AP-loss, and ours."""
    from torchvision.models import resnet
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    from aploss.detectors import build_detector
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
    """Labels, losses and their gradients, for fixed outputs of the heads."""
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


def _rows(what: str, times: dict[str, float]) -> list[dict[str, Any]]:
    return [{"what": what, "name": name, "best": best, "ratio": best / times[BASELINE]} for name, best in times.items()]


def _target(size: int, classes: int) -> dict[str, Tensor]:
    corner = torch.rand(OBJECTS_PER_IMAGE, 2) * size * 0.7
    extent = (0.05 + 0.25 * torch.rand(OBJECTS_PER_IMAGE, 2)) * size
    return {
        "boxes": torch.cat([corner, corner + extent], dim=1),
        "labels": torch.randint(0, classes, (OBJECTS_PER_IMAGE,)),
    }
