"""``aploss predict``: detect objects in images with a trained run.

Pictures with boxes go to ``pictures/`` in the output folder, detections in COCO's result format to ``detections.json``,
and the images and classes that they refer to, to ``images.json``. The detections of each image are first appended to
``unfinished.jsonl``, so that the same command resumes where it was stopped.
"""

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from glob import glob
from os.path import commonpath
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from aploss.cli.options import EXIT_PROBLEMS, free_folder, positive_int, progress, run_folder_of
from aploss.data.folder import EXTENSIONS
from aploss.errors import ConfigError, DataError, RunError, listed
from aploss.files import as_file_name, write_json, write_text, write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from aploss.detectors.detector import Detector
    from aploss.detectors.predict import Prediction

PREDICT_EXAMPLES = """
  aploss predict runs/demo photos/
  aploss predict runs/demo a.jpg b.png "holiday/**/*.jpg" --out found/ --threshold 0.5
  aploss predict model.onnx photos/ --out found/
  aploss predict runs/coco test2017/ --submission coco --annotations image_info_test-dev2017.json
  aploss predict runs/voc VOC2012/JPEGImages/ --submission voc
"""

PICTURES, UNFINISHED = "pictures", "unfinished.jsonl"
DECIDING = ("images", "threshold", "multi_scale", "submission", "annotations")  # options that change results


def add_predict_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run", help="run folder, checkpoint or exported file")
    add("images", nargs="+", help="image files, folders or glob patterns")
    add("--out", type=Path, metavar="DIR", help="folder for the results; by default runs/predict-RUN")
    threshold = (
        "minimum score, 0 to report everything, or 'lrp' for the LRP-optimal threshold of each class; by default the "
        "best F1 on validation, or 0 for a submission"
    )
    add("--threshold", type=_threshold, metavar="X", help=threshold)
    submission = "write the result files of an evaluation server, and no pictures"
    add("--submission", choices=["coco", "voc"], help=submission)
    add("--annotations", metavar="FILE", help="COCO file with the image and category ids of --submission coco")
    scales = "merge the detections of several image sizes, each also flipped; slower"
    add("--multi-scale", action="store_true", help=scales)
    add("--device", default="auto", help="cpu, cuda, mps or auto")
    add("--batch-size", type=positive_int, metavar="N", default=8, help="images per forward pass")


