"""Boxes with captions on pictures, contact sheets, and pictures as data URIs.

``aploss predict``, ``aploss data show`` and the pages draw with these functions, so that boxes always look the same.
"""

import base64
import io
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageColor, ImageDraw, ImageFont

from aploss.plotting.plots import MUTED, PAPER, class_colour

READABLE = 256  # pixels of the longer side below which captions would hide the picture
GAP, CAPTION = 8, 12  # pixels of a contact sheet


def draw_boxes(
    image: Any,
    boxes: ArrayLike,
    labels: ArrayLike,
    class_names: Sequence[str],
    scores: ArrayLike | None = None,
    *,
    dashed: ArrayLike | None = None,
    largest: float = math.inf,
) -> Image.Image:
    """Returns a copy of an image with labelled boxes, each class in its own colour.

    Small images are enlarged to 256 pixels, so that captions are readable.

    Args:
        image: PIL image; array [H, W] or [H, W, 3]; or array or tensor [3, H, W]. Integers are 0..255, floats 0..1.
        boxes: [n, 4] xyxy in pixels of the image.
        labels: [n] class indices, from 0.
        class_names: name of each class.
        scores: [n], written after the class names; the best box is drawn on top.
        dashed: [n], boxes with dashed lines (such as difficult objects and crowds), drawn below the others.
        largest: shrink images whose longer side is longer, before drawing.

    Example:
        >>> grey = np.full((48, 64), 128, dtype=np.uint8)
        >>> draw_boxes(grey, [[8, 8, 40, 40]], [1], ("disc", "star"), [0.92]).size
        (256, 192)
    """
    picture = as_picture(image)
    factor = min(max(*picture.size, READABLE), largest) / max(picture.size)
    classes = np.asarray(labels, dtype=np.int64).reshape(-1)
    captions = [class_names[label] for label in classes.tolist()]
    if scores is not None:
        captions = [f"{name} {score:.2f}" for name, score in zip(captions, np.asarray(scores).tolist(), strict=True)]
    is_dashed = np.zeros(len(classes), bool) if dashed is None else np.asarray(dashed, bool)
    order = np.lexsort((np.zeros(len(classes)) if scores is None else np.asarray(scores), ~is_dashed))
    corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)[order] * factor
    captions, colours = [captions[row] for row in order], [class_colour(int(classes[row])) for row in order]
    dashes = is_dashed[order].tolist()
    return outline_boxes(resize(picture, factor), corners, captions=captions, colours=colours, dashed=dashes)


def outline_boxes(
    image: Image.Image, boxes: ArrayLike, *, captions: Sequence[str], colours: Sequence[str], dashed: Sequence[bool]
) -> Image.Image:
    """Draws boxes with arbitrary colours and captions on an RGB copy of a picture.

    Each line has a contrasting edge, so that it is visible on any background. Captions are placed above their box, or
    inside it if there is no room, and always within the picture. Boxes outside of it or not finite are not drawn.

    Args:
        image: picture in any mode.
        boxes: [n, 4] xyxy in pixels of the picture.
        captions: text of each box, empty for none.
        colours: colour of each box as ``#rrggbb``.
        dashed: whether each box has dashed lines, used for ground truth.
    """
    corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    canvas = image.convert("RGB")  # always a copy
    pen = ImageDraw.Draw(canvas)
    width = max(2, round(math.sqrt(max(canvas.size)) / 7))  # lines and letters grow with the picture's root
    inside = (corners[:, :2] <= canvas.size).all(1) & (corners[:, 2:] >= 0).all(1) & np.isfinite(corners).all(1)
    rows = list(itertools.compress(zip(corners, captions, colours, dashed, strict=True), np.asarray(inside)))
    for box, _, colour, is_dashed in rows:
        _draw_outline(pen, box, canvas.size, colour, width, dashed=is_dashed)
    # Captions last: a box drawn later must not cross the text of an earlier one.
    for box, caption, colour, _ in rows:
        if caption:
            _draw_caption(pen, box, caption, colour, canvas.size)
    return canvas


