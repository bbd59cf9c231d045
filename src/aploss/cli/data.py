"""``aploss data``: check a dataset, show it, and convert it to another format."""

import json
import random
import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from aploss.cli.command import Command, progress, require_at_least, say_next
from aploss.cli.options import parse_size
from aploss.errors import ConfigError, DataError
from aploss.files import as_file_name, write_whole

if TYPE_CHECKING:
    from aploss.data.annotations import DetectionDataset, Sample

CHECK_EXAMPLES = """
  aploss data check VOCdevkit
  aploss data check coco --json > report.json
  aploss data check mine/data.yaml --fast
  aploss data check blood --classes RBC,WBC,Platelets
"""
SHOW_EXAMPLES = """
  aploss data show builtin
  aploss data show VOCdevkit --split 2007_trainval --count 25 --out voc.png
  aploss data show builtin --augment paper --size 300 --out augmented.png
"""
CONVERT_EXAMPLES = """
  aploss data convert VOCdevkit --to coco --out voc-as-coco
  aploss data convert coco/annotations/instances_val2017.json --to yolo --out coco-val-yolo
  aploss data convert builtin --to voc --out shapes
"""
ONLY_PROBLEMS = "show only what goes wrong"
TILE = 300  # pixels of an image on a contact sheet


def _add_source(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=str, help="folder, COCO JSON file, YOLO data.yaml, or 'builtin'")
    parser.add_argument("--format", default="auto", help=f"where it cannot be told from the files: {_formats()}")


def _formats() -> str:
    """The formats that are registered, those of plugins as well."""
    from aploss.data.load import format_names

    return ", ".join(name for name in format_names() if name != "auto")


