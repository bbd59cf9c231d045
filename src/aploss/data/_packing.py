"""How samples travel from the processes that prepare them: compact, and errors as one line."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors

from aploss.data.dataset import Sample
from aploss.errors import DataError

__all__ = ["Batch", "Guarded", "Key", "KeyedSamples", "pack", "pack_list", "unpack"]

OBJECT_FIELDS = ("boxes", "labels", "difficult", "crowd")

Key = tuple[int, int]  # epoch, index


class KeyedSamples(Protocol):
    """Anything that gives a sample for (epoch, index)."""

    def __getitem__(self, key: Key, /) -> Sample: ...


class Batch(NamedTuple):
    """Images in [0, 1] as float32, their targets, and their indices in the dataset.

    In training ``images`` is one tensor [B, 3, H, W]; in evaluation it is a list of [3, h, w],
    each of its own size.
    """

    images: Any
    targets: list[dict[str, Any]]
    indices: list[int]


class Guarded(Dataset[tuple[int, Sample] | DataError]):
    """Samples with their index; hands an unreadable image on as a value.

    An error raised in a worker reaches the user as a page of that worker's traceback; one that is
    handed on can be raised again as the one line it is.
    """

    def __init__(self, samples: KeyedSamples) -> None:
        self.samples = samples

    def __getitem__(self, key: Key) -> tuple[int, Sample] | DataError:
        try:
            return key[1], self.samples[key]
        except DataError as error:
            return DataError(str(error))  # a subclass may not survive the way between processes


class _Packed(NamedTuple):
    """A batch on its way from a worker: images as bytes, targets as arrays.

    Each tensor would need a file handle of its own on the way; arrays travel together.
    """

    images: torch.Tensor | list[torch.Tensor]
    targets: list[dict[str, Any]]
    indices: list[int]


def pack_list(samples: Sequence[tuple[int, Sample] | DataError]) -> _Packed | DataError:
    """Collects samples whose images differ in size, or the first error among them."""
    images, targets, indices = [], [], []
    for sample in samples:
        if isinstance(sample, DataError):
            return sample
        index, (image, target) = sample
        images.append(image.as_subclass(torch.Tensor))
        arrays = {field: target[field].numpy() for field in OBJECT_FIELDS}
        targets.append({**arrays, "image_id": target["image_id"]})
        indices.append(index)
    return _Packed(images, targets, indices)


def pack(samples: Sequence[tuple[int, Sample] | DataError]) -> _Packed | DataError:
    """Like :func:`pack_list` for images of one size, which become one tensor [B, 3, H, W]."""
    packed = pack_list(samples)
    if isinstance(packed, DataError):
        return packed
    return packed._replace(images=torch.stack(list(packed.images)))


def unpack(packed: _Packed | DataError) -> Batch:
    """Turns what arrived into tensors, images into [0, 1], and an error into a raised one."""
    if isinstance(packed, DataError):
        # A new one: an error raised from a variable of its own frame keeps that frame, and with it
        # the loader's workers, alive until the garbage collector comes.
        raise DataError(str(packed))
    if isinstance(packed.images, torch.Tensor):
        images: Any = _to_unit(packed.images)
    else:
        images = [_to_unit(image) for image in packed.images]
    targets = [
        _target(target, tuple(image.shape[-2:]))
        for target, image in zip(packed.targets, images, strict=True)
    ]
    return Batch(images, targets, packed.indices)


def _to_unit(image: torch.Tensor) -> torch.Tensor:
    # By numpy: a thread beside training would start a second set of torch's threads.
    return torch.from_numpy(np.divide(image.numpy(), 255, dtype=np.float32))


def _target(packed: dict[str, Any], canvas_size: tuple[int, int]) -> dict[str, Any]:
    target = {field: torch.from_numpy(packed[field]) for field in OBJECT_FIELDS}
    boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=canvas_size)
    return {**target, "boxes": boxes, "image_id": packed["image_id"]}
