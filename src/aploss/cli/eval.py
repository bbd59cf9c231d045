"""Score a run on data, or a detections file of any detector against annotations.

``aploss predict`` writes ``images.json`` beside its ``detections.json``. Where that file is there, images and classes
are matched to the annotations by name, whatever their ids are, and only images that were looked at are scored. Image
ids that are text and not in the annotations are matched to their file names.
"""

import json
import shlex
import sys
from collections import defaultdict
from dataclasses import replace
from operator import eq
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from jsonargparse import ArgumentParser, Namespace

from aploss.cli.command import Command, data_of, newest_run, progress, require_at_least, say_next
from aploss.data.annotations import Annotations
from aploss.data.paths import is_image, stem_of
from aploss.errors import ConfigError, DataError, listed
from aploss.evaluation.matching import curves_as_dict, match_detections, match_voc, precision_recall_curves
from aploss.evaluation.metrics import Metrics, coco_metrics, voc_metrics
from aploss.evaluation.tables import DetectionTable, GroundTruth, as_detections, read_detections, read_ground_truth
from aploss.files import write_text

EXAMPLES = """
  aploss eval runs/demo --data builtin --split test
  aploss eval runs/demo --data VOCdevkit --split 2007_test --metric voc07 --json
  aploss eval --annotations instances_val2017.json --detections results.json
  aploss eval --annotations gt.json --detections found/detections.json --out scores/
  aploss eval --annotations gt.json --detections results.json --metric voc07
  aploss eval --annotations gt.json --detections results.json --iou 0.7 --json
"""

TITLES = {
    "coco": "COCO metrics",
    "voc07": "VOC2007 metrics (11 points)",
    "voc12": "VOC2012 metrics (area under the curve)",
}
MOST_DETECTIONS = 1_000_000


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="run folder or checkpoint to score on --data; none for a file")
    parser.add_argument("--data", help="dataset to score a run on: folder, file, or 'builtin'")
    parser.add_argument("--split", help="part of the dataset; test by default, or else val")
    parser.add_argument("--format", default="auto", help="of the dataset, where it cannot be told from the files")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto")
    parser.add_argument("--batch-size", type=int, help="images in one pass; as the run validated, or 8")
    parser.add_argument("--annotations", help="ground truth, COCO annotation JSON")
    parser.add_argument(
        "--detections", help="COCO results JSON: list of image_id, category_id, bbox (x, y, width, height), score"
    )
    metrics, what = Literal["coco", "voc07", "voc12"], "COCO, VOC2007 (11 points) or VOC2010 and later (area)"
    parser.add_argument("--metric", type=metrics, default="coco", help=what)
    parser.add_argument(
        "--iou", type=float, help="measure AP at this IoU alone (default: 0.50:0.95 for coco, 0.5 for voc)"
    )
    parser.add_argument(
        "--max-detections",
        type=int,
        help="detections looked at per image and class (coco only; default 100, or as many as the run makes)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--out", help="folder for metrics.json and precision-recall curves (SVG)")


def _run(options: Namespace) -> int:
    """Scores, prints a table or JSON, and writes the files asked for."""
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
    if options.run is not None:
        say_next(options, f"aploss predict {shlex.quote(options.run)} PHOTOS --out found")
    elif not written:
        files = shlex.join(["--annotations", options.annotations, "--detections", options.detections])
        say_next(options, f"aploss eval {files} --out scores")
    return 0


def _check(options: Namespace) -> None:
    """Refuses options that do not go together."""
    given = [f"--{name}" for name in ("annotations", "detections") if options[name] is not None]
    if options.run is None:
        if len(given) < 2:
            run = f"aploss eval {newest_run()} --data PATH"
            raise ConfigError(f"give a run and data ({run}), or --annotations FILE and --detections FILE")
        if options.data is not None:
            raise ConfigError("--data is what a run is scored on: name the run first")
    elif given:
        raise ConfigError(f"a run is scored on --data: leave out {' and '.join(given)}")
    elif options.data is None:
        words = shlex.join([options.run, "--data", data_of(options.run) or "PATH"])
        raise ConfigError(f"give the data to score the run on: aploss eval {words}")
    require_at_least(1, options, "batch_size")
    if options.max_detections is not None and options.max_detections > MOST_DETECTIONS:
        raise ConfigError(f"--max-detections {options.max_detections}: at most {MOST_DETECTIONS}")


