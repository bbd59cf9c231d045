"""Reading image files as upright 8-bit RGB tensors, and inspecting them for problems."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from aploss.data.problems import KINDS, Effect, Problem
from aploss.errors import DataError

# Only formats that Pillow decodes itself: others (EPS) start external programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "JPEG2000")

EXTENSIONS = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"), ("JPEG", "MPO")),
    **dict.fromkeys((".png", ".apng"), ("PNG",)),
    **dict.fromkeys((".bmp", ".dib"), ("BMP",)),
    **dict.fromkeys((".tif", ".tiff"), ("TIFF",)),
    **dict.fromkeys((".ppm", ".pgm", ".pbm", ".pnm"), ("PPM",)),
    **dict.fromkeys((".jp2", ".j2k"), ("JPEG2000",)),
    ".webp": ("WEBP",),
    ".gif": ("GIF",),
}

# Pillow warns above this: about a gigabyte as float RGB.
MAX_PIXELS = 89_478_485

_ROTATING_ORIENTATIONS = (5, 6, 7, 8)  # EXIF values that exchange width and height
_EXIF_ORIENTATION = 0x0112
_TINY_PIXELS = 16


class ImageError(DataError):
    """An image file that cannot be used.

    Constructed from the message alone, so that it can be pickled.

    Attributes:
        kind: a key of :data:`problems.KINDS`.
        detail: the message without the path.
    """

    kind = "unreadable-image"
    detail = ""

    @classmethod
    def of(cls, kind: str, path: str | Path, detail: str) -> "ImageError":
        """The error for a file."""
        assert kind in KINDS, kind
        error = cls(f"{path}: {detail}")
        error.kind, error.detail = kind, detail
        return error


class ImageHeader(NamedTuple):
    """Properties of an image file that are known without decoding it."""

    size: tuple[int, int]  # (width, height), upright
    stored_size: tuple[int, int]  # (width, height), before the EXIF rotation
    format: str
    frames: int


def read_header(path: str | Path) -> ImageHeader:
    """Size and format of an image, without decoding it.

    Raises:
        ImageError: the file is missing, not an image, or has more than `MAX_PIXELS` pixels.
    """
    with _opened(path) as image:
        # Photographs of some phones contain a second frame for depth, which is not worth a problem.
        frames = 1 if image.format == "MPO" else int(getattr(image, "n_frames", 1))
        return ImageHeader(_upright_size(image), image.size, str(image.format), frames)


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
    """
    with _opened(path) as image:
        annotated_as_stored = image.size == size != _upright_size(image)
        if _orientation(image) != 1 and not annotated_as_stored:
            image = ImageOps.exif_transpose(image)
        if size is not None and image.size != size:
            raise _size_mismatch(path, size, image.size)
        pixels = np.array(to_rgb(image))  # [H, W, 3]
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _size_mismatch(path: str | Path, annotated: tuple[int, int], found: tuple[int, int]) -> ImageError:
    sizes = f"the annotation says {annotated[0]}x{annotated[1]} pixels, the file has {found[0]}x{found[1]}"
    return ImageError.of("size-mismatch", path, f"{sizes}; correct the annotation or the image")


@contextmanager
def _opened(path: str | Path) -> Iterator[Image.Image]:
    """Opens an image lazily and converts any error of Pillow into an :class:`ImageError`."""
    try:
        if not os.path.isfile(path):  # noqa: PTH113 - called for every sample, Path is slower
            if os.path.exists(path):  # noqa: PTH110
                raise ImageError.of("image-not-a-file", path, "not a file but a folder or device")
            raise ImageError.of("missing-image", path, "no such image file")
        with Image.open(path, formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise _too_large(path, f"{image.width}x{image.height} pixels")
            yield image
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise _too_large(path, str(error)) from None
    except UnidentifiedImageError:
        if os.path.getsize(path) == 0:  # noqa: PTH202
            raise ImageError.of("empty-image", path, "the image file is empty") from None
        raise ImageError.of("unreadable-image", path, f"not an image ({', '.join(_FORMATS)})") from None
    except (OSError, SyntaxError, ValueError, EOFError, MemoryError, IndexError, KeyError) as error:
        raise ImageError.of("truncated-image", path, f"damaged image: {error}") from None


def _too_large(path: str | Path, found: str) -> ImageError:
    detail = f"refused as a decompression bomb: {found}, at most {MAX_PIXELS:,} pixels are read"
    return ImageError.of("image-too-large", path, detail)


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


class Inspection(NamedTuple):
    """The problems of one image."""

    problems: tuple[Problem, ...]
    digest: str  # of the file's content; empty if it was not read

    @property
    def usable(self) -> bool:
        """Whether training can read the image."""
        return all(problem.effect is Effect.KEPT for problem in self.problems)


def inspect_image(path: Path, *, name: str, size: tuple[int, int], decode: bool) -> Inspection:
    """Looks for problems of an image file.

    Args:
        path: the file.
        name: its name in messages.
        size: the annotated (width, height).
        decode: whether to decode the whole file, which finds damaged and duplicate images, or only its header.
    """
    digest = ""
    problems = []
    try:
        header = read_header(path)
        if size not in (header.size, header.stored_size):
            raise _size_mismatch(path, size, header.size)
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
        problems.append(Problem("several-frames", name, f"{header.frames} frames, the first is used"))
    if size != header.size:
        message = f"annotated as stored, {size[0]}x{size[1]}, without its EXIF rotation"
        problems.append(Problem("rotated-image", name, message))
    if min(size) < _TINY_PIXELS:
        problems.append(Problem("tiny-image", name, f"{size[0]}x{size[1]} pixels"))
    return Inspection(tuple(problems), digest)
