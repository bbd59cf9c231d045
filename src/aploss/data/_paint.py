"""The paint of the built-in set: ground, clutter, textures, and one figure with shadow and rim."""

import colorsys
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

__all__ = ["Figure", "Floats", "Window", "draw_clutter", "draw_figure", "draw_ground", "stencil"]

Floats = NDArray[np.floating[Any]]

TEXTURE_CONTRAST = 0.3  # of the two colours of a texture; 1 hides the shapes from small networks


@dataclass(frozen=True)
class Figure:
    """A closed outline [points, 2] in pixels, its middle [2], turn in radians, longer side, hue."""

    outline: NDArray[np.float64]
    centre: NDArray[np.float64]
    angle: float
    extent: float
    hue: float


@dataclass(frozen=True)
class Window:
    """The whole pixels a figure and its shadow touch; painting only these keeps drawing fast."""

    left: int
    top: int
    right: int
    bottom: int

    @classmethod
    def around(cls, figure: Figure, size: int) -> "Window":
        """The window of a figure in a picture of ``size`` pixels."""
        margin = 4 * _shadow_offset(size)
        low, high = figure.outline.min(axis=0), figure.outline.max(axis=0)
        left, top = (max(0, math.floor(v) - margin) for v in low)
        right, bottom = (min(size, math.ceil(v) + margin) for v in high)
        return cls(left=left, top=top, right=right, bottom=bottom)

    def slices(self, scale: int = 1) -> tuple[slice, slice]:
        """Rows and columns of the window in an array ``scale`` times finer than the pixels."""
        return (
            slice(self.top * scale, self.bottom * scale),
            slice(self.left * scale, self.right * scale),
        )


def draw_ground(generator: np.random.Generator, size: int) -> Floats:
    """A muted two-colour slope with clouds and, often, a faint weave: [size, size, 3] in 0..1."""
    centres = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = centres[None, :], centres[:, None]
    brightness = (0.25, 0.5) if generator.random() < 0.5 else (0.65, 0.95)
    first = _colour(generator, (0.05, 0.35), brightness)
    second = 0.5 * first + 0.5 * _colour(generator, (0.05, 0.35), brightness)
    angle = generator.uniform(0, 2 * np.pi)
    slope = 0.5 + 0.7 * ((x - 0.5) * math.cos(angle) + (y - 0.5) * math.sin(angle))
    canvas: Floats = first + (second - first) * np.clip(slope, 0, 1)[..., None]
    canvas = canvas + generator.uniform(0.03, 0.10) * _clouds(generator, size)[..., None]
    if generator.random() < 0.7:
        cells = generator.uniform(6, 18)
        weave = _texture(generator, x, y, generator.uniform(0, np.pi), cells)
        canvas = canvas + generator.uniform(0.02, 0.06) * (weave[..., None] - 0.5)
    return canvas


