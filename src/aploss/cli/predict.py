"""Detect objects in images with a trained run.

The pictures with boxes go to ``pictures/`` in the output folder, the detections as COCO results to
``detections.json``, and the images and classes that these refer to, to ``images.json``.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser, Namespace

from aploss.cli.image_files import ImageFile, find_images
from aploss.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    from torch import Tensor

    from aploss.detectors.multi_scale import ObjectDetector
    from aploss.detectors.prediction import Prediction

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """
  aploss predict runs/demo photos/ --out found/
  aploss predict runs/demo a.jpg b.png "holiday/**/*.jpg" --out found/ --threshold 0.5
  aploss predict runs/demo photos/ --out found/ --labels yolo
  aploss predict runs/demo photos/ --out found/ --multi-scale --device cuda
  aploss predict model.onnx photos/ --out found/
"""

EXIT_SOME_FAILED = 1
SECONDS_BETWEEN_LINES = 10.0
PICTURES = "pictures"
LOSSY = (".jpg", ".jpeg")  # drawn in kind; everything else becomes PNG


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("run", type=str, help="run folder, checkpoint, or .onnx file of a detector")
    parser.add_argument("images", type=str, nargs="+", help="image files, folders, or patterns")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--threshold", type=float | None, default=None,
        help="least score to report; 0 for all (default: best F1 on validation)",
    )  # fmt: skip
    parser.add_argument(
        "--labels", type=Literal["voc", "yolo"] | None, default=None,
        help="also write annotation files, to be corrected and trained on",
    )  # fmt: skip
    parser.add_argument(
        "--multi-scale", action="store_true", help="look at several sizes and mirrored: slower"
    )
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, mps or auto")
    parser.add_argument("--batch-size", type=int, default=8, help="images in one pass")
    parser.add_argument("--quiet", action="store_true", help="say only what went wrong")


def run(options: Namespace) -> int:
    """Predicts image by image and writes the results; 1 if some images could not be used."""
    from aploss.detectors.multi_scale import MultiScale
    from aploss.detectors.prediction import predict

    if options.batch_size < 1:
        raise ConfigError(f"--batch-size {options.batch_size}: give 1 or more")
    images, failures = find_images(options.images, exclude=options.out / PICTURES)
    if not images:
        raise DataError(f"no images to look at: {'; '.join(failures)}")
    detector = _load(options.run, options.device)
    results = _Results(options.out, detector.class_names, options.labels)
    with _progress(len(images), quiet=options.quiet) as advance:
        for start in range(0, len(images), options.batch_size):
            chunk = images[start : start + options.batch_size]
            readable = list(_read(chunk, failures))
            predictions = predict(
                detector,
                [tensor for _, tensor in readable],
                threshold=options.threshold,
                batch_size=options.batch_size,
                multi_scale=MultiScale() if options.multi_scale else None,
            )
            for (image, tensor), prediction in zip(readable, predictions, strict=True):
                results.add(image, tensor, prediction)
            advance(len(chunk))
    results.write()
    if not options.quiet:
        print(results.summary(detector.draw_threshold, options.threshold))
    return _tell(failures)


def _load(path: str, device: str) -> "ObjectDetector":
    if path.endswith(".onnx"):
        from aploss.detectors.export import OnnxDetector

        return OnnxDetector(path)
    from aploss.detectors.checkpoint_io import load
    from aploss.training.hardware import choose_device

    return load(path, device=choose_device(device))


def _read(chunk: Sequence[ImageFile], failures: list[str]) -> "Iterator[tuple[ImageFile, Tensor]]":
    from aploss.data.images import read_image

    for image in chunk:
        try:
            yield image, read_image(image.path)
        except DataError as error:
            failures.append(str(error))


def _tell(failures: list[str]) -> int:
    if not failures:
        return 0
    print(f"{len(failures)} could not be used:", file=sys.stderr)
    for line in failures:
        print(f"  {line}", file=sys.stderr)
    return EXIT_SOME_FAILED


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A live bar on a terminal, elsewhere a line from time to time; gives what to call."""
    if sys.stdout.isatty() and not quiet:
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task("images", total=total)
            yield lambda count: bar.advance(task, count)
        return
    done, said = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if not quiet and time.monotonic() - said >= SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"{done} of {total} images", flush=True)

    yield advance


@dataclass
class _Results:
    """The output folder; pictures and labels are written at once, the rest at the end."""

    folder: Path
    class_names: tuple[str, ...]
    labels: str | None
    images: list[dict[str, object]] = field(default_factory=list)
    predictions: "list[Prediction]" = field(default_factory=list)

    def add(self, image: ImageFile, tensor: "Tensor", prediction: "Prediction") -> None:
        from aploss.data.draw import draw_boxes

        width, height = prediction.image_size
        number = len(self.images) + 1
        self.images.append(
            {"id": number, "file_name": str(image.path), "width": width, "height": height}
        )
        self.predictions.append(prediction)
        picture = draw_boxes(
            tensor.numpy(),
            prediction.boxes.numpy(),
            prediction.labels.numpy(),
            self.class_names,
            prediction.scores.numpy(),
        )
        suffix = image.path.suffix.lower()
        suffix = suffix if suffix in LOSSY else ".png"
        with self._new(f"{PICTURES}/{image.name}{suffix}") as path:
            picture.save(path, quality=92)
        self._write_labels(image, prediction)

    def write(self) -> None:
        """Writes the two JSON files, and the classes of YOLO labels."""
        from aploss.evaluation.detections import DetectionTable

        found = [
            {"boxes": one.boxes, "scores": one.scores, "labels": one.labels}
            for one in self.predictions
        ]
        table = DetectionTable.from_predictions(list(range(1, len(found) + 1)), found)
        categories = [{"id": i, "name": name} for i, name in enumerate(self.class_names, start=1)]
        about = {"images": self.images, "categories": categories, "annotations": []}
        texts = {
            "detections.json": json.dumps(table.to_results()),
            "images.json": json.dumps(about, indent=1),
        }
        if self.labels == "yolo":
            texts["labels/classes.txt"] = "".join(f"{name}\n" for name in self.class_names)
        for name, text in texts.items():
            self._write(name, text)

    def summary(self, draw_threshold: float | None, threshold: float | None) -> str:
        least = draw_threshold if threshold is None else threshold
        objects = sum(len(prediction) for prediction in self.predictions)
        above = f" with a score of at least {least:.2f}" if least else ""
        return f"{objects} objects in {len(self.images)} images{above}: {self.folder}"

    def _write_labels(self, image: ImageFile, prediction: "Prediction") -> None:
        from aploss.detectors.label_files import voc_annotation, yolo_rows

        if self.labels == "voc":
            text = voc_annotation(prediction, image.path.name)
            self._write(f"labels/{image.name}.xml", text)
        elif self.labels == "yolo":
            self._write(f"labels/{image.name}.txt", yolo_rows(prediction))

    def _write(self, name: str, text: str) -> None:
        with self._new(name) as path:
            path.write_text(text, encoding="utf-8")

    @contextmanager
    def _new(self, name: str) -> Iterator[Path]:
        """A temporary name with the same ending, renamed when the file is complete."""
        path = self.folder / name
        unfinished = path.with_name(f".unfinished-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield unfinished
            unfinished.replace(path)
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"--out {self.folder}: {path} cannot be written ({reason})") from error
        finally:
            with suppress(OSError):
                unfinished.unlink()
