"""``aploss predict``: detect objects in images with a trained run.

Pictures with boxes go to ``pictures/`` in the output folder, detections in COCO's result format to ``detections.json``,
and the images and classes that they refer to, to ``images.json``. The detections of each image are first appended to
``unfinished.jsonl``, so that the same command resumes where it was stopped.
"""

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from glob import glob
from os.path import commonpath
from pathlib import Path
from typing import Any

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
from aploss.training.callbacks import Progress
from aploss.training.distributed import choose_device

PICTURES, UNFINISHED = "pictures", "unfinished.jsonl"
DECIDING = ("images", "threshold", "multi_scale", "submission", "annotations")  # options that change results


def run_predict(options: Namespace) -> int:
    """Predicts batch by batch and writes the results; exit code 1 if some images could not be read."""
    if (options.submission == "coco") != (options.annotations is not None):
        raise ConfigError("--submission coco and --annotations FILE require each other")
    command = {"run": _version(checkpoint.checkpoint_file(Path(options.run)))}
    header = json.dumps(command | {key: getattr(options, key) for key in DECIDING}, default=str).encode() + b"\n"
    out = options.out or _default_folder(options.run, header)
    images = find_images(options.images, exclude=out / PICTURES)
    versions = {path: _version(path) for path in images}
    detector = load_detector(options.run, options.device)
    ids = {path: number for number, path in enumerate(images, start=1)}
    category_ids = list(range(1, len(detector.class_names) + 1))
    if options.submission == "coco":
        ids, category_ids = _annotated_ids(options.annotations, images, detector.class_names)
    elif options.submission == "voc":
        _check_voc_names(images, detector.class_names)
    rows = _read_unfinished(out / UNFINISHED, header)
    failures = _predict_missing(detector, versions, rows, out, options)
    found = {path: rows[version] for path, version in versions.items() if version in rows}
    _write_results(out, found, ids, dict(zip(category_ids, detector.class_names, strict=True)))
    if options.submission == "voc":
        _write_voc_submission(out, found, detector.class_names)
    (out / UNFINISHED).unlink()
    if not options.quiet:
        objects = sum(len(row["scores"]) for row in found.values())
        print(f"{objects} objects in {len(found)} images: {out}", flush=True)
    if failures:
        print(f"{len(failures)} images could not be read:", *failures, sep="\n  ", file=sys.stderr)
    return int(bool(failures))


def _predict_missing(
    detector: Detector, versions: Mapping[Path, str], rows: dict[str, Any], out: Path, options: Namespace
) -> list[str]:
    """Predicts the images without a row, draws them and adds their rows; returns why images could not be read."""
    todo = [path for path, version in versions.items() if version not in rows]
    threshold = 0.0 if options.submission and options.threshold is None else options.threshold
    size, scales, failures = options.batch_size, MultiScale() if options.multi_scale else None, []
    root = commonpath([path.resolve().parent for path in versions])
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
                rows[versions[path]] = {"version": versions[path], "size": one.image_size, **columns}
                with (out / UNFINISHED).open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(rows[versions[path]]) + "\n")
            show(len(versions) - len(todo) + start + len(batch), len(versions))
    return failures


def load_detector(path: str, device: str) -> Detector:
    """Loads the detector of a run folder, a checkpoint or a file of ``aploss export``."""
    if path.lower().endswith(".onnx"):
        from aploss.detectors.export import OnnxDetector

        return OnnxDetector(path)
    return checkpoint.load(path, device=choose_device(device))


def _default_folder(run: str, header: bytes) -> Path:
    """The first of runs/predict-RUN, runs/predict-RUN-2, ... that is free or holds this command unfinished."""

    def is_free(out: Path) -> bool:
        file = out / UNFINISHED
        return not out.exists() or (file.is_file() and file.read_bytes().startswith(header))

    folder = run_folder_of(run)
    name = Path(run).stem if folder is None else folder.path.resolve().name
    return free_folder(as_file_name(f"predict-{name}"), is_free)


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


