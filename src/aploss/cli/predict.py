"""``aploss predict``: detect objects in images with a trained run.

Pictures with boxes go to ``pictures/`` in the output folder, detections in COCO's result format to ``detections.json``,
and the images and classes that they refer to, to ``images.json``. The detections of each image are first kept in a file
of ``unfinished/COMMAND/``, so that the same command resumes where it was stopped.
"""

import hashlib
import json
import os
import shutil
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from glob import glob
from os.path import commonpath
from pathlib import Path
from typing import IO

from PIL.Image import registered_extensions

from aploss.cli.train import free_folder, run_folder_of
from aploss.data import draw_boxes, read_image
from aploss.data.coco import coco_names
from aploss.data.folder import EXTENSIONS
from aploss.detectors import checkpoint
from aploss.detectors.detector import Detector
from aploss.detectors.predict import MultiScale
from aploss.errors import ConfigError, DataError, RunError, listed
from aploss.files import as_file_name, write_json, write_text, write_whole
from aploss.progress import Progress
from aploss.training.distributed import choose_device

PICTURES, UNFINISHED = "pictures", "unfinished"
DECIDING = ("images", "threshold", "multi_scale", "submission", "annotations")  # options that change results


def run_predict(options: Namespace) -> int:
    """Predicts batch by batch and writes the results; exit code 1 if some images could not be read."""
    if (options.submission == "coco") != (options.annotations is not None):
        raise ConfigError("--submission coco and --annotations FILE require each other")
    command = [_version(checkpoint.checkpoint_file(Path(options.run))), *(getattr(options, key) for key in DECIDING)]
    digest = hashlib.sha256(json.dumps(command, default=str).encode()).hexdigest()[:16]
    out = options.out or _default_folder(options.run, digest)
    images = find_images(options.images, exclude=out / PICTURES)
    unfinished = out / UNFINISHED / digest
    for other in {*unfinished.parent.glob("*")} - {unfinished}:
        raise RunError(f"{other} belongs to another command that was interrupted: finish it, or delete the folder")
    rows = {path: unfinished / f"{_version(path)}.json" for path in images}
    detector = load_detector(options.run, options.device)
    ids = {path: number for number, path in enumerate(images, start=1)}
    category_ids = list(range(1, len(detector.class_names) + 1))
    if options.submission == "coco":
        ids, category_ids = _annotated_ids(options.annotations, images, detector.class_names)
    elif options.submission == "voc":
        _check_voc_names(images, detector.class_names)
    failures = _predict_missing(detector, rows, out, options)
    found = {path: row for path, row in rows.items() if row.is_file()}
    objects = _write_results(out, found, ids, dict(zip(category_ids, detector.class_names, strict=True)))
    if options.submission == "voc":
        _write_voc_submission(out, found, detector.class_names)
    shutil.rmtree(unfinished.parent, ignore_errors=True)  # it does not exist if no image could be read
    if not options.quiet:
        print(f"{objects} objects in {len(found)} images: {out}", flush=True)
    if failures:
        print(f"{len(failures)} images could not be read:", *failures, sep="\n  ", file=sys.stderr)
    return int(bool(failures))


def _predict_missing(detector: Detector, rows: Mapping[Path, Path], out: Path, options: Namespace) -> list[str]:
    """Predicts and draws the images whose file of detections is missing; returns why images could not be read."""
    todo = [path for path, row in rows.items() if not row.is_file()]
    threshold = 0.0 if options.submission and options.threshold is None else options.threshold
    size, scales, failures = options.batch_size, MultiScale() if options.multi_scale else None, []
    root = commonpath([path.resolve().parent for path in rows])
    with Progress(quiet=options.quiet) as progress, progress.task("predicting") as show:
        for start in range(0, len(todo), size):
            batch = {}
            for path in todo[start : start + size]:
                try:
                    batch[path] = read_image(path)
                except DataError as error:
                    failures.append(str(error))
            found = detector.predict([*batch.values()], threshold=threshold, batch_size=size, multi_scale=scales)
            for (path, image), one in zip(batch.items(), found, strict=True):
                if not options.submission:
                    picture = draw_boxes(image, one.boxes, one.labels, detector.class_names, one.scores)
                    file = out / PICTURES / path.resolve().relative_to(root)
                    kind = registered_extensions().get(file.suffix.lower(), "JPEG")
                    write_whole(file, partial(picture.save, format=kind, quality=92))
                columns = {name: getattr(one, name).tolist() for name in ("boxes", "scores", "labels")}
                write_json(rows[path], {"size": one.image_size, **columns}, indent=None)
            show(len(rows) - len(todo) + start + len(batch), len(rows))
    return failures


def load_detector(path: str, device: str) -> Detector:
    """Loads the detector of a run folder, a checkpoint or a file of ``aploss export``."""
    if path.lower().endswith(".onnx"):
        from aploss.detectors.export import OnnxDetector

        return OnnxDetector(path)
    return checkpoint.load(path, device=choose_device(device))


