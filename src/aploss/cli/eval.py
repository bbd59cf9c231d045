"""``aploss eval``: evaluate a run on data, or a detections file of any detector against annotations.

``aploss predict`` writes ``images.json`` next to its ``detections.json``. If that file exists, images and classes are
matched to the annotations by name instead of id, and only the images that predict processed are evaluated.
"""

import json
import shlex
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from operator import eq
from pathlib import Path, PurePosixPath

import numpy as np

from aploss.cli.command import Command, progress, require_at_least, run_folder_of
from aploss.cli.options import Parser
from aploss.data.annotations import Annotations
from aploss.errors import ConfigError, DataError, listed
from aploss.evaluation.matching import curves_as_dict, match_detections, match_voc, precision_recall_curves
from aploss.evaluation.metrics import Metrics, coco_metrics, voc_metrics
from aploss.evaluation.tables import DetectionTable, GroundTruth, as_detections, read_detections, read_ground_truth
from aploss.files import write_text

EXAMPLES = """
  aploss eval runs/demo --data VOCdevkit --split 2007_test --metric voc07 --json
  aploss eval --annotations instances_val2017.json --detections results.json
  aploss eval --annotations gt.json --detections found/detections.json --iou 0.7 --out scores/
"""

TITLES = {
    "coco": "COCO metrics",
    "voc07": "VOC2007 metrics (11 points)",
    "voc12": "VOC2012 metrics (area under the curve)",
}


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("run", nargs="?", help="run folder or checkpoint to evaluate on --data")
    parser.add_argument("--data", help="dataset to evaluate a run on: folder, file, or 'builtin'")
    parser.add_argument("--split", help="split of the dataset; by default test, else val")
    parser.add_argument("--format", default="auto", help="format of the dataset, if it cannot be detected")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto")
    batch = "images per forward pass; by default the run's validation batch size"
    parser.add_argument("--batch-size", type=int, metavar="N", help=batch)
    parser.add_argument("--annotations", metavar="FILE", help="ground truth as COCO annotation JSON")
    parser.add_argument("--detections", metavar="FILE", help="detections as COCO results JSON")
    metric = "COCO, VOC2007 (11 points) or VOC2010 and later (area under the curve)"
    parser.add_argument("--metric", choices=list(TITLES), default="coco", help=metric)
    iou = "evaluate AP at this IoU only; by default 0.50:0.95 for coco and 0.5 for voc"
    parser.add_argument("--iou", type=float, metavar="X", help=iou)
    limit = "detections per image and class (coco only); by default 100, or as many as the run returns"
    parser.add_argument("--max-detections", type=int, metavar="N", help=limit)
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for metrics.json and precision-recall curves")


def _run(options: Namespace) -> int:
    """Evaluates, prints a table or JSON, and writes the requested files."""
    _check(options)
    truth, table = _detect(options) if options.run is not None else _read(options.annotations, options.detections)
    metrics = _score(truth, table, options)
    written = [] if options.out is None else _write(truth, table, metrics, options)
    if options.json:
        print(json.dumps(metrics.as_dict(), allow_nan=False))
        return 0
    counts = f"{metrics.images} images, {metrics.objects} objects, {metrics.detections} detections"
    print(f"{TITLES[metrics.metric]}, IoU {metrics.iou}: {counts}\n\n{metrics.table()}", flush=True)
    for path in () if options.quiet else written:
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _check(options: Namespace) -> None:
    """Raises ConfigError for options that are missing or exclude each other."""
    files = [options.annotations, options.detections]
    if options.run is None and (None in files or options.data is not None):
        raise ConfigError("give either RUN and --data, or --annotations and --detections")
    if options.run is not None and (options.data is None or files != [None, None]):
        raise ConfigError(f"a run is evaluated on --data: aploss eval {shlex.quote(options.run)} --data PATH")
    require_at_least(1, options, "batch_size")
    if options.max_detections is not None and options.metric != "coco":
        raise ConfigError("--max-detections requires --metric coco: VOC evaluates all detections")


def _detect(options: Namespace) -> tuple[Annotations, DetectionTable]:
    """The ground truth of a split and the detections of the run on it."""
    from aploss.data import find_source
    from aploss.detectors import load
    from aploss.training.distributed import start_accelerator
    from aploss.training.evaluate import detect_split
    from aploss.training.machine import choose_device, choose_workers
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
    if options.metric == "coco" and options.max_detections is None:
        options.max_detections = detector.detections_per_image
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
    names = _names_from_predict(detections, table)
    if names is not None:
        return _match_by_name(truth, table, *names, annotations)
    try:
        table = as_detections(table, truth)
    except DataError as error:
        raise DataError(f"{detections}: {error}") from None
    missed = len(truth.images) - len(np.unique(table.image_ids))
    if missed:
        _warn(f"{missed} of {len(truth.images)} annotated images have no detections; their objects count as missed")
    return truth, table


