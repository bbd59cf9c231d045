"""One picture of the built-in set: objects, look-alikes and clutter over a noisy ground.

Everything is a function of the random generator handed in, drawn in a fixed order, so the same generator state gives
the same pixels in any process.
"""

import colorsys
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Floats = NDArray[np.floating[Any]]
Points = NDArray[np.float64]
Mask = NDArray[np.bool_]

CLASS_NAMES = ("circle", "square", "triangle", "star", "cross")

EMPTY_SHARE = 0.04  # of the pictures show look-alikes and clutter only
OBJECTS_PER_PICTURE = (0.20, 0.30, 0.30, 0.20)  # probabilities of 1, 2, 3, 4
LOOKALIKES_PER_PICTURE = (0, 2)
MAX_TURN = 15.0  # degrees to either side
OBJECT_SIZES = (0.20, 0.50)  # longer side of the box, as a share of the picture's width
LOOKALIKE_SIZES = (0.16, 0.42)
MAX_COVERED = 0.12  # share of a thing that later ones may hide
GRAIN = (0.01, 0.03)  # deviation of the noise, where 1 is white
PLACEMENT_TRIES = 12
HUES = (0.58, 0.02, 0.33, 0.13, 0.80)  # of each class, as things of a kind often have a colour
HUE_SHARE = 0.95  # of the objects keep to it; look-alikes borrow that of a random class
TEXTURE_CONTRAST = 0.3  # of the two colours of a texture; 1 hides the shapes from small networks


@dataclass(frozen=True)
class Silhouette:
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
    def around(cls, figure: Silhouette, size: int) -> "Window":
        """The window of a figure in a picture of ``size`` pixels."""
        margin = 4 * _shadow_offset(size)
        low, high = figure.outline.min(axis=0), figure.outline.max(axis=0)
        left, top = (max(0, math.floor(v) - margin) for v in low)
        right, bottom = (min(size, math.ceil(v) + margin) for v in high)
        return cls(left=left, top=top, right=right, bottom=bottom)

    def slices(self, scale: int = 1) -> tuple[slice, slice]:
        """Rows and columns of the window in an array ``scale`` times finer than the pixels."""
        return (slice(self.top * scale, self.bottom * scale), slice(self.left * scale, self.right * scale))


@dataclass(frozen=True)
class Scene:
    """A picture [size, size, 3] uint8, boxes [n, 4] xyxy of the visible parts, labels [n]."""

    pixels: NDArray[np.uint8]
    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]


@dataclass
class _Thing:
    """What was placed: its area and the part still visible, on a grid finer than the pixels."""

    label: int | None  # None: a look-alike
    area: int
    visible: Mask


def draw_scene(
    generator: np.random.Generator,
    size: int,
    *,
    things: Sequence[int | None] | None = None,
    silhouette: Callable[[np.random.Generator, int, int | None], Silhouette] | None = None,
    grain: tuple[float, float] = GRAIN,
    shadows: bool = True,
) -> Scene:
    """Draws a square picture, with the objects' boxes and labels.

    Args:
        generator: decides everything that is not given.
        size: side of the picture in pixels.
        things: what to show, in drawing order: class labels, None for a look-alike.
        silhouette: gives the outline of a thing; :func:`make_silhouette` where not given.
        grain: lowest and highest deviation of the noise, where 1 is white.
        shadows: whether things cast one.

    Example:
        >>> scene = draw_scene(np.random.default_rng(0), 64)
        >>> scene.pixels.shape, scene.boxes.shape[1]
        ((64, 64, 3), 4)
    """
    canvas = _draw_clutter(generator, _draw_ground(generator, size))
    placed: list[_Thing] = []
    for label in choose_things(generator) if things is None else things:
        _place(generator, canvas, placed, label, silhouette or make_silhouette, shadows)
    noise = generator.standard_normal(canvas.shape, dtype=np.float32) * generator.uniform(*grain)
    objects = [thing for thing in placed if thing.label is not None]
    return Scene(
        pixels=np.clip((canvas + noise) * 255.0, 0, 255).astype(np.uint8),
        boxes=np.array([_bounds(thing.visible, size) for thing in objects], dtype=np.float64).reshape(-1, 4),
        labels=np.array([thing.label for thing in objects], dtype=np.int64),
    )


def choose_things(generator: np.random.Generator) -> list[int | None]:
    """What the picture shall show, in drawing order: class labels, None for a look-alike."""
    empty = generator.random() < EMPTY_SHARE
    count = 1 + int(generator.choice(len(OBJECTS_PER_PICTURE), p=OBJECTS_PER_PICTURE))
    labels = generator.integers(len(CLASS_NAMES), size=0 if empty else count).tolist()
    fewest, most = LOOKALIKES_PER_PICTURE
    things = [*labels, *[None] * int(generator.integers(fewest, most + 1))]
    return [things[position] for position in generator.permutation(len(things))]