def contact_sheet(
    images: Sequence[Image.Image], captions: Sequence[str] | None = None, *, tile: int = READABLE
) -> Image.Image:
    """Arranges pictures on a nearly square sheet, each with a line of text below it.

    Args:
        images: at least one; scaled to fit, keeping their aspect ratio.
        captions: one line per image, cut to its width; None for no captions.
        tile: longer side of the pictures in pixels.

    Returns:
        The sheet; each row is as high as its highest picture.

    Raises:
        ValueError: if there are no images, or not as many captions as images.

    Example:
        >>> pages = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green", "blue")]
        >>> contact_sheet(pages, tile=100).size
        (224, 174)
    """
    if not images or (captions is not None and len(captions) != len(images)):
        raise ValueError(f"{len(images)} images and {len(captions or ())} captions for a sheet")
    columns = math.ceil(math.sqrt(len(images)))
    fitted = [resize(image, tile / max(image.size)) for image in images]
    texts = captions or [""] * len(images)
    heights = [max(one.height for one in fitted[k : k + columns]) for k in range(0, len(images), columns)]
    line = 0 if captions is None else CAPTION + 8
    size = (GAP + columns * (tile + GAP), GAP + sum(heights) + len(heights) * (line + GAP))
    sheet = Image.new("RGB", size, PAPER)
    for k, (picture, text) in enumerate(zip(fitted, texts, strict=True)):
        row, column = divmod(k, columns)
        x, y = GAP + column * (tile + GAP), GAP + sum(heights[:row]) + row * (line + GAP)
        sheet.paste(picture, (x + (tile - picture.width) // 2, y + (heights[row] - picture.height) // 2))
        ImageDraw.Draw(sheet).text((x, y + heights[row] + 3), _cut(text, tile), fill=MUTED, font=_font(CAPTION))
    return sheet


def as_picture(image: Any) -> Image.Image:
    """Converts a PIL image, array or tensor to an RGB picture; see :func:`draw_boxes`."""
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[0] == 3 and array.shape[2] != 3:
        array = array.transpose(1, 2, 0)
    if np.issubdtype(array.dtype, np.floating):
        array = np.round(np.clip(array, 0, 1) * 255)
    return Image.fromarray(np.ascontiguousarray(array, dtype=np.uint8)).convert("RGB")


def resize(image: Image.Image, factor: float) -> Image.Image:
    """Scales an image, to at least one pixel per side."""
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


def crop_around(image: Image.Image, box: ArrayLike, *, context: float = 0.8) -> tuple[Image.Image, tuple[int, int]]:
    """Crops a picture to a box and ``context`` times its longer side around it; also returns the upper left corner."""
    corners, size = np.asarray(box, dtype=np.float64).reshape(2, 2), np.array(image.size)
    margin = context * max(*(corners[1] - corners[0]), 8.0)
    left, top = np.clip(corners[0] - margin, 0, size - 1).astype(int).tolist()
    right, bottom = np.clip(np.ceil(corners[1] + margin), (left + 1, top + 1), size).astype(int).tolist()
    return image.crop((left, top, right, bottom)), (left, top)


def data_uri(image: Image.Image) -> str:
    """The picture as a data URI: PNG if it is small, JPEG otherwise."""
    picture = image.convert("RGB")
    kind = "png" if picture.width * picture.height <= 64 * 64 else "jpeg"
    picture.save(buffer := io.BytesIO(), format=kind, quality=82, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _draw_outline(
    pen: ImageDraw.ImageDraw, box: np.ndarray, size: tuple[int, int], colour: str, width: int, *, dashed: bool
) -> None:
    lengths, inset = np.array([*size, *size]), width // 2
    corners = np.clip(np.round(box), -64, lengths + 64)
    # Sides at the border are moved inside, to be visible; sides beyond it stay outside.
    near = (corners > -3) & (corners < lengths + 3)
    x1, y1, x2, y2 = map(int, np.where(near, np.clip(corners, inset, lengths - 1 - inset), corners))
    x2, y2 = max(x1, x2), max(y1, y2)
    sides = list(itertools.pairwise([(x1, y1), (x2, y1), (x2, y2), (x1, y2), (x1, y1)]))
    # The contrast fills the gaps of dashed lines, and is an edge on both sides of solid ones.
    for side in sides:
        pen.line(side, fill=_contrasting(colour), width=width if dashed else width + 2)
    for start, end in sides:
        count = max(1, round(math.dist(start, end) / max(4, 3 * width))) if dashed else 1
        points = np.linspace(start, end, count + 1).tolist()
        for first, last in itertools.islice(itertools.pairwise(points), 0, None, 2):
            pen.line([*first, *last], fill=colour, width=width)


def _draw_caption(pen: ImageDraw.ImageDraw, box: np.ndarray, text: str, colour: str, size: tuple[int, int]) -> None:
    text, font = " ".join(text.split()), _font(max(12, round(0.68 * math.sqrt(max(size)))))
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    width, height = right - left + 6, bottom - top + 5
    x = min(max(0, round(float(box[0]))), max(0, size[0] - round(width)))
    above = round(float(box[1])) - round(height)
    y = above if above >= 0 else min(max(0, round(float(box[1]))), max(0, size[1] - round(height)))
    pen.rectangle([x, y, x + width, y + height], fill=colour)
    pen.text((x + 3 - left, y + 2 - top), text, fill=_contrasting(colour), font=font)


def _cut(caption: str, width: int) -> str:
    """The caption of a sheet on one line, cut to ``width`` pixels."""
    line = " ".join(caption.split())
    while _font(CAPTION).getlength(line) > width:
        line = line[:-1]
    return line


@lru_cache(maxsize=16)
def _font(pixels: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which is installed with matplotlib and covers most alphabets."""
    import matplotlib

    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", pixels)


def _contrasting(colour: str) -> str:
    """Black or white, whichever is more readable on ``colour``."""
    return "#000000" if np.dot(ImageColor.getrgb(colour), (0.299, 0.587, 0.114)) > 100 else "#ffffff"
