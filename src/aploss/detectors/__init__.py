"""One-stage detectors with any classification loss.

Names are imported on first use, so that ``import aploss.detectors`` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aploss.detectors.build import DETECTOR_NAMES, build_detector
    from aploss.detectors.checkpoint import load, save_detector
    from aploss.detectors.criterion import LOSS_NAMES, Criterion, make_loss
    from aploss.detectors.detector import Detector, DetectorConfig, Network, register_detector
    from aploss.detectors.labels import label_anchors
    from aploss.detectors.predict import MultiScale, Prediction
    from aploss.detectors.retinanet import retinanet_network
    from aploss.detectors.score_map import ScoreThresholdWarning, calibrate
    from aploss.detectors.swap_loss import use_loss

__all__ = [
    "DETECTOR_NAMES", "LOSS_NAMES", "Criterion", "Detector", "DetectorConfig", "MultiScale", "Network", "Prediction",
    "ScoreThresholdWarning", "build_detector", "calibrate", "label_anchors", "load", "make_loss", "register_detector",
    "retinanet_network", "save_detector", "use_loss",
]  # fmt: skip

_NAMES = {
    "build": ("DETECTOR_NAMES", "build_detector"),
    "checkpoint": ("load", "save_detector"),
    "criterion": ("LOSS_NAMES", "Criterion", "make_loss"),
    "detector": ("Detector", "DetectorConfig", "Network", "register_detector"),
    "labels": ("label_anchors",),
    "predict": ("MultiScale", "Prediction"),
    "retinanet": ("retinanet_network",),
    "score_map": ("ScoreThresholdWarning", "calibrate"),
    "swap_loss": ("use_loss",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
