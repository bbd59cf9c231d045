"""One training step with every loss, for batches with no, few and very many objects."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aploss.detectors import LOSS_NAMES, Detector, build_detector

SIZE = 64
CLASSES = ["a", "b", "c", "d", "e"]
OBJECTS = {  # in each of two images
    "no object at all": (0, 0),
    "no object in one image": (3, 0),
    "one object": (1, 0),
    "hundreds of objects": (300, 150),
}


def check_gradients(detector: Detector) -> None:
    for name, parameter in detector.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            assert parameter.grad.isfinite().all(), f"{name} has a gradient that is not finite"


def heads_that_learn(detector: Detector) -> set[str]:
    parameters = detector.head.named_parameters()
    return {name.split("_")[0] for name, p in parameters if p.grad is not None and p.grad.any()}


@pytest.mark.parametrize(("name", "loss"), [*(("retinanet-tiny", loss) for loss in LOSS_NAMES), ("ssdlite", "ce-ohem")])
def test_every_loss_gives_finite_gradients_for_any_number_of_objects(
    name: str, loss: str, make_target: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    detector = build_detector(name, class_names=CLASSES, loss=loss, test_size=(SIZE, SIZE))
    images = torch.rand(2, 3, SIZE, SIZE)
    for case, counts in OBJECTS.items():
        detector.zero_grad()
        targets = [make_target(n, size=SIZE, seed=i) for i, n in enumerate(counts)]
        losses = detector(images, targets)
        assert set(losses) == {"classification", "box"}, case
        assert all(value.isfinite() and value.ndim == 0 for value in losses.values()), case
        sum(losses.values()).backward()
        check_gradients(detector)
        if sum(counts):
            assert heads_that_learn(detector) == {"classification", "regression"}, case


def test_images_of_different_sizes_are_trained_on_in_one_batch(make_target: Callable[..., Any]) -> None:
    detector = build_detector("retinanet-tiny", class_names=CLASSES)
    images = [torch.rand(3, 64, 96), torch.rand(3, 100, 50)]
    losses = detector(images, [make_target(2, size=50), make_target(1, size=50)])
    sum(losses.values()).backward()
    check_gradients(detector)


def test_step_under_autocast_and_compile_runs(make_target: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    detector = build_detector("retinanet-tiny", class_names=CLASSES)
    images, targets = torch.rand(1, 3, 64, 64), [make_target(2, size=64)]
    plain = detector(images, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = detector(images, targets)
    assert {value.dtype for value in losses.values()} == {torch.float32}
    torch.testing.assert_close(losses, plain, rtol=0.1, atol=0.1)
    detector.compile(backend="eager")
    torch.testing.assert_close(detector(images, targets), plain)
    names = {name.split(".")[0] for name in detector.state_dict()}
    assert names == {"backbone", "head"}  # weights keep their names
