"""``aploss data``: check a dataset, show it, and convert it to another format."""

import json
import random
import sys
import warnings
from argparse import Namespace
from pathlib import Path

from PIL import Image

from aploss import data
from aploss.data.check import check_report
from aploss.data.folder import Effect, summarise
from aploss.data.loader import AugmentedSamples
from aploss.errors import ConfigError, DataError
from aploss.files import as_file_name, write_whole
from aploss.progress import Progress
from aploss.reports.data_page import write_data_page

TILE = 300  # pixels of an image on a contact sheet


def run_check(options: Namespace) -> int:
    """Checks the dataset and prints the problems; see :attr:`~aploss.data.check.CheckResult.exit_code`."""
    names = options.classes and [name.strip() for name in options.classes.split(",")]
    with (
        warnings.catch_warnings(),
        Progress(quiet=options.quiet or options.json) as progress,
        progress.task("checking") as show,
    ):
        # Pillow warns about images that the check itself reports as too large.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        result = data.check_dataset(
            options.path, format=options.format, class_names=names, pixels=options.pixels, progress=show
        )
    print(json.dumps(result.to_dict(), indent=2) if options.json else check_report(result))
    if options.out is not None or not options.json:
        name = as_file_name(f"check-{Path(options.path).resolve().stem}")
        page = write_data_page(result, options.out or Path("runs") / f"{name}.html")
        if not options.json:
            print(f"\npage: {page}", flush=True)
    return result.exit_code


def run_show(options: Namespace) -> int:
    """Writes a contact sheet and describes it in one line."""
    suffix = ".png" if options.out is None else options.out.suffix.lower()
    kind = Image.registered_extensions().get(suffix)
    if kind is None:
        raise ConfigError(f"--out {options.out}: not a picture format, use .png or .jpg")
    dataset = data.load_dataset(options.path, options.split, format=options.format)
    if len(dataset) == 0:
        raise DataError(f"{options.path}: the dataset has no images")
    indices = sorted(random.Random(options.seed).sample(range(len(dataset)), min(options.count, len(dataset))))
    samples, augmented = [dataset[index] for index in indices], ""
    if options.augment:
        augmenter = AugmentedSamples(dataset, seed=options.seed, preset=options.augment, size=TILE)
        samples, augmented = [augmenter[0, index] for index in indices], f", augmentation '{options.augment}'"
    tiles = []
    for image, target in samples:
        boxes, labels, dashed = target["boxes"], target["labels"], target["difficult"] | target["crowd"]
        tiles.append(data.draw_boxes(image, boxes, labels, dataset.class_names, dashed=dashed, largest=TILE))
    title = f"{dataset.name} · {dataset.split}: {len(tiles)} of {len(dataset)} images{augmented}"
    sheet = data.contact_sheet(tiles, [dataset.image_paths[index] for index in indices], tile=TILE)
    words = "-".join(filter(None, ["show", dataset.name, dataset.split, options.augment]))
    out = options.out or Path("runs") / f"{as_file_name(words)}.png"
    write_whole(out, lambda file: sheet.save(file, format=kind))
    if not options.quiet:
        print(f"{out}: {title}, {sum(len(target['boxes']) for _, target in samples)} boxes")
    return 0


def run_convert(options: Namespace) -> int:
    """Converts the dataset and reports what was written and what was lost."""
    result = data.convert_dataset(options.path, options.out, to=options.to, format=options.format)
    if not options.quiet:
        counts = f"{result.images:,} images, {result.boxes:,} boxes, splits {', '.join(result.splits)}"
        print(f"{result.folder}: {counts}", flush=True)
    if changed := [problem for problem in result.problems if problem.effect is not Effect.KEPT]:
        print(f"dropped or clipped: {summarise(changed)}", file=sys.stderr)
    if result.losses:
        print(f"lost, since {options.to} cannot represent it: {'; '.join(result.losses)}", file=sys.stderr)
    return 0
