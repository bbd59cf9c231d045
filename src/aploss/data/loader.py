"""Batches for training and evaluation that do not depend on workers, processes or earlier batches.

A training sample is a function of (seed, epoch, index) alone: each is drawn with its own random state. So the same run
gives the same batches with any number of workers, on one machine or many, from the start or resumed within an epoch.
"""

import itertools
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from aploss.data.annotations import OBJECT_FIELDS, DetectionDataset, Sample, Target
from aploss.data.features import StoredFeatures
from aploss.errors import ConfigError, DataError

PREFETCH = 4  # batches that a worker prepares ahead, which evens out slow images
MAX_REPLACEMENTS = 100  # images tried in place of an unreadable one

PRESETS = ("paper", "light", "flip", "none")  # of augmentation
MEAN_COLOUR = (123.0, 117.0, 104.0)  # of ImageNet, which SSD uses as padding
ZOOM = (0.75, 1.25)  # range of the light preset's zoom

Candidates = tuple[int | None, list[int]]  # epoch (None in evaluation), indices to try in turn


class Batch(NamedTuple):
    """Images in [0, 1] as float32, their targets, and their indices in the dataset.

    In training ``images`` is one tensor [B, 3, H, W], or with stored features their
    :class:`~aploss.data.features.FeatureMaps`; in evaluation it is a list of [3, h, w], each of its own size. A
    target holds ``boxes`` (xyxy in the image's pixels, float32 [n, 4]), ``labels`` (int64 [n]), ``difficult`` and
    ``crowd`` (bool [n]) and ``image_id``. ``unreadable`` are the images that could not be read for it: index → reason.
    """

    images: Any
    targets: list[Target]
    indices: list[int]
    unreadable: dict[int, str]


def make_training_loader(
    dataset: DetectionDataset,
    *,
    batch_size: int,
    seed: int,
    preset: str,
    size: int | tuple[int, int],
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    skip_unreadable: bool = False,
    features: StoredFeatures | None = None,
    pinned: bool = False,
) -> "TrainingBatches":
    """Training batches of a dataset, reproducible bit for bit.

    Args:
        dataset: the images; at least one.
        batch_size: images per step over all processes; each gets ``batch_size / world_size``.
        seed: decides the order of the images and the augmentation of each.
        preset: augmentation, see :func:`training_transforms`.
        size: side of the square training images, or (height, width).
        workers: processes that prepare batches, 0 for none. They do not change the batches.
        rank: number of this process.
        world_size: number of processes; step by step, their batches make up the batch of a single process.
        skip_unreadable: replace an unreadable image by the next one of the epoch and record it in ``unreadable``,
            instead of raising an error.
        features: stored features of the dataset's images at this size, used instead of the images; see
            :func:`~aploss.data.features.store_features`.
        pinned: leave images in uint8, a quarter of the bytes, and in pinned memory, for a GPU that converts them.

    Returns:
        An object whose ``epoch(number)`` and ``endless(first_batch=0)`` generate :class:`Batch` objects.

    Raises:
        ConfigError: invalid settings.
        DataError: the dataset is empty.

    Example:
        >>> from aploss.data import builtin_dataset
        >>> images = builtin_dataset(cache=".", counts=(4, 2, 2))
        >>> loader = make_training_loader(images, batch_size=2, seed=0, preset="light", size=64)
        >>> [batch.images.shape for batch in loader.epoch(0)]
        [torch.Size([2, 3, 64, 64]), torch.Size([2, 3, 64, 64])]
    """
    samples = AugmentedSamples(dataset, seed=seed, preset=preset, size=size, features=features)
    _check_settings(len(dataset), batch_size)
    return TrainingBatches(samples, batch_size, workers, rank, world_size, skip_unreadable, pinned)


def make_evaluation_loader(
    dataset: DetectionDataset,
    *,
    batch_size: int,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    skip_unreadable: bool = False,
) -> Iterator[Batch]:
    """Returns an iterator of :class:`Batch` objects: each image once, of its own size, in the dataset's order.

    Args:
        dataset: the images; at least one.
        batch_size: images per batch of this process; the last batch may be smaller.
        workers: processes that read images, 0 for none.
        rank: number of this process.
        world_size: number of processes; each gets every world_size-th image.
        skip_unreadable: leave out unreadable images and list them in their batch, instead of raising an error.

    Raises:
        ConfigError: invalid settings.
        DataError: the dataset is empty, or, while iterating, an image cannot be read.

    Example:
        >>> from aploss.data import builtin_dataset
        >>> images = builtin_dataset(cache=".", counts=(4, 2, 2))
        >>> [batch.indices for batch in make_evaluation_loader(images, batch_size=3)]
        [[0, 1, 2], [3]]
    """
    _check_settings(len(dataset), batch_size)
    keys: list[Candidates] = [(None, [index]) for index in range(rank, len(dataset), world_size)]
    plan = [keys[start : start + batch_size] for start in range(0, len(keys), batch_size)]
    return _evaluation_batches(_read_batches(dataset, plan, workers), skip_unreadable)


