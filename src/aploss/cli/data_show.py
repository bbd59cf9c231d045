"""Draws a contact sheet of a dataset with its boxes, as it is or as training sees it."""

import random
from pathlib import Path
from typing import TYPE_CHECKING

from aploss.errors import ConfigError, DataError
from aploss.files import write_whole

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

TILE = 300  # pixels of an image on the sheet


def add_arguments(parser: "ArgumentParser") -> None:
    """Declares the options of ``aploss data show``."""
    parser.add_argument("path", type=str, help="dataset folder or file, or 'builtin'")
    parser.add_argument("--split", type=str, help="part of the dataset; all of it if not given")
    parser.add_argument(
        "--format",
        choices=["auto", "voc", "coco", "yolo"],
        default="auto",
        help="how the dataset is written",
    )
    parser.add_argument(
        "--augment",
        choices=["paper", "light", "none"],
        help="show images as this augmentation hands them to training",
    )
    parser.add_argument(
        "--size", type=str, help="of augmented images, as 300 or 240x320 (height x width); 300"
    )
    parser.add_argument("--count", type=int, default=16, help="how many images")
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
    _write(contact_sheet(tiles, captions, tile=TILE, title=title), options.out)
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

    size = _parse_size(options.size or "300")
    samples = AugmentedSamples(dataset, seed=options.seed, preset=options.augment, size=size)
    return [samples[0, index] for index in indices]


def _parse_size(text: str) -> tuple[int, int]:
    """Height and width of ``300`` or ``240x320``."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise ConfigError(f"--size {text}: write 300, or 240x320 for height x width")
    return int(sides[0]), int(sides[-1])


def _draw(sample: "Sample", dataset: "DetectionDataset") -> "Image.Image":
    from aploss.data.draw import draw_boxes

    image, target = sample
    return draw_boxes(
        image.numpy(),
        target["boxes"].numpy(),
        target["labels"].numpy(),
        dataset.class_names,
        dashed=(target["difficult"] | target["crowd"]).numpy(),
        smallest=TILE,
        largest=TILE,
    )


def _write(sheet: "Image.Image", path: Path) -> None:
    from PIL import Image

    kind = Image.registered_extensions()[path.suffix.lower()]
    write_whole(path, lambda file: sheet.save(file, format=kind))
