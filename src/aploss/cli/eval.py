"""``aploss eval``: evaluate a run on data, or a detections file of any detector against annotations.

``aploss predict`` writes ``images.json`` next to its ``detections.json``. If that file exists, images and classes are
matched to the annotations by name instead of id, and only the images that predict processed are evaluated.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from aploss.cli.command import Command, positive_int, progress, run_folder_of
from aploss.data.annotations import Annotations
from aploss.errors import ConfigError, DataError
from aploss.evaluation.matching import curves_as_dict, match_detections, match_voc, precision_recall_curves
from aploss.evaluation.metrics import Metrics, coco_metrics, voc_metrics
from aploss.evaluation.tables import DetectionTable, GroundTruth, as_detections, read_detections, read_ground_truth
from aploss.files import write_text

EXAMPLES = """
  aploss eval runs/demo --data VOCdevkit --split 2007_test --metric voc07 --json
  aploss eval --annotations instances_val2017.json --detections results.json
  aploss eval --annotations gt.json --detections found/detections.json --iou 0.7 --out scores/
"""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="run folder or checkpoint to evaluate on --data")
    parser.add_argument("--data", help="dataset to evaluate a run on: folder, file, or 'builtin'")
    parser.add_argument("--split", help="split of the dataset; by default test, else val")
    parser.add_argument("--format", default="auto", help="format of the dataset, if it cannot be detected")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto")
    batch = "images per forward pass; by default the run's validation batch size"
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help=batch)
    parser.add_argument("--annotations", metavar="FILE", help="ground truth as COCO annotation JSON")
    parser.add_argument("--detections", metavar="FILE", help="detections as COCO results JSON")
    metric = "COCO, VOC2007 (11 points) or VOC2010 and later (area under the curve)"
    parser.add_argument("--metric", choices=["coco", "voc07", "voc12"], default="coco", help=metric)
    iou = "evaluate AP at this IoU only; by default 0.50:0.95 for coco and 0.5 for voc"
    parser.add_argument("--iou", type=float, metavar="X", help=iou)
    limit = "detections per image and class (coco only); by default 100, or as many as the run returns"
    parser.add_argument("--max-detections", type=positive_int, metavar="N", help=limit)
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for metrics.json and precision-recall curves")


def _run(options: Namespace) -> int:
    """Evaluates, prints a table or JSON, and writes the requested files."""
    files = [options.annotations, options.detections]
    given = [value is not None for value in (options.run, options.data, *files)]
    if given not in ([True, True, False, False], [False, False, True, True]):
        raise ConfigError("give either RUN and --data, or --annotations and --detections")
    if options.max_detections is not None and options.metric != "coco":
        raise ConfigError("--max-detections requires --metric coco: VOC evaluates all detections")
    truth, table = _detect(options) if options.run is not None else _read(*files)
    iou = 0.5 if options.iou is None else options.iou
    if options.metric == "coco":
        metrics = coco_metrics(truth, table, iou=options.iou, max_detections=options.max_detections or 100)
    else:
        metrics = voc_metrics(truth, table, year=2007 if options.metric == "voc07" else 2012, iou=iou)
    if options.out is not None:
        _write(options.out, truth, table, metrics, iou)
    if options.json:
        print(json.dumps(metrics.as_dict(), allow_nan=False))
    else:
        counts = f"{metrics.images} images, {metrics.objects} objects, {metrics.detections} detections"
        print(f"{metrics.metric.upper()} metrics, IoU {metrics.iou}: {counts}\n\n{metrics.table()}")
    return 0


def _detect(options: Namespace) -> tuple[Annotations, DetectionTable]:
    """The ground truth of a split and the detections of the run on it."""
    from aploss.data import find_source
    from aploss.detectors import load
    from aploss.training.distributed import choose_device, choose_workers, start_accelerator
    from aploss.training.evaluate import detect_split
    from aploss.training.splits import Split

    device = choose_device(options.device)
    detector = load(options.run, device=device)
    source = find_source(options.data, format=options.format)
    split = options.split or _default_split(options.data, source.splits)
    dataset = source.load(split, class_names=detector.class_names)
    if dataset.num_boxes == 0:
        names = ", ".join(detector.class_names)
        raise DataError(f"{options.data}: split '{split}' has no objects of the run's classes ({names})")
    prepared, workers = Split(dataset), choose_workers(None, device, 1)
    # The batch size of the run's own validation: the last bits of a convolution depend on it.
    folder = run_folder_of(options.run)
    size = options.batch_size or (folder.read_config().validation.batch_size if folder is not None else 8)
    with start_accelerator(device) as accelerator, progress("images", quiet=options.quiet or options.json) as show:
        table = detect_split(detector, prepared, accelerator, batch_size=size, workers=workers, on_images=show)
    assert table is not None  # there is only one process
    options.max_detections = options.max_detections or detector.detections_per_image
    if not (options.json or options.quiet):
        print(f"{options.run} on {dataset.name}, split {split}")
    return prepared.truth, table


def _default_split(data: str, splits: Sequence[str]) -> str:
    """The test split of a dataset, else its validation split, else its only split."""
    usual = [split for name in ("test", "val") for split in splits if split.startswith(name)]  # such as val2017
    if not usual and len(splits) > 1:
        raise ConfigError(f"--split is required: {data} has no test or val split, but {', '.join(splits)}")
    return (usual or splits)[0]


def _read(annotations: str, detections: str) -> tuple[Annotations, DetectionTable]:
    """The ground truth and detections of two files, matched by name if predict wrote the detections."""
    truth, table = read_ground_truth(annotations), read_detections(detections)
    names = Path(detections).with_name("images.json")
    if Path(detections).name == "detections.json" and names.is_file():
        truth, table = _match_by_name(truth, table, read_ground_truth(names))
    try:
        table = as_detections(table, truth)
    except DataError as error:
        raise DataError(f"{detections}: {error}") from None
    if missed := len(truth.images) - len(np.unique(table.image_ids)):
        _warn(f"{missed} of {len(truth.images)} evaluated images have no detections; their objects count as missed")
    return truth, table


def _match_by_name(
    truth: GroundTruth, table: DetectionTable, predicted: GroundTruth
) -> tuple[GroundTruth, DetectionTable]:
    """The ground truth of the images that predict processed, and its detections with the ids of the annotations."""
    annotated = {name: number for number, name in truth.file_names.items()}
    images = {}
    for number, path in predicted.file_names.items():
        parts = Path(path).parts
        ends = ("/".join(parts[start:]) for start in range(len(parts)))  # the longest one that is annotated
        if (end := next((one for one in ends if one in annotated), None)) is not None:
            images[number] = annotated[end]
    if not images:
        raise DataError("the annotations contain none of the images of the detections; is it another split?")
    by_name = {name: number for number, name in truth.categories.items()}
    classes = {number: by_name[name] for number, name in predicted.categories.items() if name in by_name}
    kept = np.isin(table.image_ids, list(images)) & np.isin(table.category_ids, list(classes))
    if not kept.all():
        _warn(f"{np.sum(~kept)} detections left out: their images or classes are not in the annotations")
    if len(images) < len(truth.images):
        _warn(f"evaluated on {len(images)} of {len(truth.images)} annotated images")
    processed = np.isin(truth.image_ids, list(images.values()))
    columns = ("image_ids", "category_ids", "xywh", "areas", "crowd", "difficult")
    part = {name: getattr(truth, name)[processed] for name in columns}
    return replace(truth, images=np.unique([*images.values()]), **part), DetectionTable(
        image_ids=np.array([images[one] for one in table.image_ids[kept].tolist()], dtype=np.int64),
        category_ids=np.array([classes[one] for one in table.category_ids[kept].tolist()], dtype=np.int64),
        xywh=table.xywh[kept],
        scores=table.scores[kept],
    )


def _warn(text: str) -> None:
    print(f"aploss eval: warning: {text}", file=sys.stderr)


def _write(folder: Path, truth: Annotations, table: DetectionTable, metrics: Metrics, iou: float) -> None:
    """Writes metrics.json and, if any class has objects, a plot of the curves."""
    from aploss.plotting.plots import precision_recall_plot

    match = match_detections if metrics.metric == "coco" else match_voc
    curves = precision_recall_curves(truth, table, matches=match(truth, table, iou))
    document = {**metrics.as_dict(), "precision_recall_iou": iou, "precision_recall": curves_as_dict(curves)}
    write_text(folder / "metrics.json", json.dumps(document, indent=2, allow_nan=False) + "\n")
    if curves:
        write_text(folder / "precision-recall.svg", precision_recall_plot(curves, iou))


EVAL = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