def _add_check_arguments(parser: ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument(
        "--classes", type=str, default=None, help="class names joined by commas; others are reported as unknown"
    )
    parser.add_argument(
        "--fast", action="store_true", help="read the headers of images alone: does not find damaged or equal images"
    )
    parser.add_argument("--limit", type=int, default=20, help="problems of a kind to write out, 0 for all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _check(options: Namespace) -> int:
    """Checks the dataset and prints what was found; see :attr:`~aploss.data.check.CheckResult.exit_code`."""
    from PIL import Image

    from aploss.data.check import UNUSABLE, check_dataset, check_report

    names = options.classes and [name.strip() for name in options.classes.split(",")]
    with warnings.catch_warnings(), progress("images checked", quiet=options.quiet) as show:
        # Pillow warns of images that the check itself reports as too large.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        result = check_dataset(
            options.path, format=options.format, class_names=names, decode=not options.fast, progress=show
        )
    print(json.dumps(result.to_dict(), indent=2) if options.json else check_report(result, limit=max(options.limit, 0)))
    if result.exit_code != UNUSABLE:
        sys.stdout.flush()
        say_next(options, f"aploss train --data {shlex.quote(options.path)}")
    return result.exit_code


def _add_show_arguments(parser: ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("--split", type=str, help="part of the dataset; all of it if not given")
    parser.add_argument(
        "--augment", choices=["paper", "light", "none"], help="show images as this augmentation hands them to training"
    )
    parser.add_argument("--size", type=str, help="of augmented images, as 300 or 240x320 (height x width); 300")
    parser.add_argument("--count", type=int, default=16, help="how many images")
    parser.add_argument("--seed", type=int, default=0, help="which images, and which augmentation")
    parser.add_argument("--out", type=Path, help="picture to write: .png, .jpg ... (default: runs/show-DATA-SPLIT.png)")


def _show(options: Namespace) -> int:
    """Writes a contact sheet and says in one line what is on it."""
    from PIL import Image

    from aploss.data import contact_sheet, draw_boxes, load_dataset

    require_at_least(1, options, "count")
    require_at_least(0, options, "seed")
    if options.size and not options.augment:
        raise ConfigError("--size is that of augmented images: add --augment paper, light or none")
    suffix = ".png" if options.out is None else options.out.suffix.lower()
    kind = Image.registered_extensions().get(suffix)
    if kind is None:
        raise ConfigError(f"--out {options.out}: no picture format, end its name in .png or .jpg")
    dataset = load_dataset(options.path, options.split, format=options.format)
    if len(dataset) == 0:
        raise DataError("the dataset has no images: check its path and split")
    indices = sorted(random.Random(options.seed).sample(range(len(dataset)), min(options.count, len(dataset))))
    samples = _samples(dataset, indices, options)
    tiles = [
        draw_boxes(
            image.numpy(),
            target["boxes"].numpy(),
            target["labels"].numpy(),
            dataset.class_names,
            dashed=(target["difficult"] | target["crowd"]).numpy(),
            smallest=TILE,
            largest=TILE,
        )
        for image, target in samples
    ]
    captions = [dataset.relative_path(index) for index in indices]
    how = f", augmented as '{options.augment}'" if options.augment else ""
    title = f"{dataset.name} · {dataset.split}: {len(tiles)} of {len(dataset)} images{how}"
    sheet = contact_sheet(tiles, captions, tile=TILE, title=title)
    words = "-".join(filter(None, ["show", dataset.name, dataset.split, options.augment]))
    out = options.out or Path("runs") / f"{as_file_name(words)}.png"
    write_whole(out, lambda file: sheet.save(file, format=kind))
    boxes = sum(len(target["boxes"]) for _, target in samples)
    if not options.quiet:
        print(f"{out}: {title}, {boxes} boxes", flush=True)
        say_next(options, f"aploss train --data {shlex.quote(options.path)}")
    return 0


def _samples(dataset: "DetectionDataset", indices: list[int], options: Namespace) -> "list[Sample]":
    if not options.augment:
        return [dataset[index] for index in indices]
    from aploss.data.loader import AugmentedSamples

    size: Any = parse_size(options.size or "300", "--size", 300)
    samples = AugmentedSamples(dataset, seed=options.seed, preset=options.augment, size=size)
    return [samples[0, index] for index in indices]


def _add_convert_arguments(parser: ArgumentParser) -> None:
    _add_source(parser)
    from aploss.data.formats import writable_formats

    parser.add_argument(
        "--to", required=True, metavar="FORMAT", help=f"format to write: {', '.join(writable_formats())}"
    )
    parser.add_argument("--out", type=str, required=True, metavar="DIR", help="new folder; nothing is overwritten")


def _convert(options: Namespace) -> int:
    """Converts the dataset and says what was written and what was not."""
    from aploss.data import convert_dataset
    from aploss.data.problems import Effect, summarise

    result = convert_dataset(options.path, options.out, to=options.to, format=options.format)
    if not options.quiet:
        counts = f"{result.images:,} images, {result.boxes:,} boxes, splits {', '.join(result.splits)}"
        print(f"{result.folder}: {counts}", flush=True)
    changed = [problem for problem in result.problems if problem.effect is not Effect.KEPT]
    if changed:
        print(f"left out or clipped: {summarise(changed)}", file=sys.stderr)
    if result.losses:
        print(f"{options.to} cannot hold, and so lost: {'; '.join(result.losses)}", file=sys.stderr)
    say_next(options, f"aploss data check {shlex.quote(options.out)}")
    return 0


CHECK = Command(examples=CHECK_EXAMPLES, add_arguments=_add_check_arguments, run=_check, computes=False)
SHOW = Command(
    examples=SHOW_EXAMPLES, add_arguments=_add_show_arguments, run=_show, computes=False, quiet=ONLY_PROBLEMS
)
CONVERT = Command(
    examples=CONVERT_EXAMPLES,
    add_arguments=_add_convert_arguments,
    run=_convert,
    computes=False,
    quiet=ONLY_PROBLEMS,
    needs={"--to": "coco", "--out": "converted"},
)
