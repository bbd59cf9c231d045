"""Feature maps of a frozen backbone, computed once for some views of each image and cached on disk.

Training that leaves the backbone unchanged needs only its feature maps. They are read from one file of float16, whose
cache key covers the images, objects, image size, views and weights. The views of an image are a number of augmented
versions that are drawn once.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aploss.data.annotations import DetectionDataset, Sample, Target
from aploss.data.augment import OBJECT_FIELDS
from aploss.data.builtin import cache_folder, make_once
from aploss.errors import DataError

VERSION = 3  # part of the cache key: increase it with every change of the stored files
VIEWS_AT_ONCE = 8  # per forward pass
DTYPE = np.dtype(np.float16)
FIELDS = ("boxes", *OBJECT_FIELDS)
MAPS_FILE, CONTENT_FILE = "features.bin", "features.pt"


class FeatureMaps(NamedTuple):
    """The feature maps of a batch, in place of its images."""

    maps: tuple[Tensor, ...]  # one per level, [B, C, H, W]
    image_size: tuple[int, int]  # height and width of the images, including padding

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "FeatureMaps":
        """The maps on a device, in float32."""
        moved = (one.to(device, non_blocking=non_blocking).float() for one in self.maps)
        return FeatureMaps(tuple(moved), self.image_size)


@dataclass(frozen=True)
class Views:
    """The views of each image whose features are stored."""

    preset: str  # of the augmentation
    count: int  # per image
    sample: Callable[[tuple[int, int]], Sample]  # of (view, index), deterministic


@dataclass(frozen=True, kw_only=True)
class StoredFeatures:
    """The maps of all views of a dataset's images; made by :func:`store_features`."""

    file: Path  # float16 [images, views, values of all maps of an image]
    shapes: tuple[tuple[int, int, int], ...]  # channels, height and width of each map
    image_size: tuple[int, int]  # height and width of the images, including padding
    images: int  # number of images
    views: int  # per image
    preset: str  # of the views
    unreadable: dict[int, str]  # images without maps: index → reason
    targets: dict[str, Tensor] = field(compare=False, repr=False)  # objects of all views, and where each view starts

    @property
    def values(self) -> int:
        """Number of values in all maps of one image."""
        return sum(map(prod, self.shapes))

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.views * self.images * self.values * DTYPE.itemsize

    def read(self, index: int, view: int) -> Tensor:
        """The concatenated maps of one view of an image: float16 [values].

        Raises:
            DataError: the image or the file cannot be read.
        """
        if index in self.unreadable:
            raise DataError(self.unreadable[index])
        row = self.values * DTYPE.itemsize
        try:
            read = np.fromfile(self.file, DTYPE, self.values, offset=(self.views * index + view) * row)
        except OSError as error:
            raise DataError(f"the stored features {self.file} cannot be read: {error.strerror}") from error
        if len(read) < self.values:
            raise DataError(f"the stored features {self.file} are truncated: remove {self.file.parent}")
        return torch.from_numpy(read)

    def target(self, index: int, view: int) -> dict[str, Tensor]:
        """Boxes, labels and flags of the objects in a view."""
        start, stop = self.targets["starts"][self.views * index + view :][:2].tolist()
        return {name: self.targets[name][start:stop].clone() for name in FIELDS}

    def as_maps(self, rows: Tensor) -> FeatureMaps:
        """The rows of a batch [B, values], as returned by :meth:`read`, as maps."""
        parts = torch.split(rows, [prod(shape) for shape in self.shapes], dim=1)
        maps = tuple(part.reshape(len(rows), *shape) for part, shape in zip(parts, self.shapes, strict=True))
        return FeatureMaps(maps, self.image_size)


def store_features(
    dataset: DetectionDataset,
    network: Callable[[Tensor], FeatureMaps],
    views: Views,
    *,
    network_digest: str,
    size: int | tuple[int, int],
    on_progress: Callable[[int, int], Any] | None = None,
    cache: Path | None = None,
) -> StoredFeatures:
    """The feature maps of a dataset's images, computed unless they are in the cache.

    Safe to call from several processes: one computes, the others wait.

    Args:
        dataset: the images.
        network: computes the maps of images [B, 3, H, W] in [0, 1].
        views: the augmented views to store.
        network_digest: identifies the network and its weights.
        size: size of the views: side of a square, or (height, width).
        on_progress: called with (images done, total).
        cache: folder to keep them in; defaults to ``features`` in :func:`~aploss.data.builtin.cache_folder`.

    Raises:
        DataError: the cache is not writable, or no image can be read.
    """
    home = cache_folder() / "features" if cache is None else cache
    folder = home / _cache_key(dataset, network_digest, size, views)
    compute = partial(_compute, dataset=dataset, network=network, views=views, on_progress=on_progress)
    return make_once(folder, find=_open, make=compute)


