"""A dataset that needs no download: drawn on first use, then read like any COCO dataset.

Five classes of textured, turned and partly hidden shapes over a wide range of sizes, among look-alikes that are no
objects (ellipses and angle irons), lines, specks and noise.
"""

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from PIL import Image
from platformdirs import user_cache_path

from aploss.data.annotations import DetectionDataset
from aploss.data.coco import CocoFormat
from aploss.data.paths import DatasetFolder
from aploss.data.scenes import CLASS_NAMES, draw_scene
from aploss.errors import ConfigError, DataError

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
    if split not in SPLITS:
        raise ConfigError(f"the built-in set has no split '{split}': choose {', '.join(SPLITS)}")
    folder = builtin_folder(seed=seed, cache=cache, image_size=image_size, counts=counts)
    source = CocoFormat(DatasetFolder(folder), [f"annotations/instances_{split}.json"])
    source.name = "builtin"
    return source.read(split, CLASS_NAMES)


def builtin_folder(
    *,
    seed: int = 0,
    cache: str | Path | None = None,
    image_size: int = IMAGE_SIZE,
    counts: tuple[int, int, int] = COUNTS,
) -> Path:
    """The folder of the built-in dataset as COCO JSON and PNG, drawn first if it is not there.

    Several processes may ask at once: one draws, the others wait. Arguments and errors as in :func:`builtin_dataset`.
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
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f".{folder.name}.lock"):
            if not _is_complete(folder, counts):  # nobody drew it while we waited
                _log.info("drawing the built-in dataset into %s (once, some seconds)", folder)
                _draw(folder, seed, image_size, counts)
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
    return user_cache_path("aploss", appauthor=False)


def _is_complete(folder: Path, counts: tuple[int, int, int]) -> bool:
    """Whether all files are there; systems that tidy caches may have taken some away."""
    return all(
        (folder / "annotations" / f"instances_{split}.json").is_file()
        and (folder / split).is_dir()
        and sum(entry.name.endswith(".png") for entry in os.scandir(folder / split)) == count
        for split, count in zip(SPLITS, counts, strict=True)
    )


def _draw(folder: Path, seed: int, image_size: int, counts: tuple[int, int, int]) -> None:
    """Draws into a folder of another name, which gets its own when it is complete."""
    with tempfile.TemporaryDirectory(prefix=".drawing-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        (fresh / "annotations").mkdir(parents=True)
        for number, split in enumerate(SPLITS):
            content = _draw_split(fresh / split, [VERSION, seed, number], image_size, counts[number])
            (fresh / "annotations" / f"instances_{split}.json").write_text(json.dumps(content), encoding="utf-8")
        if folder.exists():
            shutil.move(folder, Path(scratch) / "damaged")
        fresh.rename(folder)


def _draw_split(folder: Path, seeds: list[int], image_size: int, count: int) -> dict[str, Any]:
    """Draws one split. Picture i depends on (seeds, i, size) alone, not on the counts."""
    folder.mkdir()
    names = [f"{number:06d}.png" for number in range(1, count + 1)]
    scenes = []
    for number, name in enumerate(names):
        scene = draw_scene(np.random.default_rng([*seeds, number]), image_size)
        Image.fromarray(scene.pixels).save(folder / name, compress_level=1)
        scenes.append((scene.boxes, scene.labels))
    boxes, labels = zip(*scenes, strict=True)
    dataset = DetectionDataset(
        root=folder,
        class_names=CLASS_NAMES,
        image_paths=names,
        image_sizes=[(image_size, image_size)] * count,
        boxes_per_image=list(map(len, labels)),
        boxes=np.concatenate(boxes),
        labels=np.concatenate(labels),
    )
    version, seed, _ = seeds
    info = {"description": "aploss built-in shapes", "version": str(version), "seed": seed, "split": folder.name}
    return {"info": info, **dataset.to_coco()}