def _names_from_predict(detections: str, table: DetectionTable) -> tuple[dict[int, str], dict[int, str]] | None:
    """The names of images and classes by id from predict's ``images.json``; None if it is missing or unrelated."""
    try:
        content = json.loads(Path(detections).with_name("images.json").read_text(encoding="utf-8"))
        images = {int(one["id"]): str(one["file_name"]) for one in content["images"]}
        classes = {int(one["id"]): str(one["name"]) for one in content["categories"]}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    related = {*table.image_ids.tolist()} <= {*images} and {*table.category_ids.tolist()} <= {*classes}
    return (images, classes) if related else None


def _match_by_name(
    truth: GroundTruth, table: DetectionTable, images: dict[int, str], classes: dict[int, str], annotations: str
) -> tuple[Annotations, DetectionTable]:
    """The ground truth of the processed images, and the detections with the ids of the annotations."""
    image_ids = _match_file_names(images, truth.file_names)
    by_name = {name: number for number, name in truth.categories.items()}
    category_ids = {number: by_name[name] for number, name in classes.items() if name in by_name}
    for kind, names, ids in (("images", images, image_ids), ("classes", classes, category_ids)):
        if left_out := [name for number, name in names.items() if number not in ids]:
            _warn(f"{len(left_out)} {kind} left out, not in the annotations: {listed(left_out)}")
    if not image_ids:
        raise DataError(f"{annotations}: contains none of the images of the detections; is it another split?")
    processed = np.isin(truth.images, list(image_ids.values()))
    if not processed.all():
        _warn(f"evaluated on {processed.sum()} of {len(truth.images)} annotated images")
    objects = np.isin(truth.image_ids, truth.images[processed])
    columns = ("image_ids", "category_ids", "xywh", "areas", "crowd", "difficult")
    truth = replace(truth, images=truth.images[processed], **{name: getattr(truth, name)[objects] for name in columns})
    kept = np.isin(table.image_ids, list(image_ids)) & np.isin(table.category_ids, list(category_ids))
    return truth, DetectionTable(
        image_ids=np.array([image_ids[one] for one in table.image_ids[kept].tolist()], dtype=np.int64),
        category_ids=np.array([category_ids[one] for one in table.category_ids[kept].tolist()], dtype=np.int64),
        xywh=table.xywh[kept],
        scores=table.scores[kept],
    )


def _match_file_names(found: dict[int, str], annotated: dict[int, str]) -> dict[int, int]:
    """Maps image ids by file name: one path must be the end of the other. Ambiguous images are left out.

    Example:
        >>> _match_file_names({1: "data/test/b.jpg", 2: "a.jpg"}, {7: "test/a.jpg", 8: "test/b.jpg"})
        {1: 8, 2: 7}
    """
    candidates = defaultdict(list)
    for number, name in annotated.items():
        candidates[_parts(name)[:1]].append((number, _parts(name)))
    ids = {}
    for number, name in found.items():
        parts = _parts(name)
        same = [other for other, others in candidates[parts[:1]] if all(map(eq, parts, others))]
        if len(same) == 1:
            ids[number] = same[0]
    return ids


def _parts(path: str) -> tuple[str, ...]:
    """The parts of a path, the file name first."""
    return PurePosixPath(path.replace("\\", "/")).parts[::-1]


def _warn(text: str) -> None:
    print(f"aploss eval: warning: {text}", file=sys.stderr)


def _score(truth: Annotations, table: DetectionTable, options: Namespace) -> Metrics:
    if options.metric == "coco":
        limit = 100 if options.max_detections is None else options.max_detections
        return coco_metrics(truth, table, iou=options.iou, max_detections=limit)
    year = 2007 if options.metric == "voc07" else 2012
    return voc_metrics(truth, table, year=year, iou=0.5 if options.iou is None else options.iou)


def _write(truth: Annotations, table: DetectionTable, metrics: Metrics, options: Namespace) -> list[Path]:
    """Writes metrics.json and, if any class has objects, a plot of the curves; returns the paths."""
    from aploss.plotting.plots import precision_recall_plot

    iou = 0.5 if options.iou is None else options.iou
    match = match_detections if options.metric == "coco" else match_voc
    curves = precision_recall_curves(truth, table, matches=match(truth, table, iou))
    document = {**metrics.as_dict(), "precision_recall_iou": iou, "precision_recall": curves_as_dict(curves)}
    texts = {"metrics.json": json.dumps(document, indent=2, allow_nan=False) + "\n"}
    if curves:
        texts["precision-recall.svg"] = precision_recall_plot(curves, iou)
    for name, text in texts.items():
        write_text(options.out / name, text)
    return [options.out / name for name in texts]


EVAL = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
