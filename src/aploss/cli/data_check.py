"""Count a dataset and list every problem in it, by file.

Exit code 0: everything can be used; 1: something would be dropped or clipped; 2: the dataset, or
its training split, cannot be used.
"""

import json
import sys
import warnings

from jsonargparse import ArgumentParser, Namespace

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """
  aploss data check VOCdevkit
  aploss data check coco --json > report.json
  aploss data check mine/data.yaml --fast
  aploss data check blood --classes RBC,WBC,Platelets
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "path", type=str, help="folder, COCO JSON file, YOLO data.yaml, or 'builtin'"
    )
    parser.add_argument(
        "--format",
        choices=["auto", "coco", "voc", "yolo"],
        default="auto",
        help="format, where it cannot be told from the files",
    )
    parser.add_argument(
        "--classes",
        type=str,
        default=None,
        help="class names joined by commas; others are reported as unknown",
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="read the headers of images alone: does not find damaged or equal images",
    )
    parser.add_argument(
        "--limit", type=int, default=20, help="problems of a kind to write out, 0 for all"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: Namespace) -> int:
    """Checks the dataset and prints what was found."""
    from PIL import Image

    from aploss.data.check import check_dataset
    from aploss.data.check_report import check_report

    names = options.classes and [name.strip() for name in options.classes.split(",")]
    with warnings.catch_warnings():
        # Pillow warns of images that the check itself reports as too large.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        result = check_dataset(
            options.path,
            format=options.format,
            class_names=names,
            decode=not options.fast,
            progress=_show_progress if sys.stderr.isatty() else None,
        )
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        print(check_report(result, limit=max(options.limit, 0)))
    return result.exit_code


def _show_progress(done: int, total: int) -> None:
    if done % 50 == 0 or done == total:
        end = "\r" + " " * 40 + "\r" if done == total else ""
        print(f"\r{done:,} of {total:,} images{end}", end="", file=sys.stderr, flush=True)
