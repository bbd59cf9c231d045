"""What the readers of all formats have in common."""

import re
from collections.abc import Sequence
from typing import Protocol

from aploss.data.dataset import DetectionDataset
from aploss.data.paths import DatasetFolder
from aploss.data.problems import Problem
from aploss.errors import DataError

__all__ = [
    "Source",
    "check_class_names",
    "common_split_name",
    "split_order",
    "usual_split_name",
]

_COMMON_NAMES = {
    "training": "train",
    "validation": "val",
    "valid": "val",
    "dev": "val",
    "testing": "test",
}
_ORDER = ("train", "trainval", "val", "test")


class Source(Protocol):
    """A dataset on disk whose splits can be read.

    Attributes:
        format: "voc", "coco" or "yolo".
        folder: The folder that nothing may reach out of.
        name: What to call the dataset.
        splits: Names of its splits, training first.
    """

    format: str
    folder: DatasetFolder
    name: str
    splits: tuple[str, ...]

    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """Reads one split; unusable images and boxes go into the dataset's problems.

        Args:
            split: One of :attr:`splits`, or a file that lists images.
            class_names: The classes to read; those of the data where None.

        Raises:
            ProblemError: Nothing of the split can be read.
        """
        ...

    def leftovers(self) -> list[Problem]:
        """Annotations and images that no split reaches."""
        ...


def common_split_name(name: str) -> str:
    """The usual name of a split: "train" for "train2017" and "training", "val" for "valid".

    Example:
        >>> common_split_name("valid"), common_split_name("train2017"), common_split_name("day")
        ('val', 'train', 'day')
    """
    return usual_split_name(re.sub(r"[-_]?\d+$", "", name) or name)


def usual_split_name(name: str) -> str:
    """The same, but a year stays: "val" for "Validation", "train2017" for itself."""
    return _COMMON_NAMES.get(name.lower(), name.lower())


def split_order(name: str) -> tuple[int, str]:
    """Sort key that puts training before validation before test before everything else."""
    common = common_split_name(name)
    return (_ORDER.index(common) if common in _ORDER else len(_ORDER), name)


def check_class_names(names: Sequence[str]) -> tuple[str, ...]:
    """A class list that a user gave.

    Raises:
        DataError: It is empty or names a class twice.
    """
    if isinstance(names, str):
        raise DataError(f"class names must be a list of names, got the text {names!r}")
    if not names or any(not isinstance(name, str) or not name for name in names):
        raise DataError(f"class names must be a list of non-empty names, got {list(names)}")
    if len(set(names)) < len(names):
        raise DataError(f"class names must be distinct, got {', '.join(names)}")
    return tuple(names)