def _check_settings(images: int, batch_size: int) -> None:
    if images == 0:
        raise DataError("the dataset has no images: check its path and split")
    if batch_size < 1:
        raise ConfigError(f"the batch size is {batch_size}: give 1 or more")


@dataclass
class TrainingBatches:
    """Training data, one epoch at a time or without end; see :func:`make_training_loader`.

    Each epoch visits the images once in its own order. The images of an incomplete last batch are left out of that
    epoch; a dataset smaller than a batch is one batch.

    Attributes:
        batches_per_epoch: steps in one epoch, the same for every process.
        unreadable: images that were replaced in the batches so far: index → reason.
    """

    samples: "AugmentedSamples"
    batch_size: int
    workers: int
    rank: int
    world_size: int
    skip_unreadable: bool
    pinned: bool
    unreadable: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch_size = min(self.batch_size, len(self.samples.dataset))
        if self.batch_size % self.world_size:
            wrong = f"a batch of {self.batch_size} images cannot be split evenly over {self.world_size} processes"
            raise ConfigError(f"{wrong}: choose a multiple of {self.world_size}")
        self.batches_per_epoch = len(self.samples.dataset) // self.batch_size

    def epoch(self, number: int) -> Generator[Batch]:
        """This process's part of each batch of an epoch, counted from 0.

        Raises:
            DataError: while iterating, if an image cannot be read.
        """
        return self._load(self._plan(number))

    def endless(self, first_batch: int = 0) -> Generator[Batch]:
        """The batches of all epochs in sequence, prefetched across their borders; close it to stop the workers.

        Args:
            first_batch: where to start, counted from the beginning of the first epoch.

        Raises:
            DataError: while iterating, if an image cannot be read.
        """
        epoch, start = divmod(first_batch, self.batches_per_epoch)
        plans = itertools.chain.from_iterable(map(self._plan, itertools.count(epoch)))
        return self._load(itertools.islice(plans, start, None))

    def _plan(self, epoch: int) -> Iterator[list[Candidates]]:
        """This process's part of each batch: the images, and those after them that replace unreadable ones."""
        order = self.samples.order(epoch)
        around = [*order, *order]
        tried = min(len(order), MAX_REPLACEMENTS) if self.skip_unreadable else 1
        share = self.batch_size // self.world_size
        for step in range(self.batches_per_epoch):
            start = step * self.batch_size + self.rank * share
            yield [(epoch, around[place : place + tried]) for place in range(start, start + share)]

    def _load(self, plan: Iterable[list[Candidates]]) -> Generator[Batch]:
        stacked = partial(_collate, stack=True)
        for batch in _read_batches(self.samples, plan, self.workers, collate_fn=stacked, pin_memory=self.pinned):
            self.unreadable.update(batch.unreadable)
            if len(batch.indices) < self.batch_size // self.world_size:
                first, *more = batch.unreadable.values()
                raise DataError(f"{first} (and {len(more)} more images)" if more else first)
            images = batch.images
            if self.samples.features is not None:
                images = self.samples.features.as_maps(images)
            elif not self.pinned:
                images = images.float() / 255
            yield batch._replace(images=images)


def _evaluation_batches(batches: Iterable[Batch], skip_unreadable: bool) -> Iterator[Batch]:
    for batch in batches:
        if batch.unreadable and not skip_unreadable:
            raise DataError(next(iter(batch.unreadable.values())))
        yield batch._replace(images=[image.float() / 255 for image in batch.images])


def _read_batches(
    samples: "AugmentedSamples | DetectionDataset", plan: Iterable[list[Candidates]], workers: int, **options: Any
) -> Generator[Batch]:
    """The batches of a plan, with 8-bit images in a list; ``options`` are those of a DataLoader."""
    loader = DataLoader(
        _Reader(samples),
        batch_sampler=plan,
        num_workers=workers,
        worker_init_fn=_ignore_signals,
        prefetch_factor=PREFETCH if workers else None,
        generator=torch.Generator(),  # otherwise it would draw from the caller's random state
        **{"collate_fn": _collate, **options},
    )
    for batch in loader:
        targets = [
            {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in one.items()}
            for one in batch.targets
        ]
        yield batch._replace(targets=targets)


