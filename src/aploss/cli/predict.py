"""``aploss predict``: detect objects in images with a trained run.

Pictures with boxes go to ``pictures/`` in the output folder, detections in COCO's result format to ``detections.json``,
and the images and classes that they refer to, to ``images.json``.
"""

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from aploss.cli.command import EXIT_PROBLEMS, Command, progress, require_at_least, say_next
from aploss.cli.options import Parser
from aploss.data.images import EXTENSIONS
from aploss.errors import DataError
from aploss.files import write_text, write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from aploss.detectors.predict import ObjectDetector, Prediction

EXAMPLES = """
  aploss predict runs/demo photos/ --out found/
  aploss predict runs/demo a.jpg b.png "holiday/**/*.jpg" --out found/ --threshold 0.5 --labels yolo
  aploss predict model.onnx photos/ --out found/
"""

PICTURES = "pictures"
LOSSY = (".jpg", ".jpeg")  # drawn pictures of other formats are PNG


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("run", help="run folder, checkpoint or exported file")
    parser.add_argument("images", nargs="+", help="image files, folders or glob patterns")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    threshold = "minimum score, 0 to report everything; by default the best F1 on validation"
    parser.add_argument("--threshold", type=float, metavar="X", help=threshold)
    labels = "also write annotation files, to correct by hand and train on"
    parser.add_argument("--labels", choices=["voc", "yolo"], help=labels)
    scales = "merge the detections of several image sizes, each also flipped; slower"
    parser.add_argument("--multi-scale", action="store_true", help=scales)
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto")
    parser.add_argument("--batch-size", type=int, metavar="N", default=8, help="images per forward pass")


def _run(options: Namespace) -> int:
    """Predicts batch by batch and writes the results; exit code 1 if some images could not be used."""
    from aploss.detectors.predict import MultiScale

    require_at_least(1, options, "batch_size")
    images, failures = find_images(options.images, exclude=options.out / PICTURES)
    if not images:
        raise DataError(f"no images: {'; '.join(failures)}")
    detector = load_detector(options.run, options.device)
    results = _Results(options.out, detector.class_names, options.labels)
    with progress("images", quiet=options.quiet) as show:
        files = list(images)
        for start in range(0, len(files), options.batch_size):
            chunk = list(_read(files[start : start + options.batch_size], failures))
            predictions = detector.predict(
                [tensor for _, tensor in chunk],
                threshold=options.threshold,
                batch_size=options.batch_size,
                multi_scale=MultiScale() if options.multi_scale else None,
            )
            for (path, tensor), prediction in zip(chunk, predictions, strict=True):
                results.add(path, images[path], tensor, prediction)
            show(start + len(chunk), len(files))
    results.write()
    if not options.quiet:
        minimum = detector.draw_threshold if options.threshold is None else options.threshold
        above = f" with a score of at least {minimum:.2f}" if minimum else ""
        objects = sum(map(len, results.predictions))
        print(f"{objects} objects in {len(results.images)} images{above}: {options.out}", flush=True)
        found = shlex.quote(str(options.out / "detections.json"))
        say_next(options, f"aploss eval --annotations ANNOTATIONS.json --detections {found}")
    if failures:
        print(f"{len(failures)} could not be used:", *failures, sep="\n  ", file=sys.stderr)
    return EXIT_PROBLEMS if failures else 0


def load_detector(path: str, device: str) -> "ObjectDetector":
    """Loads the detector of a run folder, a checkpoint or a file of ``aploss export``."""
    if path.lower().endswith(".onnx"):
        from aploss.detectors.export import OnnxDetector

        return OnnxDetector(path)
    from aploss.detectors.checkpoint import load
    from aploss.training.machine import choose_device

    return load(path, device=choose_device(device))


def _read(paths: Sequence[Path], failures: list[str]) -> "Iterator[tuple[Path, Tensor]]":
    from aploss.data.images import read_image

    for path in paths:
        try:
            yield path, read_image(path)
        except DataError as error:
            failures.append(str(error))