def _detect(options: Namespace) -> tuple[Annotations, DetectionTable]:
    """The objects of a split, and what a run finds there."""
    from aploss.data import load_dataset
    from aploss.detectors import load
    from aploss.training.distributed import World
    from aploss.training.evaluate import detect_split
    from aploss.training.machine import choose_device, choose_workers
    from aploss.training.splits import Split

    device = choose_device(options.device)
    detector = load(options.run, device=device)
    split = options.split or _usual_split(options.data, options.format)
    dataset = load_dataset(options.data, split, format=options.format, class_names=detector.class_names)
    if dataset.num_boxes == 0:
        names = ", ".join(detector.class_names)
        raise DataError(f"{options.data}: split '{split}' has no object of the run's classes ({names})")
    prepared, workers = Split(dataset), choose_workers(None, device, 1)
    # As the run itself was measured: the last bits of a convolution depend on the size of its batch.
    size = options.batch_size or _validation_batch_size(Path(options.run))
    with progress("images", quiet=options.quiet or options.json) as show:
        table = detect_split(detector, prepared, World(), batch_size=size, workers=workers, on_images=show)
    assert table is not None  # this is the only process
    if options.metric == "coco" and options.max_detections is None:
        options.max_detections = detector.detections_per_image
    if not (options.json or options.quiet):
        print(f"{options.run} on {dataset.name}, split {split}")
    return prepared.truth, table


def _validation_batch_size(run: Path) -> int:
    """The batch size that a run was measured with; the usual one for a checkpoint without its run."""
    from aploss.training.run_folder import RunFolder

    found = [folder for folder in map(RunFolder, (run, run.parent.parent)) if folder.config_file.is_file()]
    return found[0].read_config().validation.batch_size if found else 8


def _usual_split(data: str, format: str) -> str:
    """``test`` where a dataset has it, else ``val``, else its only one."""
    from aploss.data import dataset_splits

    splits = dataset_splits(data, format=format)
    usual = [split for name in ("test", "val") for split in splits if split.startswith(name)]  # val2017
    if not usual and len(splits) > 1:
        raise ConfigError(f"--split: no test or val in {data}; name one of: {', '.join(splits)}")
    return (usual or splits)[0]


def _read(annotations: str, detections: str) -> tuple[Annotations, DetectionTable]:
    """The objects and detections of two files, matched by name where predict's names are there."""
    truth, table = read_ground_truth(annotations), read_detections(detections)
    names = _names_of(detections, table)
    if names is not None:
        return _matched_by_name(truth, table, *names, annotations)
    try:
        table = as_detections(table, truth)
    except DataError as error:
        raise DataError(f"{detections}: {error}") from None
    missed = len(truth.images) - len(np.unique(table.image_ids))
    if missed:
        images = f"{missed} of {len(truth.images)} annotated images"
        _warn(f"{images} have no detection, which counts as missed: are these the detections of all images?")
    return truth, table


def _names_of(detections: str, table: DetectionTable) -> tuple[dict[int, str], dict[int, str]] | None:
    """The names of images and of classes that predict wrote beside its detections, where they belong."""
    try:
        content = json.loads(Path(detections).with_name("images.json").read_text(encoding="utf-8"))
        images = {int(one["id"]): str(one["file_name"]) for one in content["images"]}
        classes = {int(one["id"]): str(one["name"]) for one in content["categories"]}
    except (OSError, ValueError, TypeError, KeyError):
        return None  # no file of that name, or not predict's
    belong = {*table.image_ids.tolist()} <= {*images} and {*table.category_ids.tolist()} <= {*classes}
    return (images, classes) if belong else None