def _threshold(text: str) -> float | str:
    try:
        return text if text == "lrp" else float(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a number or 'lrp', got {text!r}") from None


def run_predict(options: Namespace) -> int:
    """Predicts batch by batch and writes the results; exit code 1 if some images could not be read."""
    from aploss.data.images import read_image
    from aploss.detectors.checkpoint import checkpoint_file
    from aploss.detectors.predict import MultiScale

    if (options.submission == "coco") != (options.annotations is not None):
        raise ConfigError("--submission coco and --annotations FILE require each other")
    command = {"run": _version(checkpoint_file(Path(options.run)))} | {key: getattr(options, key) for key in DECIDING}
    header = json.dumps(command, default=str) + "\n"
    out = options.out or _default_folder(options.run, header)
    images = find_images(options.images, exclude=out / PICTURES)
    root = commonpath([path.resolve().parent for path in images])
    detector = load_detector(options.run, options.device)
    ids = {path: number for number, path in enumerate(images, start=1)}
    category_ids = list(range(1, len(detector.class_names) + 1))
    if options.submission == "coco":
        ids, category_ids = _annotated_ids(Path(options.annotations), images, detector.class_names)
    elif options.submission == "voc":
        _check_voc_names(images, detector.class_names)
    threshold = 0.0 if options.submission and options.threshold is None else options.threshold
    scales, failures = MultiScale() if options.multi_scale else None, []
    parts = PartialResults(out / UNFINISHED, header)
    todo = [path for path in images if _version(path) not in parts.done]
    with progress("images", quiet=options.quiet) as show:
        for start in range(0, len(todo), options.batch_size):
            batch = {}
            for path in todo[start : start + options.batch_size]:
                try:
                    batch[path] = read_image(path)
                except DataError as error:
                    failures.append(str(error))
            found = detector.predict(
                [*batch.values()], threshold=threshold, batch_size=options.batch_size, multi_scale=scales
            )
            for (path, image), prediction in zip(batch.items(), found, strict=True):
                if not options.submission:
                    picture = out / PICTURES / path.resolve().relative_to(root)
                    _write_picture(picture, image, prediction, detector.class_names)
                parts.add(path, prediction)
            show(len(images) - len(todo) + start + len(batch), len(images))
    objects = _write_results(out, parts, ids, category_ids, detector.class_names)
    if options.submission == "voc":
        _write_voc_submission(out, parts.rows(ids), detector.class_names)
    parts.file.unlink()
    if not options.quiet:
        print(f"{objects} objects in {len(images) - len(failures)} images: {out}", flush=True)
    if failures:
        print(f"{len(failures)} images could not be read:", *failures, sep="\n  ", file=sys.stderr)
    return EXIT_PROBLEMS if failures else 0


def load_detector(path: str, device: str) -> "Detector":
    """Loads the detector of a run folder, a checkpoint or a file of ``aploss export``."""
    if path.lower().endswith(".onnx"):
        from aploss.detectors.export import OnnxDetector

        return OnnxDetector(path)
    from aploss.detectors.checkpoint import load
    from aploss.training.distributed import choose_device

    return load(path, device=choose_device(device))


def _default_folder(run: str, header: str) -> Path:
    """The first of runs/predict-RUN, runs/predict-RUN-2, ... that is free or holds this command unfinished."""
    folder = run_folder_of(run)
    name = Path(run).stem if folder is None else folder.path.resolve().name
    return free_folder(
        as_file_name(f"predict-{name}"), lambda out: not out.exists() or _first_line(out / UNFINISHED) == header
    )


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


class PartialResults:
    """The predictions of a command that has not finished, one line per image; the first line identifies the command.

    ``done`` has the versions of the images with predictions. Raises RunError if the file belongs to another command.
    """

    def __init__(self, file: Path, header: str) -> None:
        self.file = file
        if not file.is_file():
            write_text(file, header)
        if _first_line(file) != header:
            raise RunError(f"{file} belongs to another command that was interrupted: finish it, or delete the file")
        self.done = {row["version"] for row in self._rows()}

    def add(self, path: Path, found: "Prediction") -> None:
        """Appends the prediction of an image."""
        columns = {name: getattr(found, name).tolist() for name in ("boxes", "scores", "labels")}
        row = {"path": str(path), "version": _version(path), "size": found.image_size, **columns}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self, paths: "dict[Path, int]") -> Iterator[dict[str, Any]]:
        """The predictions of images as they are now: ``path``, ``size``, ``boxes``, ``scores`` and ``labels``."""
        versions = {_version(path) for path in paths if path.exists()}
        return (row for row in self._rows() if row["version"] in versions)

    def _rows(self) -> Iterator[dict[str, Any]]:
        """The lines after the first, one at a time; a line that a kill cut is removed."""
        with self.file.open("rb+") as file:
            end = len(file.readline())
            for line in file:
                if not line.endswith(b"\n"):
                    file.truncate(end)
                    return
                end += len(line)
                try:
                    yield json.loads(line)
                except ValueError:
                    raise RunError(f"{self.file} is damaged: delete it to start again") from None


def _first_line(file: Path) -> str:
    """The first line of a file; empty if there is none."""
    if not file.is_file():
        return ""
    with file.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline()


def _version(path: Path) -> str:
    """Identifies a file and its content."""
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def _write_picture(file: Path, image: "Tensor", found: "Prediction", class_names: Sequence[str]) -> None:
    from PIL.Image import registered_extensions

    from aploss.data import draw_boxes

    kind = registered_extensions().get(file.suffix.lower(), "JPEG")
    picture = draw_boxes(image.numpy(), found.boxes.numpy(), found.labels.numpy(), class_names, found.scores.numpy())
    write_whole(file, lambda stream: picture.save(stream, format=kind, quality=92))