def _place(
    generator: np.random.Generator,
    canvas: Floats,
    things: list[_Thing],
    label: int | None,
    silhouette: Callable[[np.random.Generator, int, int | None], Silhouette],
    shadows: bool,
) -> None:
    """Draws one thing where it hides nobody too much; leaves it out when there is no room."""
    size = canvas.shape[0]
    scale = 4 if size <= 192 else 2  # how much finer the masks are: boxes are tight to that part of a pixel
    for _ in range(PLACEMENT_TRIES):
        figure = silhouette(generator, size, label)
        window = Window.around(figure, size)
        shape = _stencil(figure, window, scale)
        mask = np.asarray(shape) > 0
        region = window.slices(scale)
        if any(_covered(thing, mask, region) > MAX_COVERED for thing in things):
            continue
        for thing in things:
            thing.visible[region] &= ~mask
        visible = np.zeros((size * scale, size * scale), dtype=np.bool_)
        visible[region] = mask
        things.append(_Thing(label=label, area=int(np.count_nonzero(mask)), visible=visible))
        _draw_figure(generator, canvas, figure, window, shape, shadows=shadows)
        return


def _covered(thing: _Thing, mask: Mask, region: tuple[slice, slice]) -> float:
    """The hidden share of a thing if ``mask`` were drawn over it."""
    left = np.count_nonzero(thing.visible) - np.count_nonzero(thing.visible[region] & mask)
    return 1.0 - left / thing.area


def make_silhouette(generator: np.random.Generator, size: int, label: int | None) -> Silhouette:
    """A turned outline of random size and place, wholly inside the picture."""
    if label is None:
        points = _ellipse(generator) if generator.random() < 0.5 else _angle_iron(generator)
        sizes, angle = LOOKALIKE_SIZES, generator.uniform(0, 2 * np.pi)
        hue = HUES[int(generator.integers(len(HUES)))]
    else:
        points = _OUTLINES[CLASS_NAMES[label]]
        sizes, angle = OBJECT_SIZES, np.deg2rad(generator.uniform(-MAX_TURN, MAX_TURN))
        hue = HUES[label]
    points = points @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    low, high = points.min(axis=0), points.max(axis=0)
    # Uniform in the logarithm: as many small objects as large ones.
    extent = size * float(np.exp(generator.uniform(*np.log(sizes))))
    factor = extent / float((high - low).max())
    corner = generator.uniform(1, size - 1 - (high - low) * factor)
    return Silhouette(
        outline=(points - low) * factor + corner,
        centre=corner - low * factor,
        angle=float(angle),
        extent=extent,
        hue=hue if generator.random() < HUE_SHARE else float(generator.random()),
    )


