"""The splits of a run: which images it trains on, and the evaluation of a detector on the others.

Each set of weights is run on a split once, with the images shared among the ranks, and its detections are matched once.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from aploss.data.annotations import Annotations, DetectionDataset
from aploss.data.check import fingerprint
from aploss.data.formats import DataFormat, common_split_name, find_source
from aploss.data.loader import make_evaluation_loader
from aploss.detectors.checkpoint import Checkpoint
from aploss.detectors.detector import Detector
from aploss.detectors.predict import detect_by_size, evaluation_mode
from aploss.errors import ConfigError, DataError, RunError, listed
from aploss.evaluation import METRICS, DetectionTable, Metrics, coco_metrics
from aploss.evaluation.calibration import calibrate_detections, calibration_report
from aploss.evaluation.matching import Matches, match_detections, precision_recall_curves
from aploss.evaluation.metrics import voc_metrics
from aploss.files import write_json
from aploss.plotting.pictures import contact_sheet, draw_boxes
from aploss.reports.run_files import matches_document
from aploss.training.callbacks import Progress
from aploss.training.config import TrainConfig
from aploss.training.distributed import on_main
from aploss.training.run_folder import RunFolder

NO_SPLIT = "none"
UNKNOWN = "unknown-class"
MAX_CPU_SIDE = 320  # of a square with as many pixels as a CPU trains on in reasonable time
MIN_SIDE = 128
STRIDE = 32  # images are padded to multiples of it anyway
DRAWN_IMAGES = 4


class Split:
    """A dataset to evaluate on.

    Attributes:
        unreadable: images that were left out because they cannot be read: path → reason.
        step, detections: of the weights that were last evaluated here; detections are on rank 0 only.
    """

    def __init__(self, dataset: DetectionDataset) -> None:
        self.dataset = dataset
        self.name = dataset.split
        self.unreadable: dict[str, str] = {}
        self.step: int | None = None
        self.detections: DetectionTable | None = None

    @property
    def truth(self) -> Annotations:
        """The objects of the readable images."""
        return self.dataset.annotations

    @property
    def ignored_objects(self) -> int:
        """The number of objects that are not evaluated since the detector does not know their classes."""
        return sum(problem.count for problem in self.dataset.problems if problem.kind == UNKNOWN)

    def leave_out(self, unreadable: dict[int, str]) -> None:
        """Drops unreadable images (index → reason); DataError if no image is left."""
        self.unreadable |= {str(self.dataset.image_path(index)): reason for index, reason in unreadable.items()}
        rest = [index for index in range(len(self.dataset)) if index not in unreadable]
        if not rest:
            raise DataError(f"no image of the split {self.name} can be read: {list(unreadable.values())[-1]}")
        self.dataset = self.dataset.subset(rest)

    def measure(self, detections: DetectionTable, detector: Detector) -> Metrics:
        """Computes COCO's metrics of detections."""
        return coco_metrics(self.truth, detections, max_detections=detector.detections_per_image)

    @property
    def table(self) -> DetectionTable:
        """The detections, on rank 0."""
        assert self.detections is not None
        return self.detections

    @cached_property
    def matches(self) -> Matches:
        """The final detections of a run matched with the objects, on rank 0."""
        return match_detections(self.truth, self.table)


