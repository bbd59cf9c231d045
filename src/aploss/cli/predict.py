"""Detect objects in images with a trained run.

The pictures with boxes go to ``pictures/`` in the output folder, the detections as COCO results to ``detections.json``,
and the images and classes that these refer to, to ``images.json``.
"""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser, Namespace

from aploss.cli.command import EXIT_PROBLEMS, Command, newest_run, progress, require_at_least, say_next
from aploss.data.images import EXTENSIONS
from aploss.errors import ConfigError, DataError
from aploss.files import write_text, write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from aploss.detectors.predict import ObjectDetector, Prediction

EXAMPLES = """
  aploss predict runs/demo photos/ --out found/
  aploss predict runs/demo a.jpg b.png "holiday/**/*.jpg" --out found/ --threshold 0.5
  aploss predict runs/demo photos/ --out found/ --labels yolo
  aploss predict runs/demo photos/ --out found/ --multi-scale --device cuda
  aploss predict model.onnx photos/ --out found/
"""

PICTURES = "pictures"
LOSSY = (".jpg", ".jpeg")  # drawn in kind; everything else becomes PNG


@dataclass(frozen=True)
class ImageFile:
    """An image to look at, and what its results are called: different for all images."""

    path: Path
    name: str  # the path below the folder that was given, without suffix


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=str, help="run folder, checkpoint, or exported file (.onnx)")
    parser.add_argument("images", type=str, nargs="*", help="image files, folders, or patterns")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument(
        "--threshold", type=float, help="least score to report; 0 for all (default: best F1 on validation)"
    )
    parser.add_argument(
        "--labels", type=Literal["voc", "yolo"], help="also write annotation files, to be corrected and trained on"
    )
    parser.add_argument("--multi-scale", action="store_true", help="look at several sizes and mirrored: slower")
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, mps or auto")
    parser.add_argument("--batch-size", type=int, default=8, help="images in one pass")


def _run(options: Namespace) -> int:
    """Predicts image by image and writes the results; 1 if some images could not be used."""
    from aploss.detectors.predict import MultiScale

    _require_all(options)
    require_at_least(1, options, "batch_size")
    images, failures = find_images(options.images, exclude=options.out / PICTURES)
    if not images:
        raise DataError(f"no images to look at: {'; '.join(failures)}")
    detector = load_detector(options.run, options.device)
    results = _Results(options.out, detector.class_names, options.labels)
    multi_scale = MultiScale() if options.multi_scale else None
    with progress("images", quiet=options.quiet) as show:
        for start in range(0, len(images), options.batch_size):
            chunk = images[start : start + options.batch_size]
            readable = list(_read(chunk, failures))
            tensors = [tensor for _, tensor in readable]
            predictions = detector.predict(
                tensors, threshold=options.threshold, batch_size=options.batch_size, multi_scale=multi_scale
            )
            for (image, tensor), prediction in zip(readable, predictions, strict=True):
                results.add(image, tensor, prediction)
            show(start + len(chunk), len(images))
    results.write()
    if not options.quiet:
        least = detector.draw_threshold if options.threshold is None else options.threshold
        objects, looked_at = sum(map(len, results.predictions)), len(results.images)
        above = f" with a score of at least {least:.2f}" if least else ""
        found_in = f"{objects} object{'s' * (objects != 1)} in {looked_at} image{'s' * (looked_at != 1)}"
        print(f"{found_in}{above}: {options.out}", flush=True)
        found = shlex.quote(str(options.out / "detections.json"))
        say_next(options, f"aploss eval --annotations ANNOTATIONS.json --detections {found}")
    if failures:
        print(f"{len(failures)} could not be used:", *failures, sep="\n  ", file=sys.stderr)
    return EXIT_PROBLEMS if failures else 0


def _require_all(options: Namespace) -> None:
    """Completes a command that lacks the run, the images or --out."""
    run, images = options.run, options.images
    if not images and Path(run).suffix.lower() in EXTENSIONS:
        raise ConfigError(f"the run comes first: aploss predict {newest_run()} {shlex.quote(run)} --out found")
    if swapped := next((one for one in images if (Path(one) / "config.yaml").is_file()), None):
        rest = shlex.join([swapped, run, "--out", str(options.out or "found")])
        raise ConfigError(f"the run comes first: aploss predict {rest}")
    if not images or options.out is None:
        missing = " and ".join(["images"] * (not images) + ["--out"] * (options.out is None))
        rest = shlex.join([run, *(images or ["photos/"]), "--out", str(options.out or "found")])
        raise ConfigError(f"without {missing} there is nothing to do: aploss predict {rest}")


def load_detector(path: str, device: str) -> "ObjectDetector":
    """The detector of a run folder, a checkpoint, or a file of ``aploss export``."""
    if path.lower().endswith(".onnx"):
        from aploss.detectors.export import OnnxDetector

        return OnnxDetector(path)
    from aploss.detectors.checkpoint import load
    from aploss.training.machine import choose_device

    return load(path, device=choose_device(device))


