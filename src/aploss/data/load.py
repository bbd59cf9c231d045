"""Finding out what a dataset is, and loading its splits."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import aploss.data.coco
import aploss.data.labelme
import aploss.data.voc
import aploss.data.yolo  # noqa: F401 - each registers its format
from aploss.data.annotations import DetectionDataset, concatenate
from aploss.data.builtin import builtin_folder
from aploss.data.formats import FORMATS, DataFormat, check_class_names, common_split_name, usual_split_name
from aploss.data.images import Inspection, inspect_image
from aploss.data.problems import Effect, raise_refused, summarise
from aploss.errors import DataError, did_you_mean

Progress = Callable[[int, int], None]  # images done, images in all

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

    What cannot be used (a box without width, an image that is missing) is left out and listed in the dataset's
    ``problems`` with its file.

    Args:
        path: a folder, a COCO JSON file, a YOLO ``data.yaml``, or ``"builtin"``.
        split: a split's name (``train``, ``2007_trainval``), a text file that lists images (VOC), or several joined by
            ``+``. ``train[:80%]`` and ``train[80%:]`` are parts of one, of a fixed mixed order, so that they have no
            image in common. None stands for all images.
        format: "voc", "coco", "yolo", "labelme", or "auto" to recognise it.
        class_names: the classes to read, in the order of their labels; objects of other classes are left out. Where not
            given, the data's own. Give a training split's ``class_names`` when loading its validation split.
        verify_images: whether to decode every image once and leave out those that are damaged or not of the annotated
            size. Otherwise reading such an image raises a DataError.

    Raises:
        DataError: there is no such dataset or split, it has no usable image, or something in it leads outside its
            folder.

    Example:
        >>> load_dataset("no-such-folder")
        Traceback (most recent call last):
        aploss.errors.DataError: no-such-folder: no such file or folder
    """
    names = None if class_names is None else check_class_names(class_names)
    dataset = load_split(find_source(path, format=format), split or _ALL, names)
    return _not_empty(without_unusable_images(dataset)) if verify_images else dataset


def load_split(source: DataFormat, split: str, class_names: tuple[str, ...] | None = None) -> DetectionDataset:
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
    """Names of a dataset's splits, training first; arguments as in :func:`load_dataset`."""
    return find_source(path, format=format).splits


def format_names() -> tuple[str, ...]:
    """What may be given as format: "auto", and the names of all that are registered."""
    return ("auto", *sorted(FORMATS))


def find_source(path: str | Path, *, format: str = "auto") -> DataFormat:
    """Recognises a dataset without loading it; DataError where there is none, or it may be of several formats."""
    if format not in format_names():
        raise DataError(f"unknown format '{format}'; choose one of {', '.join(format_names())}")
    builtin = str(path) == "builtin"
    if builtin:
        path, format = builtin_folder(), "coco"
    path = Path(path).expanduser()
    if not path.exists():
        meant = did_you_mean(str(path), (str(one) for one in path.parent.glob("*")))
        raise DataError(f"{path}: no such file or folder{meant}")
    formats = [one for name, one in FORMATS.items() if format in ("auto", name)]
    found = [source for one in formats if (source := one.find(path))]
    if not found:
        looked_for = "; ".join(one.looked_for or one.format for one in formats)
        raise DataError(f"{path}: no dataset found; looked for {looked_for}")
    source = found[0]
    if len(found) > 1:
        names = " and ".join(one.format for one in found)
        raise DataError(f"{path}: looks like {names}; choose the format (--format {source.format})")
    if not source.splits:
        raise DataError(f"{path}: the {source.format} dataset names no split (train, val, test)")
    if builtin:
        source.name = "builtin"
    return source


def _read_expression(source: DataFormat, expression: str, class_names: tuple[str, ...] | None) -> DetectionDataset:
    """Reads splits joined by ``+``."""
    terms = [expression] if expression in source.splits else expression.split("+")
    if terms == [_ALL] and _ALL not in source.splits:
        terms = list(source.splits)
    parts = [_read_term(source, term.strip(), class_names) for term in terms]
    if len({part.class_names for part in parts}) > 1:
        # Splits that name their classes differently get one list, so that labels mean the same.
        union = tuple(dict.fromkeys(name for part in parts for name in part.class_names))
        parts = [_read_term(source, term.strip(), union) for term in terms]
    return parts[0] if len(parts) == 1 else concatenate(parts, split=expression)


def _read_term(source: DataFormat, term: str, class_names: tuple[str, ...] | None) -> DetectionDataset:
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
    def mixing_key(index: int) -> bytes:
        name = whole.relative_path(index).encode(errors="surrogateescape")
        return hashlib.blake2b(name, digest_size=8).digest()

    order = sorted(range(len(whole)), key=mixing_key)
    return whole.subset(sorted(order[start:stop]), split=term)


def _resolve(source: DataFormat, name: str) -> str:
    """A split by its own name or, where that is clear, by a usual one: "train" for "train2017"."""
    if name in source.splits or name.endswith(".txt"):
        return name
    usual = usual_split_name(name)
    alike = [split for split in source.splits if common_split_name(split) == usual]
    if len(alike) != 1:
        raise DataError(f"{source.folder.root}: no split '{name}'; there are: {', '.join(source.splits)}")
    return alike[0]


def _fraction(text: str, term: str) -> float:
    try:
        value = float(text.rstrip("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise DataError(f"'{term}': a part of a split is written as train[:80%] or train[80%:]")
    return value


def without_unusable_images(dataset: DetectionDataset, *, decode: bool = True) -> DetectionDataset:
    """Leaves out images that cannot be read or are not of the annotated size; see its problems."""
    inspections = list(inspect_images(dataset, decode=decode))
    kept = [i for i, inspection in enumerate(inspections) if inspection.usable]
    if len(kept) == len(dataset):
        return dataset
    verified = dataset.subset(kept)
    found = (problem for inspection in inspections for problem in inspection.problems)
    verified.problems += [problem for problem in found if problem.effect is not Effect.KEPT]
    return verified


def inspect_images(
    dataset: DetectionDataset, *, decode: bool = True, progress: Progress | None = None
) -> Iterator[Inspection]:
    """Inspects the images of a dataset in order, in several threads; see :func:`inspect_image`."""
    total = len(dataset)

    def inspect(index: int) -> Inspection:
        name, size = dataset.relative_path(index), dataset.image_size(index)
        return inspect_image(dataset.image_path(index), name=name, size=size, decode=decode)

    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        indices = iter(range(total))
        pending = [pool.submit(inspect, i) for i in islice(indices, 4 * workers)]
        for done in range(1, total + 1):
            result = pending.pop(0).result()
            pending += [pool.submit(inspect, i) for i in islice(indices, 1)]
            if progress is not None:
                progress(done, total)
            yield result
