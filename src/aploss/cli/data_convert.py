"""Write a dataset in another format, with all its splits and images."""

import sys

from jsonargparse import ArgumentParser, Namespace

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """
  aploss data convert VOCdevkit --to coco --out voc-as-coco
  aploss data convert coco/annotations/instances_val2017.json --to yolo --out coco-val-yolo
  aploss data convert builtin --to voc --out shapes
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "path", type=str, help="folder, COCO JSON file, YOLO data.yaml, or 'builtin'"
    )
    parser.add_argument(
        "--to", choices=["coco", "voc", "yolo"], required=True, help="format to write"
    )
    parser.add_argument("--out", type=str, required=True, help="new folder; nothing is overwritten")
    parser.add_argument(
        "--format",
        choices=["auto", "coco", "voc", "yolo"],
        default="auto",
        help="format of PATH, where it cannot be told from the files",
    )


def run(options: Namespace) -> int:
    """Converts the dataset and says what was written and what was not."""
    from aploss.data.convert import convert_dataset
    from aploss.data.problems import Effect, summarise

    result = convert_dataset(options.path, options.out, to=options.to, format=options.format)
    print(
        f"{result.folder}: {result.images:,} images, {result.boxes:,} boxes, "
        f"splits {', '.join(result.splits)}"
    )
    changed = [problem for problem in result.problems if problem.effect is not Effect.KEPT]
    if changed:
        print(f"left out or clipped: {summarise(changed)}", file=sys.stderr)
    if result.losses:
        losses = "; ".join(result.losses)
        print(f"{options.to} cannot hold, and so lost: {losses}", file=sys.stderr)
    return 0
