"""Recognising the format of a dataset, loading its splits, and fingerprinting them."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import aploss.data.coco
import aploss.data.voc
import aploss.data.yolo  # noqa: F401 - each module registers its format
from aploss.data.annotations import DetectionDataset
from aploss.data.builtin import builtin_folder
from aploss.data.formats import FORMATS, DataFormat
from aploss.data.images import ImageError, read_image, read_sizes, size_mismatch
from aploss.data.problems import Problem
from aploss.errors import DataError, did_you_mean

T = TypeVar("T")
U = TypeVar("U")
Progress = Callable[[int, int], None]  # (images done, total)

SAMPLED_FILES = 2000  # image files whose bytes enter a fingerprint; of the others only the size does
SAMPLED_BYTES = 1 << 14  # at the beginning, in the middle and at the end of a file


def load_dataset(
    path: str | Path, split: str | None = None, *, format: str = "auto", class_names: Sequence[str] | None = None
) -> DetectionDataset:
    """Loads a dataset of any registered format.

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
        >>> load_dataset("no-such-folder")
        Traceback (most recent call last):
        aploss.errors.DataError: no-such-folder: no such file or folder
    """
    return find_source(path, format=format).load(split, class_names=class_names)


def dataset_splits(path: str | Path, *, format: str = "auto") -> tuple[str, ...]:
    """Names of a dataset's splits, training first; see :func:`load_dataset` for the arguments."""
    return find_source(path, format=format).splits


def format_names() -> tuple[str, ...]:
    """Valid values of ``format``: "auto" and the registered names."""
    return ("auto", *sorted(FORMATS))


def find_source(path: str | Path, *, format: str = "auto") -> DataFormat:
    """Recognises a dataset without reading its annotations.

    Args:
        path: see :func:`load_dataset`.
        format: see :func:`load_dataset`.

    Returns:
        The dataset on disk: ``splits`` names its splits, ``load(split)`` loads one of them.

    Raises:
        DataError: no dataset is found, or several formats match.
    """
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
        raise DataError(f"{path}: the {source.format} dataset has no split (train, val, test)")
    if builtin:
        source.name = "builtin"
    return source


def inspect_images(dataset: DetectionDataset, *, pixels: bool) -> Iterator[Problem | None]:
    """The problem of each image file of a dataset, or None, in order.

    Args:
        dataset: the images.
        pixels: whether to decode the whole files, which finds damaged images, or only their headers.
    """
    root = str(dataset.root)

    def inspect(index: int) -> Problem | None:
        name, size = dataset.image_paths[index], dataset.image_size(index)
        path = f"{root}/{name}"
        try:
            sizes = read_sizes(path)
            if size not in sizes:
                raise size_mismatch(path, size, sizes[0])
            if pixels:
                read_image(path, size=size)
            return None
        except ImageError as error:
            return replace(error.problem, file=name, image=name)

    return map_in_threads(inspect, range(len(dataset)))


def map_in_threads(function: Callable[[T], U], items: Sequence[T]) -> Iterator[U]:
    """Like ``map``, in a few threads; a task is many items, because one per item costs more than a file's header."""
    chunks = (items[start : start + 64] for start in range(0, len(items), 64))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for results in pool.map(lambda chunk: [function(item) for item in chunk], chunks):
            yield from results


def fingerprint(dataset: DetectionDataset) -> dict[str, Any]:
    """Identifies the content of a split, cheaply enough for COCO (118,000 images in seconds).

    Equal for equal content in equal order, wherever the dataset is and whatever its format; file names and image ids
    do not matter. Of the images, the size of every file and a sample of the bytes of up to :data:`SAMPLED_FILES`
    files are used, so that an exchanged image is found without reading all of them.

    Returns:
        ``class_names`` (list of str, in the order of the labels), ``images`` and ``boxes`` (their numbers),
        ``annotations`` (digest of image sizes, boxes, labels, flags and areas) and ``files`` (digest of the image
        files). Ready for JSON; compare the entries to tell what changed.

    Example:
        >>> dataset = DetectionDataset(
        ...     root=".", class_names=("disc",), image_paths=(), image_sizes=[], boxes_per_image=[], boxes=[],
        ...     labels=[])
        >>> found = fingerprint(dataset)
        >>> found["class_names"], found["images"], len(found["annotations"])
        (['disc'], 0, 32)
    """
    annotations, files = (hashlib.blake2b(digest_size=16) for _ in range(2))
    for column in ("image_sizes", "boxes_per_image", "boxes", "labels", "difficult", "crowd", "areas"):
        annotations.update(getattr(dataset, column).tobytes())
    paths = [f"{dataset.root}/{path}" for path in dataset.image_paths]
    sampled = set(np.linspace(0, len(paths) - 1, min(len(paths), SAMPLED_FILES)).astype(int).tolist())
    for content in map_in_threads(lambda index: sample_file(paths[index], index in sampled), range(len(paths))):
        files.update(content)
    return {
        "class_names": list(dataset.class_names),
        "images": len(dataset),
        "boxes": dataset.num_boxes,
        "annotations": annotations.hexdigest(),
        "files": files.hexdigest(),
    }


def sample_file(path: str, read: bool) -> bytes:
    """The size of a file and, with ``read``, a digest of a sample of its bytes."""
    try:
        size = os.stat(path).st_size  # noqa: PTH116 - called for every image, Path is slower
        if not read:
            return b"%d\n" % size
        with open(path, "rb") as file:  # noqa: PTH123
            digest = hashlib.blake2b(digest_size=16)
            for start in sorted({0, max(0, size // 2), max(0, size - SAMPLED_BYTES)}):
                file.seek(start)
                digest.update(file.read(SAMPLED_BYTES))
        return b"%d " % size + digest.digest()
    except OSError:
        return b"unreadable\n"