def draw_clutter(generator: np.random.Generator, canvas: Floats) -> Floats:
    """Lines, arcs and specks over a canvas: edges everywhere that belong to no object."""
    size = canvas.shape[0]
    fine = 2 * size  # drawn twice as fine, then averaged: smooth edges
    image = Image.fromarray((np.clip(canvas, 0, 1) * 255).astype(np.uint8))
    image = image.resize((fine, fine), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(image)
    for _ in range(int(generator.integers(3, 9))):
        ends = generator.uniform(-0.1, 1.1, 4) * fine
        pen.line(ends.tolist(), fill=_paint(generator), width=_stroke(generator, fine))
    for _ in range(int(generator.integers(0, 4))):
        x, y = generator.uniform(0, fine, 2)
        radius = generator.uniform(0.15, 0.45) * fine
        start = generator.uniform(0, 360)
        pen.arc(
            (x - radius, y - radius, x + radius, y + radius),
            start,
            start + generator.uniform(40, 150),
            fill=_paint(generator),
            width=_stroke(generator, fine),
        )
    for _ in range(int(generator.integers(10, 30))):
        x, y = generator.uniform(0, fine, 2)
        wide = generator.uniform(0.006, 0.020) * fine
        high = generator.uniform(0.5, 1.0) * wide
        pen.ellipse((x - wide, y - high, x + wide, y + high), fill=_paint(generator))
    return np.asarray(image.reduce(2), dtype=np.float32) / 255


def stencil(figure: Figure, window: Window, scale: int) -> Image.Image:
    """The filled figure in its window, white on black, ``scale`` times finer than the pixels."""
    shape = Image.new("L", _fine_size(window, scale))
    ImageDraw.Draw(shape).polygon(_corners_in(figure, window, scale), fill=255)
    return shape


def draw_figure(
    generator: np.random.Generator,
    canvas: Floats,
    figure: Figure,
    window: Window,
    shape: Image.Image,
) -> None:
    """Lays shadow, texture, light and rim of a figure over the canvas, in place.

    Args:
        generator: picks colours and texture.
        canvas: [size, size, 3] in 0..1, changed inside the window.
        figure: what to draw.
        window: where.
        shape: the figure's :func:`stencil`.
    """
    size = canvas.shape[0]
    ground = canvas[window.slices()]
    scale = shape.width // (window.right - window.left)
    small = shape.reduce(scale)
    alpha = _unit(small)
    ground *= 1 - 0.35 * _unit(_shadow(small, size))

    middle_x, middle_y = figure.centre.tolist()
    x = np.arange(window.left, window.right, dtype=np.float32)[None, :] + (0.5 - middle_x)
    y = np.arange(window.top, window.bottom, dtype=np.float32)[:, None] + (0.5 - middle_y)
    x, y = x / figure.extent, y / figure.extent
    base, accent = _two_colours(
        generator, figure.hue, (ground * alpha).sum(axis=(0, 1)) / alpha.sum()
    )
    pattern = _texture(generator, x, y, figure.angle, generator.uniform(4, 7))[..., None]
    light = np.clip(1.0 - 0.35 * (x + y), 0.75, 1.2)[..., None]  # from the top left
    body = (base + TEXTURE_CONTRAST * (accent - base) * pattern) * light
    body = body * (1 - 0.45 * _unit(_rim(figure, window, scale).reduce(scale)))
    ground += (body - ground) * alpha


def _shadow_offset(size: int) -> int:
    return max(1, round(size / 64))


def _shadow(small: Image.Image, size: int) -> Image.Image:
    offset = _shadow_offset(size)
    moved = Image.new("L", small.size)
    moved.paste(small, (offset, offset))
    return moved.filter(ImageFilter.GaussianBlur(size / 64))


def _rim(figure: Figure, window: Window, scale: int) -> Image.Image:
    """The outline as a line that grows with the figure; half of it falls outside and is cut."""
    rim = Image.new("L", _fine_size(window, scale))
    corners = _corners_in(figure, window, scale)
    width = max(2, round(2 * scale * (0.7 + figure.extent / 40)))
    # Joints cost time and many short edges need none. The first edge is drawn twice, so that the
    # last joint is round like the others.
    joint = "curve" if len(corners) < 20 else None
    ImageDraw.Draw(rim).line([*corners, *corners[:2]], fill=255, width=width, joint=joint)
    return rim


def _fine_size(window: Window, scale: int) -> tuple[int, int]:
    return (window.right - window.left) * scale, (window.bottom - window.top) * scale


def _corners_in(figure: Figure, window: Window, scale: int) -> list[tuple[float, float]]:
    # Pillow's coordinates name pixel centres, ours name places between pixels: hence the half.
    moved = (figure.outline - [window.left, window.top]) * scale - 0.5
    return [(float(x), float(y)) for x, y in moved]


def _unit(image: Image.Image) -> Floats:
    """A grey image as [height, width, 1] in 0..1."""
    return np.asarray(image, dtype=np.float32)[..., None] / 255


def _colour(
    generator: np.random.Generator,
    saturation: tuple[float, float],
    value: tuple[float, float],
    hue: float | None = None,
) -> Floats:
    hue = generator.random() if hue is None else hue
    rgb = colorsys.hsv_to_rgb(hue % 1.0, generator.uniform(*saturation), generator.uniform(*value))
    return np.array(rgb, dtype=np.float32)


def _paint(generator: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = (int(255 * v) for v in _colour(generator, (0.1, 0.7), (0.2, 0.95)))
    return red, green, blue


def _stroke(generator: np.random.Generator, size: int) -> int:
    return max(1, round(generator.uniform(0.004, 0.016) * size))


def _two_colours(
    generator: np.random.Generator, hue: float, behind: Floats
) -> tuple[Floats, Floats]:
    """A strong colour that stands out from what it covers, and a lighter, darker or other one."""
    for _ in range(20):
        base = _colour(generator, (0.45, 0.95), (0.45, 1.0), hue + generator.normal(0, 0.03))
        if np.abs(base - behind).sum() > 0.7:
            break
    other = _colour(generator, (0.4, 0.9), (0.5, 1.0))
    accents = (base + 0.6 * (1 - base), 0.5 * base, 0.4 * base + 0.6 * other)
    return base, accents[int(generator.integers(len(accents)))]


def _clouds(generator: np.random.Generator, size: int) -> Floats:
    """Smooth noise [size, size], about -1..1."""
    cells = int(generator.integers(4, 12))
    coarse = Image.fromarray(generator.uniform(-1, 1, (cells, cells)).astype(np.float32))
    return np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC))


def _texture(
    generator: np.random.Generator, x: Floats, y: Floats, angle: float, cells: float
) -> Floats:
    """A soft-edged pattern in 0..1, turned by ``angle``, of ``cells`` half-waves a unit of x, y."""
    across = (x * math.cos(angle) + y * math.sin(angle)) * (cells * math.pi)
    along = (y * math.cos(angle) - x * math.sin(angle)) * (cells * math.pi)
    kind = generator.choice(["plain", "stripes", "checks", "dots", "rings"])
    if kind == "plain":
        wave = np.full_like(across, -1.0)
    elif kind == "stripes":
        wave = np.sin(across)
    elif kind == "checks":
        wave = 2 * np.sin(across) * np.sin(along)
    elif kind == "dots":
        wave = np.cos(across) + np.cos(along) - 0.8
    else:
        wave = np.sin(1.2 * np.hypot(across, along))
    return np.clip(0.5 + 2.0 * wave, 0, 1)
