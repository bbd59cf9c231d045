"""Batches for training and evaluation that do not depend on workers, processes or the past.

A training sample is a function of (seed, epoch, index) alone: each is drawn with its own random state. So the same run
gives the same batches with any number of workers, on one machine or many, started afresh or in the middle of an epoch.
"""

import itertools
import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors

from aploss.data.annotations import DetectionDataset, Sample
from aploss.data.augment import OBJECT_FIELDS, draw_flip, mirrored, training_transforms
from aploss.data.features import StoredFeatures
from aploss.errors import ConfigError, DataError

PREFETCH = 4  # batches a worker prepares ahead: evens out slow images
MOST_REPLACEMENTS = 1000  # images tried in place of one that cannot be read

Key = tuple[int, int]  # epoch, index


class Batch(NamedTuple):
    """Images in [0, 1] as float32, their targets, and their indices in the dataset.

    In training ``images`` is one tensor [B, 3, H, W], or with stored features their
    :class:`~aploss.data.features.FeatureMaps`; in evaluation it is a list of [3, h, w], each of its own size. A
    target holds ``boxes`` (xyxy in the image's pixels, float32 [n, 4]), ``labels`` (int64 [n]), ``difficult`` and
    ``crowd`` (bool [n]) and ``image_id``.
    """

    images: Any
    targets: list[dict[str, Any]]
    indices: list[int]


_Loaded = tuple[Batch, dict[int, str]]  # and what could not be read for it: index → reason


class AugmentedSamples(Dataset[Sample]):
    """A dataset whose samples are augmented, each as (seed, epoch, index) alone decide.

    ``preset`` and ``size`` are those of :func:`~aploss.data.augment.training_transforms`.
    """

    def __init__(self, dataset: DetectionDataset, *, seed: int, preset: str, size: int | tuple[int, int]) -> None:
        if seed < 0:
            raise ConfigError(f"the seed is {seed}: give 0 or more")
        self.dataset = dataset
        self.seed = seed
        self.transforms = training_transforms(preset, size)
        self._order: tuple[int, list[int]] = (-1, [])  # of the epoch last asked for

    def __len__(self) -> int:
        return len(self.dataset)

    def order(self, epoch: int) -> list[int]:
        """The indices of an epoch in the order of its steps."""
        if self._order[0] != epoch:
            shuffle = torch.Generator().manual_seed(_mix(self.seed, epoch))
            self._order = (epoch, torch.randperm(len(self), generator=shuffle).tolist())
        return self._order[1]

    def __getitem__(self, key: Key) -> Sample:
        """The sample of ``key = (epoch, index)``."""
        image, target = self.dataset[key[1]]
        with self._drawing(key):
            return self.transforms(image, target)  # type: ignore[no-any-return]

    @contextmanager
    def _drawing(self, key: Key) -> Iterator[None]:
        """Draws random numbers that the key decides."""
        with torch.random.fork_rng(devices=[]):  # the caller's state is back after it, and no GPU is touched
            torch.default_generator.manual_seed(_mix(self.seed, *key))
            yield


class FeatureSamples(AugmentedSamples):
    """Samples with stored feature maps in the place of images: of drawn views, or for the presets ``flip``, ``none``.

    Of the dataset only annotations are looked at; ``options`` are ``seed``, and the ``size`` of the images in features.
    """

    def __init__(self, dataset: DetectionDataset, features: StoredFeatures, *, preset: str, **options: Any) -> None:
        if preset not in ("flip", "none") and not features.drawn:
            raise ConfigError(f"stored features without drawn views go with flip or none, got {preset!r}")
        super().__init__(dataset, preset="none", **options)
        self.features, self._flips = features, preset == "flip"

    def __getitem__(self, key: Key) -> Sample:
        """The sample of ``key = (epoch, index)``; the image is the float16 row of its maps."""
        index, features = key[1], self.features
        if features.drawn:
            with self._drawing(key):
                view = int(torch.randint(features.views, ()))
            maps = features.read(index, view)  # first: it says if the image cannot be read
            return maps, {**features.target(index, view), "image_id": self.dataset.image_id(index)}
        pixel = tv_tensors.Image(torch.zeros(3, 1, 1, dtype=torch.uint8))  # transforms want some image
        image, target = self.transforms(pixel, self.dataset.target(index))
        with self._drawing(key):
            flips = self._flips and draw_flip()
        if flips:
            target["boxes"] = mirrored(target["boxes"], image.shape[-1])
        return features.read(index, int(flips)), target