def _default_folder(run: str, digest: str) -> Path:
    """The first of runs/predict-RUN, runs/predict-RUN-2, ... that is free or holds this command unfinished."""
    folder = run_folder_of(run)
    name = as_file_name(f"predict-{Path(run).stem if folder is None else folder.path.resolve().name}")
    return free_folder(name, lambda out: not out.exists() or (out / UNFINISHED / digest).exists())


def find_images(arguments: Sequence[str], *, exclude: Path) -> list[Path]:
    """Finds the images that files, folders (recursively) and glob patterns name, except images in a folder.

    Raises:
        DataError: an argument names no image.
    """
    found: dict[Path, None] = {}
    for argument in arguments:
        matches = [argument] if Path(argument).exists() else sorted(glob(argument, recursive=True))  # noqa: PTH207
        files = [Path(match) for match in matches if Path(match).is_file()]
        for match in matches:
            below = (path for path in sorted(Path(match).rglob("*")) if path.suffix.lower() in EXTENSIONS)
            files += [path for path in below if path.is_file()]
        files = [path for path in files if not path.resolve().is_relative_to(exclude.resolve())]
        if not files:
            raise DataError(f"{argument}: no images found")
        found |= dict.fromkeys(files)
    return list(found)


def _version(path: Path) -> str:
    """Identifies a file and its content, by path, size and time."""
    status = path.stat()
    return hashlib.sha256(os.fsencode(f"{path} {status.st_size} {status.st_mtime_ns}")).hexdigest()[:32]


def _write_results(
    folder: Path, found: Mapping[Path, Path], ids: Mapping[Path, int], categories: Mapping[int, str]
) -> int:
    """Writes ``detections.json``, and ``images.json`` with the images and classes that its ids stand for.

    Returns:
        The number of detections.
    """
    images, category_ids, counts = [], list(categories), []

    def write(file: IO[bytes]) -> None:
        separator = b"["
        for path, source in found.items():  # one at a time: those of a large dataset do not fit into memory
            row = json.loads(source.read_bytes())
            width, height = row["size"]
            images.append({"id": ids[path], "file_name": str(path), "width": width, "height": height})
            counts.append(len(row["scores"]))
            for label, score, (x1, y1, x2, y2) in zip(row["labels"], row["scores"], row["boxes"], strict=True):
                box = {"image_id": ids[path], "category_id": category_ids[label], "bbox": [x1, y1, x2 - x1, y2 - y1]}
                file.write(separator + json.dumps({**box, "score": score}).encode())
                separator = b", "
        file.write(b"]\n" if sum(counts) else b"[]\n")

    write_whole(folder / "detections.json", write)
    classes = [{"id": number, "name": name} for number, name in categories.items()]
    write_json(folder / "images.json", {"images": images, "categories": classes, "annotations": []}, indent=1)
    return sum(counts)


def _annotated_ids(file: Path, paths: Sequence[Path], class_names: Sequence[str]) -> tuple[dict[Path, int], list[int]]:
    """The ids of the images, by the longest end of the path that is annotated, and of the classes in a COCO file."""
    try:
        image_names, category_names = coco_names(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file}: not valid COCO JSON: {error}") from None
    known, categories = _ids_by_name(image_names), _ids_by_name(category_names)
    ids = {}
    for path in paths:
        ends = ("/".join(path.parts[start:]) for start in range(len(path.parts)))
        ids[path] = next((known[end] for end in ends if end in known), None)
    missing = [str(path) for path, number in ids.items() if number is None]
    if missing := [*missing, *(name for name in class_names if categories.get(name) is None)]:
        raise DataError(f"{listed(missing)}: no unique id in --annotations {file}")
    return ids, [categories[name] for name in class_names]  # type: ignore[return-value, misc]


def _ids_by_name(names: Mapping[int, str]) -> dict[str, int | None]:
    """Ids by name; None for a name that several have."""
    times = Counter(names.values())
    return {name: number if times[name] == 1 else None for number, name in names.items()}


def _check_voc_names(paths: Sequence[Path], class_names: Sequence[str]) -> None:
    """Raises DataError for names that the files of the VOC server cannot represent."""
    stems = [path.stem for path in paths]
    if repeated := [stem for stem, times in Counter(stems).items() if times > 1]:
        raise DataError(f"several images are called {listed(repeated)}: a VOC submission names images without folders")
    if wrong := [name for name in (*stems, *class_names) if name != as_file_name(name, longest=200)]:
        raise DataError(f"a VOC submission cannot contain the names {listed(wrong)}")


def _write_voc_submission(folder: Path, found: Mapping[Path, Path], class_names: Sequence[str]) -> None:
    """Writes ``comp4_det_test_CLASS.txt`` of each class: image, score and box, whose pixels count from 1."""
    lines: dict[str, list[str]] = {name: [] for name in class_names}
    for path, file in found.items():
        row = json.loads(file.read_bytes())
        for label, score, (x1, y1, x2, y2) in zip(row["labels"], row["scores"], row["boxes"], strict=True):
            box = " ".join(f"{corner:.3f}" for corner in (x1 + 1, y1 + 1, x2, y2))
            lines[class_names[label]].append(f"{path.stem} {score:.9g} {box}\n")
    for name, own in lines.items():
        write_text(folder / f"comp4_det_test_{name}.txt", "".join(own))
