"""Datasets for object detection: reading, checking, converting, augmenting, batching."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aploss.data.annotations import AnnotationBuilder, Annotations, DetectionDataset
from aploss.data.builtin import builtin_dataset
from aploss.data.check import check_dataset
from aploss.data.convert import convert_dataset
from aploss.data.folder import DatasetFolder, Problem
from aploss.data.formats import DataFormat, find_source, load_dataset, register_format
from aploss.data.images import read_image
from aploss.plotting.pictures import contact_sheet, draw_boxes

if TYPE_CHECKING:
    from aploss.data.loader import make_evaluation_loader, make_training_loader, training_transforms

__all__ = [
    "AnnotationBuilder", "Annotations", "DataFormat", "DatasetFolder", "DetectionDataset", "Problem", "builtin_dataset",
    "check_dataset", "contact_sheet", "convert_dataset", "draw_boxes", "find_source", "load_dataset",
    "make_evaluation_loader", "make_training_loader", "read_image", "register_format", "training_transforms",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports the loader lazily: torchvision takes seconds, and reading a dataset does not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".loader", __name__), name)
