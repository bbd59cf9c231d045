"""A dataset that needs no download: drawn on first use, then read like any COCO dataset.

Five classes of textured, rotated and partly occluded shapes over a wide range of sizes, among distractors (ellipses and
L-shapes), lines, specks and noise. A picture is a function of its random generator: the same on every machine.
"""

import colorsys
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from platformdirs import user_cache_path

from aploss.data.annotations import DetectionDataset
from aploss.data.coco import CocoFormat
from aploss.data.folder import DatasetFolder
from aploss.errors import ConfigError, DataError

SPLITS = ("train", "val", "test")
IMAGE_SIZE = 128
COUNTS = (600, 150, 150)  # images in each of SPLITS
VERSION = 2  # part of the cache key: increase it with every change of the pictures

CLASS_NAMES = ("circle", "square", "triangle", "star", "cross")
EMPTY_SHARE = 0.04  # of the pictures contain distractors and clutter only
OBJECTS_PER_PICTURE = (0.20, 0.30, 0.30, 0.20)  # probabilities of 1, 2, 3, 4
MAX_DISTRACTORS = 2
MAX_ROTATION = 15.0  # degrees to either side
OBJECT_SIZES = (0.20, 0.50)  # longer side of the box, as a share of the picture's width
DISTRACTOR_SIZES = (0.16, 0.42)
MAX_OCCLUDED = 0.12  # share of a figure that later ones may cover
GRAIN = (0.01, 0.03)  # standard deviation of the noise, where 1 is white
PLACEMENT_TRIES = 12
HUES = (0.58, 0.02, 0.33, 0.13, 0.80)  # typical hue of each class
HUE_SHARE = 0.95  # of the objects have it; distractors use the hue of a random class
TEXTURE_CONTRAST = 0.3  # between the two colours of a texture; 1 hides the shapes from small networks

Counts = tuple[int, int, int]
Generator = np.random.Generator
Range = tuple[float, float]
Floats = NDArray[np.floating[Any]]
Points = NDArray[np.float64]
Mask = NDArray[np.bool_]

_log = logging.getLogger(__name__)


def builtin_dataset(
    split: str = "train",
    *,
    seed: int = 0,
    cache: str | Path | None = None,
    image_size: int = IMAGE_SIZE,
    counts: Counts = COUNTS,
) -> DetectionDataset:
    """Returns one split of the built-in dataset, drawn unless it is in the cache.

    Args:
        split: "train", "val" or "test".
        seed: another seed gives other pictures of the same kind.
        cache: folder to keep it in; defaults to :func:`cache_folder`.
        image_size: side of the square pictures, in pixels.
        counts: number of images in train, val and test.

    Raises:
        ConfigError: invalid split, seed or size.
        DataError: the cache folder is not writable.

    Example:
        >>> dataset = builtin_dataset("val", cache=".", counts=(4, 2, 2))
        >>> len(dataset), dataset.image_size(0), dataset.class_names
        (2, (128, 128), ('circle', 'square', 'triangle', 'star', 'cross'))
    """
    if split not in SPLITS:
        raise ConfigError(f"the built-in dataset has no split '{split}': choose {', '.join(SPLITS)}")
    folder = builtin_folder(seed=seed, cache=cache, image_size=image_size, counts=counts)
    source = CocoFormat(DatasetFolder(folder), [f"annotations/instances_{split}.json"])
    source.name = "builtin"
    return source.read(split, CLASS_NAMES)


def builtin_folder(
    *, seed: int = 0, cache: str | Path | None = None, image_size: int = IMAGE_SIZE, counts: Counts = COUNTS
) -> Path:
    """The folder of the built-in dataset as COCO JSON and PNG; arguments and errors as in :func:`builtin_dataset`."""
    if seed < 0 or image_size < 32 or len(counts) != len(SPLITS) or min(counts) < 1:
        wrong = f"built-in dataset with seed {seed}, {image_size} pixels, counts {counts}"
        raise ConfigError(f"{wrong}: give at least 0, 32, and 1 for each of {', '.join(SPLITS)}")
    home = cache_folder() if cache is None else Path(cache)
    folder = home / f"shapes-v{VERSION}-seed{seed}-{image_size}px-{'-'.join(map(str, counts))}"

    def is_complete() -> bool:
        return all((folder / split).is_dir() for split in (*SPLITS, "annotations"))

    try:
        if not is_complete():
            home.mkdir(parents=True, exist_ok=True)
            with FileLock(home / f".{folder.name}.lock"):
                if not is_complete():  # another process may have drawn it meanwhile
                    _log.info("drawing the built-in dataset into %s (once, takes some seconds)", folder)
                    _draw_folder(folder, seed, image_size, counts)
    except OSError as error:
        raise cache_error(home, error) from error
    return folder