def _cache_key(dataset: DetectionDataset, network_digest: str, size: int | tuple[int, int], views: Views) -> str:
    """A digest of everything that the stored maps and targets depend on."""
    digest = hashlib.sha256(repr((VERSION, network_digest, size, views.preset, views.count)).encode())
    for index in range(len(dataset)):
        try:
            with dataset.image_path(index).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            content = "unreadable"
        digest.update(repr((content, dataset.image_size(index))).encode())  # the size decides the EXIF rotation
        target = dataset.target(index)
        for name in FIELDS:
            digest.update(target[name].numpy().tobytes())
    return digest.hexdigest()[:20]


def _open(folder: Path) -> StoredFeatures | None:
    """The features stored in a folder; None if they are missing or incomplete."""
    try:
        content = torch.load(folder / CONTENT_FILE, weights_only=True)
        stored = StoredFeatures(file=folder / MAPS_FILE, **content)
        return stored if stored.file.stat().st_size == stored.bytes else None
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, UnpicklingError):
        return None


def _compute(
    folder: Path,
    dataset: DetectionDataset,
    network: Callable[[Tensor], FeatureMaps],
    views: Views,
    on_progress: Callable[[int, int], Any] | None,
) -> None:
    """Computes the maps and targets of all views into a folder."""
    unreadable: dict[int, str] = {}
    targets: dict[int, list[Target]] = {}
    content: dict[str, Any] = {}
    row_bytes = 0
    with (folder / MAPS_FILE).open("wb") as file:
        for indices, images in _image_batches(len(dataset), views, targets, unreadable):
            maps, image_size = network(images)
            rows = torch.cat([one.flatten(1).cpu() for one in maps], dim=1).half()
            if not content:
                content = {"shapes": tuple(tuple(one.shape[1:]) for one in maps), "image_size": tuple(image_size)}
                row_bytes = views.count * rows.shape[1] * DTYPE.itemsize
                needed, free = row_bytes * len(dataset), shutil.disk_usage(folder).free
                if free < needed:
                    raise OSError(f"{needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
                file.truncate(needed)
            if not bool(rows.isfinite().all()):
                raise DataError("the backbone's features overflow float16: leave batches.cache_features false")
            for index, of_image in zip(indices, torch.split(rows, views.count), strict=True):
                file.seek(index * row_bytes)
                file.write(of_image.numpy().tobytes())
            if on_progress is not None:
                on_progress(indices[-1] + 1, len(dataset))
    if not content:
        reason = next(iter(unreadable.values()), "it is empty")
        raise DataError(f"no image of split '{dataset.split}' can be read: {reason}")
    content |= {"images": len(dataset), "views": views.count, "preset": views.preset, "unreadable": unreadable}
    counts = [len(one["boxes"]) for i in range(len(dataset)) for one in targets.get(i, [{"boxes": ()}] * views.count)]
    columns = {name: torch.cat([one[name] for many in targets.values() for one in many]) for name in FIELDS}
    content["targets"] = {"starts": torch.tensor([0, *counts]).cumsum(0), **columns}
    torch.save(content, folder / CONTENT_FILE)


def _image_batches(
    images: int, views: Views, targets: dict[int, list[Target]], unreadable: dict[int, str]
) -> Iterator[tuple[list[int], Tensor]]:
    """Indices of some images and all their views [B * views, 3, H, W] in [0, 1]; fills ``targets`` and
    ``unreadable``."""
    indices: list[int] = []
    pixels: list[Tensor] = []
    for index in range(images):
        try:
            samples = [views.sample((view, index)) for view in range(views.count)]
        except DataError as error:
            unreadable[index] = str(error)
        else:
            indices.append(index)
            pixels += [image for image, _ in samples]
            targets[index] = [target for _, target in samples]
        if indices and (len(pixels) >= VIEWS_AT_ONCE or index == images - 1):
            yield indices, torch.stack(pixels).float() / 255
            indices, pixels = [], []
