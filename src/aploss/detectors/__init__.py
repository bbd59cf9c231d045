"""One-stage detectors with any classification loss.

Names are imported on first use, so that ``import aploss.detectors`` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aploss.detectors.build import DETECTOR_NAMES, build_detector
    from aploss.detectors.checkpoint_io import load, save_detector
    from aploss.detectors.criterion import Criterion
    from aploss.detectors.detector import Detector
    from aploss.detectors.losses_by_name import LOSS_NAMES, make_loss
    from aploss.detectors.multi_scale import MultiScale
    from aploss.detectors.prediction import Prediction
    from aploss.detectors.ranking_labels import label_anchors
    from aploss.detectors.swap_loss import use_loss

__all__ = [
    "DETECTOR_NAMES",
    "LOSS_NAMES",
    "Criterion",
    "Detector",
    "MultiScale",
    "Prediction",
    "build_detector",
    "label_anchors",
    "load",
    "make_loss",
    "save_detector",
    "use_loss",
]

_MODULES = {
    "DETECTOR_NAMES": "build",
    "LOSS_NAMES": "losses_by_name",
    "Criterion": "criterion",
    "Detector": "detector",
    "MultiScale": "multi_scale",
    "Prediction": "prediction",
    "build_detector": "build",
    "label_anchors": "ranking_labels",
    "load": "checkpoint_io",
    "make_loss": "losses_by_name",
    "save_detector": "checkpoint_io",
    "use_loss": "swap_loss",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