@dataclass(frozen=True)
class RunData:
    """The data of a run; a dataset that serves two purposes is one split."""

    train: DetectionDataset
    validation: Split | None  # for every choice: best checkpoint, calibration, threshold
    evaluation: Split | None  # for the final metrics; may be the validation split
    remarks: Sequence[str]  # about the choice, for the user

    @property
    def splits(self) -> list[Split]:
        """The distinct splits to evaluate on."""
        return list(dict.fromkeys(split for split in (self.validation, self.evaluation) if split is not None))

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Identifies the content of every split, by name; see :func:`~aploss.data.check.fingerprint`."""
        datasets = (self.train, *(split.dataset for split in self.splits))
        return {dataset.split: fingerprint(dataset) for dataset in datasets}


def fingerprint_changes(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """Describes the differences between two results of :meth:`RunData.fingerprints`.

    Example:
        >>> fingerprint_changes({"train": {"images": 3, "files": "a"}}, {"train": {"images": 2, "files": "b"}})
        ['split train: other images, files']
    """
    changes = [f"split {name} is {'new' if name in now else 'gone'}" for name in sorted({*before} ^ {*now})]
    for name in (name for name in before if name in now):
        if others := [key for key in now[name] if before[name].get(key) != now[name][key]]:
            changes.append(f"split {name}: other {', '.join(others)}")
    return changes


def load_run_data(
    config: TrainConfig, source: DataFormat | None = None, *, class_names: Sequence[str] | None = None
) -> RunData:
    """Loads the splits that the config names, or that the dataset has.

    Args:
        config: the settings of the run.
        source: the dataset of ``config.data`` if it has been found already, so that nothing is parsed twice.
        class_names: the classes of a resumed run; if the dataset has them in another order, labels follow this one.

    Raises:
        DataError: if there is nothing to train on.
        RunError: if the dataset has other classes than ``class_names``.
    """
    if not config.data:
        raise ConfigError("no data: give --data a folder, or --data builtin")
    source = source or find_source(config.data, format=config.splits.format)
    known = {common_split_name(name): name for name in reversed(source.splits)}  # "train" for "train2017"
    train_name = config.splits.train or _training_split(known, config.data)
    train = source.load(train_name)
    if train.num_boxes == 0:
        raise DataError(f"the split {train_name} of {config.data} has no objects to learn from")
    remarks: list[str] = []
    if class_names is not None and train.class_names != (*class_names,):
        if sorted(train.class_names) != sorted(class_names):
            raise RunError(
                f"the run was started with the classes {', '.join(class_names)}, but {config.data} has "
                f"{', '.join(train.class_names)}; restore the names, or start a new run with --out"
            )
        remarks.append("classes are in another order than when the run was started: mapped by name")
        train = source.load(train_name, class_names=class_names)
    option = None if config.splits.ignore_unknown_classes else "--splits.ignore-unknown-classes true"
    load = partial(load_split, source, class_names=train.class_names, ignore_unknown=option)
    validation: Split | None = None
    validation_name = config.splits.validation or _validation_split(known, train_name)
    if validation_name is None:
        train_name, validation_name = _hold_out(train_name, config.splits.holdout)
        train = source.load(train_name, class_names=train.class_names)
        validation = load(validation_name)
        remarks.append(f"no validation split: {len(validation.dataset)} training images are held out")
    elif validation_name != NO_SPLIT:
        validation = load(validation_name)
    if config.splits.drop_empty:
        train = train.subset(np.flatnonzero(train.boxes_per_image).tolist())
    test_name = None if "test" in train_name else known.get("test")
    wanted = config.evaluation.split or test_name
    evaluation = None if wanted == NO_SPLIT else validation
    if wanted not in (None, NO_SPLIT, validation_name):
        evaluation = load(wanted)
        if config.evaluation.split is None and evaluation.dataset.num_boxes == 0:
            remarks.append(f"the split {wanted} has no annotations: evaluating on validation instead")
            evaluation = validation
    data = RunData(train, validation, evaluation, remarks)
    trained = {train.image_path(index) for index in range(len(train))}
    for split in data.splits:
        name, paths = split.name, [split.dataset.image_path(index) for index in range(len(split.dataset))]
        if shared := len(trained.intersection(paths)):
            remarks.append(
                f"metrics on {name} are optimistic: {shared} of its {len(paths)} images are also in the training split"
            )
        if count := split.ignored_objects:
            remarks.append(f"{count} objects of {name} are ignored: their classes are not in the training split")
    return data


def load_split(source: DataFormat, split: str, class_names: Sequence[str], *, ignore_unknown: str | None) -> Split:
    """Loads a split for the evaluation of a detector with these classes.

    Objects of other classes cannot be evaluated. Left out silently, a class that is only spelt differently would
    vanish from the metrics.

    Args:
        source: the dataset.
        split: see :meth:`DataFormat.load`.
        class_names: the classes of the detector.
        ignore_unknown: the option that accepts such objects, for the error message; None if it was given.

    Raises:
        DataError: the split has objects of other classes, and ``ignore_unknown`` was not given.
    """
    loaded = Split(source.load(split, class_names=class_names))
    if ignore_unknown is not None and (count := loaded.ignored_objects):
        first = next(problem for problem in loaded.dataset.problems if problem.kind == UNKNOWN)
        names = {"detector": class_names}
        with suppress(DataError):  # a dataset without class names
            names["dataset"] = source.load(split).class_names
        lists = "; ".join(f"classes of the {whose}: {listed(list(own), 20)}" for whose, own in names.items())
        raise DataError(
            f"{loaded.dataset.name}, split {split}: {count} objects of unknown classes, such as {first.file}: "
            f"{first.message}; {lists}; rename the classes, or evaluate without these objects: {ignore_unknown}"
        )
    return loaded


def _training_split(known: dict[str, str], data: str) -> str:
    for name in ("train", "trainval", "all"):
        if name in known:
            return known[name]
    of_years = [name for name in known.values() if name.endswith("_trainval")]  # a VOC devkit
    if of_years:
        return "+".join(of_years)
    if len(known) == 1:
        return next(iter(known.values()))
    raise ConfigError(f"{data} has the splits {', '.join(known.values())}: choose one with --splits.train")


def _validation_split(known: dict[str, str], train_name: str) -> str | None:
    """The split called val, unless it is trained on or only a part of a split is."""
    trained = any("val" in part or "[" in part for part in train_name.split("+"))
    return None if trained else known.get("val")


def _hold_out(name: str, share: float) -> tuple[str, str]:
    """Splits an expression of splits joined by ``+`` into a training and a validation part."""
    kept = f"{100 * (1 - share):g}%"
    terms = name.split("+")
    return "+".join(f"{t}[:{kept}]" for t in terms), "+".join(f"{t}[{kept}:]" for t in terms)


# --- training without a recipe ---


def suggest_recipe(device: torch.device, detector: str | None = None) -> str:
    """Chooses the recipe for data without one; on a CPU a detector named by the user is trained from scratch."""
    if device.type == "cuda":
        return "any-gpu"
    return "any-cpu" if detector in (None, "retinanet-lite0") else "scratch-cpu"


def suggest_image_sizes(recipe: str, source: DataFormat) -> dict[str, Any]:
    """Chooses image sizes for a recipe of :func:`suggest_recipe` that suit the images of a dataset.

    On a CPU, training images get the usual shape of the dataset, so that objects look the same as in testing, in
    multiples of 32, and are not enlarged. On a GPU the size of the recipe is kept: its augmentation changes shapes
    anyway.
    """
    if recipe not in ("any-cpu", "scratch-cpu"):
        return {}
    dataset = source.load()
    sizes = np.array([dataset.image_size(index) for index in range(len(dataset))], dtype=float)
    side = np.clip(np.median(np.sqrt(sizes.prod(axis=1))), MIN_SIDE, MAX_CPU_SIDE)
    stretch = np.clip(np.median(sizes[:, 0] / sizes[:, 1]), 0.5, 2.0) ** 0.5  # width over height
    height, width = (max(STRIDE, STRIDE * round(length / STRIDE)) for length in (side / stretch, side * stretch))
    shorter = min(height, width)
    return {"batches": {"image_size": [height, width]}, "model": {"options": {"test_size": [shorter, 2 * shorter]}}}


# --- evaluation ---


def detect_split(
    detector: Detector,
    split: Split,
    accelerator: Accelerator,
    *,
    batch_size: int,
    workers: int = 0,
    on_images: Callable[[int, int], Any] | None = None,
) -> DetectionTable | None:
    """Runs a detector on all images of a split, each rank on its share, without a score threshold.

    Args:
        detector: the detector.
        split: the split; images that cannot be read are dropped from it.
        accelerator: the processes of the run.
        batch_size: images per forward pass.
        workers: data loader workers.
        on_images: called with the number of images done (estimated for other ranks) and their total.

    Returns:
        On rank 0 the detections in the order of the images, on other ranks None.
    """
    found: dict[int, dict[str, np.ndarray]] = {}
    unreadable: dict[int, str] = {}
    rank, processes = accelerator.process_index, accelerator.num_processes
    if rank < len(split.dataset):  # otherwise there are fewer images than ranks
        loader = make_evaluation_loader(
            split.dataset, batch_size=batch_size, workers=workers, rank=rank, world_size=processes, skip_unreadable=True
        )
        with evaluation_mode(detector):
            for batch in loader:
                unreadable |= batch.unreadable
                for target, result in zip(batch.targets, detect_by_size(detector, batch.images), strict=True):
                    found[target["image_id"]] = {key: value.cpu().numpy() for key, value in result.items()}
                if on_images is not None:
                    on_images(min(len(found) * processes, len(split.dataset)), len(split.dataset))
    shares = gather_object([(found, unreadable)])
    unreadable = {index: why for _, share in shares for index, why in share.items()}
    if unreadable:
        split.leave_out(unreadable)
    if not accelerator.is_main_process:
        return None
    by_image = {image: result for share, _ in shares for image, result in share.items()}
    order = split.dataset.image_ids.tolist()
    return DetectionTable.from_predictions(order, [by_image[image] for image in order])


def draw_detections(split: Split, detections: DetectionTable, class_names: Sequence[str]) -> Image.Image:
    """Draws detections on images evenly spaced through a split: as many of the best of each as it has objects."""
    pictures, dataset = [], split.dataset
    for index in np.linspace(0, len(dataset) - 1, min(DRAWN_IMAGES, len(dataset))).astype(int).tolist():
        image, target = dataset[index]
        rows = np.flatnonzero(detections.image_ids == dataset.image_ids[index])
        rows = rows[np.argsort(-detections.scores[rows], kind="stable")][: max(1, len(target["labels"]))]
        boxes = detections.xywh[rows]
        boxes[:, 2:] += boxes[:, :2]
        labels, scores = detections.category_ids[rows] - 1, detections.scores[rows]
        pictures.append(draw_boxes(image, boxes, labels, class_names, scores))
    return contact_sheet(pictures)


def evaluate_run(
    config: TrainConfig, folder: RunFolder, accelerator: Accelerator, data: RunData, *, workers: int,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Calibrates and evaluates the final detector of a run and writes ``evaluation/``.

    The calibration and the drawing threshold are fitted on the validation split, measured on the evaluation split, and
    stored in the evaluated checkpoint. All ranks run the detector; rank 0 writes.

    Returns:
        The fields of :class:`~aploss.training.run_folder.Summary` that are measured.
    """

    def load_final() -> Checkpoint:
        is_best = config.evaluation.checkpoint == "best" and folder.best.is_file()
        return Checkpoint.read(folder.best) if is_best else folder.load_last()

    chosen = on_main(accelerator, load_final)
    detector = chosen.detector().to(accelerator.device)
    size = config.validation.batch_size
    for split in data.splits:
        if split.step != chosen.step:  # otherwise it was validated with the same weights
            with progress.images(f"evaluating on {split.name}") as show:
                split.detections = detect_split(
                    detector, split, accelerator, batch_size=size, workers=workers, on_images=show
                )

    def measure() -> dict[str, Any]:
        report = _calibrate(detector, data)
        chosen.with_calibration(detector).write(folder.last if chosen.training is not None else folder.best)
        split = data.evaluation
        metrics = {} if split is None else _write_evaluation(config, folder, detector, split, report)
        after = report.get("after", {})
        return {
            "split": split and split.name,
            **{name: metrics.get(name) for name in METRICS},
            "per_class": metrics.get("per_class", {}),
            "calibration_error": after.get("all", {}).get("expected_calibration_error"),
            "calibration_error_drawn": after.get("expected_calibration_error"),
            "calibration_split": report.get("measured_on"),
            "calibration_held_out": report.get("held_out"),
            "draw_threshold": detector.draw_threshold if report else None,
            "best_step": chosen.step,
        }

    return on_main(accelerator, measure)


