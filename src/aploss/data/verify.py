"""Every image of a dataset opened once, before training meets it."""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from aploss.data.dataset import DetectionDataset
from aploss.data.images import EXTENSIONS, ImageError, read_header, read_image, size_mismatch
from aploss.data.problems import Effect, Problem

__all__ = ["Inspection", "inspect_image", "inspect_images", "verify_images"]

_TINY_PIXELS = 16
Progress = Callable[[int, int], None]


class Inspection(NamedTuple):
    """What was found about one image."""

    problems: tuple[Problem, ...]
    digest: str  # of the file's content; empty where it was not read

    @property
    def usable(self) -> bool:
        """Whether training can read the image."""
        return all(problem.effect is Effect.KEPT for problem in self.problems)


def verify_images(
    dataset: DetectionDataset, *, decode: bool = True, progress: Progress | None = None
) -> DetectionDataset:
    """Leaves out images that cannot be read or whose size is not the annotated one.

    Args:
        dataset: Every image of it is read once, in several threads.
        decode: Whether to decode the images, which finds damaged ones too, or read their headers.
        progress: Called with (images done, images in all).

    Returns:
        The dataset with the usable images; what was left out is in its problems.
    """
    inspections = list(inspect_images(dataset, decode=decode, progress=progress))
    kept = [i for i, inspection in enumerate(inspections) if inspection.usable]
    if len(kept) == len(dataset):
        return dataset
    verified = dataset.subset(kept)
    found = (problem for inspection in inspections for problem in inspection.problems)
    verified.problems += [problem for problem in found if problem.effect is not Effect.KEPT]
    return verified


def inspect_images(
    dataset: DetectionDataset, *, decode: bool = True, progress: Progress | None = None
) -> Iterator[Inspection]:
    """Inspects the images of a dataset in order.

    Args:
        dataset: Where they are.
        decode: Whether to read the whole file (finds damage and equal files) or the header only.
        progress: Called with (images done, images in all).
    """
    total = len(dataset)

    def inspect(index: int) -> Inspection:
        return inspect_image(
            dataset.image_path(index),
            name=dataset.relative_path(index),
            size=dataset.image_size(index),
            decode=decode,
        )

    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        indices = iter(range(total))
        pending = [pool.submit(inspect, i) for i in islice(indices, 4 * workers)]
        for done in range(1, total + 1):
            result = pending.pop(0).result()
            pending += [pool.submit(inspect, i) for i in islice(indices, 1)]
            if progress is not None:
                progress(done, total)
            yield result


def inspect_image(path: Path, *, name: str, size: tuple[int, int], decode: bool) -> Inspection:
    """Looks for everything that can be wrong with an image file.

    Args:
        path: The file.
        name: What to call it in messages.
        size: The annotated (width, height).
        decode: See :func:`inspect_images`.
    """
    digest = ""
    problems = []
    try:
        header = read_header(path)
        if size not in (header.size, header.stored_size):
            raise ImageError.of("size-mismatch", path, size_mismatch(size, header.size))
        if decode:
            pixels = read_image(path, size=size)
            digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            if bool((pixels == pixels[:, :1, :1]).all()):
                problems.append(Problem("blank-image", name, "every pixel has the same colour"))
    except ImageError as error:
        return Inspection((Problem(error.kind, name, error.detail),), digest)
    if header.format not in EXTENSIONS.get(path.suffix.lower(), ()):
        problems.append(Problem("wrong-extension", name, f"contains a {header.format} image"))
    if header.frames > 1:
        problems.append(
            Problem("several-frames", name, f"{header.frames} frames, the first counts")
        )
    if size != header.size:
        message = f"annotated as stored, {size[0]}x{size[1]}, not as its EXIF rotation shows it"
        problems.append(Problem("rotated-image", name, message))
    if min(size) < _TINY_PIXELS:
        problems.append(Problem("tiny-image", name, f"{size[0]}x{size[1]} pixels"))
    return Inspection(tuple(problems), digest)