# --- in a worker ----------------------------------------------------------------------------------


class _Reader(Dataset[Batch]):
    """Reads the first readable of several samples, as a batch of one image, or of none.

    The others are listed as unreadable, not raised: an error in a worker reaches the user as a page of its traceback.
    """

    def __init__(self, samples: "AugmentedSamples | DetectionDataset") -> None:
        self.samples: Any = samples

    def __getitem__(self, candidates: Candidates) -> Batch:
        epoch, indices = candidates
        unreadable = {}
        for index in indices:
            try:
                image, target = self.samples[index if epoch is None else (epoch, index)]
            except DataError as error:
                unreadable[index] = str(error)
                continue
            # Every tensor needs a file handle of its own on the way to the training process, arrays do not.
            arrays = {name: value.numpy() if isinstance(value, Tensor) else value for name, value in target.items()}
            return Batch([image], [arrays], [index], unreadable)
        return Batch([], [], [], unreadable)


def _collate(parts: list[Batch], *, stack: bool = False) -> Batch:
    images, targets, indices = (list(itertools.chain(*column)) for column in list(zip(*parts, strict=True))[:3])
    unreadable = {index: reason for part in parts for index, reason in part.unreadable.items()}
    return Batch(torch.stack(images) if stack and images else images, targets, indices, unreadable)


def _ignore_signals(worker: int) -> None:
    """Batch systems send SIGTERM to all processes: the main process saves, then ends its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


# --- augmentation ---------------------------------------------------------------------------------


@dataclass
class AugmentedSamples(Dataset[Sample]):
    """A dataset whose samples are augmented depending on (seed, epoch, index) alone.

    See :func:`training_transforms` for ``preset`` and ``size``; a view of the stored ``features`` replaces the image.
    """

    dataset: DetectionDataset
    _: KW_ONLY
    seed: int
    preset: str
    size: int | tuple[int, int]
    features: StoredFeatures | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"the seed is {self.seed}: give 0 or more")
        if self.features is not None and self.preset != self.features.preset:
            raise ConfigError(f"the stored features are for augmentation {self.features.preset!r}, not {self.preset!r}")
        self.transforms = training_transforms(self.preset, self.size)

    def order(self, epoch: int) -> list[int]:
        """The indices of an epoch in the order of its steps."""
        shuffle = torch.Generator().manual_seed(_mix(self.seed, epoch))
        order: list[int] = torch.randperm(len(self.dataset), generator=shuffle).tolist()
        return order

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        """The sample of ``key = (epoch, index)``: image or float16 row of feature maps, and target."""
        index = key[1]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_mix(self.seed, *key))
            if self.features is None:
                return self.transforms(*self.dataset[index])
            view = int(torch.randint(self.features.views, ()))
        maps = self.features.read(index, view)  # first, because it raises if the image could not be read
        return maps, {**self.features.target(index, view), "image_id": int(self.dataset.image_ids[index])}


def _mix(*numbers: int) -> int:
    """Hashes several numbers into one 64-bit seed, so that neighbours are independent."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def training_transforms(preset: str, size: int | tuple[int, int]) -> Callable[[Tensor, Target], Sample]:
    """The augmentation of one training sample; random numbers come from torch's default generator.

    ``paper`` is the augmentation of SSD (Liu et al. 2016, Section 2.2), which the AP-loss paper adopts: photometric
    distortion, zoom-out up to four times, a crop with a minimal IoU with some object, horizontal flip. ``light`` zooms
    by ±25 %, changes brightness and contrast by ±20 % and flips: enough for small datasets and short training.
    ``flip`` resizes and flips, ``none`` only resizes.

    Args:
        preset: one of :data:`PRESETS`.
        size: side of the square output, or (height, width).

    Returns:
        A function of ``(image, target)``, uint8 [3, H, W] and the dict of a :class:`DetectionDataset`, that returns the
        same for the output size. Objects that vanish are removed with their labels and flags; an image without objects
        stays usable.

    Raises:
        ConfigError: unknown preset, or a size below 8 pixels.

    Example:
        >>> image, no = torch.zeros(3, 60, 80, dtype=torch.uint8), torch.tensor([False])
        >>> boxes = torch.tensor([[8.0, 6.0, 40.0, 30.0]])
        >>> target = dict(boxes=boxes, labels=torch.tensor([2]), difficult=no, crowd=no)
        >>> image, target = training_transforms("none", 40)(image, target)
        >>> image.shape, target["boxes"].tolist()
        (torch.Size([3, 40, 40]), [[4.0, 4.0, 20.0, 20.0]])
    """
    size = (size, size) if isinstance(size, int) else size
    if min(size) < 8:
        raise ConfigError(f"training images of {size[0]}x{size[1]} pixels are too small: give at least 8")
    if preset not in PRESETS:
        raise ConfigError(f"unknown augmentation '{preset}': choose one of {', '.join(PRESETS)}")
    resize, flip = v2.Resize(size, antialias=True), v2.RandomHorizontalFlip()
    transforms: dict[str, list[nn.Module]] = {
        "paper": [
            v2.RandomPhotometricDistort(),
            v2.RandomZoomOut(fill=MEAN_COLOUR, side_range=(1.0, 4.0)),
            IoUCrop(),
            flip,
            resize,
        ],
        "light": [Zoom(), flip, resize, v2.ColorJitter(brightness=0.2, contrast=0.2)],
        "flip": [resize, flip],
        "none": [resize],
    }
    # A photograph of many megapixels has detail that no training image keeps, and zooming it out would need gigabytes.
    limit = 2 * max(size) if preset in ("paper", "light") else None
    return Augmentation(transforms[preset], limit)


