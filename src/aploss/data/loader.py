"""Batches for training and evaluation that do not depend on workers, processes or the past.

A training sample is a function of (seed, epoch, index) alone: each is drawn with its own random
state. So the same run gives the same batches with any number of workers, on one machine or many,
started afresh or in the middle of an epoch.
"""

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from aploss.data.annotations import DetectionDataset, Sample
from aploss.data.augment import OBJECT_FIELDS, training_transforms
from aploss.errors import ConfigError, DataError

__all__ = [
    "AugmentedSamples",
    "Batch",
    "EvaluationBatches",
    "TrainingBatches",
    "make_evaluation_loader",
    "make_training_loader",
]

PREFETCH = 4  # batches a worker prepares ahead: evens out slow images

Key = tuple[int, int]  # epoch, index


class Batch(NamedTuple):
    """Images in [0, 1] as float32, their targets, and their indices in the dataset.

    In training ``images`` is one tensor [B, 3, H, W]; in evaluation it is a list of [3, h, w],
    each of its own size. A target holds ``boxes`` (xyxy in the image's pixels, float32 [n, 4]),
    ``labels`` (int64 [n]), ``difficult`` and ``crowd`` (bool [n]) and ``image_id``.
    """

    images: Any
    targets: list[dict[str, Any]]
    indices: list[int]


class AugmentedSamples(Dataset[Sample]):
    """A dataset whose samples are augmented, each as (seed, epoch, index) alone decide.

    Args:
        dataset: the images.
        seed: not negative.
        preset: augmentation, see :func:`~aploss.data.augment.training_transforms`.
        size: side of the square that comes out, or (height, width).
    """

    def __init__(
        self, dataset: DetectionDataset, *, seed: int, preset: str, size: int | tuple[int, int]
    ) -> None:
        if seed < 0:
            raise ConfigError(f"the seed is {seed}: give 0 or more")
        self.dataset = dataset
        self.seed = seed
        self.transforms = training_transforms(preset, size)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Sample:
        """The sample of ``key = (epoch, index)``."""
        epoch, index = key
        image, target = self.dataset[index]
        with _own_randomness(self.seed, epoch, index):
            image, target = self.transforms(image, target)
        return image, target


