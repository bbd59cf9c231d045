"""Which images a run trains on, is validated on and is evaluated on, and settings that suit them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from aploss.data.annotations import Annotations, DetectionDataset
from aploss.data.check import fingerprint
from aploss.data.formats import DataFormat, common_split_name, find_source
from aploss.detectors.detector import Detector
from aploss.errors import ConfigError, DataError, RunError, listed
from aploss.evaluation import DetectionTable, Metrics, coco_metrics
from aploss.training.config import TrainConfig

NO_SPLIT = "none"
UNKNOWN = "unknown-class"
MAX_CPU_SIDE = 320  # of a square with as many pixels as a CPU trains on in reasonable time
MIN_SIDE = 128
STRIDE = 32  # images are padded to multiples of it anyway


class Split:
    """A dataset to evaluate on.

    Attributes:
        unreadable: images that were left out because they cannot be read: path → reason.
        validated: the step whose weights were last evaluated here, and their detections (None except on rank 0).
    """

    def __init__(self, dataset: DetectionDataset) -> None:
        self.dataset = dataset
        self.name = dataset.split
        self.unreadable: dict[str, str] = {}
        self.validated: tuple[int, DetectionTable | None] | None = None

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

    def measure(self, detections: DetectionTable | None, detector: Detector) -> Metrics:
        """Computes COCO's metrics of the detections on rank 0."""
        assert detections is not None
        return coco_metrics(self.truth, detections, max_detections=detector.detections_per_image)


@dataclass(frozen=True)
class RunData:
    """The data of a run; a dataset that serves two purposes is one split."""

    train: DetectionDataset
    validation: Split | None  # for every choice: best checkpoint, calibration, threshold
    evaluation: Split | None  # for the final metrics; may be the validation split
    held_out: Split | None  # measures the calibration; another split than it is fitted on, if possible
    remarks: tuple[str, ...]  # about the choice, for the user

    @property
    def splits(self) -> list[Split]:
        """The distinct splits to evaluate on."""
        found = (self.validation, self.evaluation, self.held_out)
        return list(dict.fromkeys(split for split in found if split is not None))

    def fingerprints(self) -> dict[str, dict[str, Any]]:
        """Identifies the content of every split, by name; see :func:`~aploss.data.check.fingerprint`."""
        datasets = (self.train, *(split.dataset for split in self.splits))
        return {dataset.split: fingerprint(dataset) for dataset in datasets}


def fingerprint_changes(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """Describes the differences between two results of :meth:`RunData.fingerprints`.

    Example:
        >>> fingerprint_changes({"train": {"images": 3, "files": "a"}}, {"train": {"images": 2, "files": "b"}})
        ['split train: 3 images, now 2; other image files']
    """
    changes = [f"split {name} is {'new' if name in now else 'gone'}" for name in sorted({*before} ^ {*now})]
    for name in (name for name in before if name in now):
        old, new = before[name], now[name]
        parts = [f"{old.get(key)} {key}, now {new[key]}" for key in ("images", "boxes") if old.get(key) != new.get(key)]
        others = {"class_names": "class names", "annotations": "annotations", "files": "image files"}
        parts += [f"other {others[key]}" for key in others if old.get(key) != new.get(key)]
        if parts:
            changes.append(f"split {name}: {'; '.join(parts)}")
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
    held_out = evaluation
    if evaluation is not None and evaluation is validation and test_name is not None:
        held_out = load(test_name)
        held_out = held_out if held_out.dataset.num_boxes else validation
    remarks += _overlaps(train, [split.dataset for split in (validation, evaluation) if split is not None])
    remarks += [
        f"{split.ignored_objects} objects of {split.name} are ignored: their classes are not in the training split"
        for split in dict.fromkeys((validation, evaluation, held_out))
        if split is not None and split.ignored_objects
    ]
    return RunData(train, validation, evaluation, held_out, tuple(remarks))


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


def _overlaps(train: DetectionDataset, others: list[DetectionDataset]) -> list[str]:
    trained = {train.image_path(index) for index in range(len(train))}
    return [
        f"metrics on {split} are optimistic: {shared} of its {len(other)} images are also in the training split"
        for split, other in {other.split: other for other in others}.items()
        if (shared := sum(other.image_path(index) in trained for index in range(len(other))))
    ]


# --- training without a recipe ---


def suggest_recipe(device: torch.device, detector: str | None = None) -> str:
    """Chooses the recipe for data without one; on a CPU a detector named by the user is trained from scratch."""
    if device.type == "cuda":
        return "any-gpu"
    return "any-cpu" if detector in (None, "retinanet-lite0") else "scratch-cpu"


def suggest_image_sizes(recipe: str, source: DataFormat) -> dict[str, Any]:
    """Chooses image sizes for a recipe of :func:`suggest_recipe` that suit the images of a dataset.

    On a CPU, training images get the usual shape of the dataset, so that objects look the same as in testing, and are
    not enlarged. On a GPU the size of the recipe is kept: its augmentation changes shapes anyway.
    """
    if recipe not in ("any-cpu", "scratch-cpu"):
        return {}
    height, width = usual_size(source.load())
    shorter = min(height, width)
    return {"batches": {"image_size": [height, width]}, "model": {"options": {"test_size": [shorter, 2 * shorter]}}}


def usual_size(dataset: DetectionDataset) -> tuple[int, int]:
    """Returns the usual height and width of a dataset's images, as multiples of 32.

    Example:
        >>> dataset = DetectionDataset(
        ...     root=".", class_names=["a"], image_paths=["1.png"], image_sizes=[(640, 480)],
        ...     boxes_per_image=[0], boxes=[], labels=[])
        >>> usual_size(dataset)
        (288, 384)
    """
    sizes = np.array([dataset.image_size(index) for index in range(len(dataset))], dtype=float)
    side = np.clip(np.median(np.sqrt(sizes.prod(axis=1))), MIN_SIDE, MAX_CPU_SIDE)
    stretch = np.clip(np.median(sizes[:, 0] / sizes[:, 1]), 0.5, 2.0) ** 0.5  # width over height
    height, width = (max(STRIDE, STRIDE * round(length / STRIDE)) for length in (side / stretch, side * stretch))
    return height, width