class TrainingBatches:
    """Training data, one epoch at a time or without end; made by :func:`make_training_loader`.

    Each epoch visits the images once in its own order. Images that fill no whole batch are left out of that epoch; a
    set smaller than a batch is one batch.

    Attributes:
        unreadable: images that others stood in for in the batches given so far: index → reason.
    """

    def __init__(
        self, samples: AugmentedSamples, batch_size: int, workers: int, rank: int, world_size: int, skip: bool
    ) -> None:
        _check_settings(len(samples), batch_size, workers, rank, world_size)
        self.batch_size = min(batch_size, len(samples))
        if self.batch_size % world_size:
            wrong = f"a batch of {self.batch_size} images cannot be split evenly over {world_size} processes"
            raise ConfigError(f"{wrong}: choose a multiple of {world_size}")
        self.seed = samples.seed
        self.rank = rank
        self.world_size = world_size
        self.unreadable: dict[int, str] = {}
        self._samples, self._workers, self._skip = samples, workers, skip

    @property
    def batches_per_epoch(self) -> int:
        """Steps in one epoch, the same for every process."""
        return len(self._samples) // self.batch_size

    def order(self, epoch: int) -> list[int]:
        """The indices of an epoch in the order of its steps, for all processes."""
        return self._samples.order(epoch)

    def epoch(self, epoch: int, start_batch: int = 0) -> Generator[Batch]:
        """This process's part of each batch of an epoch.

        Args:
            epoch: its number, from 0.
            start_batch: first step to give, to go on in the middle of an epoch.

        Raises:
            ConfigError: when the epoch has no such step.
            DataError: while iterating, when an image cannot be read.
        """
        if not 0 <= start_batch <= self.batches_per_epoch:
            raise ConfigError(f"an epoch has {self.batches_per_epoch} batches: it cannot start at {start_batch}")
        return self._give(self._load(self._keys(epoch, start_batch)))

    def endless(self, first_batch: int = 0) -> Generator[Batch]:
        """The batches of one epoch after the other, prepared across their borders.

        With workers, the next batch is also brought over and unpacked while the last one is used: who asks for it does
        not wait. Close it to end the workers.

        Args:
            first_batch: where to start, counted from the beginning of the first epoch.

        Raises:
            DataError: while iterating, when an image cannot be read.
        """
        first, start_batch = divmod(first_batch, self.batches_per_epoch)
        later = itertools.chain.from_iterable(map(self._keys, itertools.count(first + 1)))
        batches = self._load(itertools.chain(self._keys(first, start_batch), later))
        return self._give(_one_ahead(batches) if self._workers else batches)

    def _give(self, loaded: Generator[_Loaded]) -> Generator[Batch]:
        for batch, unreadable in loaded:
            self.unreadable.update(unreadable)
            if isinstance(self._samples, FeatureSamples):
                batch = batch._replace(images=self._samples.features.as_maps(batch.images))
            yield batch

    def _load(self, keys: Iterable[list[Key]]) -> Generator[_Loaded]:
        yield from map(_unpack, _data_loader(_Guarded(self._samples, skip=self._skip), keys, self._workers, stack=True))

    def _keys(self, epoch: int, start_batch: int = 0) -> list[list[Key]]:
        """What this process's batches of an epoch are made of: (epoch, place in its order)."""
        share = self.batch_size // self.world_size
        return [
            [(epoch, place) for place in range(start, start + share)]
            for step in range(start_batch, self.batches_per_epoch)
            for start in [step * self.batch_size + self.rank * share]
        ]


