"""Feature maps of a frozen backbone, computed once for some views of each image and cached on disk.

Training that leaves the backbone unchanged needs only its feature maps. They are read from one file of float16, whose
cache key covers the images, objects, image size, views and weights. The views of an image are the image and its mirror
image, or a number of augmented versions that are drawn once.
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

from aploss.data.annotations import DetectionDataset, Sample, Target
from aploss.data.augment import OBJECT_FIELDS, mirrored, training_transforms
from aploss.data.builtin import cache_folder
from aploss.errors import DataError

VERSION = 2  # part of the cache key: increase it with every change of the stored files
VIEWS_AT_ONCE = 8  # per forward pass
DTYPE = np.dtype(np.float16)
FIELDS = ("boxes", *OBJECT_FIELDS)


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

    preset: str  # of the augmentation; "flip" is the image and its mirror image
    count: int  # per image
    sample: Callable[[tuple[int, int]], Sample]  # of (view, index), deterministic


@dataclass(frozen=True, kw_only=True)
class StoredFeatures:
    """The maps of all views of a dataset's images; made by :func:`store_features`."""

    file: Path  # float16 [images, views, values of all maps of an image]; objects are in targets.npz beside it
    shapes: tuple[tuple[int, int, int], ...]  # channels, height and width of each map
    image_size: tuple[int, int]  # height and width of the images, including padding
    images: int  # number of images
    views: int  # per image
    preset: str  # of the views
    unreadable: dict[int, str]  # images without maps: index → reason

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
        rows = slice(*self._targets["starts"][self.views * index + view :][:2])
        return {name: torch.tensor(self._targets[name][rows]) for name in FIELDS}

    @cached_property
    def _targets(self) -> dict[str, np.ndarray]:
        file = _targets_file(self.file.parent)
        try:
            with np.load(file, allow_pickle=False) as stored:
                return dict(stored)
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise DataError(f"the stored objects {file} cannot be read: remove {file.parent}") from error

    def as_maps(self, rows: Tensor) -> FeatureMaps:
        """The rows of a batch [B, values], as returned by :meth:`read`, as maps."""
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
    """The feature maps of a dataset's images, computed unless they are in the cache.

    Safe to call from several processes: one computes, the others wait.

    Args:
        dataset: the images.
        network: computes the maps of images [B, 3, H, W] in [0, 1].
        network_digest: identifies the network and its weights.
        size: images are resized to it: side of a square, or (height, width).
        drawn: augmented views to store; defaults to each image and its mirror image.
        on_progress: called with (images done, total).
        cache: folder to keep them in; defaults to ``features`` in :func:`~aploss.data.builtin.cache_folder`.

    Raises:
        DataError: the cache is not writable, or no image can be read.
    """
    views = drawn or _flips(dataset, size)
    home = cache_folder() / "features" if cache is None else cache
    folder = home / _cache_key(dataset, network_digest, size, views)
    if (stored := _open(folder)) is not None:
        return stored
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f".{folder.name}.lock"):
            if (stored := _open(folder)) is None:  # another process may have computed them meanwhile
                stored = _compute(folder, dataset, network, views, on_progress)
    except OSError as error:
        raise DataError(
            f"features cannot be stored in {home} ({error.strerror or error}): name a folder with more space in the "
            "environment variable APLOSS_CACHE, or leave batches.cache_features false"
        ) from error
    return stored


def _flips(dataset: DetectionDataset, size: int | tuple[int, int]) -> Views:
    """Each image, resized as for training, and its mirror image."""
    resize = training_transforms("none", size)

    def sample(key: tuple[int, int]) -> Sample:
        view, index = key
        image, target = resize(*dataset[index])
        if view:
            image, target["boxes"] = image.flip(-1), mirrored(target["boxes"], image.shape[-1])
        return image, target

    return Views("flip", 2, sample)


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


def _targets_file(folder: Path) -> Path:
    return folder / "targets.npz"


def _open(folder: Path) -> StoredFeatures | None:
    """The features stored in a folder; None if they are missing or incomplete."""
    try:
        values = json.loads((folder / "features.json").read_text(encoding="utf-8"))
        values["unreadable"] = {int(index): reason for index, reason in values["unreadable"].items()}
        values["shapes"] = tuple(map(tuple, values["shapes"]))
        stored = StoredFeatures(file=folder / "features.bin", **{**values, "image_size": tuple(values["image_size"])})
        complete = stored.file.stat().st_size == stored.bytes and _targets_file(folder).is_file()
        return stored if complete else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _compute(
    folder: Path,
    dataset: DetectionDataset,
    network: Callable[[Tensor], FeatureMaps],
    views: Views,
    on_progress: Callable[[int, int], Any] | None,
) -> StoredFeatures:
    """Computes into a temporary folder, which is renamed when it is complete."""
    unreadable: dict[int, str] = {}
    targets: dict[int, list[Target]] = {}
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
                        preset=views.preset,
                        unreadable=unreadable,
                    )
                    if (free := shutil.disk_usage(folder.parent).free) < stored.bytes:
                        raise OSError(f"{stored.bytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
                    file.truncate(stored.bytes)
                rows = torch.cat([one.flatten(1).cpu() for one in features.maps], dim=1).half()
                if not bool(rows.isfinite().all()):
                    raise DataError("the backbone's features overflow float16: leave batches.cache_features false")
                for index, of_image in zip(indices, torch.split(rows, views.count), strict=True):
                    file.seek(views.count * index * stored.values * DTYPE.itemsize)
                    file.write(of_image.numpy().tobytes())
                if on_progress is not None:
                    on_progress(indices[-1] + 1, len(dataset))
        if stored is None:
            reason = next(iter(unreadable.values()), "it is empty")
            raise DataError(f"no image of split '{dataset.split}' can be read: {reason}")
        if folder.exists():
            shutil.move(folder, Path(scratch) / "damaged")
        _write_targets(_targets_file(fresh), [targets.get(index, []) for index in range(len(dataset))], views.count)
        content = json.dumps({key: value for key, value in asdict(stored).items() if key != "file"})
        (fresh / "features.json").write_text(content, encoding="utf-8")
        fresh.rename(folder)
    return stored


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


def _write_targets(file: Path, targets: list[list[Target]], views: int) -> None:
    """The objects of all views of all images, one after the other, and where each view starts."""
    counts = [len(target["boxes"]) for of_image in targets for target in of_image or [{"boxes": ()}] * views]
    known = [target for of_image in targets for target in of_image]
    arrays = {name: torch.cat([target[name] for target in known]).numpy() for name in FIELDS}
    np.savez(file, starts=np.cumsum([0, *counts]), **arrays)  # type: ignore[arg-type]  # not allow_pickle
