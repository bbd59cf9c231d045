"""Boxes with captions on pictures, contact sheets, and pictures as data for a page.

PIL and NumPy alone. What ``aploss predict``, ``aploss data show`` and the pages show is drawn here, so that boxes look
the same in all of them.
"""

import base64
import io
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont

from aploss.plotting.style import INK, MUTED, PAPER, class_colour

READABLE = 256  # pixels of the longer side below which captions would hide the picture
GAP, CAPTION, TITLE = 8, 12, 17  # pixels of a contact sheet

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def draw_boxes(
    image: Any,
    boxes: ArrayLike,
    labels: Sequence[int] | NDArray[Any],
    class_names: Sequence[str],
    scores: Sequence[float] | NDArray[Any] | None = None,
    *,
    dashed: Sequence[bool] | NDArray[Any] | None = None,
    smallest: int = READABLE,
    largest: int | None = None,
) -> Image.Image:
    """Draws labelled boxes on a copy of an image, each class in its colour and with its name.

    Args:
        image: PIL image; array [H, W] or [H, W, 3]; or array or tensor [3, H, W]. Integers are 0..255, floats 0..1.
        boxes: [n, 4] xyxy in the image's pixels.
        labels: [n] classes, from 0.
        class_names: name of each class.
        scores: [n], shown behind the class names; drawn so that the best lies on top.
        dashed: [n], which boxes have dashed lines (such as difficult objects and crowds) and lie below the others.
        smallest: images whose longer side is below it are enlarged to it, for captions to be readable; 0 enlarges none.
        largest: images whose longer side is above it are made smaller before drawing, lines and captions are not;
            None keeps every size.

    Returns:
        A picture of the image's size, or as `smallest` and `largest` say.

    Example:
        >>> grey = np.full((48, 64), 128, dtype=np.uint8)
        >>> draw_boxes(grey, [[8, 8, 40, 40]], [1], ("disc", "star"), [0.92]).size
        (256, 192)
    """
    picture = as_picture(image)
    longer = max(picture.size)
    factor = min(max(longer, smallest), math.inf if largest is None else largest) / longer
    classes = np.asarray(labels, dtype=np.int64).reshape(-1)
    captions = [class_names[label] for label in classes.tolist()]
    if scores is not None:
        captions = [f"{name} {score:.2f}" for name, score in zip(captions, scores, strict=True)]
    broken = np.zeros(len(classes), bool) if dashed is None else np.asarray(dashed, bool)
    order = np.lexsort((np.zeros(len(classes)) if scores is None else np.asarray(scores), ~broken))
    corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * factor
    return outline_boxes(
        _resized(picture, factor),
        corners[order],
        captions=[captions[row] for row in order],
        colours=[class_colour(int(classes[row])) for row in order],
        dashed=broken[order],
    )


def outline_boxes(
    image: Image.Image,
    boxes: ArrayLike,
    *,
    captions: Sequence[str] | None = None,
    colours: Sequence[str] | str = "#0072b2",
    dashed: Sequence[bool] | NDArray[Any] | bool = False,
    line_width: int | None = None,
) -> Image.Image:
    """Draws boxes in any colours and with any captions on an RGB copy of a picture.

    Each line has a thin dark or light edge, so that it is seen on any background. Captions stand above their box, or
    inside it where there is no room, and always within the picture.

    Args:
        image: any mode.
        boxes: [n, 4] xyxy in the picture's pixels; what is outside or not finite is not drawn.
        captions: one text per box (empty for none), or None for no text at all.
        colours: one colour per box as ``#rrggbb``, or one for all.
        dashed: dashed lines, our sign for ground truth: one value per box, or one for all.
        line_width: in pixels; by default it grows with the picture.

    Raises:
        ValueError: when the numbers of boxes, captions, colours and dashes differ.
    """
    corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    count = len(corners)
    texts = [""] * count if captions is None else list(captions)
    all_colours = [colours] * count if isinstance(colours, str) else list(colours)
    broken = [dashed] * count if isinstance(dashed, bool) else list(dashed)
    if not len(texts) == len(all_colours) == len(broken) == count:
        raise ValueError(
            f"{count} boxes need as many colours and captions, got {len(all_colours)} colours and {len(texts)} captions"
        )
    canvas = image.convert("RGB")  # a copy, whatever the mode
    pen = ImageDraw.Draw(canvas)
    root = math.sqrt(max(canvas.size))  # larger pictures have larger letters, but not in proportion
    width = line_width or max(2, round(root / 7))
    inside = (corners[:, :2] <= canvas.size).all(1) & (corners[:, 2:] >= 0).all(1) & np.isfinite(corners).all(1)
    shown = np.flatnonzero(inside).tolist()
    for row in shown:
        box = _whole_pixels(corners[row], canvas.size, width)
        _draw_outline(pen, box, all_colours[row], width, dashed=bool(broken[row]))
    font = _font(max(12, round(0.68 * root)))
    # Captions last: a box drawn later must not run through the text of an earlier one.
    for row in shown:
        if texts[row]:
            _draw_caption(pen, corners[row], texts[row], all_colours[row], font, canvas.size)
    return canvas