class EvaluationBatches:
    """Every image once, unchanged and in order; made by :func:`make_evaluation_loader`.

    Attributes:
        unreadable: images that were left out so far: index → reason.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self.unreadable: dict[int, str] = {}
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch, unreadable in map(_unpack, self._loader):
            self.unreadable.update(unreadable)
            yield batch


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
) -> TrainingBatches:
    """Training batches of a dataset, reproducible to the bit.

    Args:
        dataset: the images; at least one.
        batch_size: images in a step over all processes; each gets ``batch_size / world_size``.
        seed: decides the order of the images and what augmentation does to each.
        preset: augmentation, see :func:`~aploss.data.augment.training_transforms`.
        size: side of the square training images, or (height, width).
        workers: processes that prepare batches, 0 for none. They change no batch.
        rank: number of this process.
        world_size: number of processes; step by step, their batches make up the one that a single process would get.
        skip_unreadable: the next image of the epoch stands in for one that cannot be read, which is noted in
            ``unreadable``; otherwise that is an error.
        features: of the dataset's images in this size, to be given in their place; for the presets flip and none, or
            with the views that the preset drew.

    Returns:
        An object whose ``epoch(number, start_batch=0)`` and ``endless(first_batch=0)`` give :class:`Batch` after
        :class:`Batch`.

    Raises:
        ConfigError: for settings that cannot be.
        DataError: for an empty dataset.
    """
    kind = AugmentedSamples if features is None else partial(FeatureSamples, features=features)
    samples = kind(dataset, seed=seed, preset=preset, size=size)
    return TrainingBatches(samples, batch_size, workers, rank, world_size, skip_unreadable)


def make_evaluation_loader(
    dataset: DetectionDataset,
    *,
    batch_size: int,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    skip_unreadable: bool = False,
) -> EvaluationBatches:
    """Evaluation batches: each image once, of its own size, in the dataset's order.

    Args:
        dataset: the images; at least one.
        batch_size: images in a batch of this process; the last batch may be smaller.
        workers: processes that read images, 0 for none.
        rank: number of this process.
        world_size: number of processes; each gets every world_size-th image.
        skip_unreadable: leave out images that cannot be read, and note them in ``unreadable``; otherwise the first is
            an error.

    Returns:
        An iterable of :class:`Batch`, to be gone through any number of times.

    Raises:
        ConfigError: for settings that cannot be.
        DataError: for an empty dataset, and while iterating for an image that cannot be read.
    """
    _check_settings(len(dataset), batch_size, workers, rank, world_size)
    keys = [(0, index) for index in range(rank, len(dataset), world_size)]
    plan = [keys[start : start + batch_size] for start in range(0, len(keys), batch_size)]
    return EvaluationBatches(_data_loader(_Guarded(dataset, skip=skip_unreadable), plan, workers))


def _check_settings(images: int, batch_size: int, workers: int, rank: int, world_size: int) -> None:
    if images == 0:
        raise DataError("the dataset has no images: check its path and split")
    if batch_size < 1:
        raise ConfigError(f"the batch size is {batch_size}: give 1 or more")
    if workers < 0:
        raise ConfigError(f"the number of workers is {workers}: give 0 or more")
    if not 0 <= rank < world_size:
        raise ConfigError(f"process {rank} of {world_size} does not exist")


def _mix(*numbers: int) -> int:
    """One well-mixed 64-bit seed of several numbers, so that neighbours share nothing."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def _one_ahead(batches: Generator[_Loaded]) -> Generator[_Loaded]:
    """The same batches without end; a thread takes the next one while the last one is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="aploss-batches") as thread:
        batch = next(batches)  # here, for the workers start with the first
        while True:
            coming = thread.submit(next, batches)
            yield batch
            batch = coming.result()


# --- the way from a worker ------------------------------------------------------------------------


def _data_loader(
    samples: "_Guarded", plan: Iterable[list[Key]], workers: int, *, stack: bool = False
) -> "DataLoader[Any]":
    return DataLoader(
        samples,
        batch_sampler=plan,
        num_workers=workers,
        worker_init_fn=_leave_signals_to_main,
        collate_fn=partial(_pack, stack=stack),
        prefetch_factor=PREFETCH if workers else None,
        generator=torch.Generator(),  # else it would draw from the caller's random state
    )


def _leave_signals_to_main(worker: int) -> None:
    """Batch systems send SIGTERM to all processes: the main one saves, then ends its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class _Read(NamedTuple):
    """A sample, None where there is none, its number in the dataset, and what cannot be read."""

    number: int
    sample: Sample | None
    unreadable: tuple[tuple[int, str], ...] = ()


