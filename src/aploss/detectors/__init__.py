"""One-stage detectors with any classification loss.

Names are imported on first use, so that ``import aploss.detectors`` is fast.
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

    ScoreThresholdWarning: Any
    calibrate: Any
    use_loss: Any

__all__ = [
    "DETECTOR_NAMES", "LOSS_NAMES", "Criterion", "Detector", "DetectorConfig", "MultiScale", "Network", "Prediction",
    "ScoreThresholdWarning", "build_detector", "calibrate", "label_anchors", "load", "make_loss", "register_detector",
    "retinanet_network", "save_detector", "use_loss",
]  # fmt: skip

_NAMES = {
    "aploss.detectors.build": ("DETECTOR_NAMES", "build_detector"),
    "aploss.detectors.checkpoint": ("load", "save_detector"),
    "aploss.detectors.criterion": ("LOSS_NAMES", "Criterion", "make_loss"),
    "aploss.detectors.detector": ("Detector", "DetectorConfig", "Network", "register_detector"),
    "aploss.detectors.labels": ("label_anchors",),
    "aploss.detectors.predict": ("MultiScale", "Prediction"),
    "aploss.detectors.retinanet": ("retinanet_network",),
    "aploss.integrations": ("ScoreThresholdWarning", "calibrate", "use_loss"),  # they were here in earlier versions
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
