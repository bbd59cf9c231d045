"""Finding out what a dataset is, and loading its splits."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from aploss.data.coco import find_coco
from aploss.data.dataset import DetectionDataset, concatenate
from aploss.data.problems import raise_refused, summarise
from aploss.data.source import Source, check_class_names, common_split_name, usual_split_name
from aploss.data.verify import verify_images as verify
from aploss.data.voc import find_voc
from aploss.data.yolo import find_yolo
from aploss.errors import DataError

__all__ = ["FORMATS", "dataset_splits", "find_source", "load_dataset", "load_split"]

_FINDERS = {"yolo": find_yolo, "coco": find_coco, "voc": find_voc}
FORMATS = ("auto", *sorted(_FINDERS))
_SLICE = re.compile(r"(?P<name>.*)\[(?P<start>[\d.]+%)?:(?P<stop>[\d.]+%)?\]$")
_ALL = "all"


def load_dataset(
    path: str | Path,
    split: str | None = None,
    *,
    format: str = "auto",
    class_names: Sequence[str] | None = None,
    verify_images: bool = False,
) -> DetectionDataset:
    """Loads a dataset of any format.

    What cannot be used (a box without width, an image that is missing) is left out and listed in
    the dataset's ``problems`` with its file.

    Args:
        path: A folder, a COCO JSON file, a YOLO ``data.yaml``, or ``"builtin"``.
        split: A split's name (``train``, ``2007_trainval``), a text file that lists images (VOC),
            or several joined by ``+``. ``train[:80%]`` and ``train[80%:]`` are parts of one, of a
            fixed mixed order, so that they have no image in common. None stands for all images.
        format: "voc", "coco", "yolo", or "auto" to recognise it.
        class_names: The classes to read, in the order of their labels; objects of other classes
            are left out. Where not given, the data's own. Give a training split's ``class_names``
            when loading its validation split.
        verify_images: Whether to decode every image once and leave out those that are damaged or
            not of the annotated size. Otherwise reading such an image raises a DataError.

    Raises:
        DataError: There is no such dataset or split, it has no usable image, or something in it
            leads outside its folder.

    Example:
        >>> load_dataset("no-such-folder")
        Traceback (most recent call last):
        aploss.errors.DataError: no-such-folder: no such file or folder
    """
    names = None if class_names is None else check_class_names(class_names)
    dataset = load_split(find_source(path, format=format), split or _ALL, names)
    return _not_empty(verify(dataset)) if verify_images else dataset


def load_split(
    source: Source, split: str, class_names: tuple[str, ...] | None = None
) -> DetectionDataset:
    """Loads a split of a dataset that :func:`find_source` found; as :func:`load_dataset`."""
    dataset = _read_expression(source, split, class_names)
    raise_refused(dataset.problems)
    return _not_empty(dataset)


def _not_empty(dataset: DetectionDataset) -> DetectionDataset:
    if not len(dataset):
        found = f" ({summarise(dataset.problems)})" if dataset.problems else ""
        raise DataError(f"{dataset.root}: no usable image in split '{dataset.split}'{found}")
    return dataset


def dataset_splits(path: str | Path, *, format: str = "auto") -> tuple[str, ...]:
    """Names of a dataset's splits, training first.

    Args:
        path: See :func:`load_dataset`.
        format: See :func:`load_dataset`.
    """
    return find_source(path, format=format).splits


def find_source(path: str | Path, *, format: str = "auto") -> Source:
    """Recognises a dataset without loading it.

    Raises:
        DataError: There is none, or it may be of several formats.
    """
    if format not in FORMATS:
        raise DataError(f"unknown format '{format}'; choose one of {', '.join(FORMATS)}")
    if str(path) == "builtin":
        return _builtin_source()
    path = Path(path).expanduser()
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    formats = _FINDERS if format == "auto" else {format: _FINDERS[format]}
    found: list[Source] = [source for find in formats.values() if (source := find(path))]
    if not found:
        raise DataError(f"{path}: no dataset found; looked for {_looked_for(format)}")
    if len(found) > 1:
        names = " and ".join(source.format for source in found)
        raise DataError(
            f"{path}: looks like {names}; choose the format (--format {found[0].format})"
        )
    if not found[0].splits:
        raise DataError(f"{path}: the {found[0].format} dataset names no split (train, val, test)")
    return found[0]


def _builtin_source() -> Source:
    from aploss.data.builtin import builtin_folder  # it loads what it wrote by this module

    source = find_coco(builtin_folder())
    assert source is not None
    source.name = "builtin"
    return source


def _looked_for(format: str) -> str:
    places = {
        "yolo": "YOLO (data.yaml with names and train, val or test)",
        "coco": "COCO (annotations/*.json, *.json or train/*.json with images and annotations)",
        "voc": "VOC (VOCdevkit/VOC2007, Annotations/*.xml, or *.xml in any folder)",
    }
    return "; ".join(places.values() if format == "auto" else [places[format]])


def _read_expression(
    source: Source, expression: str, class_names: tuple[str, ...] | None
) -> DetectionDataset:
    """Reads splits joined by ``+``."""
    if expression in source.splits:
        terms = [expression]
    elif expression == _ALL:
        terms = list(source.splits)
    else:
        terms = expression.split("+")
    parts = [_read_term(source, term.strip(), class_names) for term in terms]
    if len({part.class_names for part in parts}) > 1:
        # Splits that name their classes differently get one list, so that labels mean the same.
        union = tuple(dict.fromkeys(name for part in parts for name in part.class_names))
        parts = [_read_term(source, term.strip(), union) for term in terms]
    return parts[0] if len(parts) == 1 else concatenate(parts, split=expression)


def _read_term(source: Source, term: str, class_names: tuple[str, ...] | None) -> DetectionDataset:
    """Reads one split, or a part of it such as ``train[:80%]``."""
    match = _SLICE.match(term)
    if match is None or term in source.splits:
        return source.read(_resolve(source, term), class_names)
    whole = _read_expression(source, match["name"] or _ALL, class_names)
    start, stop = (
        round(_fraction(text, term) * len(whole)) if text else default
        for text, default in ((match["start"], 0), (match["stop"], len(whole)))
    )
    # The order is by a hash of the name: mixed, yet the same on every machine.
    order = sorted(range(len(whole)), key=lambda i: _mixing_key(whole.relative_path(i)))
    return whole.subset(sorted(order[start:stop]), split=term)


def _resolve(source: Source, name: str) -> str:
    """A split by its own name or, where that is clear, by a usual one: "train" for "train2017"."""
    if name in source.splits or name.endswith(".txt"):
        return name
    usual = usual_split_name(name)
    alike = [split for split in source.splits if common_split_name(split) == usual]
    if len(alike) != 1:
        known = ", ".join(source.splits)
        raise DataError(f"{source.folder.root}: no split '{name}'; there are: {known}")
    return alike[0]


def _fraction(text: str, term: str) -> float:
    try:
        value = float(text.rstrip("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise DataError(f"'{term}': a part of a split is written as train[:80%] or train[80%:]")
    return value


def _mixing_key(path: str) -> bytes:
    return hashlib.blake2b(path.encode(errors="surrogateescape"), digest_size=8).digest()