def _write_results(
    folder: Path, parts: PartialResults, ids: dict[Path, int], category_ids: Sequence[int], class_names: Sequence[str]
) -> int:
    """Writes ``detections.json``, and ``images.json`` with the images and classes that its ids stand for.

    Returns:
        The number of detections.
    """
    images, detections = [], 0

    def write(file: IO[bytes]) -> None:
        nonlocal detections
        for row in parts.rows(ids):
            number, (width, height) = ids[Path(row["path"])], row["size"]
            images.append({"id": number, "file_name": row["path"], "width": width, "height": height})
            for label, score, (x1, y1, x2, y2) in zip(row["labels"], row["scores"], row["boxes"], strict=True):
                entry = {"image_id": number, "category_id": category_ids[label], "bbox": [x1, y1, x2 - x1, y2 - y1]}
                file.write(b", " if detections else b"[")
                file.write(json.dumps({**entry, "score": score}).encode())
                detections += 1
        file.write(b"]" if detections else b"[]")

    write_whole(folder / "detections.json", write)
    categories = [{"id": number, "name": name} for number, name in zip(category_ids, class_names, strict=True)]
    write_json(folder / "images.json", {"images": images, "categories": categories, "annotations": []}, indent=1)
    return detections


def _annotated_ids(file: Path, paths: Sequence[Path], class_names: Sequence[str]) -> tuple[dict[Path, int], list[int]]:
    """The ids of the images, by the longest end of the path that is annotated, and of the classes in a COCO file."""
    from aploss.data.coco import coco_names

    image_ids: defaultdict[str, set[int]] = defaultdict(set)
    category_ids: defaultdict[str, set[int]] = defaultdict(set)
    try:
        names = coco_names(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file}: not valid COCO JSON: {error}") from None
    for ids, named in zip((image_ids, category_ids), names, strict=True):
        for number, name in named.items():
            ids[name].add(number)
    found: dict[Path, set[int]] = {}
    for path in paths:
        ends = ("/".join(path.parts[start:]) for start in range(len(path.parts)))
        found[path] = next((image_ids[end] for end in ends if end in image_ids), set())
    unclear = [str(path) for path, ids in found.items() if len(ids) != 1]
    unclear += [name for name in class_names if len(category_ids[name]) != 1]
    if unclear:
        raise DataError(f"{listed(unclear)}: no unique id in --annotations {file}")
    return {path: min(ids) for path, ids in found.items()}, [min(category_ids[name]) for name in class_names]


def _check_voc_names(paths: Sequence[Path], class_names: Sequence[str]) -> None:
    """Raises DataError for names that the files of the VOC server cannot represent."""
    stems = [path.stem for path in paths]
    if repeated := [stem for stem, times in Counter(stems).items() if times > 1]:
        raise DataError(f"several images are called {listed(repeated)}: a VOC submission names images without folders")
    if wrong := [name for name in (*stems, *class_names) if name != as_file_name(name, longest=200)]:
        raise DataError(f"a VOC submission cannot contain the names {listed(wrong)}")


def _write_voc_submission(folder: Path, rows: Iterator[dict[str, Any]], class_names: Sequence[str]) -> None:
    """Writes ``comp4_det_test_CLASS.txt`` of each class: image, score and box, whose pixels count from 1."""
    lines: dict[str, list[str]] = {name: [] for name in class_names}
    for row in rows:
        for label, score, (x1, y1, x2, y2) in zip(row["labels"], row["scores"], row["boxes"], strict=True):
            box = " ".join(f"{corner:.3f}" for corner in (x1 + 1, y1 + 1, x2, y2))
            lines[class_names[label]].append(f"{Path(row['path']).stem} {score:.9g} {box}\n")
    for name, own in lines.items():
        write_text(folder / f"comp4_det_test_{name}.txt", "".join(own))