def _read_unfinished(file: Path, header: bytes) -> dict[str, Any]:
    """The predictions of this command so far, by version of the image: a line for each, after one for the command.

    Creates the file, and removes a line that a kill has cut. Raises RunError if it belongs to another command.
    """
    content = file.read_bytes() if file.is_file() else header
    if not content.startswith(header):
        raise RunError(f"{file} belongs to another command that was interrupted: finish it, or delete the file")
    *lines, cut = content.removeprefix(header).split(b"\n")
    if cut or content == header:
        write_whole(file, lambda stream: stream.write(content.removesuffix(cut)))
    try:
        return {row["version"]: row for row in map(json.loads, lines)}
    except ValueError:
        raise RunError(f"{file} is damaged: delete it to start again") from None


def _version(path: Path) -> str:
    """Identifies a file and its content."""
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def _detections(row: Mapping[str, Any]) -> Iterable[tuple[int, float, list[float]]]:
    """Label, score and corners of each detection."""
    return zip(row["labels"], row["scores"], row["boxes"], strict=True)


def _write_results(
    folder: Path, found: Mapping[Path, Any], ids: Mapping[Path, int], categories: Mapping[int, str]
) -> None:
    """Writes ``detections.json``, and ``images.json`` with the images and classes that its ids stand for."""
    detections, images, category_ids = [], [], list(categories)
    for path, row in found.items():
        width, height = row["size"]
        images.append({"id": ids[path], "file_name": str(path), "width": width, "height": height})
        for label, score, (x1, y1, x2, y2) in _detections(row):
            box = {"image_id": ids[path], "category_id": category_ids[label], "bbox": [x1, y1, x2 - x1, y2 - y1]}
            detections.append(json.dumps({**box, "score": score}))  # as text: a fifth of the memory of a dictionary
    write_text(folder / "detections.json", f"[{', '.join(detections)}]\n")
    classes = [{"id": number, "name": name} for number, name in categories.items()]
    write_json(folder / "images.json", {"images": images, "categories": classes, "annotations": []}, indent=1)


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
    if missing := [*missing, *(name for name in class_names if name not in categories)]:
        raise DataError(f"{listed(missing)}: no unique id in --annotations {file}")
    return ids, [categories[name] for name in class_names]  # type: ignore[return-value]


def _ids_by_name(names: Mapping[int, str]) -> dict[str, int]:
    """Ids by name, without names that several have."""
    times = Counter(names.values())
    return {name: number for number, name in names.items() if times[name] == 1}


def _check_voc_names(paths: Sequence[Path], class_names: Sequence[str]) -> None:
    """Raises DataError for names that the files of the VOC server cannot represent."""
    stems = [path.stem for path in paths]
    if repeated := [stem for stem, times in Counter(stems).items() if times > 1]:
        raise DataError(f"several images are called {listed(repeated)}: a VOC submission names images without folders")
    if wrong := [name for name in (*stems, *class_names) if name != as_file_name(name, longest=200)]:
        raise DataError(f"a VOC submission cannot contain the names {listed(wrong)}")


def _write_voc_submission(folder: Path, found: Mapping[Path, Any], class_names: Sequence[str]) -> None:
    """Writes ``comp4_det_test_CLASS.txt`` of each class: image, score and box, whose pixels count from 1."""
    lines: dict[str, list[str]] = {name: [] for name in class_names}
    for path, row in found.items():
        for label, score, (x1, y1, x2, y2) in _detections(row):
            box = " ".join(f"{corner:.3f}" for corner in (x1 + 1, y1 + 1, x2, y2))
            lines[class_names[label]].append(f"{path.stem} {score:.9g} {box}\n")
    for name, own in lines.items():
        write_text(folder / f"comp4_det_test_{name}.txt", "".join(own))