def contact_sheet(
    images: Sequence[Image.Image],
    captions: Sequence[str] | None = None,
    *,
    columns: int | None = None,
    tile: int = READABLE,
    title: str | None = None,
) -> Image.Image:
    """Many pictures on one sheet, each with a line of text below it.

    Args:
        images: at least one; each is scaled to fit its place, its aspect ratio kept.
        captions: one line per image, cut off where too long; None for no lines.
        columns: pictures in a row; as many rows as columns, or one less, where not given.
        tile: longer side of the pictures, in pixels.
        title: a line above all.

    Returns:
        The sheet; a row is as high as its highest picture.

    Raises:
        ValueError: for no images, or another number of captions.

    Example:
        >>> pages = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green", "blue")]
        >>> contact_sheet(pages, columns=2, tile=100).size
        (224, 174)
    """
    if not images or (captions is not None and len(captions) != len(images)):
        raise ValueError(f"{len(images)} images and {len(captions or ())} captions for a sheet")
    columns = min(len(images), columns or math.ceil(math.sqrt(len(images))))
    fitted = [_resized(image, tile / max(image.size)) for image in images]
    texts = captions or [""] * len(images)
    rows = [range(k, min(k + columns, len(images))) for k in range(0, len(images), columns)]
    heights = [max(fitted[k].height for k in row) for row in rows]
    line = 0 if captions is None else CAPTION + 8
    head = 0 if title is None else TITLE + 14
    size = (GAP + columns * (tile + GAP), GAP + head + sum(heights) + len(rows) * (line + GAP))
    sheet = Image.new("RGB", size, PAPER)
    if title is not None:
        _write_line(sheet, title, (GAP, GAP), TITLE, INK, size[0] - 2 * GAP)
    y = GAP + head
    for row, height in zip(rows, heights, strict=True):
        for column, k in enumerate(row):
            x = GAP + column * (tile + GAP)
            sheet.paste(fitted[k], (x + (tile - fitted[k].width) // 2, y + (height - fitted[k].height) // 2))
            _write_line(sheet, texts[k], (x, y + height + 3), CAPTION, MUTED, tile)
        y += height + line + GAP
    return sheet


def as_picture(image: Any) -> Image.Image:
    """A PIL image, array or tensor as RGB picture; see :func:`draw_boxes` for what is taken."""
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[0] == 3 and array.shape[2] != 3:
        array = array.transpose(1, 2, 0)
    if np.issubdtype(array.dtype, np.floating):
        array = np.round(np.clip(array, 0, 1) * 255)
    return Image.fromarray(np.ascontiguousarray(array, dtype=np.uint8)).convert("RGB")


def thumbnail(image: Image.Image, longest: int = 480) -> tuple[Image.Image, float]:
    """The picture with its longer side ``longest``, but at most three times larger, and the factor for its boxes."""
    factor = min(longest / max(image.size), 3.0)
    return _resized(image, factor), factor


def crop_around(image: Image.Image, box: ArrayLike, *, context: float = 0.6) -> tuple[Image.Image, tuple[int, int]]:
    """The part of a picture around a box, with ``context`` times its longer side on every side, and its corner."""
    x1, y1, x2, y2 = np.asarray(box, dtype=np.float64).tolist()
    margin = context * max(x2 - x1, y2 - y1, 8.0)
    left = min(max(0, int(x1 - margin)), image.width - 1)
    top = min(max(0, int(y1 - margin)), image.height - 1)
    right = max(min(image.width, math.ceil(x2 + margin)), left + 1)
    bottom = max(min(image.height, math.ceil(y2 + margin)), top + 1)
    return image.crop((left, top, right, bottom)), (left, top)


def data_uri(image: Image.Image) -> str:
    """The picture as a ``data:`` address: PNG when that is small, else JPEG."""
    picture = image.convert("RGB")
    kind = "png" if picture.width * picture.height <= 64 * 64 else "jpeg"
    picture.save(buffer := io.BytesIO(), format=kind, quality=82, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _resized(image: Image.Image, factor: float) -> Image.Image:
    """The image enlarged or reduced, with at least one pixel per side."""
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


def _draw_outline(pen: ImageDraw.ImageDraw, box: tuple[int, ...], colour: str, width: int, *, dashed: bool) -> None:
    x1, y1, x2, y2 = box
    sides = list(itertools.pairwise([(x1, y1), (x2, y1), (x2, y2), (x1, y2), (x1, y1)]))
    # Under dashes the contrast fills the gaps; under a solid line it is an edge on both sides.
    for start, end in sides:
        pen.line([start, end], fill=_contrasting(colour), width=width if dashed else width + 2)
    for start, end in sides:
        for piece in _dashes(start, end, length=max(4, 3 * width)) if dashed else [(start, end)]:
            pen.line(piece, fill=colour, width=width)


def _whole_pixels(box: np.ndarray, size: tuple[int, int], width: int) -> tuple[int, int, int, int]:
    """The box in whole pixels. A side on the picture's edge is moved in, to be seen; one further out stays outside."""
    lengths = np.array([*size, *size], dtype=np.float64)
    corners = np.clip(np.round(box), -64.0, lengths + 64)
    inset = width // 2
    at_start = (corners > -3) & (corners < inset)
    at_end = (corners > lengths - 1 - inset) & (corners < lengths + 3)
    corners = np.where(at_start, inset, np.where(at_end, lengths - 1 - inset, corners))
    x1, y1, x2, y2 = map(int, corners)
    return x1, y1, max(x1, x2), max(y1, y2)


def _dashes(start: tuple[int, int], end: tuple[int, int], *, length: int) -> list[Any]:
    (x1, y1), (x2, y2) = start, end
    steps = max(1, round((abs(x2 - x1) + abs(y2 - y1)) / length))  # sides are parallel to the axes
    points = [(x1 + (x2 - x1) * k / steps, y1 + (y2 - y1) * k / steps) for k in range(steps + 1)]
    return list(itertools.pairwise(points))[::2]


def _draw_caption(
    pen: ImageDraw.ImageDraw, box: np.ndarray, text: str, colour: str, font: Font, size: tuple[int, int]
) -> None:
    text = " ".join(text.split())
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    width, height = right - left + 6, bottom - top + 5
    x = min(max(0, round(float(box[0]))), max(0, size[0] - round(width)))
    above = round(float(box[1])) - round(height)
    y = above if above >= 0 else min(max(0, round(float(box[1]))), max(0, size[1] - round(height)))
    pen.rectangle([x, y, x + width, y + height], fill=colour)
    pen.text((x + 3 - left, y + 2 - top), text, fill=_contrasting(colour), font=font)


def _write_line(sheet: Image.Image, text: str, place: tuple[int, int], height: int, colour: str, width: int) -> None:
    """Writes one line no wider than ``width`` pixels, its end cut off where necessary."""
    font = _font(height)
    text = " ".join(text.split())
    if font.getlength(text) > width:
        while text and font.getlength(text + "…") > width:
            text = text[:-1]
        text += "…"
    ImageDraw.Draw(sheet).text(place, text, fill=colour, font=font)


@lru_cache(maxsize=16)
def _font(pixels: int) -> Font:
    """DejaVu Sans, which comes with matplotlib and knows most alphabets."""
    try:
        import matplotlib

        return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", pixels)
    except (ImportError, OSError):
        return ImageFont.load_default(pixels)


def _contrasting(colour: str) -> str:
    """Black or white, whichever is easier to read on ``colour``."""
    channels = np.array(ImageColor.getrgb(colour)) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return "#000000" if linear @ (0.2126, 0.7152, 0.0722) > 0.18 else "#ffffff"
