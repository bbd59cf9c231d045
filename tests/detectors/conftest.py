"""Pictures and targets for detectors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aploss.detectors import Detector, build_detector

Target = dict[str, Tensor]


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Target]:
    """Makes the target of an image with some random objects."""

    def make(count: int, *, size: int, classes: int = 5, seed: int = 0) -> Target:
        generator = torch.Generator().manual_seed(seed)
        corner = torch.rand(count, 2, generator=generator) * size * 0.7
        extent = (0.05 + 0.25 * torch.rand(count, 2, generator=generator)) * size
        return {
            "boxes": torch.cat([corner, corner + extent], dim=1),
            "labels": torch.randint(0, classes, (count,), generator=generator),
        }

    return make


@pytest.fixture(scope="module")
def detector() -> Detector:
    """A small one whose weights are large enough for all kinds of detections."""
    torch.manual_seed(0)
    detector = build_detector("retinanet-tiny", class_names=["cat", "dog"], test_size=(96, 128))
    for layer in (detector.head.classification_head, detector.head.regression_head):
        for weight in layer.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.05)
    return detector.eval()