class _Results:
    """The output folder; pictures and labels are written at once, the JSON files at the end."""

    def __init__(self, folder: Path, class_names: tuple[str, ...], labels: str | None) -> None:
        self.folder, self.class_names, self.labels = folder, class_names, labels
        self.images: list[dict[str, object]] = []
        self.predictions: list[Prediction] = []

    def add(self, path: Path, name: str, tensor: "Tensor", prediction: "Prediction") -> None:
        """Writes the picture and labels of an image as ``name``."""
        from aploss.data import draw_boxes
        from aploss.data.voc import voc_annotation
        from aploss.data.yolo import yolo_rows

        size = width, height = prediction.image_size
        self.images.append({"id": len(self.images) + 1, "file_name": str(path), "width": width, "height": height})
        self.predictions.append(prediction)
        boxes, labels, scores = (one.numpy() for one in (prediction.boxes, prediction.labels, prediction.scores))
        picture = draw_boxes(tensor.numpy(), boxes, labels, self.class_names, scores)
        suffix, kind = (path.suffix, "JPEG") if path.suffix.lower() in LOSSY else (".png", "PNG")
        file = self.folder / PICTURES / f"{name}{suffix.lower()}"
        write_whole(file, lambda stream: picture.save(stream, format=kind, quality=92))
        rows = boxes.tolist()
        if self.labels == "voc":
            names = prediction.class_names
            text = voc_annotation(path.name, size, names, rows, scores=scores.tolist(), digits=2)
            write_text(self.folder / f"labels/{name}.xml", text)
        elif self.labels == "yolo":
            write_text(self.folder / f"labels/{name}.txt", yolo_rows(labels.tolist(), rows, size, digits=6))

    def write(self) -> None:
        """Writes the two JSON files, and the class names of YOLO labels."""
        from aploss.evaluation.tables import DetectionTable

        found = [{"boxes": one.boxes, "scores": one.scores, "labels": one.labels} for one in self.predictions]
        table = DetectionTable.from_predictions(list(range(1, len(found) + 1)), found)
        categories = [{"id": i, "name": name} for i, name in enumerate(self.class_names, start=1)]
        about = {"images": self.images, "categories": categories, "annotations": []}
        write_text(self.folder / "detections.json", json.dumps(table.to_results()))
        write_text(self.folder / "images.json", json.dumps(about, indent=1))
        if self.labels == "yolo":
            lines = "".join(f"{' '.join(name.split())}\n" for name in self.class_names)
            write_text(self.folder / "labels/classes.txt", lines)


def find_images(arguments: Sequence[str], *, exclude: Path | None = None) -> tuple[dict[Path, str], list[str]]:
    """Finds the images that files, folders (recursively) and glob patterns name.

    Args:
        arguments: as given on the command line.
        exclude: folder to skip.

    Returns:
        The images in order with a unique name for the results of each, and a line for each argument without images.
    """
    found: dict[Path, str] = {}
    problems: list[str] = []
    taken: set[str] = set()
    for argument in arguments:
        matches = [argument] if Path(argument).exists() else sorted(glob(argument, recursive=True))  # noqa: PTH207
        candidates = [one for match in matches for one in _candidates(Path(match))]
        if not candidates:
            problems.append(f"{argument}: no images found")
        for path, wanted in candidates:
            if path in found or (exclude is not None and path.resolve().is_relative_to(exclude.resolve())):
                continue
            name, number = wanted, 1
            while name.casefold() in taken:  # some file systems ignore case
                number += 1
                name = f"{wanted}-{number}"
            taken.add(name.casefold())
            found[path] = name
    return found, problems


def _candidates(path: Path) -> Iterator[tuple[Path, str]]:
    """A file, or the images of a folder, each with the name of its results: the path in the folder without suffix."""
    if path.is_file():
        yield path, path.stem
    for file in sorted(path.rglob("*")) if path.is_dir() else ():
        if file.suffix.lower() in EXTENSIONS and file.is_file():
            yield file, file.relative_to(path).with_suffix("").as_posix()


PREDICT = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
