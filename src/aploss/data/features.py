"""Feature maps of a frozen backbone, computed once for each image and its mirror image, and kept on disk.

Training that changes only what follows the backbone needs its maps, not the images: they are read from one file of
float16, found again by the content of the images, their size and the weights.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from aploss.data.annotations import DetectionDataset
from aploss.data.augment import training_transforms
from aploss.data.builtin import cache_folder
from aploss.errors import DataError

VERSION = 1  # to be raised with every change of what is stored, so that no old file is used
IMAGES_AT_ONCE = 4  # each with its mirror image
DTYPE = np.dtype(np.float16)


class FeatureMaps(NamedTuple):
    """The feature maps of a batch, in the place of its images.

    Attributes:
        maps: of each level [B, C, H, W].
        image_size: height and width of the images, padding included.
    """

    maps: tuple[Tensor, ...]
    image_size: tuple[int, int]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "FeatureMaps":
        """The maps on a device, in float32."""
        moved = (one.to(device, non_blocking=non_blocking).float() for one in self.maps)
        return FeatureMaps(tuple(moved), self.image_size)


@dataclass(frozen=True, kw_only=True)
class StoredFeatures:
    """The maps of all images of a dataset and of their mirror images; made by :func:`store_features`.

    Attributes:
        file: float16 [images, 2, values of all maps of an image].
        shapes: channels, height and width of each map.
        image_size: height and width of the images, padding included.
        images: how many.
        unreadable: images without maps: index → reason.
    """

    file: Path
    shapes: tuple[tuple[int, int, int], ...]
    image_size: tuple[int, int]
    images: int
    unreadable: dict[int, str]

    @property
    def values(self) -> int:
        """Values of all maps of one image."""
        return sum(map(prod, self.shapes))

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return 2 * self.images * self.values * DTYPE.itemsize

    def read(self, index: int, *, mirrored: bool) -> Tensor:
        """The maps of one image, one after the other: float16 [values].

        Raises:
            DataError: the image could not be read, or the file cannot.
        """
        if index in self.unreadable:
            raise DataError(self.unreadable[index])
        row = self.values * DTYPE.itemsize
        try:
            read = np.fromfile(self.file, DTYPE, self.values, offset=(2 * index + mirrored) * row)
        except OSError as error:
            raise DataError(f"the stored features {self.file} cannot be read: {error.strerror}") from error
        if len(read) < self.values:
            raise DataError(f"the stored features {self.file} are cut short: remove {self.file.parent}")
        return torch.from_numpy(read)

    def as_maps(self, rows: Tensor) -> FeatureMaps:
        """What :meth:`read` gave for the images of a batch [B, values], as maps."""
        parts = torch.split(rows, [prod(shape) for shape in self.shapes], dim=1)
        maps = tuple(part.reshape(len(rows), *shape) for part, shape in zip(parts, self.shapes, strict=True))
        return FeatureMaps(maps, self.image_size)


def store_features(
    dataset: DetectionDataset,
    network: Callable[[Tensor], FeatureMaps],
    *,
    network_digest: str,
    size: int | tuple[int, int],
    on_progress: Callable[[int, int], Any] | None = None,
    cache: Path | None = None,
) -> StoredFeatures:
    """The maps of a dataset's images, computed where they are not stored yet.

    Several processes may ask at once: one computes, the others wait.

    Args:
        dataset: the images.
        network: gives the maps of images [B, 3, H, W] in [0, 1].
        network_digest: other weights or another network have another one.
        size: images are resized to it: side of a square, or (height, width).
        on_progress: called with images done and all images.
        cache: folder to keep them in; ``features`` in :func:`~aploss.data.builtin.cache_folder` where not given.

    Raises:
        DataError: the cache cannot be written, or no image can be read.
    """
    home = cache_folder() / "features" if cache is None else cache
    folder = home / _key(dataset, network_digest, size)
    if (stored := _opened(folder)) is not None:
        return stored
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f".{folder.name}.lock"):
            if (stored := _opened(folder)) is None:  # nobody computed them while we waited
                stored = _compute(folder, dataset, network, size, on_progress or (lambda done, images: None))
    except OSError as error:
        raise DataError(
            f"features cannot be stored in {home} ({error.strerror or error}): name a folder with more space in the "
            "environment variable APLOSS_CACHE, or leave batches.cache_features false"
        ) from error
    return stored


def _key(dataset: DetectionDataset, network_digest: str, size: int | tuple[int, int]) -> str:
    """Names everything that the maps follow from: content of the images in their order, size, network."""
    digest = hashlib.sha256(repr((VERSION, network_digest, size)).encode())
    for index in range(len(dataset)):
        try:
            with dataset.image_path(index).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            content = "unreadable"
        digest.update(repr((content, dataset.image_size(index))).encode())  # the size decides the EXIF rotation
    return digest.hexdigest()[:20]


def _opened(folder: Path) -> StoredFeatures | None:
    """What is stored there; None where it is not, or not whole."""
    try:
        values = json.loads((folder / "features.json").read_text(encoding="utf-8"))
        stored = StoredFeatures(
            file=folder / "features.bin",
            shapes=tuple(map(tuple, values["shapes"])),
            image_size=tuple(values["image_size"]),
            images=values["images"],
            unreadable={int(index): reason for index, reason in values["unreadable"].items()},
        )
        return stored if stored.file.stat().st_size == stored.bytes else None
    except (OSError, ValueError, KeyError):
        return None


def _compute(
    folder: Path,
    dataset: DetectionDataset,
    network: Callable[[Tensor], FeatureMaps],
    size: int | tuple[int, int],
    on_progress: Callable[[int, int], Any],
) -> StoredFeatures:
    """Computes into a folder of another name, which gets its own when it is complete."""
    unreadable: dict[int, str] = {}
    stored: StoredFeatures | None = None
    with tempfile.TemporaryDirectory(prefix=".computing-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        with (fresh / "features.bin").open("wb") as file:
            for indices, images in _image_batches(dataset, size, unreadable):
                features = network(torch.cat([images, images.flip(-1)]))
                if stored is None:
                    shapes = tuple((one.shape[1], one.shape[2], one.shape[3]) for one in features.maps)
                    stored = StoredFeatures(
                        file=folder / "features.bin",
                        shapes=shapes,
                        image_size=features.image_size,
                        images=len(dataset),
                        unreadable=unreadable,
                    )
                    _require_space(folder.parent, stored)
                    file.truncate(stored.bytes)
                rows = torch.cat([one.flatten(1).cpu() for one in features.maps], dim=1).half()
                if not bool(rows.isfinite().all()):
                    raise DataError("the backbone's features are too large for float16: leave batches.cache_features")
                for place, index in enumerate(indices):
                    file.seek(2 * index * stored.values * DTYPE.itemsize)
                    file.write(rows[place :: len(indices)].numpy().tobytes())  # the image and its mirror image
                on_progress(indices[-1] + 1, len(dataset))
        if stored is None:
            raise DataError(
                f"no image of {dataset.split} can be read: {next(iter(unreadable.values()), 'it is empty')}"
            )
        if folder.exists():
            shutil.move(folder, Path(scratch) / "damaged")
        content = json.dumps({key: value for key, value in asdict(stored).items() if key != "file"})
        (fresh / "features.json").write_text(content, encoding="utf-8")
        fresh.rename(folder)
    return stored


def _image_batches(
    dataset: DetectionDataset, size: int | tuple[int, int], unreadable: dict[int, str]
) -> Iterator[tuple[list[int], Tensor]]:
    """Indices and images [B, 3, H, W] in [0, 1], resized as for training; what cannot be read is noted."""
    resize = training_transforms("none", size)
    indices: list[int] = []
    images: list[Tensor] = []
    for index in range(len(dataset)):
        try:
            images.append(resize(*dataset[index])[0].as_subclass(Tensor))
            indices.append(index)
        except DataError as error:
            unreadable[index] = str(error)
        if indices and (len(indices) == IMAGES_AT_ONCE or index == len(dataset) - 1):
            yield indices, torch.stack(images).float() / 255
            indices, images = [], []
    if indices:
        yield indices, torch.stack(images).float() / 255


def _require_space(home: Path, stored: StoredFeatures) -> None:
    if (free := shutil.disk_usage(home).free) < stored.bytes:
        needed = f"{stored.bytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free"
        raise OSError(needed)
