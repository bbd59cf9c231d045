"""Feature maps of a frozen backbone, computed once for some views of each image, and kept on disk.

Training that changes only what follows the backbone needs its maps, not the images: they are read from one file of
float16, found again by the content of the images, their size, the views and the weights. The views of an image are
itself and its mirror image, or a number of augmented ones that are drawn once.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from aploss.data.annotations import DetectionDataset, Sample
from aploss.data.augment import OBJECT_FIELDS, training_transforms
from aploss.data.builtin import cache_folder
from aploss.errors import DataError

VERSION = 1  # to be raised with every change of what is stored, so that no old file is used
VIEWS_AT_ONCE = 8  # in one forward pass
DTYPE = np.dtype(np.float16)
TARGETS_FILE = "targets.npz"


class FeatureMaps(NamedTuple):
    """The feature maps of a batch, in the place of its images."""

    maps: tuple[Tensor, ...]  # of each level [B, C, H, W]
    image_size: tuple[int, int]  # height and width of the images, padding included

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "FeatureMaps":
        """The maps on a device, in float32."""
        moved = (one.to(device, non_blocking=non_blocking).float() for one in self.maps)
        return FeatureMaps(tuple(moved), self.image_size)


@dataclass(frozen=True)
class Views:
    """The views of each image whose features are stored, as an augmentation makes them."""

    preset: str  # of the augmentation; "flip" stands for the image and its mirror image
    count: int  # of each image
    sample: Callable[[tuple[int, int]], Sample]  # of (view, index), the same ones whenever it is called

    @property
    def drawn(self) -> bool:
        """Whether augmentation draws them, so that their objects have to be stored, too."""
        return self.preset != "flip"


@dataclass(frozen=True, kw_only=True)
class StoredFeatures:
    """The maps of all views of the images of a dataset; made by :func:`store_features`."""

    file: Path  # float16 [images, views, values of all maps of an image]
    shapes: tuple[tuple[int, int, int], ...]  # channels, height and width of each map
    image_size: tuple[int, int]  # height and width of the images, padding included
    images: int  # how many
    views: int = 2  # of each image: two, itself and its mirror image, where none were drawn
    drawn: bool = False  # whether augmentation drew the views; their targets are then stored, too
    unreadable: dict[int, str]  # images without maps: index → reason

    @property
    def values(self) -> int:
        """Values of all maps of one image."""
        return sum(map(prod, self.shapes))

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.views * self.images * self.values * DTYPE.itemsize

    def read(self, index: int, view: int) -> Tensor:
        """The maps of one view of an image, one after the other: float16 [values].

        Raises:
            DataError: the image could not be read, or the file cannot.
        """
        if index in self.unreadable:
            raise DataError(self.unreadable[index])
        row = self.values * DTYPE.itemsize
        try:
            read = np.fromfile(self.file, DTYPE, self.values, offset=(self.views * index + view) * row)
        except OSError as error:
            raise DataError(f"the stored features {self.file} cannot be read: {error.strerror}") from error
        if len(read) < self.values:
            raise DataError(f"the stored features {self.file} are cut short: remove {self.file.parent}")
        return torch.from_numpy(read)

    def target(self, index: int, view: int) -> dict[str, Tensor]:
        """Boxes, labels and flags of the objects in a view that was drawn."""
        starts = self._targets["starts"]
        rows = slice(*starts[self.views * index + view :][:2])
        return {name: torch.tensor(self._targets[name][rows]) for name in ("boxes", *OBJECT_FIELDS)}

    @cached_property
    def _targets(self) -> dict[str, np.ndarray]:
        file = self.file.with_name(TARGETS_FILE)
        try:
            with np.load(file, allow_pickle=False) as stored:
                return dict(stored)
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise DataError(f"the stored objects {file} cannot be read: remove {file.parent}") from error

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
    drawn: Views | None = None,
    on_progress: Callable[[int, int], Any] | None = None,
    cache: Path | None = None,
) -> StoredFeatures:
    """The maps of a dataset's images, computed where they are not stored yet.

    Several processes may ask at once: one computes, the others wait. DataError where the cache cannot be written, or no
    image can be read.

    Args:
        dataset: the images.
        network: gives the maps of images [B, 3, H, W] in [0, 1].
        network_digest: other weights or another network have another one.
        size: images are resized to it: side of a square, or (height, width).
        drawn: augmented views to store, in place of each image and its mirror image.
        on_progress: called with images done and all images.
        cache: folder to keep them in; ``features`` in :func:`~aploss.data.builtin.cache_folder` where not given.
    """
    home = cache_folder() / "features" if cache is None else cache
    folder = home / _key(dataset, network_digest, size, drawn)
    if (stored := _opened(folder)) is not None:
        return stored
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f".{folder.name}.lock"):
            if (stored := _opened(folder)) is None:  # nobody computed them while we waited
                stored = _compute(folder, dataset, network, drawn or _flips(dataset, size), on_progress)
    except OSError as error:
        raise DataError(
            f"features cannot be stored in {home} ({error.strerror or error}): name a folder with more space in the "
            "environment variable APLOSS_CACHE, or leave batches.cache_features false"
        ) from error
    return stored


def _key(dataset: DetectionDataset, network_digest: str, size: int | tuple[int, int], drawn: Views | None) -> str:
    """Names everything that the maps follow from: content of the images in their order, size, views, network."""
    digest = hashlib.sha256(repr((VERSION, network_digest, size)).encode())
    if drawn is not None:
        digest.update(repr((drawn.preset, drawn.count)).encode())
    for index in range(len(dataset)):
        try:
            with dataset.image_path(index).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            content = "unreadable"
        digest.update(repr((content, dataset.image_size(index))).encode())  # the size decides the EXIF rotation
        if drawn is not None:  # their targets are stored, too
            target = dataset.target(index)
            for name in ("boxes", *OBJECT_FIELDS):
                digest.update(target[name].numpy().tobytes())
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
            views=values.get("views", 2),  # not in older ones
            drawn=values.get("drawn", False),
            unreadable={int(index): reason for index, reason in values["unreadable"].items()},
        )
        whole = stored.file.stat().st_size == stored.bytes
        return stored if whole and (not stored.drawn or (folder / TARGETS_FILE).is_file()) else None
    except (OSError, ValueError, KeyError):
        return None


def _compute(
    folder: Path,
    dataset: DetectionDataset,
    network: Callable[[Tensor], FeatureMaps],
    views: Views,
    on_progress: Callable[[int, int], Any] | None,
) -> StoredFeatures:
    """Computes into a folder of another name, which gets its own when it is complete."""
    unreadable: dict[int, str] = {}
    targets: dict[int, list[dict[str, Any]]] = {}
    stored: StoredFeatures | None = None
    with tempfile.TemporaryDirectory(prefix=".computing-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        with (fresh / "features.bin").open("wb") as file:
            for indices, images in _image_batches(len(dataset), views, targets, unreadable):
                features = network(images)
                if stored is None:
                    stored = StoredFeatures(
                        file=folder / "features.bin",
                        shapes=tuple((one.shape[1], one.shape[2], one.shape[3]) for one in features.maps),
                        image_size=features.image_size,
                        images=len(dataset),
                        views=views.count,
                        drawn=views.drawn,
                        unreadable=unreadable,
                    )
                    if (free := shutil.disk_usage(folder.parent).free) < stored.bytes:
                        raise OSError(f"{stored.bytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
                    file.truncate(stored.bytes)
                rows = torch.cat([one.flatten(1).cpu() for one in features.maps], dim=1).half()
                if not bool(rows.isfinite().all()):
                    raise DataError("the backbone's features are too large for float16: leave batches.cache_features")
                for index, of_image in zip(indices, torch.split(rows, views.count), strict=True):
                    file.seek(views.count * index * stored.values * DTYPE.itemsize)
                    file.write(of_image.numpy().tobytes())
                if on_progress is not None:
                    on_progress(indices[-1] + 1, len(dataset))
        if stored is None:
            raise DataError(
                f"no image of {dataset.split} can be read: {next(iter(unreadable.values()), 'it is empty')}"
            )
        if folder.exists():
            shutil.move(folder, Path(scratch) / "damaged")
        if views.drawn:
            _write_targets(fresh / TARGETS_FILE, [targets.get(index, []) for index in range(len(dataset))], views.count)
        content = json.dumps({key: value for key, value in asdict(stored).items() if key != "file"})
        (fresh / "features.json").write_text(content, encoding="utf-8")
        fresh.rename(folder)
    return stored


def _flips(dataset: DetectionDataset, size: int | tuple[int, int]) -> Views:
    """Each image, resized as for training, and its mirror image."""
    resize = training_transforms("none", size)

    def sample(key: tuple[int, int]) -> Sample:
        view, index = key
        image, target = resize(*dataset[index])
        return (image.flip(-1) if view else image), target  # the targets are not stored

    return Views("flip", 2, sample)


def _image_batches(
    images: int, views: Views, targets: dict[int, list[dict[str, Any]]], unreadable: dict[int, str]
) -> Iterator[tuple[list[int], Tensor]]:
    """Indices of some images, and all their views [B * views, 3, H, W] in [0, 1]; what cannot be read is noted."""
    indices: list[int] = []
    pixels: list[Tensor] = []
    for index in range(images):
        try:
            samples = [views.sample((view, index)) for view in range(views.count)]
        except DataError as error:
            unreadable[index] = str(error)
        else:
            indices.append(index)
            pixels += [image.as_subclass(Tensor) for image, _ in samples]
            targets[index] = [target for _, target in samples]
        if indices and (len(pixels) >= VIEWS_AT_ONCE or index == images - 1):
            yield indices, torch.stack(pixels).float() / 255
            indices, pixels = [], []


def _write_targets(file: Path, targets: list[list[dict[str, Any]]], views: int) -> None:
    """The objects of all views of all images, one after the other, and where those of each view start."""
    counts = [len(target["boxes"]) for of_image in targets for target in of_image or [{"boxes": ()}] * views]
    known = [target for of_image in targets for target in of_image]
    arrays = {name: torch.cat([target[name] for target in known]).numpy() for name in ("boxes", *OBJECT_FIELDS)}
    arrays["starts"] = np.cumsum([0, *counts])
    np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's keyword allow_pickle is meant
