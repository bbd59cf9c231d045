"""Reading image files as upright 8-bit RGB tensors, and inspecting them for problems."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from aploss.data.folder import Problem, ProblemError

if TYPE_CHECKING:
    from aploss.data.annotations import DetectionDataset

T = TypeVar("T")
U = TypeVar("U")
Progress = Callable[[int, int], None]  # (images done, total)

# Only formats that Pillow decodes itself: others (EPS) start external programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "JPEG2000")

# Pillow warns above this: about a gigabyte as float RGB.
MAX_PIXELS = 89_478_485

_ROTATING_ORIENTATIONS = (5, 6, 7, 8)  # EXIF values that exchange width and height
_EXIF_ORIENTATION = 0x0112


class ImageError(ProblemError):
    """An image file that cannot be used; ``problem`` has its kind, path and reason."""


def read_sizes(path: str | Path) -> tuple[tuple[int, int], tuple[int, int]]:
    """(width, height) of an image, upright and as stored, without decoding it; ImageError as in :func:`read_image`."""
    with _opened(path) as image:
        return _upright_size(image), image.size


def read_image(path: str | Path, *, size: tuple[int, int] | None = None) -> Tensor:
    """Reads an image file as RGB.

    Grey, palette, CMYK and YCbCr images are converted; 16-bit and float images are scaled to 8 bits; transparent parts
    become white; the first of several frames is used; the image is rotated upright according to its EXIF data.

    Args:
        path: the file.
        size: the annotated (width, height). If it matches the image as stored but not the upright one, the annotation
            ignores the EXIF rotation, and so does this function.

    Returns:
        uint8 tensor [3, height, width].

    Raises:
        ImageError: the file cannot be read, or its size is not `size`.

    Example:
        >>> Image.new("L", (64, 48)).save("grey.png")
        >>> read_image("grey.png").shape
        torch.Size([3, 48, 64])
    """
    with _opened(path) as image:
        annotated_as_stored = image.size == size != _upright_size(image)
        if _orientation(image) != 1 and not annotated_as_stored:
            image = ImageOps.exif_transpose(image)
        if size is not None and image.size != size:
            raise size_mismatch(path, size, image.size)
        pixels = np.array(to_rgb(image))  # [H, W, 3]
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def size_mismatch(path: str | Path, annotated: tuple[int, int], found: tuple[int, int]) -> ImageError:
    """The error for an image of another size than annotated."""
    sizes = f"the annotation says {annotated[0]}x{annotated[1]} pixels, the file has {found[0]}x{found[1]}"
    return ImageError("size-mismatch", str(path), f"{sizes}; correct the annotation or the image")


@contextmanager
def _opened(path: str | Path) -> Iterator[Image.Image]:
    """Opens an image lazily and converts any error of Pillow into an :class:`ImageError`."""

    def unreadable(reason: str) -> ImageError:
        return ImageError("unreadable-image", str(path), reason)

    try:
        if not os.path.isfile(path):  # noqa: PTH113 - called for every sample, Path is slower
            if os.path.exists(path):  # noqa: PTH110
                raise unreadable("not a file but a folder or device")
            raise ImageError("missing-image", str(path), "no such image file")
        with Image.open(path, formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            yield image
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise unreadable(f"refused as a decompression bomb: it has more than {MAX_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise unreadable(f"empty, or not an image (expected {', '.join(_FORMATS)})") from None
    except (OSError, SyntaxError, ValueError, EOFError, MemoryError, IndexError, KeyError) as error:
        raise unreadable(f"damaged image: {error}") from None


def _upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    rotated = _orientation(image) in _ROTATING_ORIENTATIONS
    return (height, width) if rotated else (width, height)


def _orientation(image: Image.Image) -> int:
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # Pillow would decode the image to look for EXIF data behind its pixels
    return int(image.getexif().get(_EXIF_ORIENTATION, 1))


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image of any mode to three channels of eight bits."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return _eight_bit(image).convert("RGB")
    if image.mode in ("LA", "PA", "La", "RGBa", "RGBA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _eight_bit(image: Image.Image) -> Image.Image:
    """Scales by the range of the type, not of the image, so that grey levels of different images stay comparable."""
    values = np.array(image, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("NaN or infinite pixels")
    largest = 65535 if image.mode != "F" else 1 if values.max() <= 1 else 255
    values *= 255 / largest
    return Image.fromarray(np.clip(np.round(values), 0, 255).astype(np.uint8))


# --- all images of a dataset ----------------------------------------------------------------------


def inspect_images(dataset: "DetectionDataset", pixels: bool, progress: Progress | None = None) -> list[Problem]:
    """The problems of a dataset's image files, found in their headers, or by decoding their ``pixels``."""
    root = str(dataset.root)

    def inspect(index: int) -> Problem | None:
        name, size = dataset.image_paths[index], dataset.image_size(index)
        path = f"{root}/{name}"
        try:
            if pixels:
                read_image(path, size=size)
            elif size not in (sizes := read_sizes(path)):
                raise size_mismatch(path, size, sizes[0])
        except ImageError as error:
            return replace(error.problem, file=name, image=name)
        return None

    problems = []
    for done, problem in enumerate(map_in_threads(inspect, range(len(dataset))), start=1):
        problems += [problem] if problem else []
        if progress is not None:
            progress(done, len(dataset))
    return problems


def map_in_threads(function: Callable[[T], U], items: Sequence[T]) -> Iterator[U]:
    """Like ``map``, in a few threads; a task is many items, because one per item costs more than a file's header."""
    chunks = (items[start : start + 64] for start in range(0, len(items), 64))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for results in pool.map(lambda chunk: [function(item) for item in chunk], chunks):
            yield from results