def cache_error(folder: Path, error: Exception) -> DataError:
    """The error for a cache that cannot be written."""
    reason = getattr(error, "strerror", None) or error
    remedy = "name a writable folder with enough space in the environment variable APLOSS_CACHE"
    return DataError(f"cannot write to the cache {folder} ({reason}): {remedy}")


def cache_folder() -> Path:
    """The folder for generated data: ``APLOSS_CACHE``, or the system's cache folder."""
    if named := os.environ.get("APLOSS_CACHE"):
        return Path(named).expanduser()
    return user_cache_path("aploss", appauthor=False)


def _draw_folder(folder: Path, seed: int, image_size: int, counts: Counts) -> None:
    """Draws all splits in a temporary folder, which replaces ``folder`` when it is complete."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        parts = {
            split: _draw_split(fresh / split, [VERSION, seed, number], image_size, counts[number])
            for number, split in enumerate(SPLITS)
        }
        paths = [part.image_path(index) for part in parts.values() for index in range(len(part))]
        CocoFormat.write(fresh, parts, {path: path.name for path in paths})
        if folder.exists():
            shutil.move(folder, Path(scratch) / "damaged")
        fresh.rename(folder)


def _draw_split(folder: Path, seeds: list[int], image_size: int, count: int) -> DetectionDataset:
    """Draws one split. Picture i depends on (seeds, i, size) alone, not on the counts."""
    folder.mkdir(parents=True)
    names = [f"{number:06d}.png" for number in range(1, count + 1)]
    scenes = [draw_scene(np.random.default_rng([*seeds, number]), image_size) for number in range(count)]
    for name, scene in zip(names, scenes, strict=True):
        Image.fromarray(scene.pixels).save(folder / name, compress_level=1)
    return DetectionDataset(
        root=folder,
        class_names=CLASS_NAMES,
        image_paths=names,
        image_sizes=[(image_size, image_size)] * count,
        boxes_per_image=[len(scene.labels) for scene in scenes],
        boxes=np.concatenate([scene.boxes for scene in scenes]),
        labels=np.concatenate([scene.labels for scene in scenes]),
    )


# --- one picture ------------------------------------------------------------------------------
# The order of the random draws is part of the dataset: changing it changes every picture.


class Scene(NamedTuple):
    """A picture [size, size, 3] uint8, boxes [n, 4] xyxy of the visible parts, labels [n]."""

    pixels: NDArray[np.uint8]
    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]


class _Figure(NamedTuple):
    """A closed outline [points, 2] in pixels, its centre [2], rotation in radians, longer side, hue."""

    outline: Points
    centre: Points
    angle: float
    extent: float
    hue: float


class _Placed(NamedTuple):
    """A drawn figure: its class (None for a distractor), area, and visible part on the grid of masks."""

    label: int | None
    area: int
    visible: Mask


def draw_scene(generator: Generator, size: int) -> Scene:
    """Draws a square picture of ``size`` pixels, with the objects' boxes and labels."""
    canvas = _draw_clutter(generator, _draw_background(generator, size))
    empty = generator.random() < EMPTY_SHARE
    count = 1 + int(generator.choice(len(OBJECTS_PER_PICTURE), p=OBJECTS_PER_PICTURE))
    labels = generator.integers(len(CLASS_NAMES), size=0 if empty else count).tolist()
    figures = [*labels, *[None] * int(generator.integers(0, MAX_DISTRACTORS + 1))]
    placed: list[_Placed] = []
    for position in generator.permutation(len(figures)):
        _place(generator, canvas, placed, figures[position])
    noise = generator.standard_normal(canvas.shape, dtype=np.float32) * generator.uniform(*GRAIN)
    objects = [figure for figure in placed if figure.label is not None]
    bounds = [np.array(Image.fromarray(one.visible).getbbox()) * (size / len(one.visible)) for one in objects]
    return Scene(
        pixels=np.clip((canvas + noise) * 255.0, 0, 255).astype(np.uint8),
        boxes=np.array(bounds, dtype=np.float64).reshape(-1, 4),
        labels=np.array([figure.label for figure in objects], dtype=np.int64),
    )