def _matched_by_name(
    truth: GroundTruth, table: DetectionTable, images: dict[int, str], classes: dict[int, str], annotations: str
) -> tuple[Annotations, DetectionTable]:
    """The detections under the annotations' ids, and the objects of the images looked at."""
    image_ids = _by_file_name(images, truth.file_names)
    unknown = [name for number, name in images.items() if number not in image_ids]
    if not image_ids:
        none = f"none of the images that were looked at is in it ({listed(unknown)})"
        raise DataError(f"{annotations}: {none}: is it of another split?")
    if unknown:
        _warn(f"{len(unknown)} images are not in the annotations, left out: {listed(unknown)}")
    looked_at = np.isin(truth.images, list(image_ids.values()))
    if not looked_at.all():
        _warn(f"scored on the {looked_at.sum()} images that were looked at; the annotations have {len(truth.images)}")
    by_name = {name: number for number, name in truth.categories.items()}
    category_ids = {number: by_name[name] for number, name in classes.items() if name in by_name}
    strange = sorted({*classes.values()} - {*by_name})
    if strange:
        _warn(f"classes that are not in the annotations, left out: {listed(strange)}")
    objects = np.isin(truth.image_ids, truth.images[looked_at])
    columns = ("image_ids", "category_ids", "xywh", "areas", "crowd", "difficult")
    truth = replace(truth, images=truth.images[looked_at], **{name: getattr(truth, name)[objects] for name in columns})
    kept = np.isin(table.image_ids, list(image_ids)) & np.isin(table.category_ids, list(category_ids))
    return truth, DetectionTable(
        image_ids=_renumbered(table.image_ids[kept], image_ids),
        category_ids=_renumbered(table.category_ids[kept], category_ids),
        xywh=table.xywh[kept],
        scores=table.scores[kept],
    )


def _by_file_name(found: dict[int, str], annotated: dict[int, str]) -> dict[int, int]:
    """Image id of the detections → image id of the annotations that name the same file.

    One of the two names is the end of the other, whose folders are then not known, and may lack the extension of an
    image; an image that several others may be is left out.

    Example:
        >>> _by_file_name({1: "data/test/b.jpg", 2: "a"}, {7: "test/a.jpg", 8: "test/b.jpg"})
        {1: 8, 2: 7}
    """
    candidates = defaultdict(list)
    for number, name in annotated.items():
        candidates[stem_of(name)].append((name, number))
    ids = {}
    for number, name in found.items():
        bare = not is_image(name)
        parts = _parts_from_end(name, bare=bare)
        same = [k for other, k in candidates[stem_of(name)] if all(map(eq, parts, _parts_from_end(other, bare=bare)))]
        if len(same) == 1:
            ids[number] = same[0]
    return ids


def _parts_from_end(name: str, *, bare: bool) -> tuple[str, ...]:
    """File and folders of a path, the file without the extension of an image where ``bare``."""
    file, *folders = PurePosixPath(name.replace("\\", "/")).parts[::-1] or ("",)
    return (stem_of(file) if bare else file, *folders)


def _renumbered(column: np.ndarray, ids: dict[int, int]) -> np.ndarray:
    return np.array([ids.get(number, number) for number in column.tolist()], dtype=np.int64)


def _warn(text: str) -> None:
    print(f"aploss eval: warning: {text}", file=sys.stderr)


def _score(truth: Annotations, table: DetectionTable, options: Namespace) -> Metrics:
    if options.metric == "coco":
        limit = 100 if options.max_detections is None else options.max_detections
        return coco_metrics(truth, table, iou=options.iou, max_detections=limit)
    if options.max_detections is not None:
        raise ConfigError("--max-detections is for --metric coco; VOC looks at all detections")
    year = 2007 if options.metric == "voc07" else 2012
    return voc_metrics(truth, table, year=year, iou=0.5 if options.iou is None else options.iou)


def _write(truth: Annotations, table: DetectionTable, metrics: Metrics, options: Namespace) -> list[Path]:
    """Writes metrics.json and, where a class has objects, the curves; gives the paths."""
    from aploss.plotting.plots import precision_recall_plot

    iou = 0.5 if options.iou is None else options.iou
    match = match_detections if options.metric == "coco" else match_voc
    curves = precision_recall_curves(truth, table, matches=match(truth, table, iou))
    document = {**metrics.as_dict(), "precision_recall_iou": iou, "precision_recall": curves_as_dict(curves)}
    texts = {"metrics.json": json.dumps(document, indent=2, allow_nan=False) + "\n"}
    if curves:
        texts["precision-recall.svg"] = precision_recall_plot(curves, iou)
    folder = Path(options.out)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


EVAL = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run, needs={"run": "RUN", "--data": "PATH"})
