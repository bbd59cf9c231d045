"""``aploss eval`` and ``aploss export``: a trained run evaluated, or written as ONNX.

Detections files of any detector are evaluated, too: they are matched to annotations by their ids, which
``aploss predict --submission coco`` takes from the annotations.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np

from aploss.cli.train import run_folder_of
from aploss.data import find_source
from aploss.data.annotations import Annotations
from aploss.data.coco import coco_names
from aploss.detectors import export, load
from aploss.errors import ConfigError, DataError
from aploss.evaluation.matching import match_detections, match_voc, precision_recall_curves
from aploss.evaluation.metrics import coco_metrics, voc_metrics
from aploss.evaluation.tables import DetectionTable, as_tables, read_detections, read_ground_truth
from aploss.files import write_json, write_text
from aploss.plotting.plots import precision_recall_plot
from aploss.progress import Progress
from aploss.training import splits
from aploss.training.distributed import choose_device, choose_workers, start_accelerator


def run_eval(options: Namespace) -> int:
    """Evaluates, prints a table or JSON, and writes the requested files."""
    files = [options.annotations, options.detections]
    given = [value is not None for value in (options.run, options.data, *files)]
    if given not in ([True, True, False, False], [False, False, True, True]):
        raise ConfigError("give either RUN and --data, or --annotations and --detections")
    if options.max_detections is not None and options.metric != "coco":
        raise ConfigError("--max-detections requires --metric coco: VOC evaluates all detections")
    truth, table, ignored = _detect(options) if options.run is not None else _read(*files)
    iou = 0.5 if options.iou is None else options.iou
    if options.metric == "coco":
        metrics = coco_metrics(truth, table, iou=options.iou, max_detections=options.max_detections or 100)
    else:
        metrics = voc_metrics(truth, table, year=2007 if options.metric == "voc07" else 2012, iou=iou)
    document = {**metrics.as_dict(), "ignored_objects": ignored}
    if options.out is not None:
        matches = (match_detections if options.metric == "coco" else match_voc)(truth, table, iou)
        curves = precision_recall_curves(truth, table, matches=matches)
        lists = {"precision_recall": {name: curve.as_dict() for name, curve in curves.items()}}
        write_json(options.out / "metrics.json", {**document, "precision_recall_iou": iou, **lists})
        if curves:  # some class has objects
            write_text(options.out / "precision-recall.svg", precision_recall_plot(curves, iou))
    if options.json:
        print(json.dumps(document, allow_nan=False))
    else:
        if ignored:
            print(f"{ignored} objects of classes that the run does not know are ignored")
        counts = f"{metrics.images} images, {metrics.objects} objects, {metrics.detections} detections"
        print(f"{metrics.metric.upper()} metrics, IoU {metrics.iou}: {counts}\n\n{metrics.table()}")
    return 0


def _detect(options: Namespace) -> tuple[Annotations, DetectionTable, int]:
    """The ground truth of a split, the detections of the run on it, and the number of ignored objects."""
    device = choose_device(options.device)
    detector = load(options.run, device=device)
    source = find_source(options.data, format=options.format)
    usual = [split for name in ("test", "val") for split in source.splits if split.startswith(name)]  # or val2017
    if not options.split and not usual and len(source.splits) > 1:
        raise ConfigError(f"{options.data} has no test or val split: choose --split of {', '.join(source.splits)}")
    name = options.split or (usual or source.splits)[0]
    option = None if options.ignore_unknown_classes else "--ignore-unknown-classes"
    split = splits.load_split(source, name, detector.class_names, ignore_unknown=option)
    if split.dataset.num_boxes == 0:
        names = ", ".join(detector.class_names)
        raise DataError(f"{options.data}: split '{name}' has no objects of the run's classes ({names})")
    # The batch size of the run's own validation: the last bits of a convolution depend on it.
    folder, workers = run_folder_of(options.run), choose_workers(None, device, 1)
    size = options.batch_size or (folder.read_config().validation.batch_size if folder is not None else 8)
    with (
        start_accelerator(device) as accelerator,
        Progress(quiet=options.quiet or options.json) as progress,
        progress.task("detecting") as show,
    ):
        table = splits.detect_split(detector, split, accelerator, batch_size=size, workers=workers, on_images=show)
    options.max_detections = options.max_detections or detector.detections_per_image
    if not (options.json or options.quiet):
        print(f"{options.run} on {split.dataset.name}, split {name}")
    return split.truth, table, split.ignored_objects


def _read(annotations: Path, detections: Path) -> tuple[Annotations, DetectionTable, int]:
    """The ground truth and detections of two files; see :func:`_detect`."""
    truth, table = as_tables(read_ground_truth(annotations), read_detections(detections))
    predicted = detections.with_name("images.json")  # next to the detections of aploss predict
    files = [predicted, annotations] if predicted.is_file() else []
    for names, known in zip(*(coco_names(file.read_bytes()) for file in files), strict=True):
        if any(Path(name).name != Path(known.get(number, "")).name for number, name in names.items()):
            option = f"--submission coco --annotations {annotations}"
            raise DataError(f"{detections} has other ids than {annotations}: add {option} to aploss predict")
    if missed := len(truth.images) - len(np.unique(table.image_ids)):
        warning = f"{missed} of {len(truth.images)} images have no detections; their objects count as missed"
        print(f"aploss eval: warning: {warning}", file=sys.stderr)
    return truth, table, 0


def run_export(options: Namespace) -> int:
    """Exports, and prints what the file contains."""
    if options.out.suffix.lower() != ".onnx":
        raise ConfigError(f"--out {options.out}: the name must end in .onnx")
    detector = load(options.run)
    path = export.export_onnx(detector, options.out, size=options.size)
    if not options.quiet:
        scores = "calibrated" if detector.calibration is not None else "not calibrated"
        print(f"{path}: {detector.name}, {path.stat().st_size / 1e6:.1f} MB, verified against the detector")
        print(f"  classes: {', '.join(detector.class_names)}; scores: {scores}", flush=True)
    return 0
