"""Data formats: the interface, the registry, finding datasets, loading their splits and converting them.

A format is a subclass of :class:`DataFormat` whose instances are datasets on disk; docs/plugins.md shows an example.
"""

import difflib
import hashlib
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from PIL import Image

from aploss.data.annotations import DetectionDataset, concatenate
from aploss.data.folder import DatasetFolder, Effect, Problem, ProblemError, summarise
from aploss.data.images import inspect_images, read_image, read_sizes
from aploss.errors import DataError
from aploss.registry import Registry

Parts = dict[str, DetectionDataset]  # split → its images

SPLITS = ("train", "trainval", "val", "test")  # common names, in their usual order
_ALL = "all"
_SYNONYMS = {"training": "train", "validation": "val", "valid": "val", "dev": "val", "testing": "test"}
_PERCENT = r"\d+(?:\.\d+)?"
_UNUSUAL = re.compile(r"[^\w .()+-]")  # in a file name
_SLICE = re.compile(rf"(?P<name>.*)\[(?:(?P<start>{_PERCENT})%)?:(?:(?P<stop>{_PERCENT})%)?\]$")


class DataFormat(ABC):
    """A dataset on disk whose splits can be loaded; see :func:`find_source`.

    Args:
        folder: the dataset's folder; no path in the dataset may leave it.
        splits: names of the splits, in any order.

    Attributes:
        format: the registered name.
        looked_for: description of the files, for the error message if no dataset is found.
        image_folder: where :meth:`write` expects the images, relative to the new dataset.
        name: display name of the dataset.
        splits: names of the splits, training first.

    Example:
        >>> from aploss.data import builtin_dataset
        >>> source = find_source(builtin_dataset(cache=".", counts=(4, 2, 2)).root)
        >>> source.format, source.splits, len(source.load("train+val"))
        ('coco', ('train', 'val', 'test'), 6)
    """

    format: ClassVar[str] = ""
    looked_for: ClassVar[str] = ""
    image_folder: ClassVar[str] = "images"

    def __init__(self, folder: DatasetFolder, splits: Sequence[str]) -> None:
        self.folder = folder
        self.name = folder.root.name
        self.splits = tuple(sorted(splits, key=split_order))
        self._cache: dict[tuple[str, tuple[str, ...] | None], DetectionDataset] = {}

    @classmethod
    @abstractmethod
    def find(cls, path: Path) -> "DataFormat | None":
        """The dataset of this format in an existing folder or file, or None."""

    @abstractmethod
    def read(self, split: str, class_names: Sequence[str] | None) -> DetectionDataset:
        """Reads one split; unusable images and boxes are listed in the dataset's ``problems``.

        Args:
            split: one of :attr:`splits`.
            class_names: the classes to read; None reads the dataset's own.

        Raises:
            ProblemError: the split cannot be read at all.
        """

    @classmethod
    def write(cls, folder: Path, parts: Parts, names: dict[Path, str]) -> list[str]:
        """Writes the annotations of a new dataset for ``aploss data convert``; optional.

        Args:
            folder: the new dataset; its :attr:`image_folder` exists.
            parts: split name → images.
            names: image file → its file name in :attr:`image_folder`.

        Returns:
            Descriptions of everything the format cannot represent.
        """
        raise NotImplementedError

    def load(self, split: str | None = None, *, class_names: Sequence[str] | None = None) -> DetectionDataset:
        """Loads a split, parsing each annotation file at most once.

        Args:
            split: a split's name or an expression, see :func:`aploss.data.load_dataset`; None loads all images.
            class_names: the classes to read, in the order of their labels; None reads the dataset's own.

        Raises:
            DataError: the split does not exist, has no usable image, or refers to a file outside the folder.
        """
        names = None if class_names is None else check_class_names(class_names)
        dataset = self._load_expression(split or _ALL, names)
        for problem in dataset.problems:
            if problem.effect is Effect.REFUSED:
                raise DataError(f"{problem.file}: {problem.message}; nothing was loaded")
        if not len(dataset):
            found = f": {summarise(dataset.problems)}; {dataset.problems[0]}" if dataset.problems else ""
            raise DataError(f"{dataset.root}: no usable image in split '{dataset.split}'{found}")
        return dataset

    def _load_expression(self, expression: str, class_names: tuple[str, ...] | None) -> DetectionDataset:
        """Loads splits joined by ``+``."""
        terms = [expression] if expression in self.splits else [term.strip() for term in expression.split("+")]
        if terms == [_ALL] and _ALL not in self.splits:
            terms = list(self.splits)
        parts = [self._load_term(term, class_names) for term in terms]
        if len({part.class_names for part in parts}) > 1:
            # Splits with different class lists share one, so that a label means the same in all of them.
            union = tuple(dict.fromkeys(name for part in parts for name in part.class_names))
            parts = [self._load_term(term, union) for term in terms]
        return parts[0] if len(parts) == 1 else concatenate(parts, split=expression)

    def _load_term(self, term: str, class_names: tuple[str, ...] | None) -> DetectionDataset:
        """Loads one split, or a part of it such as ``train[:80%]``."""
        match = _SLICE.match(term)
        if match is None or term in self.splits:
            return self._read_once(self._resolve(term), class_names)
        whole = self._load_expression(match["name"] or _ALL, class_names)
        start, stop = float(match["start"] or 0) / 100, float(match["stop"] or 100) / 100
        if not max(start, stop) <= 1:
            raise DataError(f"'{term}': write a part of a split as train[:80%] or train[80%:]")
        # Shuffled by a hash of the name: the same order on every machine.
        names = (name.encode(errors="surrogateescape") for name in whole.image_paths)
        hashes = [hashlib.blake2b(name, digest_size=8).digest() for name in names]
        order = sorted(range(len(whole)), key=hashes.__getitem__)
        chosen = order[round(start * len(whole)) : round(stop * len(whole))]
        return whole.subset(sorted(chosen), split=term)

    def _read_once(self, split: str, class_names: tuple[str, ...] | None) -> DetectionDataset:
        if (split, class_names) not in self._cache:
            dataset = self.read(split, class_names)
            self._cache[split, class_names] = self._cache[split, dataset.class_names] = dataset
        return self._cache[split, class_names]

    def _resolve(self, name: str) -> str:
        """A split by its own name or, if unambiguous, by a common one: "train" for "train2017"."""
        if name in self.splits:
            return name
        usual = _SYNONYMS.get(name.lower(), name.lower())
        matches = [split for split in self.splits if common_split_name(split) == usual]
        if len(matches) != 1:
            raise DataError(f"{self.folder.root}: no split '{name}'; available: {', '.join(self.splits)}")
        return matches[0]


