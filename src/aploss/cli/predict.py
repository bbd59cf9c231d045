"""``aploss predict``: detect objects in images with a trained run.

Pictures with boxes go to ``pictures/`` in the output folder, detections in COCO's result format to ``detections.json``,
and the images and classes that they refer to, to ``images.json``.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from glob import glob
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from aploss.cli.command import EXIT_PROBLEMS, Command, positive_int, progress
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


def _add_arguments(parser: ArgumentParser) -> None:
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
    batch = "images per forward pass"
    parser.add_argument("--batch-size", type=positive_int, metavar="N", default=8, help=batch)


def _run(options: Namespace) -> int:
    """Predicts batch by batch and writes the results; exit code 1 if some images could not be used."""
    from aploss.data.images import read_image
    from aploss.detectors.predict import MultiScale

    images = find_images(options.images, exclude=options.out / PICTURES)
    detector = load_detector(options.run, options.device)
    scales = MultiScale() if options.multi_scale else None
    files, predictions, failures = list(images), {}, []
    with progress("images", quiet=options.quiet) as show:
        for start in range(0, len(files), options.batch_size):
            batch = {}
            for path in files[start : start + options.batch_size]:
                try:
                    batch[path] = read_image(path)
                except DataError as error:
                    failures.append(str(error))
            found = detector.predict(
                [*batch.values()], threshold=options.threshold, batch_size=options.batch_size, multi_scale=scales
            )
            for (path, image), prediction in zip(batch.items(), found, strict=True):
                predictions[path] = prediction
                name, class_names = images[path], detector.class_names
                _write_picture(options.out / PICTURES / name, path.suffix, image, prediction, class_names)
                if options.labels is not None:
                    _write_labels(options.out / "labels" / name, path.name, prediction, options.labels)
            show(start + len(batch), len(files))
    _write_json(options.out, predictions, detector.class_names)
    if options.labels == "yolo":
        names = "".join(f"{' '.join(name.split())}\n" for name in detector.class_names)
        write_text(options.out / "labels/classes.txt", names)
    if not options.quiet:
        objects = sum(map(len, predictions.values()))
        print(f"{objects} objects in {len(predictions)} images: {options.out}", flush=True)
    if failures:
        print(f"{len(failures)} could not be used:", *failures, sep="\n  ", file=sys.stderr)
    return EXIT_PROBLEMS if failures else 0


def load_detector(path: str, device: str) -> "ObjectDetector":
    """Loads the detector of a run folder, a checkpoint or a file of ``aploss export``."""
    if path.lower().endswith(".onnx"):
        from aploss.detectors.export import OnnxDetector

        return OnnxDetector(path)
    from aploss.detectors.checkpoint import load
    from aploss.training.distributed import choose_device

    return load(path, device=choose_device(device))


def _write_picture(file: Path, suffix: str, image: "Tensor", found: "Prediction", class_names: Sequence[str]) -> None:
    """Draws the detections, as JPEG if the image is one."""
    from aploss.data import draw_boxes

    picture = draw_boxes(image.numpy(), found.boxes.numpy(), found.labels.numpy(), class_names, found.scores.numpy())
    suffix, kind = (suffix.lower(), "JPEG") if suffix.lower() in LOSSY else (".png", "PNG")
    write_whole(Path(f"{file}{suffix}"), lambda stream: picture.save(stream, format=kind, quality=92))


def _write_labels(file: Path, image_name: str, found: "Prediction", labels: str) -> None:
    """Writes the detections as an annotation file of VOC or YOLO."""
    from aploss.data.voc import voc_annotation
    from aploss.data.yolo import yolo_rows

    boxes, scores, size = found.boxes.tolist(), found.scores.tolist(), found.image_size
    if labels == "voc":
        text = voc_annotation(image_name, size, found.class_names, boxes, scores=scores, digits=2)
        write_text(Path(f"{file}.xml"), text)
    else:
        write_text(Path(f"{file}.txt"), yolo_rows(found.labels.tolist(), boxes, size, digits=6))


def _write_json(folder: Path, predictions: "dict[Path, Prediction]", class_names: Sequence[str]) -> None:
    """Writes ``detections.json``, and ``images.json`` with the images and classes that its ids stand for."""
    from aploss.evaluation.tables import DetectionTable

    found = [{"boxes": one.boxes, "scores": one.scores, "labels": one.labels} for one in predictions.values()]
    table = DetectionTable.from_predictions(list(range(1, len(found) + 1)), found)
    images = [
        {"id": number, "file_name": str(path), "width": one.image_size[0], "height": one.image_size[1]}
        for number, (path, one) in enumerate(predictions.items(), start=1)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(class_names, start=1)]
    about = {"images": images, "categories": categories, "annotations": []}
    write_text(folder / "detections.json", json.dumps(table.to_results()))
    write_text(folder / "images.json", json.dumps(about, indent=1))


def find_images(arguments: Sequence[str], *, exclude: Path) -> dict[Path, str]:
    """Finds the images that files, folders (recursively) and glob patterns name, except those in a folder.

    Returns:
        The images in order with a unique name for the results of each: its path in the folder, without suffix.

    Raises:
        DataError: an argument names no image.
    """
    found: dict[Path, str] = {}
    taken: set[str] = set()  # in lower case, since some file systems ignore case
    for argument in arguments:
        candidates = list(_candidates(argument))
        if not candidates:
            raise DataError(f"{argument}: no images found")
        for path, name in candidates:
            if path not in found and not path.resolve().is_relative_to(exclude.resolve()):
                names = chain([name], (f"{name}-{number}" for number in count(2)))
                found[path] = next(one for one in names if one.casefold() not in taken)
                taken.add(found[path].casefold())
    return found


def _candidates(argument: str) -> Iterator[tuple[Path, str]]:
    for match in [argument] if Path(argument).exists() else sorted(glob(argument, recursive=True)):  # noqa: PTH207
        if Path(match).is_file():
            yield Path(match), Path(match).stem
        for path in sorted(Path(match).rglob("*")):
            if path.suffix.lower() in EXTENSIONS and path.is_file():
                yield path, path.relative_to(match).with_suffix("").as_posix()


PREDICT = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