def _calibrate(detector: Detector, data: RunData) -> dict[str, Any]:
    """Calibrates the detector and chooses its threshold; returns the report on the evaluation split."""
    fitted, measured = data.validation, data.evaluation
    if fitted is None or measured is None:
        return {}
    calibration, threshold = calibrate_detections(fitted.truth, fitted.table, matches=fitted.matches)
    detector.calibration, detector.draw_threshold = calibration, threshold
    report = calibration_report(measured.truth, measured.table, calibration, threshold, matches=measured.matches)
    names = {"fitted_on": fitted.name, "measured_on": measured.name}
    return {**report, **names, "held_out": measured is not fitted}


def _write_evaluation(
    config: TrainConfig, folder: RunFolder, detector: Detector, split: Split, report: dict[str, Any]
) -> dict[str, Any]:
    """Computes the metrics of the evaluation split; writes them with detections, ground truth and matches."""
    table, matches = split.table, split.matches
    metrics = split.measure(table, detector).as_dict()
    curves = precision_recall_curves(split.truth, table, matches=matches)
    metrics["precision_recall"] = {name: curve.as_dict() for name, curve in curves.items()}
    coco = split.dataset.to_coco()
    for index, image in enumerate(coco["images"]):
        image["path"] = str(split.dataset.image_path(index).resolve())
    ids = [annotation["id"] for annotation in coco["annotations"]]
    documents: dict[str, Any] = {
        "ground_truth": coco,
        "detections": table.to_results(),
        "metrics": {**metrics, "ignored_objects": split.ignored_objects},
        "matches": matches_document(matches, ids),
    }
    if detector.calibration is not None:
        documents["calibration"] = {
            **report,
            "calibrated_scores": np.asarray(detector.calibration(table.scores)).tolist(),
        }
    for name, document in documents.items():
        write_json(folder.evaluation / f"{name}.json", document, indent=None)
    year = config.evaluation.voc_year
    return {**metrics, "voc_AP50": None if year is None else voc_metrics(split.truth, table, year=year).AP50}