FORMATS: Registry[type[DataFormat]] = Registry("data format")
FormatClass = TypeVar("FormatClass", bound=type[DataFormat])


def register_format(name: str) -> Callable[[FormatClass], FormatClass]:
    """Returns a decorator that registers a :class:`DataFormat` for loading, checking, converting and training.

    Unless a format is given, a dataset is read by the one format whose ``find`` recognises it.

    Args:
        name: such as "my-format", for ``--format my-format``.

    Raises:
        ConfigError: the name is taken.

    Example:
        >>> from aploss.data.coco import CocoFormat
        >>> register_format("coco")(CocoFormat) is CocoFormat  # a class may be registered again under its own name
        True
    """

    def add(format_class: FormatClass) -> FormatClass:
        FORMATS.register(name)(format_class)
        format_class.format = name
        return format_class

    return add


def all_formats() -> dict[str, type[DataFormat]]:
    """The registered formats by name, including the built-in ones, which their modules register."""
    for module in ("coco", "voc", "yolo"):
        import_module(f"aploss.data.{module}")
    return dict(sorted(FORMATS.items()))


# --- loading --------------------------------------------------------------------------------------


def load_dataset(
    path: str | Path, split: str | None = None, *, format: str = "auto", class_names: Sequence[str] | None = None
) -> DetectionDataset:
    """Returns the images and boxes of a dataset of any registered format.

    Unusable annotations and images (a box of zero width, a missing image) are left out and listed in the dataset's
    ``problems`` with their file; images are not opened before they are read. To load several splits, call
    :func:`find_source` once and load them from it.

    Args:
        path: a folder, a COCO JSON file, a YOLO ``data.yaml``, or ``"builtin"``.
        split: a split's name (``train``, ``2007_trainval``), or several joined by ``+``. ``train[:80%]`` and
            ``train[80%:]`` are disjoint parts of a split in a fixed shuffled order. None loads all images.
        format: "voc", "coco", "yolo", or "auto" to recognise it.
        class_names: the classes to read, in the order of their labels; objects of other classes are left out. Defaults
            to the dataset's own. Pass the training split's ``class_names`` when loading its validation split.

    Raises:
        DataError: the dataset or split does not exist, has no usable image, or refers to a file outside its folder.

    Example:
        >>> from aploss.data import builtin_dataset
        >>> folder = builtin_dataset(cache=".", counts=(4, 2, 2)).root  # in place of a dataset of yours
        >>> len(load_dataset(folder)), len(load_dataset(folder, "train[:50%]"))
        (8, 2)
    """
    return find_source(path, format=format).load(split, class_names=class_names)