def _read(chunk: Sequence[ImageFile], failures: list[str]) -> "Iterator[tuple[ImageFile, Tensor]]":
    from aploss.data.images import read_image

    for image in chunk:
        try:
            yield image, read_image(image.path)
        except DataError as error:
            failures.append(str(error))


@dataclass
class _Results:
    """The output folder; pictures and labels are written at once, the rest at the end."""

    folder: Path
    class_names: tuple[str, ...]
    labels: str | None
    images: list[dict[str, object]] = field(default_factory=list)
    predictions: "list[Prediction]" = field(default_factory=list)

    def add(self, image: ImageFile, tensor: "Tensor", prediction: "Prediction") -> None:
        from aploss.data import draw_boxes
        from aploss.data.voc import voc_annotation
        from aploss.data.yolo import yolo_rows

        width, height = prediction.image_size
        number = len(self.images) + 1
        self.images.append({"id": number, "file_name": str(image.path), "width": width, "height": height})
        self.predictions.append(prediction)
        boxes, labels, scores = prediction.boxes.numpy(), prediction.labels.numpy(), prediction.scores.numpy()
        picture = draw_boxes(tensor.numpy(), boxes, labels, self.class_names, scores)
        suffix = image.path.suffix.lower()
        suffix, kind = (suffix, "JPEG") if suffix in LOSSY else (".png", "PNG")
        path = self.folder / PICTURES / f"{image.name}{suffix}"
        write_whole(path, lambda file: picture.save(file, format=kind, quality=92))
        size, rows = prediction.image_size, boxes.tolist()
        if self.labels == "voc":
            names, listed = prediction.class_names, scores.tolist()
            text = voc_annotation(image.path.name, size, names, rows, scores=listed, digits=2)
            write_text(self.folder / f"labels/{image.name}.xml", text)
        elif self.labels == "yolo":
            write_text(self.folder / f"labels/{image.name}.txt", yolo_rows(labels.tolist(), rows, size, digits=6))

    def write(self) -> None:
        """Writes the two JSON files, and the classes of YOLO labels."""
        from aploss.evaluation.tables import DetectionTable

        found = [{"boxes": one.boxes, "scores": one.scores, "labels": one.labels} for one in self.predictions]
        table = DetectionTable.from_predictions(list(range(1, len(found) + 1)), found)
        categories = [{"id": i, "name": name} for i, name in enumerate(self.class_names, start=1)]
        about = {"images": self.images, "categories": categories, "annotations": []}
        texts = {"detections.json": json.dumps(table.to_results()), "images.json": json.dumps(about, indent=1)}
        if self.labels == "yolo":
            texts["labels/classes.txt"] = "".join(f"{' '.join(name.split())}\n" for name in self.class_names)
        for name, text in texts.items():
            write_text(self.folder / name, text)


def find_images(arguments: Sequence[str], *, exclude: Path | None = None) -> tuple[list[ImageFile], list[str]]:
    """The files of arguments that are files, folders (with the folders in them) or patterns such as ``*.jpg``, in their
    order and each once; and a line for each argument that is no image. The folder ``exclude`` is not looked into."""
    found: dict[Path, str] = {}
    problems: list[str] = []
    for argument in arguments:
        candidates = dict(_candidates(argument))
        if not candidates:
            problems.append(f"{argument}: {_why_nothing(argument)}")
        for path, name in candidates.items():
            if exclude is None or not path.resolve().is_relative_to(exclude.resolve()):
                found.setdefault(path, name)
    return _with_different_names(found), problems


def _candidates(argument: str) -> Iterator[tuple[Path, str]]:
    """Files and their names; folders are searched for names that images end in."""
    path = Path(argument)
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix.lower() in EXTENSIONS and file.is_file():
                yield file, file.relative_to(path).with_suffix("").as_posix()
    elif path.is_file():
        yield path, path.stem
    elif has_magic(argument):
        for match in sorted(glob(argument, recursive=True)):  # noqa: PTH207 - absolute ones too
            yield from _candidates(match)


def _why_nothing(argument: str) -> str:
    if Path(argument).is_dir():
        return "no images in this folder"
    return "no image matches" if has_magic(argument) else "no such image file or folder"


def _with_different_names(found: dict[Path, str]) -> list[ImageFile]:
    taken: set[str] = set()
    images = []
    for path, wanted in found.items():
        name, number = wanted, 1
        while name.casefold() in taken:  # some file systems take A and a for the same
            number += 1
            name = f"{wanted}-{number}"
        taken.add(name.casefold())
        images.append(ImageFile(path, name))
    return images


PREDICT = Command(
    examples=EXAMPLES,
    add_arguments=_add_arguments,
    run=_run,
    quiet="show only what goes wrong",
    needs={"images": "photos/", "--out": "found"},
)
