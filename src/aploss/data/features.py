"""Feature maps of a frozen backbone, computed once for some views of each image and cached on disk.

Training that leaves the backbone unchanged needs only its feature maps. The views of an image are a number of augmented
versions that are drawn once. The cache consists of small files of float16 maps and objects, for one or a few images
each. A file's name holds a digest of everything that its content depends on and a checksum of the content itself, which
is verified when the cache is opened. So a damaged or outdated file is computed again, never trained on, and an
interrupted computation resumes where it stopped.
"""

import hashlib
import io
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from aploss.data.annotations import OBJECT_FIELDS, DetectionDataset, Sample, Target
from aploss.data.builtin import cache_error, cache_folder
from aploss.errors import DataError, RunError
from aploss.files import remove_unfinished, write_whole

if TYPE_CHECKING:
    from aploss.data.loader import AugmentedSamples

VERSION = 4  # part of the cache key: increase it with every change of the stored files
VIEWS_AT_ONCE = 8  # per forward pass
DTYPE = np.dtype(np.float16)
LENGTH_BYTES = 8  # at the beginning of a file: the number of bytes of its maps
FIELDS = ("boxes", *OBJECT_FIELDS)
PARTIAL = "partial"  # instead of the checksum of a file with unreadable images, which are tried again next time


class FeatureMaps(NamedTuple):
    """The feature maps of a batch, in place of its images."""

    maps: tuple[Tensor, ...]  # one per level, [B, C, H, W]
    image_size: tuple[int, int]  # height and width of the images, including padding

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "FeatureMaps":
        """The maps on a device, in float32."""
        moved = (one.to(device, non_blocking=non_blocking).float() for one in self.maps)
        return FeatureMaps(tuple(moved), self.image_size)


@dataclass(frozen=True, kw_only=True)
class StoredFeatures:
    """The maps of all views of a dataset's images; made by :func:`store_features`."""

    folder: Path
    files: tuple[Path, ...]  # each of the next few images
    images_per_file: int
    shapes: tuple[tuple[int, ...], ...]  # channels, height and width of each map
    image_size: tuple[int, int]  # height and width of the images, including padding
    views: int  # per image
    preset: str  # of the views
    bytes: int  # size of all files
    unreadable: dict[int, str]  # images without maps: index → reason
    targets: dict[str, Tensor] = field(compare=False, repr=False)  # objects of all views, and where each view starts

    def read(self, index: int, view: int) -> Tensor:
        """The concatenated maps of one view of an image: float16 [values].

        Raises:
            DataError: the image or the file cannot be read.
        """
        if index in self.unreadable:
            raise DataError(self.unreadable[index])
        number, place = divmod(index, self.images_per_file)
        file, values = self.files[number], sum(map(prod, self.shapes))
        offset = LENGTH_BYTES + (place * self.views + view) * values * DTYPE.itemsize
        try:
            row = np.fromfile(file, DTYPE, values, offset=offset)
        except OSError as error:
            raise DataError(f"the stored features {file} cannot be read: {error.strerror}") from error
        if len(row) < values:
            raise DataError(f"the stored features {file} are truncated; the next start computes them again")
        return torch.from_numpy(row)

    def target(self, index: int, view: int) -> dict[str, Tensor]:
        """Boxes, labels and flags of the objects in a view."""
        start, stop = self.targets["starts"][self.views * index + view :][:2].tolist()
        return {name: self.targets[name][start:stop].clone() for name in FIELDS}

    def as_maps(self, rows: Tensor) -> FeatureMaps:
        """The rows of a batch [B, values], as returned by :meth:`read`, as maps."""
        parts = torch.split(rows, [prod(shape) for shape in self.shapes], dim=1)
        maps = tuple(part.reshape(len(rows), *shape) for part, shape in zip(parts, self.shapes, strict=True))
        return FeatureMaps(maps, self.image_size)


class _File(NamedTuple):
    """One file of the cache; its maps stay on disk."""

    path: Path
    bytes: int
    arrays: dict[str, np.ndarray]  # "shapes", "image_size", "counts" of the objects of each view, and their FIELDS
    unreadable: dict[int, str]


def store_features(
    samples: "AugmentedSamples",
    network: Callable[[Tensor], FeatureMaps],
    *,
    views: int,
    network_digest: str,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
    note: Callable[[str], Any] = lambda line: None,
    cache: Path | None = None,
) -> StoredFeatures:
    """The feature maps of a dataset's images, computed unless they are in the cache.

    Safe to call from several processes: one computes, the others wait. Files are written one by one, so that a process
    that is stopped at any moment loses the latest one only.

    Args:
        samples: the augmented images; the sample of epoch k is the view k of an image.
        network: computes the maps of images [B, 3, H, W] in [0, 1].
        views: number of views of each image to store.
        network_digest: identifies the network and its weights.
        on_progress: called with (images done, total).
        note: called with a line about what is computed and how long it takes, and one about damaged files.
        cache: folder to keep them in; defaults to ``features`` in :func:`~aploss.data.builtin.cache_folder`.

    Raises:
        DataError: the cache is not writable, or no image can be read.
    """
    dataset, step = samples.dataset, ceil(VIEWS_AT_ONCE / views)
    settings = repr((VERSION, network_digest, samples.size, samples.preset, samples.seed, views))
    home = cache_folder() / "features" if cache is None else cache
    folder = home / hashlib.sha256(settings.encode()).hexdigest()[:20]
    blocks = [range(start, min(start + step, len(dataset))) for start in range(0, len(dataset), step)]
    names = {f"{number:06d}-{_digest_inputs(dataset, block)}": block for number, block in enumerate(blocks)}
    try:
        files, _ = _open(folder, names)
        if len(files) < len(names):
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(home / f".{folder.name}.lock"):
                remove_unfinished(folder)
                files, damaged = _open(folder, names)  # another process may have computed them meanwhile
                if damaged:
                    note(f"features  {damaged} damaged files in {folder} are computed again")
                missing = {name: block for name, block in names.items() if name not in files}
                started = time.monotonic()
                for position, (name, block) in enumerate(missing.items()):
                    files[name] = _write(folder / name, *_compute(block, samples, network, views))
                    if position == 0:
                        minutes = max(1, round((time.monotonic() - started) * len(missing) / 60))
                        count, megabytes = sum(map(len, missing.values())), files[name].bytes * len(missing) / 1e6
                        cost = f"{megabytes:.0f} MB, about {minutes} min"
                        note(f"features  to compute: {count} of {len(dataset)} images ({cost}) into {folder}")
                    on_progress(block[-1] + 1, len(dataset))
    except (OSError, RunError) as error:
        raise cache_error(home, error) from error
    return _assemble(folder, [files[name] for name in names], samples, views)


