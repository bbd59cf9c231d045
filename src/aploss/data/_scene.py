"""Composes one picture of the built-in set: objects, look-alikes and clutter over a noisy ground.

Everything is a function of the random generator handed in, drawn in a fixed order, so the same
generator state gives the same pixels in any process.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aploss.data._paint import (
    Figure,
    Floats,
    Window,
    draw_clutter,
    draw_figure,
    draw_ground,
    stencil,
)

__all__ = ["CLASS_NAMES", "Scene", "draw_scene"]

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


def draw_scene(generator: np.random.Generator, size: int) -> Scene:
    """Draws a square picture of ``size`` pixels, with the objects' boxes and labels.

    Example:
        >>> scene = draw_scene(np.random.default_rng(0), 64)
        >>> scene.pixels.shape, scene.boxes.shape[1]
        ((64, 64, 3), 4)
    """
    canvas = draw_clutter(generator, draw_ground(generator, size))
    things: list[_Thing] = []
    for label in _cast(generator):
        _place(generator, canvas, things, label)
    grain = generator.standard_normal(canvas.shape, dtype=np.float32) * generator.uniform(*GRAIN)
    boxes, labels = [], []
    for thing in things:
        if thing.label is not None:
            boxes.append(_bounds(thing.visible, size))
            labels.append(thing.label)
    return Scene(
        pixels=np.clip((canvas + grain) * 255.0, 0, 255).astype(np.uint8),
        boxes=np.array(boxes, dtype=np.float64).reshape(-1, 4),
        labels=np.array(labels, dtype=np.int64),
    )


def _cast(generator: np.random.Generator) -> list[int | None]:
    """What the picture shall show, in drawing order: class labels, None for a look-alike."""
    empty = generator.random() < EMPTY_SHARE
    count = 1 + int(generator.choice(len(OBJECTS_PER_PICTURE), p=OBJECTS_PER_PICTURE))
    labels = generator.integers(len(CLASS_NAMES), size=0 if empty else count).tolist()
    fewest, most = LOOKALIKES_PER_PICTURE
    cast = [*labels, *[None] * int(generator.integers(fewest, most + 1))]
    return [cast[position] for position in generator.permutation(len(cast))]


def _place(
    generator: np.random.Generator,
    canvas: Floats,
    things: list[_Thing],
    label: int | None,
) -> None:
    """Draws one thing where it hides nobody too much; leaves it out when there is no room."""
    size = canvas.shape[0]
    scale = _mask_scale(size)
    for _ in range(PLACEMENT_TRIES):
        figure = _figure(generator, size, label)
        window = Window.around(figure, size)
        shape = stencil(figure, window, scale)
        mask = np.asarray(shape) > 0
        region = window.slices(scale)
        if any(_covered(thing, mask, region) > MAX_COVERED for thing in things):
            continue
        for thing in things:
            thing.visible[region] &= ~mask
        visible = np.zeros((size * scale, size * scale), dtype=np.bool_)
        visible[region] = mask
        things.append(_Thing(label=label, area=int(np.count_nonzero(mask)), visible=visible))
        draw_figure(generator, canvas, figure, window, shape)
        return


def _mask_scale(size: int) -> int:
    """How much finer than the picture the masks are: boxes are tight to that part of a pixel."""
    return 4 if size <= 192 else 2


def _covered(thing: _Thing, mask: Mask, region: tuple[slice, slice]) -> float:
    """The hidden share of a thing if ``mask`` were drawn over it."""
    left = np.count_nonzero(thing.visible) - np.count_nonzero(thing.visible[region] & mask)
    return 1.0 - left / thing.area


def _figure(generator: np.random.Generator, size: int, label: int | None) -> Figure:
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
    return Figure(
        outline=(points - low) * factor + corner,
        centre=corner - low * factor,
        angle=float(angle),
        extent=extent,
        hue=hue if generator.random() < HUE_SHARE else float(generator.random()),
    )


def _bounds(visible: Mask, size: int) -> tuple[float, float, float, float]:
    """The tight box x1, y1, x2, y2 of a mask, in the picture's pixels."""
    scale = visible.shape[0] / size
    columns = np.flatnonzero(visible.any(axis=0))
    rows = np.flatnonzero(visible.any(axis=1))
    return (
        float(columns[0] / scale),
        float(rows[0] / scale),
        float((columns[-1] + 1) / scale),
        float((rows[-1] + 1) / scale),
    )


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
