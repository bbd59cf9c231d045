"""One-stage detectors with any classification loss.

Names are imported on first use, so that ``import aploss.detectors`` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aploss.detectors.build import DETECTOR_NAMES, build_detector
    from aploss.detectors.checkpoint import load, save_detector
    from aploss.detectors.criterion import Criterion
    from aploss.detectors.detector import Detector, DetectorConfig, Network, register_detector
    from aploss.detectors.labels import label_anchors
    from aploss.detectors.losses_by_name import LOSS_NAMES, make_loss
    from aploss.detectors.postprocess import MultiScale
    from aploss.detectors.predict import Prediction
    from aploss.detectors.retinanet import retinanet_network
    from aploss.detectors.score_map import calibrate
    from aploss.detectors.swap_loss import ScoreThresholdWarning, use_loss

__all__ = [
    "DETECTOR_NAMES",
    "LOSS_NAMES",
    "Criterion",
    "Detector",
    "DetectorConfig",
    "MultiScale",
    "Network",
    "Prediction",
    "ScoreThresholdWarning",
    "build_detector",
    "calibrate",
    "label_anchors",
    "load",
    "make_loss",
    "register_detector",
    "retinanet_network",
    "save_detector",
    "use_loss",
]

_MODULES = {
    "DETECTOR_NAMES": "build",
    "LOSS_NAMES": "losses_by_name",
    "Criterion": "criterion",
    "Detector": "detector",
    "DetectorConfig": "detector",
    "MultiScale": "postprocess",
    "Network": "detector",
    "Prediction": "predict",
    "ScoreThresholdWarning": "swap_loss",
    "build_detector": "build",
    "calibrate": "score_map",
    "label_anchors": "labels",
    "load": "checkpoint",
    "make_loss": "losses_by_name",
    "register_detector": "detector",
    "retinanet_network": "retinanet",
    "save_detector": "checkpoint",
    "use_loss": "swap_loss",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