class _Guarded(Dataset[_Read | DataError]):
    """Samples with their index; hands an unreadable image on as a value.

    An error raised in a worker reaches the user as a page of that worker's traceback; one that is handed on can be
    raised again as the one line it is.
    """

    def __init__(self, samples: AugmentedSamples | DetectionDataset, *, skip: bool) -> None:
        self.samples, self.skip = samples, skip

    def __getitem__(self, key: Key) -> _Read | DataError:
        """The sample of ``key``: epoch and place in its order; of a dataset only the place."""
        unreadable: list[tuple[int, str]] = []
        for index, own_key in self._candidates(*key):
            try:
                return _Read(index, self.samples[own_key], tuple(unreadable))  # type: ignore[index]
            except DataError as error:
                if not self.skip:
                    return DataError(str(error))  # a subclass may not survive the way over
                unreadable.append((index, str(error)))
        if isinstance(self.samples, DetectionDataset):
            return _Read(unreadable[0][0], None, tuple(unreadable))
        return DataError(f"{unreadable[0][1]} (and {len(unreadable) - 1} images after it)")

    def _candidates(self, epoch: int, place: int) -> Iterator[tuple[int, int | Key]]:
        """Index and key of the sample, and of those that may stand in for it."""
        if isinstance(self.samples, DetectionDataset):
            yield place, place
            return
        order = self.samples.order(epoch)
        for step in range(min(len(order), MOST_REPLACEMENTS)):
            index = order[(place + step) % len(order)]
            yield index, (epoch, index)


class _Packed(NamedTuple):
    """A batch on its way: images as bytes, the objects of all images in one tensor a field.

    Each tensor needs a file handle of its own on the way, so there are few.
    """

    images: Tensor | list[Tensor]
    fields: dict[str, Tensor]  # boxes [objects of all images, 4], others [objects of all images]
    counts: list[int]  # objects of each image
    image_ids: list[int]
    indices: list[int]
    unreadable: tuple[tuple[int, str], ...]


def _pack(samples: Sequence[_Read | DataError], *, stack: bool) -> _Packed | DataError:
    """Collects samples, their images in a list or stacked to [B, 3, H, W]; or the first error."""
    images, targets, indices = [], [], []
    unreadable: list[tuple[int, str]] = []
    for read in samples:
        if isinstance(read, DataError):
            return read
        unreadable += read.unreadable
        if read.sample is not None:
            image, target = read.sample
            images.append(image.as_subclass(Tensor))
            targets.append(target)
            indices.append(read.number)
    if not targets:
        objects = {"boxes": torch.zeros(0, 4), **dict.fromkeys(OBJECT_FIELDS, torch.zeros(0))}
        return _Packed([], objects, [], [], [], tuple(unreadable))
    fields = ("boxes", *OBJECT_FIELDS)
    return _Packed(
        torch.stack(images) if stack else images,
        {field: torch.cat([target[field].as_subclass(Tensor) for target in targets]) for field in fields},
        [len(target["labels"]) for target in targets],
        [target["image_id"] for target in targets],
        indices,
        tuple(unreadable),
    )


def _unpack(packed: _Packed | DataError) -> _Loaded:
    """Images into [0, 1], objects to their images, and an error into a raised one."""
    if isinstance(packed, DataError):
        # A new one: an error raised from a variable of its own frame keeps that frame, and with it the loader's
        # workers, alive until the garbage collector comes.
        raise DataError(str(packed))
    images: Any = packed.images
    images = _to_unit(images) if isinstance(images, Tensor) else list(map(_to_unit, images))
    columns = [torch.split(column, packed.counts) for column in packed.fields.values()]
    targets = [
        {**dict(zip(packed.fields, values, strict=True)), "image_id": image_id}
        for image_id, *values in zip(packed.image_ids, *columns, strict=True)
    ]
    return Batch(images, targets, packed.indices), dict(packed.unreadable)


def _to_unit(image: Tensor) -> Tensor:
    if image.is_floating_point():  # features
        return image
    # By numpy: a thread beside training would start a second set of torch's threads.
    return torch.from_numpy(np.divide(image.numpy(), 255, dtype=np.float32))
