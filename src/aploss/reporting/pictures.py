"""Boxes with captions on a picture, and pictures as data for a page. PIL and NumPy alone.

Also for others: the pictures of ``aploss predict`` and ``aploss data show`` are drawn with
:func:`draw_boxes`, so that boxes look the same in all of them.
"""

import base64
import io
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["crop_around", "data_uri", "draw_boxes", "thumbnail"]


def draw_boxes(
    image: Image.Image,
    boxes: Sequence[Sequence[float]] | np.ndarray,
    *,
    captions: Sequence[str] | None = None,
    colours: Sequence[str] | str = "#0072b2",
    dashed: bool = False,
    line_width: int | None = None,
) -> Image.Image:
    """Draw boxes on a copy of a picture.

    Each line has a thin dark and light edge, so that it is seen on any background. Captions stand
    above their box, or inside it where there is no room, and always within the picture.

    Args:
        image: any mode; the result is RGB.
        boxes: [n, 4] xyxy in the picture's pixels; what is outside or not finite is not drawn.
        captions: one text per box (empty for none), or None for no text at all.
        colours: one colour per box as ``#rrggbb``, or one for all.
        dashed: dashed lines, our sign for ground truth.
        line_width: in pixels; by default it grows with the picture.

    Returns:
        A new picture of the same size.

    Raises:
        ValueError: when the numbers of boxes, captions and colours differ.

    Example:
        >>> picture = Image.new("RGB", (64, 48), "white")
        >>> draw_boxes(picture, [[8, 8, 40, 40]], captions=["cat 0.92"], colours="#d55e00").size
        (64, 48)
    """
    corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    count = len(corners)
    all_colours = [colours] * count if isinstance(colours, str) else list(colours)
    texts = [""] * count if captions is None else list(captions)
    if len(all_colours) != count or len(texts) != count:
        raise ValueError(
            f"{count} boxes need as many colours and captions, "
            f"got {len(all_colours)} colours and {len(texts)} captions"
        )
    canvas = image.convert("RGB")
    if canvas is image:
        canvas = image.copy()
    pen = ImageDraw.Draw(canvas)
    root = math.sqrt(max(canvas.size))  # larger pictures have larger letters, but not in proportion
    width = line_width or max(2, round(root / 7))
    shown = [
        (box, colour, text)
        for box, colour, text in zip(corners, all_colours, texts, strict=True)
        if _is_visible(box, canvas.size)
    ]
    for box, colour, _ in shown:
        _draw_box(pen, box, colour, width, canvas.size, dashed=dashed)
    font = _font(max(12, round(0.68 * root)))
    # Captions last: a box drawn later must not run through the text of an earlier one.
    for box, colour, text in shown:
        if text:
            _draw_caption(pen, box, text, colour, font, canvas.size)
    return canvas


def _is_visible(box: np.ndarray, size: tuple[int, int]) -> bool:
    x1, y1, x2, y2 = box
    return bool(np.isfinite(box).all() and x1 <= size[0] and y1 <= size[1] and x2 >= 0 and y2 >= 0)


def _draw_box(
    pen: ImageDraw.ImageDraw,
    box: np.ndarray,
    colour: str,
    width: int,
    size: tuple[int, int],
    *,
    dashed: bool,
) -> None:
    x1, y1, x2, y2 = _near(box, size, width)
    corners = [(x1, y1), (x2, y1), (x2, y2), (x1, y2), (x1, y1)]
    sides = list(itertools.pairwise(corners))
    # Under dashes the contrast fills the gaps; under a solid line it is an edge on both sides.
    for start, end in sides:
        pen.line([start, end], fill=_contrasting(colour), width=width if dashed else width + 2)
    for start, end in sides:
        pieces = _dashes(start, end, length=max(4, 3 * width)) if dashed else [(start, end)]
        for piece in pieces:
            pen.line(piece, fill=colour, width=width)


def _near(box: np.ndarray, size: tuple[int, int], width: int) -> tuple[int, int, int, int]:
    """The box in whole pixels. A side on the picture's edge is moved in so far that it is seen;
    one further out is outside, and stays so."""
    lengths = np.array([size[0], size[1], size[0], size[1]], dtype=np.float64)
    corners = np.clip(np.round(box), -64.0, lengths + 64)
    inset = width // 2
    at_start = (corners > -3) & (corners < inset)
    at_end = (corners > lengths - 1 - inset) & (corners < lengths + 3)
    corners = np.where(at_start, inset, np.where(at_end, lengths - 1 - inset, corners))
    x1, y1, x2, y2 = (int(value) for value in corners)
    return x1, y1, max(x1, x2), max(y1, y2)