def _place(generator: Generator, canvas: Floats, placed: list[_Placed], label: int | None) -> None:
    """Draws a figure where it covers little of the others; leaves it out if there is no room."""
    size = len(canvas)
    scale = 4 if size <= 192 else 2  # masks have this many cells per pixel, so boxes are tight to that part of one
    for _ in range(PLACEMENT_TRIES):
        figure = _random_figure(generator, size, label)
        # Pillow's coordinates are pixel centres, ours the edges between pixels: hence the half.
        corners = [(float(x), float(y)) for x, y in figure.outline * scale - 0.5]
        stencil = Image.new("L", (size * scale, size * scale))
        ImageDraw.Draw(stencil).polygon(corners, fill=255)
        mask = np.asarray(stencil) > 0
        if all(1.0 - np.count_nonzero(one.visible & ~mask) / one.area <= MAX_OCCLUDED for one in placed):
            for one in placed:
                one.visible[mask] = False
            placed.append(_Placed(label, int(np.count_nonzero(mask)), mask))
            rim = Image.new("L", stencil.size)
            width = max(2, round(2 * scale * (0.7 + figure.extent / 40)))
            # Joints are slow, and many short edges need none. The first edge is drawn twice to join the last one.
            joint = "curve" if len(corners) < 20 else None
            ImageDraw.Draw(rim).line([*corners, *corners[:2]], fill=255, width=width, joint=joint)
            _paint_figure(generator, canvas, figure, stencil.reduce(scale), _unit(rim.reduce(scale)))
            return


# --- outlines ---


def _corners(radii: list[float], start: float = -90.0) -> Points:
    """Corners at equal angles and the given distances from the centre, clockwise from the top."""
    angles = np.deg2rad(start) + np.arange(len(radii)) * 2 * np.pi / len(radii)
    points: Points = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.array(radii)[:, None]
    return points


_A = 0.36  # half the width of the cross's arms
_OUTLINES: dict[str, Points] = {
    "circle": _corners([1.0] * 60),
    "square": _corners([1.0] * 4, start=-45.0),
    "triangle": _corners([1.0] * 3),
    "star": _corners([1.0, 0.42] * 5),
    "cross": np.reshape(
        [_A, -_A, 1, -_A, 1, _A, _A, _A, _A, 1, -_A, 1, -_A, _A, -1, _A, -1, -_A, -_A, -_A, -_A, -1, _A, -1], (12, 2)
    ),
}


def _random_figure(generator: Generator, size: int, label: int | None) -> _Figure:
    """A rotated outline of random size and position, wholly inside the picture."""
    if label is None:
        if generator.random() < 0.5:
            points = _OUTLINES["circle"] * [1.0, generator.uniform(0.42, 0.65)]  # an ellipse
        else:
            arm = generator.uniform(0.55, 0.85)  # an L: a square with one corner cut away
            points = np.array([[0, 0], [arm, 0], [arm, 2 - arm], [2, 2 - arm], [2, 2], [0, 2]]) - 1.0
        sizes, angle = DISTRACTOR_SIZES, generator.uniform(0, 2 * np.pi)
        hue = HUES[int(generator.integers(len(HUES)))]
    else:
        points = _OUTLINES[CLASS_NAMES[label]]
        sizes, angle = OBJECT_SIZES, np.deg2rad(generator.uniform(-MAX_ROTATION, MAX_ROTATION))
        hue = HUES[label]
    points = points @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    low, high = points.min(axis=0), points.max(axis=0)
    # Uniform in the logarithm: as many small objects as large ones.
    extent = size * float(np.exp(generator.uniform(*np.log(sizes))))
    factor = extent / float((high - low).max())
    corner = generator.uniform(1, size - 1 - (high - low) * factor)
    hue = hue if generator.random() < HUE_SHARE else float(generator.random())
    return _Figure((points - low) * factor + corner, corner - low * factor, float(angle), extent, hue)


# --- paint ---


def _draw_background(generator: Generator, size: int) -> Floats:
    """A muted two-colour gradient with clouds and, often, a faint pattern: [size, size, 3] in 0..1."""
    centres = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = centres[None, :], centres[:, None]
    brightness = (0.25, 0.5) if generator.random() < 0.5 else (0.65, 0.95)
    first = _colour(generator, (0.05, 0.35), brightness)
    second = 0.5 * first + 0.5 * _colour(generator, (0.05, 0.35), brightness)
    angle = generator.uniform(0, 2 * np.pi)
    slope = 0.5 + 0.7 * ((x - 0.5) * math.cos(angle) + (y - 0.5) * math.sin(angle))
    canvas: Floats = first + (second - first) * np.clip(slope, 0, 1)[..., None]
    cloudiness, cells = generator.uniform(0.03, 0.10), int(generator.integers(4, 12))
    coarse = Image.fromarray(generator.uniform(-1, 1, (cells, cells)).astype(np.float32))
    canvas = canvas + cloudiness * np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC))[..., None]
    if generator.random() < 0.7:
        waves = generator.uniform(6, 18)
        pattern = _texture(generator, x, y, generator.uniform(0, np.pi), waves)
        canvas = canvas + generator.uniform(0.02, 0.06) * (pattern[..., None] - 0.5)
    return canvas