def find_source(path: str | Path, *, format: str = "auto") -> DataFormat:
    """Recognises a dataset without reading its annotations.

    Args:
        path, format: see :func:`load_dataset`.

    Returns:
        The dataset on disk: ``splits`` names its splits, ``load(split)`` loads one of them.

    Raises:
        DataError: no dataset is found, or several formats match.

    Example:
        >>> from aploss.data import builtin_dataset
        >>> find_source(builtin_dataset(cache=".", counts=(4, 2, 2)).root).format
        'coco'
    """
    formats = all_formats()
    if format not in ("auto", *formats):
        raise DataError(f"unknown format '{format}'; choose one of {', '.join(['auto', *formats])}")
    if str(path) == "builtin":
        from aploss.data.builtin import builtin_folder

        builtin = find_source(builtin_folder(), format="coco")
        builtin.name = "builtin"
        return builtin
    path = Path(path).expanduser()
    if not path.exists():
        similar = difflib.get_close_matches(path.name, [one.name for one in path.parent.glob("*")], n=1)
        meant = f"; did you mean '{path.with_name(similar[0])}'?" if similar else ""
        raise DataError(f"{path}: no such file or folder{meant}")
    candidates = [one for name, one in formats.items() if format in ("auto", name)]
    found = [source for one in candidates if (source := one.find(path))]
    if not found:
        looked_for = "; ".join(one.looked_for or one.format for one in candidates)
        raise DataError(f"{path}: no dataset found; looked for {looked_for}")
    source = found[0]
    if len(found) > 1:
        names = " and ".join(one.format for one in found)
        raise DataError(f"{path}: looks like {names}; choose the format (--format {source.format})")
    if not source.splits:
        raise DataError(f"{path}: the {source.format} dataset has no split (train, val, test)")
    return source


# --- converting -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    folder: Path  # the new dataset
    images: int  # number of images, each counted once
    boxes: int  # number of boxes, each counted once
    splits: tuple[str, ...]  # names of the splits
    problems: tuple[Problem, ...]  # everything of the old dataset that was left out
    losses: tuple[str, ...]  # descriptions of everything the new format cannot represent


def convert_dataset(path: str | Path, out: str | Path, *, to: str, format: str = "auto") -> Conversion:
    """Writes all splits of a dataset in another format.

    Boxes, labels, splits and image files stay the same; unusable images and boxes (see
    :func:`aploss.data.load_dataset`) are left out. The folder appears when it is complete.

    Args:
        path: the dataset.
        out: a folder that does not exist or is empty.
        to: "voc", "coco", "yolo", or a registered format that can be written.
        format: format of the old dataset.

    Returns:
        Counts, and what was left out.

    Raises:
        DataError: the target is in use, or the dataset cannot be read.

    Example:
        >>> from aploss.data import builtin_dataset
        >>> done = convert_dataset(builtin_dataset(cache=".", counts=(4, 2, 2)).root, "shapes", to="yolo")
        >>> done.folder.name, done.images, done.losses
        ('shapes', 8, ())
    """
    inherited = DataFormat.write.__qualname__
    formats = {name: one for name, one in all_formats().items() if one.write.__qualname__ != inherited}
    if to not in formats:
        raise DataError(f"cannot write the format '{to}'; choose one of {', '.join(formats)}")
    source = find_source(path, format=format)
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: not an empty folder; name another one, nothing is overwritten")
    if out.resolve().is_relative_to(source.folder.root):
        raise DataError(f"{out}: inside the dataset it is made from; name a folder elsewhere")
    class_names = source.load().class_names
    parts = {split: _with_good_headers(source.load(split, class_names=class_names)) for split in source.splits}
    whole = concatenate(list(parts.values()), split="all")
    try:
        losses = _write(out, parts, whole, formats[to])
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror or error}") from error
    return Conversion(out, len(whole), whole.num_boxes, tuple(parts), tuple(whole.problems), tuple(losses))


