"""Draws a contact sheet of a dataset with its boxes, as it is or as training sees it."""

import random
from pathlib import Path
from typing import TYPE_CHECKING

from aploss.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace
    from PIL import Image

    from aploss.data.dataset import DetectionDataset, Sample

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """
  aploss data show builtin --out sheet.png
  aploss data show VOCdevkit --split 2007_trainval --count 25 --out voc.png
  aploss data show builtin --augment paper --size 300 --out augmented.png
"""

DEFAULT_SIZE = 300  # of augmented images: SSD300's


def add_arguments(parser: "ArgumentParser") -> None:
    """Declares the options of ``aploss data show``."""
    parser.add_argument("path", type=str, help="dataset folder or file, or 'builtin'")
    parser.add_argument("--split", type=str, help="part of the dataset (default: all of it)")
    parser.add_argument(
        "--format",
        choices=["auto", "voc", "coco", "yolo"],
        default="auto",
        help="how the dataset is written (default: found out)",
    )
    parser.add_argument(
        "--augment",
        choices=["paper", "light", "none"],
        help="show images as this augmentation hands them to training",
    )
    parser.add_argument(
        "--size",
        type=int,
        nargs="+",
        help=f"side of augmented images, or height and width (default: {DEFAULT_SIZE})",
    )
    parser.add_argument("--count", type=int, default=16, help="how many images (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="which images, and which augmentation")
    parser.add_argument("--out", type=Path, required=True, help="picture to write: .png, .jpg ...")


def run(options: "Namespace") -> int:
    """Writes the sheet and says in one line what is on it."""
    from aploss.data.draw import contact_sheet
    from aploss.data.load import load_dataset

    _check(options)
    dataset = load_dataset(options.path, options.split, format=options.format)
    indices = _choose(len(dataset), options.count, options.seed)
    samples = _samples(dataset, indices, options)
    tiles = [_draw(sample, dataset) for sample in samples]
    captions = [dataset.relative_path(index) for index in indices]
    how = f", augmented as '{options.augment}'" if options.augment else ""
    title = f"{dataset.name} · {dataset.split}: {len(tiles)} of {len(dataset)} images{how}"
    _write(contact_sheet(tiles, captions, title=title), options.out)
    boxes = sum(len(target["boxes"]) for _, target in samples)
    print(f"{options.out}: {title}, {boxes} boxes")
    return 0


def _check(options: "Namespace") -> None:
    from PIL import Image

    if options.count < 1:
        raise ConfigError(f"--count {options.count}: give 1 or more")
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: give 0 or more")
    if options.size and not options.augment:
        raise ConfigError("--size is that of augmented images: add --augment paper, light or none")
    if options.size and len(options.size) > 2:
        raise ConfigError("--size takes one number, or height and width")
    if options.out.suffix.lower() not in Image.registered_extensions():
        raise ConfigError(f"--out {options.out}: no picture format, end its name in .png or .jpg")


def _choose(available: int, count: int, seed: int) -> list[int]:
    """Random images in the dataset's order; all of them when there are no more."""
    if available == 0:
        raise DataError("the dataset has no images: check its path and split")
    chosen = random.Random(seed).sample(range(available), min(count, available))
    return sorted(chosen)


def _samples(
    dataset: "DetectionDataset", indices: list[int], options: "Namespace"
) -> "list[Sample]":
    if not options.augment:
        return [dataset[index] for index in indices]
    from aploss.data.batches import AugmentedSamples

    sides = options.size or [DEFAULT_SIZE]
    samples = AugmentedSamples(
        dataset, seed=options.seed, preset=options.augment, size=(sides[0], sides[-1])
    )
    return [samples[0, index] for index in indices]


def _draw(sample: "Sample", dataset: "DetectionDataset") -> "Image.Image":
    from aploss.data.draw import draw_boxes

    image, target = sample
    return draw_boxes(
        image.numpy(),
        target["boxes"].numpy(),
        target["labels"].numpy(),
        dataset.class_names,
        dashed=(target["difficult"] | target["crowd"]).numpy(),
    )


def _write(sheet: "Image.Image", path: Path) -> None:
    """Writes to a temporary name first, so that nothing half-written is left."""
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(part)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
