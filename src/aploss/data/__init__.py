"""Datasets for object detection: reading, checking, converting, augmenting, batching."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aploss.data.annotations import AnnotationBuilder, Annotations, DetectionDataset
    from aploss.data.builtin import builtin_dataset
    from aploss.data.check import check_dataset
    from aploss.data.convert import convert_dataset
    from aploss.data.folder import DatasetFolder, Problem
    from aploss.data.formats import DataFormat, find_source, load_dataset, register_format
    from aploss.data.images import read_image
    from aploss.data.loader import make_evaluation_loader, make_training_loader, training_transforms
    from aploss.plotting.pictures import contact_sheet, draw_boxes

__all__ = [
    "AnnotationBuilder", "Annotations", "DataFormat", "DatasetFolder", "DetectionDataset", "Problem", "builtin_dataset",
    "check_dataset", "contact_sheet", "convert_dataset", "draw_boxes", "find_source", "load_dataset",
    "make_evaluation_loader", "make_training_loader", "read_image", "register_format", "training_transforms",
]  # fmt: skip

_MODULES = {
    ".plotting.pictures": ("contact_sheet", "draw_boxes"),
    "annotations": ("AnnotationBuilder", "Annotations", "DetectionDataset"),
    "builtin": ("builtin_dataset",),
    "check": ("check_dataset",),
    "convert": ("convert_dataset",),
    "folder": ("DatasetFolder", "Problem"),
    "formats": ("DataFormat", "find_source", "load_dataset", "register_format"),
    "images": ("read_image",),
    "loader": ("make_evaluation_loader", "make_training_loader", "training_transforms"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports lazily: reading a dataset needs neither torchvision nor the data loader."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