def _draw_clutter(generator: Generator, canvas: Floats) -> Floats:
    """Lines, arcs and specks over a canvas: edges everywhere that belong to no object."""
    fine = 2 * len(canvas)  # drawn at twice the resolution, then averaged: smooth edges
    image = Image.fromarray((np.clip(canvas, 0, 1) * 255).astype(np.uint8))
    image = image.resize((fine, fine), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(image)

    def paint() -> tuple[int, ...]:
        return tuple(int(255 * value) for value in _colour(generator, (0.1, 0.7), (0.2, 0.95)))

    def stroke() -> int:
        return max(1, round(generator.uniform(0.004, 0.016) * fine))

    for _ in range(int(generator.integers(3, 9))):
        ends = generator.uniform(-0.1, 1.1, 4) * fine
        pen.line(ends.tolist(), fill=paint(), width=stroke())
    for _ in range(int(generator.integers(0, 4))):
        x, y = generator.uniform(0, fine, 2)
        radius = generator.uniform(0.15, 0.45) * fine
        start = generator.uniform(0, 360)
        end = start + generator.uniform(40, 150)
        pen.arc((x - radius, y - radius, x + radius, y + radius), start, end, fill=paint(), width=stroke())
    for _ in range(int(generator.integers(10, 30))):
        x, y = generator.uniform(0, fine, 2)
        wide = generator.uniform(0.006, 0.020) * fine
        high = generator.uniform(0.5, 1.0) * wide
        pen.ellipse((x - wide, y - high, x + wide, y + high), fill=paint())
    return np.asarray(image.reduce(2), dtype=np.float32) / 255


def _paint_figure(generator: Generator, canvas: Floats, figure: _Figure, stencil: Image.Image, rim: Floats) -> None:
    """Paints shadow, texture, light and rim of a figure onto the canvas, in place."""
    size = len(canvas)
    alpha, offset = _unit(stencil), max(1, round(size / 64))
    shadow = Image.new("L", stencil.size)
    shadow.paste(stencil, (offset, offset))
    canvas *= 1 - 0.35 * _unit(shadow.filter(ImageFilter.GaussianBlur(size / 64)))
    pixels = np.arange(size, dtype=np.float32)
    middle_x, middle_y = figure.centre.tolist()
    x = (pixels[None, :] + (0.5 - middle_x)) / figure.extent
    y = (pixels[:, None] + (0.5 - middle_y)) / figure.extent
    base, accent = _two_colours(generator, figure.hue, (canvas * alpha).sum(axis=(0, 1)) / alpha.sum())
    pattern = _texture(generator, x, y, figure.angle, generator.uniform(4, 7))[..., None]
    light = np.clip(1.0 - 0.35 * (x + y), 0.75, 1.2)[..., None]  # from the top left
    body = (base + TEXTURE_CONTRAST * (accent - base) * pattern) * light * (1 - 0.45 * rim)
    canvas += (body - canvas) * alpha


def _unit(image: Image.Image) -> Floats:
    """A grey image as [height, width, 1] in 0..1."""
    return np.asarray(image, dtype=np.float32)[..., None] / 255


def _colour(generator: Generator, saturation: Range, value: Range, hue: float | None = None) -> Floats:
    hue = generator.random() if hue is None else hue
    rgb = colorsys.hsv_to_rgb(hue % 1.0, generator.uniform(*saturation), generator.uniform(*value))
    return np.array(rgb, dtype=np.float32)


def _two_colours(generator: Generator, hue: float, behind: Floats) -> tuple[Floats, Floats]:
    """A strong colour that contrasts with the background, and a lighter, darker or different one."""
    for _ in range(20):
        base = _colour(generator, (0.45, 0.95), (0.45, 1.0), hue + generator.normal(0, 0.03))
        if np.abs(base - behind).sum() > 0.7:
            break
    other = _colour(generator, (0.4, 0.9), (0.5, 1.0))
    accents = (base + 0.6 * (1 - base), 0.5 * base, 0.4 * base + 0.6 * other)
    return base, accents[int(generator.integers(len(accents)))]


def _texture(generator: Generator, x: Floats, y: Floats, angle: float, cells: float) -> Floats:
    """A soft-edged pattern in 0..1, rotated by ``angle``, of ``cells`` half-waves per unit of x, y."""
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