def _dashes(
    start: tuple[int, int], end: tuple[int, int], *, length: int
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    first, last = np.array(start, float), np.array(end, float)
    distance = float(np.abs(last - first).sum())  # sides are parallel to the axes
    steps = max(1, round(distance / length))
    points = first + (last - first) * np.arange(steps + 1)[:, None] / steps
    pieces = [(tuple(points[k]), tuple(points[k + 1])) for k in range(0, steps, 2)]
    return [((a[0], a[1]), (b[0], b[1])) for a, b in pieces]


def _draw_caption(
    pen: ImageDraw.ImageDraw,
    box: np.ndarray,
    text: str,
    colour: str,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    size: tuple[int, int],
) -> None:
    text = " ".join(text.split())
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    width, height = right - left + 6, bottom - top + 5
    x = min(max(0, round(float(box[0]))), max(0, size[0] - round(width)))
    above = round(float(box[1])) - round(height)
    y = above if above >= 0 else min(max(0, round(float(box[1]))), max(0, size[1] - round(height)))
    pen.rectangle([x, y, x + width, y + height], fill=colour)
    pen.text((x + 3 - left, y + 2 - top), text, fill=_contrasting(colour), font=font)


@lru_cache(maxsize=16)
def _font(pixels: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """DejaVu Sans, which comes with matplotlib and knows most alphabets."""
    try:
        import matplotlib

        path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
        return ImageFont.truetype(str(path), pixels)
    except (ImportError, OSError):
        return ImageFont.load_default(pixels)


def _contrasting(colour: str) -> str:
    """Black or white, whichever is easier to read on ``colour``."""
    channels = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ np.array([0.2126, 0.7152, 0.0722]))
    return "#000000" if luminance > 0.18 else "#ffffff"


def thumbnail(image: Image.Image, longest: int = 480) -> tuple[Image.Image, float]:
    """The picture with its longer side at most ``longest``; small ones up to three times larger.

    Returns:
        The picture and the factor by which boxes must be multiplied.

    Example:
        >>> small, factor = thumbnail(Image.new("RGB", (1000, 500)), longest=500)
        >>> small.size, factor
        ((500, 250), 0.5)
    """
    factor = min(longest / max(image.size), 3.0)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    method = Image.Resampling.LANCZOS if factor < 1 else Image.Resampling.BICUBIC
    return (image if size == image.size else image.resize(size, method)), factor


def crop_around(
    image: Image.Image, box: Sequence[float] | np.ndarray, *, context: float = 0.6
) -> tuple[Image.Image, tuple[int, int]]:
    """The part of a picture around a box, with ``context`` times its longer side on every side.

    Returns:
        The crop and its left upper corner (x, y) in the picture.

    Example:
        >>> crop, corner = crop_around(Image.new("RGB", (100, 100)), [40, 40, 60, 60], context=0.5)
        >>> crop.size, corner
        ((40, 40), (30, 30))
    """
    x1, y1, x2, y2 = (float(value) for value in box)
    margin = context * max(x2 - x1, y2 - y1, 8.0)
    left, top = max(0, int(x1 - margin)), max(0, int(y1 - margin))
    right = min(image.width, int(np.ceil(x2 + margin)))
    bottom = min(image.height, int(np.ceil(y2 + margin)))
    left, top = min(left, image.width - 1), min(top, image.height - 1)
    return image.crop((left, top, max(right, left + 1), max(bottom, top + 1))), (left, top)


def data_uri(image: Image.Image, *, quality: int = 82) -> str:
    """The picture as a ``data:`` address: PNG when that is small, else JPEG.

    Example:
        >>> data_uri(Image.new("RGB", (4, 4)))[:22]
        'data:image/png;base64,'
    """
    picture = image.convert("RGB")
    kind = "png" if picture.width * picture.height <= 64 * 64 else "jpeg"
    buffer = io.BytesIO()
    picture.save(buffer, format=kind, quality=quality, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
