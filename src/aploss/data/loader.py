"""Batches for training and evaluation that do not depend on workers, processes or earlier batches.

A training sample is a function of (seed, epoch, index) alone: each is drawn with its own random state. So the same run
gives the same batches with any number of workers, on one machine or many, from the start or resumed within an epoch.
"""

import itertools
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from aploss.data.annotations import DetectionDataset, Sample, Target
from aploss.data.augment import training_transforms
from aploss.data.features import StoredFeatures
from aploss.errors import ConfigError, DataError

PREFETCH = 4  # batches that a worker prepares ahead, which evens out slow images
MAX_REPLACEMENTS = 1000  # images tried in place of an unreadable one

Key = tuple[int, int]  # epoch, index
T = TypeVar("T")


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


class AugmentedSamples(Dataset[Sample]):
    """A dataset whose samples are augmented depending on (seed, epoch, index) alone.

    See :func:`~aploss.data.augment.training_transforms` for ``preset`` and ``size``.
    """

    def __init__(self, dataset: DetectionDataset, *, seed: int, preset: str, size: int | tuple[int, int]) -> None:
        if seed < 0:
            raise ConfigError(f"the seed is {seed}: give 0 or more")
        self.dataset = dataset
        self.seed = seed
        self.transforms = training_transforms(preset, size)
        self._order: tuple[int, list[int]] = (-1, [])  # the latest epoch and its order

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
        with self._random_state(key):
            return self.transforms(image, target)

    @contextmanager
    def _random_state(self, key: Key) -> Iterator[None]:
        """Seeds torch's CPU generator by the key, and restores its state afterwards."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_mix(self.seed, *key))
            yield


class FeatureSamples(AugmentedSamples):
    """Samples with stored feature maps instead of images; of the dataset only the image ids are used."""

    def __init__(self, dataset: DetectionDataset, features: StoredFeatures, *, preset: str, **options: Any) -> None:
        if preset != features.preset:
            raise ConfigError(f"the stored features are for augmentation {features.preset!r}, not {preset!r}")
        super().__init__(dataset, preset=preset, **options)
        self.features = features

    def __getitem__(self, key: Key) -> Sample:
        """The sample of ``key = (epoch, index)``; the image is the float16 row of its maps."""
        index = key[1]
        with self._random_state(key):
            view = int(torch.randint(self.features.views, ()))
        maps = self.features.read(index, view)  # first, because it raises if the image could not be read
        return maps, {**self.features.target(index, view), "image_id": self.dataset.image_id(index)}


class TrainingBatches:
    """Training data, one epoch at a time or without end; made by :func:`make_training_loader`.

    Each epoch visits the images once in its own order. The images of an incomplete last batch are left out of that
    epoch; a dataset smaller than a batch is one batch.

    Attributes:
        unreadable: images that were replaced in the batches so far: index → reason.
    """

    def __init__(
        self,
        samples: AugmentedSamples,
        batch_size: int,
        workers: int,
        rank: int,
        world_size: int,
        skip: bool,
        pinned: bool,
    ) -> None:
        _check_settings(len(samples), batch_size, workers, rank, world_size)
        self.batch_size = min(batch_size, len(samples))
        if self.batch_size % world_size:
            wrong = f"a batch of {self.batch_size} images cannot be split evenly over {world_size} processes"
            raise ConfigError(f"{wrong}: choose a multiple of {world_size}")
        self.unreadable: dict[int, str] = {}
        self._samples, self._workers, self._skip, self._pinned = samples, workers, skip, pinned
        self._rank, self._world_size = rank, world_size

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
            start_batch: the first step, to resume within an epoch.

        Raises:
            ConfigError: the epoch has no such step.
            DataError: while iterating, if an image cannot be read.
        """
        if not 0 <= start_batch <= self.batches_per_epoch:
            raise ConfigError(f"an epoch has {self.batches_per_epoch} batches: it cannot start at {start_batch}")
        return self._record(self._load(self._keys(epoch, start_batch)))

    def endless(self, first_batch: int = 0) -> Generator[Batch]:
        """The batches of all epochs in sequence, prefetched across their borders.

        With workers, a thread receives and unpacks the next batch while the current one is used, so the consumer never
        blocks on it. Close the generator to stop the workers.

        Args:
            first_batch: where to start, counted from the beginning of the first epoch.

        Raises:
            DataError: while iterating, if an image cannot be read.
        """
        first, start_batch = divmod(first_batch, self.batches_per_epoch)
        later = itertools.chain.from_iterable(map(self._keys, itertools.count(first + 1)))
        batches = self._load(itertools.chain(self._keys(first, start_batch), later))
        return self._record(_one_ahead(batches) if self._workers else batches)

    def _load(self, keys: Iterable[list[Key]]) -> Generator[Batch]:
        read = partial(_read_training_batch, self._samples, skip=self._skip)
        yield from map(partial(_receive, pinned=self._pinned), _data_loader(read, keys, self._workers))

    def _record(self, batches: Generator[Batch]) -> Generator[Batch]:
        for batch in batches:
            self.unreadable.update(batch.unreadable)
            if isinstance(self._samples, FeatureSamples):
                batch = batch._replace(images=self._samples.features.as_maps(batch.images))
            yield batch

    def _keys(self, epoch: int, start_batch: int = 0) -> list[list[Key]]:
        """(epoch, position in its order) of the samples of this process's batches."""
        share = self.batch_size // self._world_size
        return [
            [(epoch, place) for place in range(start, start + share)]
            for step in range(start_batch, self.batches_per_epoch)
            for start in [step * self.batch_size + self._rank * share]
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
        for batch in map(_receive, self._loader):
            self.unreadable.update(batch.unreadable)
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
    pinned: bool = False,
) -> TrainingBatches:
    """Training batches of a dataset, reproducible bit for bit.

    Args:
        dataset: the images; at least one.
        batch_size: images per step over all processes; each gets ``batch_size / world_size``.
        seed: decides the order of the images and the augmentation of each.
        preset: augmentation, see :func:`~aploss.data.augment.training_transforms`.
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
        An object whose ``epoch(number, start_batch=0)`` and ``endless(first_batch=0)`` generate :class:`Batch` objects.

    Raises:
        ConfigError: invalid settings.
        DataError: the dataset is empty.
    """
    kind = AugmentedSamples if features is None else partial(FeatureSamples, features=features)
    samples = kind(dataset, seed=seed, preset=preset, size=size)
    return TrainingBatches(samples, batch_size, workers, rank, world_size, skip_unreadable, pinned)


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
        batch_size: images per batch of this process; the last batch may be smaller.
        workers: processes that read images, 0 for none.
        rank: number of this process.
        world_size: number of processes; each gets every world_size-th image.
        skip_unreadable: leave out unreadable images and record them in ``unreadable``, instead of raising an error.

    Returns:
        An iterable of :class:`Batch` objects that can be iterated any number of times.

    Raises:
        ConfigError: invalid settings.
        DataError: the dataset is empty, or, while iterating, an image cannot be read.
    """
    _check_settings(len(dataset), batch_size, workers, rank, world_size)
    indices = range(rank, len(dataset), world_size)
    plan = [list(indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)]
    return EvaluationBatches(
        _data_loader(partial(_read_evaluation_batch, dataset, skip=skip_unreadable), plan, workers)
    )


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
    """Hashes several numbers into one 64-bit seed, so that neighbours are independent."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def _one_ahead(batches: Generator[T]) -> Generator[T]:
    """The same endless batches; a thread fetches the next one while the current one is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="aploss-batches") as thread:
        batch = next(batches)  # in this thread, because it starts the workers
        while True:
            coming = thread.submit(next, batches)
            yield batch
            batch = coming.result()


# --- from a worker to the training process --------------------------------------------------------


class _Batches(Dataset[Batch | str]):
    """Reads a whole batch by its keys.

    An error raised in a worker reaches the user as a page of that worker's traceback. Its message is returned instead,
    and raised in the training process.
    """

    def __init__(self, read: Callable[[Any], Batch]) -> None:
        self.read = read

    def __getitem__(self, keys: Any) -> Batch | str:
        try:
            batch = self.read(keys)
        except DataError as error:
            return str(error)
        # Every tensor needs a file handle of its own in transit, arrays do not.
        arrays = [
            {key: value.numpy() if isinstance(value, Tensor) else value for key, value in target.items()}
            for target in batch.targets
        ]
        return batch._replace(targets=arrays)


def _receive(batch: Batch | str, *, pinned: bool = False) -> Batch:
    """Scales images to [0, 1] or pins them, and makes targets tensors again; raises an error that was returned."""
    if isinstance(batch, str):
        raise DataError(batch)
    if pinned:
        images: Any = batch.images.pin_memory()
    else:
        images = list(map(_to_unit, batch.images)) if isinstance(batch.images, list) else _to_unit(batch.images)
    targets = [
        {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in target.items()}
        for target in batch.targets
    ]
    return batch._replace(images=images, targets=targets)


def _data_loader(read: Callable[[Any], Batch], plan: Iterable[Any], workers: int) -> "DataLoader[Any]":
    return DataLoader(
        _Batches(read),
        sampler=plan,
        batch_size=None,  # an item of the dataset is a batch
        num_workers=workers,
        worker_init_fn=_ignore_signals,
        collate_fn=_identity,
        prefetch_factor=PREFETCH if workers else None,
        generator=torch.Generator(),  # otherwise it would draw from the caller's random state
    )


def _identity(batch: Any) -> Any:
    return batch


def _ignore_signals(worker: int) -> None:
    """Batch systems send SIGTERM to all processes: the main process saves, then ends its workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _read_training_batch(samples: AugmentedSamples, keys: list[Key], *, skip: bool) -> Batch:
    """Reads the samples at (epoch, position); with ``skip``, the following ones replace unreadable ones."""
    read, indices, unreadable = [], [], dict[int, str]()
    for epoch, place in keys:
        order = samples.order(epoch)
        for step in range(min(len(order), MAX_REPLACEMENTS)):
            index = order[(place + step) % len(order)]
            try:
                read.append(samples[epoch, index])
                indices.append(index)
                break
            except DataError as error:
                if not skip:
                    raise
                unreadable[index] = str(error)
        else:
            raise DataError(f"{unreadable[order[place]]} (and {step} images after it)")
    return Batch(torch.stack([image for image, _ in read]), [target for _, target in read], indices, unreadable)


def _read_evaluation_batch(dataset: DetectionDataset, indices: list[int], *, skip: bool) -> Batch:
    """Reads the images; with ``skip``, without the unreadable ones."""
    read, found, unreadable = [], [], dict[int, str]()
    for index in indices:
        try:
            read.append(dataset[index])
            found.append(index)
        except DataError as error:
            if not skip:
                raise
            unreadable[index] = str(error)
    return Batch([image for image, _ in read], [target for _, target in read], found, unreadable)


def _to_unit(image: Tensor) -> Tensor:
    if image.is_floating_point():  # features
        return image
    # By numpy: torch would start a second pool of threads in the prefetching thread.
    return torch.from_numpy(np.divide(image.numpy(), 255, dtype=np.float32))