class Augmentation(nn.Module):
    """Applies torchvision's transforms to plain tensors, and removes objects that vanish.

    Images whose shorter side exceeds ``limit`` pixels are shrunk to it first.
    """

    def __init__(self, transforms: Sequence[nn.Module], limit: int | None) -> None:
        super().__init__()
        self.limit = limit
        # Rounding may put a corner slightly outside.
        finish = [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=1, labels_getter=_object_fields)]
        self.transforms = v2.Compose([*transforms, *finish])

    def forward(self, image: Tensor, target: Target) -> Sample:
        """Augments one sample of 8-bit RGB."""
        size = (image.shape[-2], image.shape[-1])
        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)
        image = tv_tensors.Image(image)
        if self.limit is not None and min(size) > self.limit:
            smaller = [round(side * self.limit / min(size)) for side in size]
            image, boxes = F.resize(image, smaller, antialias=True), F.resize(boxes, smaller)
        image, target = self.transforms(image, {**target, "boxes": boxes})
        return image.as_subclass(Tensor), {**target, "boxes": target["boxes"].as_subclass(Tensor)}


def _object_fields(sample: Sample) -> tuple[Tensor, ...]:
    return tuple(sample[1][field] for field in OBJECT_FIELDS)


class IoUCrop(v2.RandomIoUCrop):  # type: ignore[misc]
    """torchvision's crop of SSD, which searches for long without objects and divides by zero below four pixels."""

    def forward(self, image: tv_tensors.Image, target: Target) -> Sample:
        """Crops one sample; the boxes of objects whose centre is outside become empty, to be removed later."""
        if not len(target["boxes"]) or min(image.shape[-2:]) * self.min_scale < 1:
            return image, target
        cropped: Sample = super().forward(image, target)
        return cropped


class Zoom(nn.Module):
    """Crops or pads a sample at random, which zooms in or out by a factor in :data:`ZOOM` without changing its shape.

    Like SSD's crop, it keeps the objects whose centre is inside.
    """

    def forward(self, image: tv_tensors.Image, target: Target) -> Sample:
        """Zooms one sample; the boxes of objects whose centre is outside become empty, to be removed later."""
        height, width = image.shape[-2:]
        share, across, down = torch.rand(3).tolist()
        zoom = ZOOM[0] + share * (ZOOM[1] - ZOOM[0])
        new_height, new_width = max(1, round(height / zoom)), max(1, round(width / zoom))
        left, top = round(abs(new_width - width) * across), round(abs(new_height - height) * down)
        if zoom < 1:
            padding = [left, top, new_width - width - left, new_height - height - top]
            return F.pad(image, padding, fill=list(MEAN_COLOUR)), {**target, "boxes": F.pad(target["boxes"], padding)}
        window = left, top, left + new_width, top + new_height
        centres = (target["boxes"][:, :2] + target["boxes"][:, 2:]).as_subclass(Tensor) / 2  # [n, 2]
        inside = (centres > torch.tensor(window[:2])) & (centres < torch.tensor(window[2:]))
        boxes = F.crop(target["boxes"], top, left, new_height, new_width)
        boxes[~inside.all(dim=1)] = 0
        return F.crop(image, top, left, new_height, new_width), {**target, "boxes": boxes}
