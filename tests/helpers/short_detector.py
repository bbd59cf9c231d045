"""A RetinaNet with few layers, for tests of what any detector shows: how it is trained, kept, resumed or exported.

All of that takes longer the more layers there are.
"""

from functools import partial

import torch
from torch import Tensor, nn

from aploss.detectors import DetectorConfig, Network, register_detector, retinanet_network
from aploss.detectors.detector import Detector


class _Body(nn.Module):
    """Maps of strides 8, 16 and 32 from layers of all the kinds that retinanet-tiny has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, stride=4, padding=3), nn.GroupNorm(8, 16), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.steps = nn.ModuleList(nn.Conv2d(16, 16, 3, stride=2, padding=1) for _ in range(2))

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = [self.pool(self.stem(images))]
        for step in self.steps:
            maps.append(torch.relu(step(maps[-1]) + self.pool(maps[-1])))
        return maps


class ShortRetinaNet(DetectorConfig):
    def network(self, *, columns: int, softmax: bool) -> Network:
        return retinanet_network(
            _Body(), columns=columns, softmax=softmax, channels=16, extra_levels=1, head_convolutions=1,
            head_norm=partial(nn.GroupNorm, 8),
        )  # fmt: skip


def register_short_detector() -> str:
    """Its name. To be called by a test or fixture: at import, other files would find it among our own detectors."""
    register_detector("retinanet-short")(ShortRetinaNet)
    return "retinanet-short"


def double(detector: Detector) -> Detector:
    """The detector in float64, with the anchors of float32 images, by which they are looked up."""
    detector.anchors_for(64, 64, "cpu")
    return detector.double()