class TrainingBatches:
    """Training data, one epoch at a time or without end; made by :func:`make_training_loader`.

    Each epoch visits the images once in its own order. Images that fill no whole batch are left
    out of that epoch; a set smaller than a batch is one batch.

    Args:
        samples: the augmented dataset.
        batch_size: images in a step over all processes.
        workers: processes that prepare batches, 0 for none.
        rank: number of this process.
        world_size: number of processes that share each batch.
    """

    def __init__(
        self,
        samples: AugmentedSamples,
        *,
        batch_size: int,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_settings(len(samples), batch_size, workers, rank, world_size)
        self.batch_size = min(batch_size, len(samples))
        if self.batch_size % world_size:
            raise ConfigError(
                f"a batch of {self.batch_size} images cannot be split evenly over {world_size} "
                f"processes: choose a multiple of {world_size}"
            )
        self.seed = samples.seed
        self.rank = rank
        self.world_size = world_size
        self._samples, self._workers = samples, workers

    @property
    def batches_per_epoch(self) -> int:
        """Steps in one epoch, the same for every process."""
        return len(self._samples) // self.batch_size

    def order(self, epoch: int) -> list[int]:
        """The indices of an epoch in the order of its steps, for all processes."""
        shuffle = torch.Generator().manual_seed(_mix(self.seed, epoch))
        return torch.randperm(len(self._samples), generator=shuffle).tolist()

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
            raise ConfigError(
                f"an epoch has {self.batches_per_epoch} batches: it cannot start at {start_batch}"
            )
        return self._load(self._keys(epoch, start_batch))

    def endless(self, first_batch: int = 0) -> Generator[Batch]:
        """The batches of one epoch after the other, prepared across their borders.

        With workers, the next batch is also brought over and unpacked while the last one is used:
        who asks for it does not wait. Close it to end the workers.

        Args:
            first_batch: where to start, counted from the beginning of the first epoch.

        Raises:
            DataError: while iterating, when an image cannot be read.
        """
        first_epoch, start_batch = divmod(first_batch, self.batches_per_epoch)
        later = itertools.count(first_epoch + 1)
        keys = itertools.chain(
            self._keys(first_epoch, start_batch),
            itertools.chain.from_iterable(map(self._keys, later)),
        )
        batches = self._load(keys)
        return _one_ahead(batches) if self._workers else batches

    def _load(self, keys: Iterable[list[Key]]) -> Generator[Batch]:
        loader = DataLoader(
            _Guarded(self._samples),
            batch_sampler=keys,
            num_workers=self._workers,
            collate_fn=_pack_stacked,
            prefetch_factor=PREFETCH if self._workers else None,
            generator=torch.Generator(),  # else it would draw from the caller's random state
        )
        for packed in loader:
            yield _unpack(packed)

    def _keys(self, epoch: int, start_batch: int = 0) -> list[list[Key]]:
        """What this process's batches of an epoch are made of."""
        order = self.order(epoch)
        share = self.batch_size // self.world_size
        return [
            [(epoch, index) for index in order[start : start + share]]
            for step in range(start_batch, self.batches_per_epoch)
            for start in [step * self.batch_size + self.rank * share]
        ]


class EvaluationBatches:
    """Every image once, unchanged and in order; made by :func:`make_evaluation_loader`."""

    def __init__(
        self,
        dataset: DetectionDataset,
        *,
        batch_size: int,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_settings(len(dataset), batch_size, workers, rank, world_size)
        indices = range(rank, len(dataset), world_size)
        plan = [
            [(0, index) for index in indices[start : start + batch_size]]
            for start in range(0, len(indices), batch_size)
        ]
        self._batches = len(plan)
        self._loader = DataLoader(
            _Guarded(dataset),
            batch_sampler=plan,
            num_workers=workers,
            collate_fn=_pack,
            generator=torch.Generator(),  # as above
        )

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        return (_unpack(packed) for packed in self._loader)


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
        world_size: number of processes; step by step, their batches make up the one that a
            single process would get.

    Returns:
        An object whose ``epoch(number, start_batch=0)`` and ``endless(first_batch=0)`` give
        :class:`Batch` after :class:`Batch`.

    Raises:
        ConfigError: for settings that cannot be.
        DataError: for an empty dataset.
    """
    samples = AugmentedSamples(dataset, seed=seed, preset=preset, size=size)
    return TrainingBatches(
        samples, batch_size=batch_size, workers=workers, rank=rank, world_size=world_size
    )


def make_evaluation_loader(
    dataset: DetectionDataset,
    *,
    batch_size: int,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> EvaluationBatches:
    """Evaluation batches: each image once, of its own size, in the dataset's order.

    Args:
        dataset: the images; at least one.
        batch_size: images in a batch of this process; the last batch may be smaller.
        workers: processes that read images, 0 for none.
        rank: number of this process.
        world_size: number of processes; each gets every world_size-th image.

    Returns:
        An iterable of :class:`Batch`, to be gone through any number of times.

    Raises:
        ConfigError: for settings that cannot be.
        DataError: for an empty dataset, and while iterating for an image that cannot be read.
    """
    return EvaluationBatches(
        dataset, batch_size=batch_size, workers=workers, rank=rank, world_size=world_size
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
    """One well-mixed 64-bit seed of several numbers, so that neighbours share nothing."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


@contextmanager
def _own_randomness(*numbers: int) -> Iterator[None]:
    """Random state of these numbers inside, the caller's again after; never touches a GPU."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_mix(*numbers))
        yield


def _one_ahead(batches: Generator[Batch]) -> Generator[Batch]:
    """The same batches without end; a thread takes the next one while the last one is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="aploss-batches") as thread:
        batch = next(batches)  # here, for the workers start with the first
        while True:
            coming = thread.submit(next, batches)
            yield batch
            batch = coming.result()


# --- the way from a worker ------------------------------------------------------------------------


class _Guarded(Dataset[tuple[int, Sample] | DataError]):
    """Samples with their index; hands an unreadable image on as a value.

    An error raised in a worker reaches the user as a page of that worker's traceback; one that is
    handed on can be raised again as the one line it is.
    """

    def __init__(self, samples: AugmentedSamples | DetectionDataset) -> None:
        self.samples = samples

    def __getitem__(self, key: Key) -> tuple[int, Sample] | DataError:
        try:
            if isinstance(self.samples, AugmentedSamples):
                return key[1], self.samples[key]
            return key[1], self.samples[key[1]]
        except DataError as error:
            return DataError(str(error))  # a subclass may not survive the way between processes


class _Packed(NamedTuple):
    """A batch on its way: images as bytes, the objects of all images in one tensor a field.

    Each tensor needs a file handle of its own on the way, so there are few.
    """

    images: Tensor | list[Tensor]
    boxes: Tensor  # [objects of all images, 4]
    fields: dict[str, Tensor]  # each [objects of all images]
    counts: list[int]  # objects of each image
    image_ids: list[int]
    indices: list[int]


def _pack(samples: Sequence[tuple[int, Sample] | DataError]) -> _Packed | DataError:
    """Collects samples whose images differ in size, or the first error among them."""
    images, targets, indices = [], [], []
    for sample in samples:
        if isinstance(sample, DataError):
            return sample
        index, (image, target) = sample
        images.append(image.as_subclass(Tensor))
        targets.append(target)
        indices.append(index)
    return _Packed(
        images,
        torch.cat([target["boxes"].as_subclass(Tensor) for target in targets]),
        {field: torch.cat([target[field] for target in targets]) for field in OBJECT_FIELDS},
        [len(target["labels"]) for target in targets],
        [target["image_id"] for target in targets],
        indices,
    )


def _pack_stacked(samples: Sequence[tuple[int, Sample] | DataError]) -> _Packed | DataError:
    """Like :func:`_pack` for images of one size, which become one tensor [B, 3, H, W]."""
    packed = _pack(samples)
    if isinstance(packed, DataError):
        return packed
    return packed._replace(images=torch.stack(list(packed.images)))


def _unpack(packed: _Packed | DataError) -> Batch:
    """Images into [0, 1], objects to their images, and an error into a raised one."""
    if isinstance(packed, DataError):
        # A new one: an error raised from a variable of its own frame keeps that frame, and with it
        # the loader's workers, alive until the garbage collector comes.
        raise DataError(str(packed))
    if isinstance(packed.images, Tensor):
        images: Any = _to_unit(packed.images)
    else:
        images = [_to_unit(image) for image in packed.images]
    columns = {"boxes": packed.boxes, **packed.fields}
    parts = {field: torch.split(column, packed.counts) for field, column in columns.items()}
    targets = [
        {**{field: parts[field][place] for field in parts}, "image_id": image_id}
        for place, image_id in enumerate(packed.image_ids)
    ]
    return Batch(images, targets, packed.indices)


def _to_unit(image: Tensor) -> Tensor:
    # By numpy: a thread beside training would start a second set of torch's threads.
    return torch.from_numpy(np.divide(image.numpy(), 255, dtype=np.float32))
