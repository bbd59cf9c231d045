"""``aploss predict``: detect objects in images with a trained run.

Pictures with boxes go to ``pictures/`` in the output folder, detections in COCO's result format to ``detections.json``,
and the images and classes that they refer to, to ``images.json``. The detections of each image are first appended to
``unfinished.jsonl``, so that the same command resumes where it was stopped.
"""

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from aploss.cli.command import EXIT_PROBLEMS, free_folder, positive_int, progress, run_folder_of
from aploss.cli.results import Parts, annotated_ids, check_voc_names, file_version, write_results, write_voc_submission
from aploss.data.folder import EXTENSIONS
from aploss.errors import ConfigError, DataError
from aploss.files import as_file_name, write_text, write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from aploss.detectors.detector import Detector
    from aploss.detectors.predict import Prediction

PREDICT_EXAMPLES = """
  aploss predict runs/demo photos/
  aploss predict runs/demo a.jpg b.png "holiday/**/*.jpg" --out found/ --threshold 0.5 --labels yolo
  aploss predict model.onnx photos/ --out found/
  aploss predict runs/coco test2017/ --submission coco --annotations image_info_test-dev2017.json
  aploss predict runs/voc VOC2012/JPEGImages/ --submission voc
"""

PICTURES, UNFINISHED = "pictures", "unfinished.jsonl"
LOSSY = (".jpg", ".jpeg")  # drawn pictures of other formats are PNG
DECIDING = ("images", "threshold", "labels", "multi_scale", "submission", "annotations")  # options that change results


def add_predict_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", help="run folder, checkpoint or exported file")
    parser.add_argument("images", nargs="+", help="image files, folders or glob patterns")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; by default runs/predict-RUN")
    threshold = (
        "minimum score, 0 to report everything, or 'lrp' for the LRP-optimal threshold of each class; by default the "
        "best F1 on validation, or 0 for a submission"
    )
    parser.add_argument("--threshold", type=_threshold, metavar="X", help=threshold)
    labels = "also write annotation files, to correct by hand and train on"
    parser.add_argument("--labels", choices=["voc", "yolo"], help=labels)
    submission = "write the result files of an evaluation server, and no pictures"
    parser.add_argument("--submission", choices=["coco", "voc"], help=submission)
    annotations = "COCO file with the image and category ids of a submission; by default the run's own dataset"
    parser.add_argument("--annotations", metavar="FILE", help=annotations)
    scales = "merge the detections of several image sizes, each also flipped; slower"
    parser.add_argument("--multi-scale", action="store_true", help=scales)
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto")
    batch = "images per forward pass"
    parser.add_argument("--batch-size", type=positive_int, metavar="N", default=8, help=batch)


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

    if options.annotations is not None and options.submission != "coco":
        raise ConfigError("--annotations requires --submission coco")
    model = checkpoint_file(Path(options.run))
    command = {"run": str(model), "version": file_version(model), **{key: getattr(options, key) for key in DECIDING}}
    header = json.dumps(command, default=str) + "\n"
    out = options.out or _default_folder(options.run, header)
    images = find_images(options.images, exclude=out / PICTURES)
    detector = load_detector(options.run, options.device)
    image_ids, category_ids = list(range(1, len(images) + 1)), list(range(1, len(detector.class_names) + 1))
    if options.submission == "coco":
        image_ids, category_ids = annotated_ids(options, list(images), detector.class_names)
    if options.submission == "voc":
        check_voc_names(list(images), detector.class_names)
    threshold = 0.0 if options.submission and options.threshold is None else options.threshold
    scales, failures = MultiScale() if options.multi_scale else None, []
    parts = Parts(out / UNFINISHED, header)
    todo = [path for path in images if path not in parts]
    with progress("images", quiet=options.quiet) as show, _resume_hint():
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
                    _write_picture(out / PICTURES / images[path], path.suffix, image, prediction, detector.class_names)
                if options.labels is not None:
                    _write_labels(out / "labels" / images[path], path.name, prediction, options.labels)
                parts.add(path, prediction)
            show(len(images) - len(todo) + start + len(batch), len(images))
    if options.labels == "yolo":
        names = "".join(f"{' '.join(name.split())}\n" for name in detector.class_names)
        write_text(out / "labels/classes.txt", names)
    objects = write_results(out, parts, dict(zip(images, image_ids, strict=True)), category_ids, detector.class_names)
    if options.submission == "voc":
        write_voc_submission(out, parts, detector.class_names)
    parts.file.unlink()
    if not options.quiet:
        print(f"{objects} objects in {len(images) - len(failures)} images: {out}", flush=True)
    if failures:
        print(f"{len(failures)} images could not be read:", *failures, sep="\n  ", file=sys.stderr)
    return EXIT_PROBLEMS if failures else 0


@contextmanager
def _resume_hint() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("the same command resumes", file=sys.stderr)
        raise


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
        as_file_name(f"predict-{name}"), lambda out: not out.exists() or Parts.first_line(out / UNFINISHED) == header
    )


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


def find_images(arguments: Sequence[str], *, exclude: Path) -> dict[Path, str]:
    """Finds the images that files, folders (recursively) and glob patterns name, except images in a folder.

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
