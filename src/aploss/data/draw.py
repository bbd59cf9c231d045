"""Pictures of labelled or detected boxes, alone and as a contact sheet. NumPy and PIL alone.

Lines and captions come from :mod:`aploss.reporting.pictures`, so that boxes look the same on a
contact sheet, in predictions and in reports.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont

from aploss.reporting import pictures
from aploss.reporting.style import INK, MUTED, PAPER, class_colour

__all__ = ["as_picture", "contact_sheet", "draw_boxes"]

READABLE = 256  # pixels of the longer side below which captions would hide the picture
GAP, CAPTION, TITLE = 8, 12, 17  # pixels


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
        image: PIL image; array [H, W] or [H, W, 3]; or array or tensor [3, H, W]. Integers are
            0..255, floats 0..1.
        boxes: [n, 4] xyxy in the image's pixels.
        labels: [n] classes, from 0.
        class_names: name of each class.
        scores: [n], shown behind the class names; drawn so that the best lies on top.
        dashed: [n], which boxes have dashed lines (difficult objects and crowds, for instance).
        smallest: images whose longer side is below this are enlarged to it, for captions to be
            readable. 0 enlarges none.
        largest: images whose longer side is above this are made smaller before drawing, so that
            lines and captions keep their size. None keeps every size.

    Returns:
        A picture of the image's size, or as `smallest` and `largest` say.

    Example:
        >>> grey = np.full((48, 64), 128, dtype=np.uint8)
        >>> draw_boxes(grey, [[8, 8, 40, 40]], [1], ("disc", "star"), [0.92]).size
        (256, 192)
    """
    picture = as_picture(image)
    longer = max(picture.size)
    target = min(max(longer, smallest), max(longer, smallest) if largest is None else largest)
    factor = target / longer
    picture = _scaled(picture, factor)
    corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * factor
    classes = np.asarray(labels, dtype=np.int64).reshape(-1)
    captions = [class_names[label] for label in classes.tolist()]
    order = np.arange(len(classes))
    if scores is not None:
        captions = [f"{name} {score:.2f}" for name, score in zip(captions, scores, strict=True)]
        order = np.argsort(np.asarray(scores), kind="stable")
    broken = np.zeros(len(classes), bool) if dashed is None else np.asarray(dashed, bool)
    for style in (True, False):
        rows = [row for row in order if broken[row] == style]
        if rows:
            picture = pictures.draw_boxes(
                picture,
                corners[rows],
                captions=[captions[row] for row in rows],
                colours=[class_colour(int(classes[row])) for row in rows],
                dashed=style,
            )
    return picture


def as_picture(image: Any) -> Image.Image:
    """A PIL image, array or tensor as RGB picture; see :func:`draw_boxes` for what is taken.

    Example:
        >>> as_picture(np.zeros((3, 10, 20))).size
        (20, 10)
    """
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[0] == 3 and array.shape[2] != 3:
        array = array.transpose(1, 2, 0)
    if np.issubdtype(array.dtype, np.floating):
        array = np.round(np.clip(array, 0, 1) * 255)
    return Image.fromarray(np.ascontiguousarray(array, dtype=np.uint8)).convert("RGB")


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
        captions: one line an image, cut off where too long; None for no lines.
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
    fitted = [_scaled(image, tile / max(image.size)) for image in images]
    texts = [""] * len(images) if captions is None else list(captions)
    rows = [range(k, min(k + columns, len(images))) for k in range(0, len(images), columns)]
    heights = [max(fitted[k].height for k in row) for row in rows]
    line = 0 if captions is None else CAPTION + 8
    head = 0 if title is None else TITLE + 14
    size = (GAP + columns * (tile + GAP), GAP + head + sum(heights) + len(rows) * (line + GAP))
    sheet = Image.new("RGB", size, PAPER)
    if title is not None:
        _write(sheet, title, (GAP, GAP), TITLE, INK, size[0] - 2 * GAP)
    y = GAP + head
    for row, height in zip(rows, heights, strict=True):
        for column, k in enumerate(row):
            x = GAP + column * (tile + GAP)
            place = (x + (tile - fitted[k].width) // 2, y + (height - fitted[k].height) // 2)
            sheet.paste(fitted[k], place)
            _write(sheet, texts[k], (x, y + height + 3), CAPTION, MUTED, tile)
        y += height + line + GAP
    return sheet


def _scaled(image: Image.Image, factor: float) -> Image.Image:
    """The image enlarged or reduced, with at least one pixel a side."""
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


def _write(
    sheet: Image.Image, text: str, place: tuple[int, int], height: int, colour: str, width: int
) -> None:
    """Writes one line no wider than ``width`` pixels, its end cut off where necessary."""
    font = ImageFont.load_default(height)
    text = " ".join(text.split())
    if font.getlength(text) > width:
        while text and font.getlength(text + "…") > width:
            text = text[:-1]
        text += "…"
    ImageDraw.Draw(sheet).text(place, text, fill=colour, font=font)
