"""One-stage detectors with any classification loss."""

from typing import Any

import aploss.detectors.ssd  # noqa: F401  # registers its detectors
from aploss.detectors.checkpoint import load, save_detector
from aploss.detectors.criterion import Criterion, make_loss
from aploss.detectors.detector import DETECTORS, Detector, DetectorConfig, Network, build_detector, register_detector
from aploss.detectors.labels import label_anchors
from aploss.detectors.predict import MultiScale, Prediction
from aploss.detectors.retinanet import retinanet_network
from aploss.losses.traits import LOSSES

__all__ = [
    "DETECTOR_NAMES", "LOSS_NAMES", "Criterion", "Detector", "DetectorConfig", "MultiScale", "Network", "Prediction",
    "build_detector", "label_anchors", "load", "make_loss", "register_detector", "retinanet_network", "save_detector",
]  # fmt: skip

DETECTOR_NAMES: tuple[str, ...]
LOSS_NAMES: tuple[str, ...]


def __getattr__(name: str) -> Any:
    if name == "DETECTOR_NAMES":  # plugins may have added some
        return DETECTORS.names()
    if name == "LOSS_NAMES":
        return LOSSES.names()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
