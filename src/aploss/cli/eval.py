"""Score a detections file of any detector against annotations."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from aploss.cli.command import Command
from aploss.errors import ConfigError, DataError
from aploss.evaluation import (
    Curve,
    DetectionTable,
    GroundTruth,
    Metrics,
    as_detections,
    coco_metrics,
    curves_as_dict,
    match_detections,
    match_voc,
    precision_recall_curves,
    read_detections,
    read_ground_truth,
    voc_metrics,
)
from aploss.files import write_text

__all__ = ["EVAL"]

EXAMPLES = """
  aploss eval --annotations instances_val2017.json --detections results.json
  aploss eval --annotations gt.json --detections results.json --metric voc07
  aploss eval --annotations gt.json --detections results.json --iou 0.7 --json
  aploss eval --annotations gt.json --detections results.json --out scores/
"""

TITLES = {
    "coco": "COCO metrics",
    "voc07": "VOC2007 metrics (11 points)",
    "voc12": "VOC2012 metrics (area under the curve)",
}
IOUS_OF_CURVES = (0.5, 0.6, 0.7, 0.8, 0.9)


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--annotations", type=str, required=True, help="ground truth, COCO annotation JSON"
    )
    parser.add_argument(
        "--detections", type=str, required=True,
        help="COCO results JSON: list of image_id, category_id, bbox (x, y, width, height), score",
    )  # fmt: skip
    parser.add_argument(
        "--metric", type=Literal["coco", "voc07", "voc12"], default="coco",
        help="COCO, VOC2007 (11 points) or VOC2010 and later (area)",
    )  # fmt: skip
    parser.add_argument(
        "--iou", type=float | None, default=None,
        help="measure AP at this IoU alone (default: 0.50:0.95 for coco, 0.5 for voc)",
    )  # fmt: skip
    parser.add_argument(
        "--max-detections", type=int | None, default=None,
        help="detections looked at per image and class (coco only, default 100)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument(
        "--out", type=str | None, default=None,
        help="folder for metrics.json and precision-recall curves (SVG)",
    )  # fmt: skip


def _run(options: Namespace) -> int:
    """Scores the detections, prints a table or JSON, and writes the files asked for."""
    truth = read_ground_truth(options.annotations)
    try:
        table = as_detections(read_detections(options.detections), truth)
    except DataError as error:
        text = str(error)
        known = text.startswith(options.detections)
        raise DataError(text if known else f"{options.detections}: {text}") from None
    metrics = _score(truth, table, options)
    written = [] if options.out is None else _write(truth, table, metrics, options)
    if options.json:
        print(json.dumps(metrics.as_dict(), allow_nan=False))
        return 0
    print(
        f"{TITLES[metrics.metric]}, IoU {metrics.iou}: {metrics.images} images, "
        f"{metrics.objects} objects, {metrics.detections} detections\n"
    )
    print(metrics.table())
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _score(truth: GroundTruth, table: DetectionTable, options: Namespace) -> Metrics:
    if options.metric == "coco":
        limit = 100 if options.max_detections is None else options.max_detections
        return coco_metrics(truth, table, iou=options.iou, max_detections=limit)
    if options.max_detections is not None:
        raise ConfigError("--max-detections is for --metric coco; VOC looks at all detections")
    year = 2007 if options.metric == "voc07" else 2012
    return voc_metrics(truth, table, year=year, iou=0.5 if options.iou is None else options.iou)


def _write(
    truth: GroundTruth, table: DetectionTable, metrics: Metrics, options: Namespace
) -> list[Path]:
    """Writes metrics.json and, where a class has objects, the curves; gives the paths."""
    from aploss.plotting.plots import precision_recall_panels, precision_recall_plot

    main_iou = 0.5 if options.iou is None else options.iou
    curves = {
        iou: _curves(truth, table, iou, options.metric) for iou in {main_iou, *IOUS_OF_CURVES}
    }
    main = curves[main_iou]
    document: dict[str, Any] = {
        **metrics.as_dict(),
        "precision_recall_iou": main_iou,
        "precision_recall": curves_as_dict(main),
    }
    texts = {"metrics.json": json.dumps(document, indent=2, allow_nan=False) + "\n"}
    if main:
        texts["precision-recall.svg"] = precision_recall_plot(main, main_iou)
        texts["precision-recall-by-class.svg"] = precision_recall_panels(
            dict(sorted(curves.items()))
        )
    folder = Path(options.out)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def _curves(truth: GroundTruth, table: DetectionTable, iou: float, metric: str) -> dict[str, Curve]:
    match = match_detections if metric == "coco" else match_voc
    return precision_recall_curves(truth, table, matches=match(truth, table, iou))


EVAL = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
