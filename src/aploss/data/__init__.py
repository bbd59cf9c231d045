"""Datasets for object detection: reading, checking, converting, augmenting, batching."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aploss.data.annotations import AnnotationBuilder, Annotations, DetectionDataset
    from aploss.data.builtin import builtin_dataset
    from aploss.data.check import check_dataset
    from aploss.data.folder import DatasetFolder, Problem
    from aploss.data.formats import DataFormat, convert_dataset, find_source, load_dataset, register_format
    from aploss.data.images import read_image
    from aploss.data.loader import make_evaluation_loader, make_training_loader, training_transforms
    from aploss.plotting.pictures import contact_sheet, draw_boxes

__all__ = [
    "AnnotationBuilder", "Annotations", "DataFormat", "DatasetFolder", "DetectionDataset", "Problem", "builtin_dataset",
    "check_dataset", "contact_sheet", "convert_dataset", "draw_boxes", "find_source", "load_dataset",
    "make_evaluation_loader", "make_training_loader", "read_image", "register_format", "training_transforms",
]  # fmt: skip

_MODULES = (
    "aploss.data.folder", "aploss.plotting.pictures", "aploss.data.images", "aploss.data.annotations",
    "aploss.data.formats", "aploss.data.builtin", "aploss.data.check", "aploss.data.loader",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports the first module that has the name: torch and torchvision take seconds, and some modules need neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (import_module(module) for module in _MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