def _with_good_headers(dataset: DetectionDataset) -> DetectionDataset:
    """Drops unreadable images and images of another size than annotated, and adds them to ``problems``."""
    problems = {problem.image: problem for problem in inspect_images(dataset, pixels=False)}
    kept = dataset.subset([index for index, path in enumerate(dataset.image_paths) if path not in problems])
    kept.problems += problems.values()
    return kept


def _write(out: Path, parts: Parts, whole: DetectionDataset, format_class: type[DataFormat]) -> list[str]:
    """Writes into a temporary folder, which is renamed when it is complete."""
    paths = [whole.image_path(index) for index in range(len(whole))]
    # Not every format states the size: without its EXIF rotation, an image is encoded again in its annotated size.
    encoded = {path for index, path in enumerate(paths) if read_sizes(path)[0] != whole.image_size(index)}
    names = _unique_names(paths, encoded)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        fresh = Path(scratch) / "dataset"
        (fresh / format_class.image_folder).mkdir(parents=True)
        losses = format_class.write(fresh, parts, names)
        for index, path in enumerate(paths):
            target = fresh / format_class.image_folder / names[path]
            if path in encoded:
                pixels = read_image(path, size=whole.image_size(index))
                Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(target)
            else:
                shutil.copyfile(path, target)
        if out.exists():
            out.rmdir()
        fresh.replace(out)
    return losses


def _unique_names(paths: list[Path], encoded: set[Path]) -> dict[Path, str]:
    """File names that are distinct ignoring extension and case, and valid in every list and file system.

    Images to be ``encoded`` again become PNG files.
    """
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for path in paths:
        stem, parent = (_UNUSUAL.sub("_", name).strip(" .") or "image" for name in (path.stem, path.parent.name))
        while stem.casefold() in taken:
            stem = f"{parent}_{stem}"
        taken.add(stem.casefold())
        names[path] = stem + (".png" if path in encoded else path.suffix)
    return names


# --- helpers for readers and writers --------------------------------------------------------------


def image_size(width: Any, height: Any) -> tuple[int, int] | None:
    """Width and height as stated in a file; None if they are not a valid size."""
    possible = all(type(side) in (int, float) and 1 <= side < 2**31 for side in (width, height))
    return (int(width), int(height)) if possible else None


def common_split_name(name: str) -> str:
    """The common name of a split: "train" for "train2017" and "training", "val" for "valid", "day" for "day"."""
    plain = (re.sub(r"[-_]?\d+$", "", name) or name).lower()
    return _SYNONYMS.get(plain, plain)


def is_usual_split(name: str) -> bool:
    """Whether a name, or its common form, is that of a usual split."""
    return common_split_name(name) in SPLITS


def split_order(name: str) -> tuple[int, str]:
    """Sort key: training, validation, test, then everything else."""
    return (SPLITS.index(common_split_name(name)) if is_usual_split(name) else len(SPLITS), name)


def check_class_names(names: Any, *, file: str | None = None) -> tuple[str, ...]:
    """Validates the class list of the user (DataError), or of a file (ProblemError): distinct, non-empty names."""
    wrong = names
    if isinstance(names, (list, tuple)) and names:
        uses = Counter(name for name in names if isinstance(name, str) and name)
        wrong = [name for name in names if not isinstance(name, str) or uses[name] != 1]
        if not wrong:
            return tuple(names)
    message = f"class names must be a list of distinct, non-empty names, got {wrong!r:.200}"
    raise DataError(message) if file is None else ProblemError("bad-categories", file, message)


def lost_areas(parts: Parts) -> list[str]:
    """What a format without segmentation areas loses of a COCO dataset."""
    for part in parts.values():
        box_areas = np.prod(part.annotations.xywh[:, 2:], axis=1)
        if not np.allclose(box_areas, part.annotations.areas, rtol=1e-3):
            return ["the segmentation areas of objects (replaced by box areas)"]
    return []