def _bounds(visible: Mask, size: int) -> tuple[float, float, float, float]:
    """The tight box x1, y1, x2, y2 of a mask, in the picture's pixels."""
    scale = visible.shape[0] / size
    columns, rows = (np.flatnonzero(visible.any(axis=axis)) for axis in (0, 1))
    left, top, right, bottom = (float(v / scale) for v in (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
    return left, top, right, bottom


def _corners(radii: list[float], start: float = -90.0) -> Points:
    """Corners at equal angles and the given distances from the middle, from the top clockwise."""
    angles = np.deg2rad(start) + np.arange(len(radii)) * 2 * np.pi / len(radii)
    points: Points = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.array(radii)[:, None]
    return points


def _cross(arm: float) -> Points:
    quarter = np.array([[arm, -arm], [1.0, -arm], [1.0, arm]])
    turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    return np.concatenate([quarter @ np.linalg.matrix_power(turn, k) for k in range(4)])


_OUTLINES: dict[str, Points] = {
    "circle": _corners([1.0] * 60),
    "square": _corners([1.0] * 4, start=-45.0),
    "triangle": _corners([1.0] * 3),
    "star": _corners([1.0, 0.42] * 5),
    "cross": _cross(0.36),
}


def _ellipse(generator: np.random.Generator) -> Points:
    return _OUTLINES["circle"] * [1.0, generator.uniform(0.42, 0.65)]


def _angle_iron(generator: np.random.Generator) -> Points:
    """An L: a square with one corner cut away."""
    arm = generator.uniform(0.55, 0.85)
    return np.array([[0, 0], [arm, 0], [arm, 2 - arm], [2, 2 - arm], [2, 2], [0, 2]]) - 1.0


# --- paint -----------------------------------------------------------------------------------


def _draw_ground(generator: np.random.Generator, size: int) -> Floats:
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


def _draw_clutter(generator: np.random.Generator, canvas: Floats) -> Floats:
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
        end = start + generator.uniform(40, 150)
        paint, width = _paint(generator), _stroke(generator, fine)
        pen.arc((x - radius, y - radius, x + radius, y + radius), start, end, fill=paint, width=width)
    for _ in range(int(generator.integers(10, 30))):
        x, y = generator.uniform(0, fine, 2)
        wide = generator.uniform(0.006, 0.020) * fine
        high = generator.uniform(0.5, 1.0) * wide
        pen.ellipse((x - wide, y - high, x + wide, y + high), fill=_paint(generator))
    return np.asarray(image.reduce(2), dtype=np.float32) / 255


def _stencil(figure: Silhouette, window: Window, scale: int) -> Image.Image:
    """The filled figure in its window, white on black, ``scale`` times finer than the pixels."""
    shape = Image.new("L", _fine_size(window, scale))
    ImageDraw.Draw(shape).polygon(_corners_in(figure, window, scale), fill=255)
    return shape


def _draw_figure(
    generator: np.random.Generator,
    canvas: Floats,
    figure: Silhouette,
    window: Window,
    shape: Image.Image,
    *,
    shadows: bool,
) -> None:
    """Lays shadow, texture, light and rim of a figure over the canvas, in place; ``shape`` is the figure's
    :func:`_stencil`."""
    size = canvas.shape[0]
    ground = canvas[window.slices()]
    scale = shape.width // (window.right - window.left)
    small = shape.reduce(scale)
    alpha = _unit(small)
    if shadows:
        ground *= 1 - 0.35 * _unit(_shadow(small, size))

    middle_x, middle_y = figure.centre.tolist()
    x = np.arange(window.left, window.right, dtype=np.float32)[None, :] + (0.5 - middle_x)
    y = np.arange(window.top, window.bottom, dtype=np.float32)[:, None] + (0.5 - middle_y)
    x, y = x / figure.extent, y / figure.extent
    base, accent = _two_colours(generator, figure.hue, (ground * alpha).sum(axis=(0, 1)) / alpha.sum())
    pattern = _texture(generator, x, y, figure.angle, generator.uniform(4, 7))[..., None]
    light = np.clip(1.0 - 0.35 * (x + y), 0.75, 1.2)[..., None]  # from the top left
    body = (base + TEXTURE_CONTRAST * (accent - base) * pattern) * light
    body = body * (1 - 0.45 * _unit(_rim(figure, window, scale).reduce(scale)))
    ground += (body - ground) * alpha


def _shadow_offset(size: int) -> int:
    return max(1, round(size / 64))


def _shadow(small: Image.Image, size: int) -> Image.Image:
    moved = Image.new("L", small.size)
    moved.paste(small, (_shadow_offset(size),) * 2)
    return moved.filter(ImageFilter.GaussianBlur(size / 64))


def _rim(figure: Silhouette, window: Window, scale: int) -> Image.Image:
    """The outline as a line that grows with the figure; half of it falls outside and is cut."""
    rim = Image.new("L", _fine_size(window, scale))
    corners = _corners_in(figure, window, scale)
    width = max(2, round(2 * scale * (0.7 + figure.extent / 40)))
    # Joints cost time and many short edges need none. The first edge is drawn twice, so that the last joint is round
    # like the others.
    joint = "curve" if len(corners) < 20 else None
    ImageDraw.Draw(rim).line([*corners, *corners[:2]], fill=255, width=width, joint=joint)
    return rim


def _fine_size(window: Window, scale: int) -> tuple[int, int]:
    return (window.right - window.left) * scale, (window.bottom - window.top) * scale


def _corners_in(figure: Silhouette, window: Window, scale: int) -> list[tuple[float, float]]:
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


def _two_colours(generator: np.random.Generator, hue: float, behind: Floats) -> tuple[Floats, Floats]:
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


def _texture(generator: np.random.Generator, x: Floats, y: Floats, angle: float, cells: float) -> Floats:
    """A soft-edged pattern in 0..1, turned by ``angle``, of ``cells`` half-waves a unit of x, y."""
    across = (x * math.cos(angle) + y * math.sin(angle)) * (cells * math.pi)
    along = (y * math.cos(angle) - x * math.sin(angle)) * (cells * math.pi)
    wave = _WAVES[str(generator.choice(list(_WAVES)))](across, along)
    return np.asarray(np.clip(0.5 + 2.0 * wave, 0, 1))


_WAVES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "plain": lambda across, along: np.full_like(across, -1.0),
    "stripes": lambda across, along: np.sin(across),
    "checks": lambda across, along: 2 * np.sin(across) * np.sin(along),
    "dots": lambda across, along: np.cos(across) + np.cos(along) - 0.8,
    "rings": lambda across, along: np.sin(1.2 * np.hypot(across, along)),
}
