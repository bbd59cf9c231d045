"""A dataset that needs no download: drawn on first use, then read like any COCO dataset.

Five classes of textured, turned and partly hidden shapes over a wide range of sizes, among
look-alikes that are no objects (ellipses and angle irons), lines, specks and noise.
"""

import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from aploss.data._scene import CLASS_NAMES, Scene, draw_scene
from aploss.data.dataset import DetectionDataset
from aploss.errors import ConfigError, DataError

__all__ = ["CLASS_NAMES", "SPLITS", "builtin_dataset", "builtin_folder", "cache_folder"]

SPLITS = ("train", "val", "test")
IMAGE_SIZE = 128
COUNTS = (600, 150, 150)  # images in each of SPLITS
VERSION = 2  # to be raised with every change of the pictures, so that no old cache is used

_log = logging.getLogger(__name__)


def builtin_dataset(
    split: str = "train",
    *,
    seed: int = 0,
    cache: str | Path | None = None,
    image_size: int = IMAGE_SIZE,
    counts: tuple[int, int, int] = COUNTS,
) -> DetectionDataset:
    """One split of the built-in dataset, drawn first if the cache does not have it.

    Args:
        split: "train", "val" or "test".
        seed: another seed gives other pictures of the same kind.
        cache: folder to keep it in; :func:`cache_folder` where not given.
        image_size: side of the square pictures, in pixels.
        counts: images in train, val and test.

    Raises:
        ConfigError: for a split, seed or size that cannot be.
        DataError: when the cache folder cannot be written.
    """
    from aploss.data.load import load_dataset  # loading "builtin" comes back here

    if split not in SPLITS:
        raise ConfigError(f"the built-in set has no split '{split}': choose {', '.join(SPLITS)}")
    folder = builtin_folder(seed=seed, cache=cache, image_size=image_size, counts=counts)
    dataset = load_dataset(folder, split, format="coco", class_names=CLASS_NAMES)
    dataset.name = "builtin"
    return dataset


def builtin_folder(
    *,
    seed: int = 0,
    cache: str | Path | None = None,
    image_size: int = IMAGE_SIZE,
    counts: tuple[int, int, int] = COUNTS,
) -> Path:
    """The folder of the built-in dataset as COCO JSON and PNG, drawn first if it is not there.

    Several processes may ask at once: each draws into a folder of its own, and the first to finish
    gives its folder the final name. Arguments and errors as in :func:`builtin_dataset`.
    """
    if seed < 0:
        raise ConfigError(f"the seed is {seed}: give 0 or more")
    if image_size < 32:
        raise ConfigError(f"built-in pictures of {image_size} pixels: give 32 or more")
    if len(counts) != len(SPLITS) or min(counts) < 1:
        raise ConfigError(f"{counts} images for {', '.join(SPLITS)}: give 1 or more for each")
    home = cache_folder() if cache is None else Path(cache)
    sizes = "-".join(map(str, counts))
    folder = home / f"shapes-v{VERSION}-seed{seed}-{image_size}px-{sizes}"
    if _is_complete(folder, counts):
        return folder
    _log.info("drawing the built-in dataset into %s (once, some seconds)", folder)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".drawing-", dir=home) as scratch:
            fresh = Path(scratch) / "fresh"
            for number, split in enumerate(SPLITS):
                _write_split(fresh, number, split, seed, image_size, counts[number])
            _move_into_place(fresh, folder, counts, discard=Path(scratch) / "damaged")
    except OSError as error:
        raise DataError(
            f"cannot write the built-in dataset to {home} ({error.strerror or error}): "
            "name a writable folder in the environment variable APLOSS_CACHE"
        ) from error
    return folder


def cache_folder() -> Path:
    """Where generated things are kept: ``APLOSS_CACHE``, or the system's place for caches."""
    if named := os.environ.get("APLOSS_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "aploss" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "aploss"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aploss"


def _is_complete(folder: Path, counts: tuple[int, int, int]) -> bool:
    """Whether all files are there; systems that tidy caches may have taken some away."""
    return all(
        _annotation_file(folder, split).is_file()
        and (folder / split).is_dir()
        and sum(entry.name.endswith(".png") for entry in os.scandir(folder / split)) == count
        for split, count in zip(SPLITS, counts, strict=True)
    )


def _move_into_place(
    fresh: Path, folder: Path, counts: tuple[int, int, int], *, discard: Path
) -> None:
    """Gives a finished folder its final name, unless another process was faster."""
    if folder.exists() and not _is_complete(folder, counts):
        shutil.move(folder, discard)
    try:
        fresh.rename(folder)
    except OSError:
        if not _is_complete(folder, counts):
            raise


def _annotation_file(folder: Path, split: str) -> Path:
    return folder / "annotations" / f"instances_{split}.json"


def _write_split(
    folder: Path, number: int, split: str, seed: int, image_size: int, count: int
) -> None:
    """Draws one split. Picture i depends on (seed, split, i, size) alone, not on the counts."""
    (folder / split).mkdir(parents=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(count):
        scene = draw_scene(np.random.default_rng([VERSION, seed, number, index]), image_size)
        name = f"{index + 1:06d}.png"
        Image.fromarray(scene.pixels).save(folder / split / name, compress_level=1)
        images.append(
            {"id": index + 1, "file_name": name, "width": image_size, "height": image_size}
        )
        annotations += _annotations(scene, image_id=index + 1, first_id=len(annotations) + 1)
    content = {
        "info": {
            "description": "aploss built-in shapes",
            "version": str(VERSION),
            "seed": seed,
            "split": split,
        },
        "images": images,
        "annotations": annotations,
        "categories": [{"id": k + 1, "name": name} for k, name in enumerate(CLASS_NAMES)],
    }
    file = _annotation_file(folder, split)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")


def _annotations(scene: Scene, *, image_id: int, first_id: int) -> list[dict[str, Any]]:
    """A scene's boxes as COCO annotations, xywh."""
    corners = scene.boxes.tolist()
    return [
        {
            "id": first_id + row,
            "image_id": image_id,
            "category_id": label + 1,
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": (x2 - x1) * (y2 - y1),
            "iscrowd": 0,
        }
        for row, ((x1, y1, x2, y2), label) in enumerate(
            zip(corners, scene.labels.tolist(), strict=True)
        )
    ]