def _digest_inputs(dataset: DetectionDataset, indices: range) -> str:
    """A digest of the images and objects that a file depends on."""
    digest = hashlib.sha256(repr(indices).encode())  # the random numbers of a view depend on the index
    for index in indices:
        try:
            with dataset.image_path(index).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            content = "unreadable"
        digest.update(repr((content, dataset.image_size(index))).encode())  # the size decides the EXIF rotation
        target = dataset.target(index)
        for name in FIELDS:
            digest.update(target[name].numpy().tobytes())
    return digest.hexdigest()[:16]


def _open(folder: Path, names: Collection[str]) -> tuple[dict[str, _File], int]:
    """The undamaged files in a folder by name, and the number of damaged ones."""
    found, damaged = {}, 0
    for path in sorted(folder.glob("*.features")):
        name, _, checksum = path.stem.rpartition("-")
        if name in names:
            content = path.read_bytes()
            if _checksum(content) == checksum:
                found[name] = _parse(path, content)
            else:
                damaged += 1
    return found, damaged


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _parse(path: Path, content: bytes, unreadable: dict[int, str] | None = None) -> _File:
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    with np.load(io.BytesIO(content[LENGTH_BYTES + length :])) as stored:
        return _File(path, len(content), dict(stored), unreadable or {})


def _compute(
    indices: range, samples: "AugmentedSamples", network: Callable[[Tensor], FeatureMaps], views: int
) -> tuple[bytes, dict[int, str]]:
    """The content of one file, and the images that cannot be read: index → reason.

    The content is the number of bytes of all maps, the maps of view after view, and the other arrays as ``.npz``.
    """
    unreadable: dict[int, str] = {}
    read: dict[int, list[Sample]] = {}
    for index in indices:
        try:
            read[index] = [samples[view, index] for view in range(views)]
        except DataError as error:
            unreadable[index] = str(error)
    shapes, image_size, maps = np.zeros((0, 3), int), (0, 0), b""
    if read:
        images = torch.stack([image for many in read.values() for image, _ in many]).float() / 255
        levels, image_size = network(images)
        shapes = np.array([one.shape[1:] for one in levels])
        rows = torch.cat([one.flatten(1).cpu() for one in levels], dim=1).half()
        if not bool(rows.isfinite().all()):
            raise DataError("the backbone's features overflow float16: leave batches.cache_features false")
        every = rows.new_zeros(len(indices), views, rows.shape[1])  # zeros for the unreadable ones
        every[[index - indices[0] for index in read]] = rows.view(-1, views, rows.shape[1])
        maps = every.numpy().tobytes()
    nothing: Target = {name: samples.dataset.target(indices[0])[name][:0] for name in FIELDS}
    targets = [read[index][view][1] if index in read else nothing for index in indices for view in range(views)]
    columns: dict[str, Any] = {name: torch.cat([target[name] for target in targets]).numpy() for name in FIELDS}
    others = io.BytesIO()
    counts = [len(target["boxes"]) for target in targets]
    np.savez(others, shapes=shapes, image_size=image_size, counts=counts, **columns)
    return len(maps).to_bytes(LENGTH_BYTES, "little") + maps + others.getvalue(), unreadable


def _write(name: Path, content: bytes, unreadable: dict[int, str]) -> _File:
    """Writes a file under its name and checksum in place of damaged ones."""
    path = name.with_name(f"{name.name}-{PARTIAL if unreadable else _checksum(content)}.features")
    for old in name.parent.glob(f"{name.name}-*.features"):
        old.unlink()
    write_whole(path, lambda file: file.write(content))
    return _parse(path, content, unreadable)


def _assemble(folder: Path, files: list[_File], samples: "AugmentedSamples", views: int) -> StoredFeatures:
    unreadable = {index: reason for file in files for index, reason in file.unreadable.items()}
    filled = next((file.arrays for file in files if len(file.arrays["shapes"])), None)
    if filled is None:
        reason = next(iter(unreadable.values()), "it is empty")
        raise DataError(f"no image of split '{samples.dataset.split}' can be read: {reason}")
    columns = {
        name: torch.from_numpy(np.concatenate([file.arrays[name] for file in files])) for name in ("counts", *FIELDS)
    }
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), columns.pop("counts").cumsum(0)])
    height, width = filled["image_size"].tolist()
    return StoredFeatures(
        folder=folder,
        files=tuple(file.path for file in files),
        images_per_file=ceil(VIEWS_AT_ONCE / views),
        shapes=tuple(map(tuple, filled["shapes"].tolist())),
        image_size=(height, width),
        views=views,
        preset=samples.preset,
        bytes=sum(file.bytes for file in files),
        unreadable=unreadable,
        targets={"starts": starts, **columns},
    )
