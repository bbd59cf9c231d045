"""``aploss data``: check a dataset, show it, and convert it to another format."""

import json
import random
import sys
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path

from aploss.cli.options import positive_int, progress
from aploss.errors import ConfigError, DataError
from aploss.files import as_file_name, write_whole

CHECK_EXAMPLES = """
  aploss data check VOCdevkit
  aploss data check mine/data.yaml --pixels --classes RBC,WBC,Platelets --json
"""
SHOW_EXAMPLES = """
  aploss data show VOCdevkit --split 2007_trainval --count 25 --out voc.png
  aploss data show builtin --augment paper --out augmented.png
"""
CONVERT_EXAMPLES = """
  aploss data convert VOCdevkit --to coco --out voc-as-coco
  aploss data convert coco/annotations/instances_val2017.json --to yolo --out coco-val-yolo
"""
TILE = 300  # pixels of an image on a contact sheet


def _add_source(parser: ArgumentParser) -> None:
    from aploss.data.formats import all_formats

    parser.add_argument("path", help="folder, COCO JSON file, YOLO data.yaml, or 'builtin'")
    parser.add_argument(
        "--format", default="auto", help=f"format of the dataset: {', '.join(['auto', *all_formats()])}"
    )


def add_check_arguments(parser: ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("--classes", help="comma-separated class names; other classes are reported as unknown")
    pixels = "decode every image, which finds damaged ones; by default only headers are read"
    parser.add_argument("--pixels", action="store_true", help=pixels)
    parser.add_argument("--json", action="store_true", help="print one JSON object, and write no page")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="page; by default runs/check-DATA.html")


def run_check(options: Namespace) -> int:
    """Checks the dataset and prints the problems; see :attr:`~aploss.data.check.CheckResult.exit_code`."""
    from PIL import Image

    from aploss.data.check import check_dataset, check_report
    from aploss.reports.data_page import write_data_page

    names = options.classes and [name.strip() for name in options.classes.split(",")]
    with warnings.catch_warnings(), progress("images checked", quiet=options.quiet) as show:
        # Pillow warns about images that the check itself reports as too large.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        result = check_dataset(
            options.path, format=options.format, class_names=names, pixels=options.pixels, progress=show
        )
    print(json.dumps(result.to_dict(), indent=2) if options.json else check_report(result))
    if options.out is not None or not options.json:
        name = as_file_name(f"check-{Path(options.path).resolve().stem}")
        page = write_data_page(result, options.out or Path("runs") / f"{name}.html")
        if not options.json:
            print(f"\npage: {page}", flush=True)
    return result.exit_code


def add_show_arguments(parser: ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("--split", help="split of the dataset; all by default")
    augment = "show images as this augmentation preset produces them for training"
    parser.add_argument("--augment", choices=["paper", "light", "none"], help=augment)
    parser.add_argument("--count", type=positive_int, metavar="N", default=16, help="number of images")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the choice and the augmentation")
    parser.add_argument("--out", type=Path, metavar="FILE", help="picture; by default runs/show-DATA-SPLIT.png")


def run_show(options: Namespace) -> int:
    """Writes a contact sheet and describes it in one line."""
    from PIL import Image

    from aploss.data import contact_sheet, draw_boxes, load_dataset
    from aploss.data.loader import AugmentedSamples

    suffix = ".png" if options.out is None else options.out.suffix.lower()
    kind = Image.registered_extensions().get(suffix)
    if kind is None:
        raise ConfigError(f"--out {options.out}: not a picture format, use .png or .jpg")
    dataset = load_dataset(options.path, options.split, format=options.format)
    if len(dataset) == 0:
        raise DataError(f"{options.path}: the dataset has no images")
    indices = sorted(random.Random(options.seed).sample(range(len(dataset)), min(options.count, len(dataset))))
    samples, augmented = [dataset[index] for index in indices], ""
    if options.augment:
        augmenter = AugmentedSamples(dataset, seed=options.seed, preset=options.augment, size=TILE)
        samples, augmented = [augmenter[0, index] for index in indices], f", augmentation '{options.augment}'"
    tiles = []
    for image, target in samples:
        boxes, labels, dashed = target["boxes"].numpy(), target["labels"].numpy(), target["difficult"] | target["crowd"]
        tiles.append(draw_boxes(image.numpy(), boxes, labels, dataset.class_names, dashed=dashed.numpy(), largest=TILE))
    title = f"{dataset.name} · {dataset.split}: {len(tiles)} of {len(dataset)} images{augmented}"
    sheet = contact_sheet(tiles, [dataset.image_paths[index] for index in indices], tile=TILE, title=title)
    words = "-".join(filter(None, ["show", dataset.name, dataset.split, options.augment]))
    out = options.out or Path("runs") / f"{as_file_name(words)}.png"
    write_whole(out, lambda file: sheet.save(file, format=kind))
    if not options.quiet:
        print(f"{out}: {title}, {sum(len(target['boxes']) for _, target in samples)} boxes")
    return 0


def add_convert_arguments(parser: ArgumentParser) -> None:
    from aploss.data.formats import writable_formats

    _add_source(parser)
    parser.add_argument("--to", required=True, metavar="FORMAT", help=f"output format: {', '.join(writable_formats())}")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder; nothing is overwritten")


def run_convert(options: Namespace) -> int:
    """Converts the dataset and reports what was written and what was lost."""
    from aploss.data import convert_dataset
    from aploss.data.folder import Effect, summarise

    result = convert_dataset(options.path, options.out, to=options.to, format=options.format)
    if not options.quiet:
        counts = f"{result.images:,} images, {result.boxes:,} boxes, splits {', '.join(result.splits)}"
        print(f"{result.folder}: {counts}", flush=True)
    if changed := [problem for problem in result.problems if problem.effect is not Effect.KEPT]:
        print(f"dropped or clipped: {summarise(changed)}", file=sys.stderr)
    if result.losses:
        print(f"lost, since {options.to} cannot represent it: {'; '.join(result.losses)}", file=sys.stderr)
    return 0
