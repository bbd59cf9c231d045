"""What a data format is, and how one is added: in a file of one's own, outside the package.

A format is a class whose objects are datasets on disk::

    @register_format("csv")
    class CsvFormat(DataFormat):
        looked_for = "CSV (train.csv, val.csv)"

        @classmethod
        def find(cls, path): ...  # the dataset in a folder or file, or None where it is not ours

        def read(self, split, class_names): ...  # fill an AnnotationBuilder, return its dataset

``aploss --plugin csv_format.py data check FOLDER`` then knows it, and so does everything else.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from aploss.data.annotations import DetectionDataset
from aploss.data.paths import DatasetFolder
from aploss.data.problems import Problem, ProblemError
from aploss.errors import DataError
from aploss.registry import Registry

Parts = dict[str, DetectionDataset]  # split → its images

_COMMON_NAMES = {"training": "train", "validation": "val", "valid": "val", "dev": "val", "testing": "test"}
SPLITS = ("train", "trainval", "val", "test")  # by their usual names, in their order


class Written(NamedTuple):
    """Where images belong below a new dataset, and what its format cannot hold."""

    image_folder: str
    lost_boxes: int = 0
    losses: tuple[str, ...] = ()  # in words


class DataFormat(ABC):
    """A dataset on disk whose splits can be read.

    Args:
        folder: the folder that nothing may reach out of.
        splits: names of its splits; they are kept with training first.

    Attributes:
        format: the name it is registered under.
        looked_for: what its files look like, for the message that nothing was found.
        one_image_folder: whether :meth:`write` wants all images in one folder, or one per split.
        name: what to call the dataset.
    """

    format: ClassVar[str] = ""
    looked_for: ClassVar[str] = ""
    one_image_folder: ClassVar[bool] = False

    def __init__(self, folder: DatasetFolder, splits: Sequence[str]) -> None:
        self.folder = folder
        self.name = folder.root.name
        self.splits = tuple(sorted(splits, key=split_order))

    @classmethod
    @abstractmethod
    def find(cls, path: Path) -> "DataFormat | None":
        """The dataset of this format in a folder or file that exists, or None."""

    @abstractmethod
    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """Reads one split; unusable images and boxes go into the dataset's problems.

        Args:
            split: one of :attr:`splits`, or a file that lists images.
            class_names: the classes to read; those of the data where None.

        Raises:
            ProblemError: nothing of the split can be read.
        """

    def leftovers(self) -> list[Problem]:
        """Annotations and images that no split reaches; called when all were read."""
        return []

    @classmethod
    def write(cls, folder: Path, parts: Parts, places: dict[Path, str]) -> Written:
        """Writes the annotations of a new dataset, for ``aploss data convert``; optional.

        Args:
            folder: the new dataset; it does not exist.
            parts: split name → images.
            places: image file → its new place below the image folder that is returned.
        """
        raise DataError(f"the format '{cls.format}' can be read, but not written")

    def no_such_split(self, split: str) -> ProblemError:
        """The error for a split that is not there."""
        return ProblemError("missing-folder", split, f"no such split; there are: {', '.join(self.splits)}")


FORMATS: Registry[type[DataFormat]] = Registry("data format")
FormatClass = TypeVar("FormatClass", bound=type[DataFormat])


def register_format(name: str) -> Callable[[FormatClass], FormatClass]:
    """Makes a data format known by a name, to loading, checking, converting and training.

    Where no format is named, a dataset is of the one format whose ``find`` knows it.

    Raises:
        ConfigError: if the name is taken.
    """

    def add(format_class: FormatClass) -> FormatClass:
        FORMATS.register(name)(format_class)
        format_class.format = name
        return format_class

    return add


def writable_formats() -> tuple[str, ...]:
    """Names of the formats that can be written, sorted."""
    own = (name for name, one in FORMATS.items() if one.write.__func__ is not DataFormat.write.__func__)  # type: ignore[attr-defined]
    return tuple(sorted(own))


def number(text: object) -> float:
    """A coordinate as float; ValueError where it is not a number (NaN and infinity are)."""
    try:
        if isinstance(text, (int, float, str)) and not isinstance(text, bool):
            return float(text)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{text!r:.80} is not a number")


def image_size(width: Any, height: Any) -> tuple[int, int] | None:
    """Width and height as a file states them; None where they are no size."""
    possible = all(type(side) in (int, float) and 1 <= side < 2**31 for side in (width, height))
    return (int(width), int(height)) if possible else None


def filled_lines(text: str) -> list[str]:
    """The lines that are not empty, without the space around them."""
    return [line for line in map(str.strip, text.splitlines()) if line]


def json_begins_with(folder: DatasetFolder, file: str, keys: re.Pattern[bytes]) -> bool:
    """Whether a JSON file has one of these keys near its beginning."""
    if not folder.is_file(file):
        return False
    try:
        with (folder.root / file).open("rb") as opened:
            start = opened.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
    except OSError:
        return False
    return start.startswith(b"{") and keys.search(start) is not None


def is_text(name: str) -> bool:
    """Whether a name can be written to a file or terminal: half a surrogate pair cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


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
    return (SPLITS.index(common) if common in SPLITS else len(SPLITS), name)


def check_class_names(names: Sequence[str]) -> tuple[str, ...]:
    """A class list that a user gave; DataError where it is empty or names a class twice."""
    if isinstance(names, str):
        raise DataError(f"class names must be a list of names, got the text {names!r}")
    if not names or any(not isinstance(name, str) or not name for name in names):
        raise DataError(f"class names must be a list of non-empty names, got {list(names)}")
    if len(set(names)) < len(names):
        raise DataError(f"class names must be distinct, got {', '.join(names)}")
    return tuple(names)


def each_image_once(parts: Parts) -> Iterator[tuple[DetectionDataset, int]]:
    """The images of all splits as (split, index), those that several splits share once."""
    seen = set()
    for part in parts.values():
        for index in range(len(part)):
            path = part.image_path(index)
            if path not in seen:
                seen.add(path)
                yield part, index


def outline_losses(parts: Parts) -> list[str]:
    """What a format of boxes alone loses of COCO's areas, which are those of outlines."""
    for part in parts.values():
        boxes = part.all_boxes()
        own = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
        if not np.allclose(own, part.annotations.areas, rtol=1e-3):
            return ["the areas of objects' outlines (a box's own area is read instead)"]
    return []
