"""The data of a run: its splits, the batches it trains on, and the detections on the other splits.

Each set of weights is run on a split once, with the images shared among the ranks, and its detections are matched once.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from aploss.data.annotations import Annotations, DetectionDataset
from aploss.data.check import fingerprint
from aploss.data.features import StoredFeatures, store_features
from aploss.data.formats import DataFormat, common_split_name, find_source
from aploss.data.loader import AugmentedSamples, TrainingBatches, make_evaluation_loader, make_training_loader
from aploss.detectors.detector import Detector
from aploss.detectors.predict import detect_by_size, evaluation_mode
from aploss.errors import ConfigError, DataError, RunError, listed
from aploss.evaluation import DetectionTable, Metrics, coco_metrics
from aploss.evaluation.matching import Matches, match_detections
from aploss.plotting.pictures import contact_sheet, draw_boxes
from aploss.progress import Progress
from aploss.training.config import TrainConfig
from aploss.training.distributed import main_first

NO_SPLIT = "none"
UNKNOWN = "unknown-class"
TOTAL_CACHED_VIEWS = 2000  # a minute of a CPU core; with few images each gets many views
MIN_CACHED_VIEWS, MAX_CACHED_VIEWS = 2, 12
MAX_CPU_SIDE = 320  # of a square with as many pixels as a CPU trains on in reasonable time
MIN_SIDE = 128
STRIDE = 32  # images are padded to multiples of it anyway
DRAWN_IMAGES = 4


@dataclass(eq=False)
class Split:
    """A dataset to evaluate on."""

    dataset: DetectionDataset  # without the images that cannot be read
    unreadable: dict[str, str] = field(default_factory=dict)  # path → reason
    step: int | None = None  # of the weights that were last evaluated here
    detections: DetectionTable = field(init=False)  # of these weights

    @property
    def name(self) -> str:
        """The name of the split."""
        return self.dataset.split

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

    @cached_property
    def matches(self) -> Matches:
        """The final detections of a run matched with the objects."""
        return match_detections(self.truth, self.detections)


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
    if class_names is not None and train.class_names != class_names:
        if sorted(train.class_names) != sorted(class_names):
            raise RunError(
                f"the run was started with the classes {', '.join(class_names)}, but {config.data} has "
                f"{', '.join(train.class_names)}; restore the names, or start a new run with --out"
            )
        remarks.append("classes are in another order than when the run was started: mapped by name")
        train = source.load(train_name, class_names=class_names)
    option = None if config.splits.ignore_unknown_classes else "--splits.ignore-unknown-classes true"
    load = partial(load_split, source, class_names=train.class_names, ignore_unknown=option)
    validation_name = config.splits.validation
    if validation_name is None and not ("val" in train_name or "[" in train_name):  # val is trained on, or a part
        validation_name = known.get("val")
    if validation_name is None:
        train_name, validation_name = _hold_out(train_name, share := config.splits.holdout)
        train = source.load(train_name, class_names=train.class_names)
        remarks.append(f"no validation split: {share:.0%} of the training images are held out")
    validation = None if validation_name == NO_SPLIT else load(validation_name)
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
    found = [known[name] for name in ("train", "trainval", "all") if name in known][:1]
    found = found or [name for name in known.values() if name.endswith("_trainval")]  # the years of a VOC devkit
    if not found and len(known) > 1:
        raise ConfigError(f"{data} has the splits {', '.join(known.values())}: choose one with --splits.train")
    return "+".join(found or known.values())


def _hold_out(name: str, share: float) -> tuple[str, str]:
    """Splits an expression of splits joined by ``+`` into a training and a validation part."""
    kept = f"{100 * (1 - share):g}%"
    terms = name.split("+")
    return "+".join(f"{t}[:{kept}]" for t in terms), "+".join(f"{t}[{kept}:]" for t in terms)


# --- training batches ---


def make_batches(
    config: TrainConfig,
    train: DetectionDataset,
    detector: Detector,
    accelerator: Accelerator,
    progress: Progress,
    workers: int,
) -> TrainingBatches:
    """Makes the training batches: of images, or of the feature maps of a frozen backbone, computed if needed."""
    settings, features = config.batches, None
    if settings.cached_views and not settings.cache_features:
        raise ConfigError("batches.cached_views needs cached features: add --batches.cache_features true")
    if settings.cache_features:
        features = main_first(accelerator, lambda: _stored_features(config, train, detector, progress))
    return make_training_loader(
        train,
        batch_size=settings.size,
        seed=config.seed,
        preset=settings.augmentation,
        size=settings.image_size,
        workers=workers if features is None else 0,  # rows of a file need no process that prepares them
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        skip_unreadable=True,
        features=features,
        pinned=accelerator.device.type == "cuda",
    )


def _stored_features(
    config: TrainConfig, train: DetectionDataset, detector: Detector, progress: Progress
) -> StoredFeatures:
    if not config.model.frozen_backbone:
        raise ConfigError("batches.cache_features needs a frozen backbone: add --model.frozen_backbone true")
    settings = config.batches
    # Not the run's seed: the runs of a comparison share the cache.
    samples = AugmentedSamples(train, seed=0, preset=settings.augmentation, size=settings.image_size)
    suitable = min(max(TOTAL_CACHED_VIEWS // len(train), MIN_CACHED_VIEWS), MAX_CACHED_VIEWS)
    count = settings.cached_views or (1 if settings.augmentation == "none" else suitable)
    length = config.schedule.length  # of training, which draws one view of an image per epoch
    drawn = length * settings.size * settings.accumulate / len(train)
    count = min(count, math.ceil(drawn) if config.schedule.unit == "steps" else length)
    body = detector.body().eval()
    digest = hashlib.sha256(str(body).encode())  # of the network and its weights
    inputs = (("", detector.image_mean), ("", detector.image_std))
    for name, tensor in (*body.state_dict().items(), *inputs):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    with progress.task("computing features") as show:
        stored = store_features(
            samples,
            detector.features,
            views=count,
            network_digest=digest.hexdigest(),
            on_progress=show,
            note=progress.note,
        )
    size, views = f"{stored.bytes / 1e6:.0f} MB", f"{stored.views} views per image"
    progress.note(f"features  of the frozen backbone from {stored.folder} ({size}, {views})")
    return stored


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


# --- detection ---


def detect_split(
    detector: Detector,
    split: Split,
    accelerator: Accelerator,
    *,
    batch_size: int,
    workers: int = 0,
    on_images: Callable[[int, int], Any] = lambda done, total: None,
) -> DetectionTable:
    """Runs a detector on all images of a split, each rank on its share, without a score threshold.

    Args:
        detector: the detector.
        split: the split; images that cannot be read are dropped from it.
        accelerator: the processes of the run.
        batch_size: images per forward pass.
        workers: data loader workers.
        on_images: called with the number of images done (estimated for other ranks) and their total.

    Returns:
        The detections of all ranks in the order of the images.
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
                on_images(min(len(found) * processes, len(split.dataset)), len(split.dataset))
    shares = gather_object([(found, unreadable)])
    by_image = {image: result for share, _ in shares for image, result in share.items()}
    if unreadable := {index: why for _, share in shares for index, why in share.items()}:
        split.leave_out(unreadable)
    order = split.dataset.image_ids.tolist()
    return DetectionTable.from_predictions(order, [by_image[image] for image in order])


def draw_detections(split: Split) -> Image.Image:
    """Draws detections on images evenly spaced through a split: as many of the best of each as it has objects."""
    pictures, dataset, detections = [], split.dataset, split.detections
    for index in np.linspace(0, len(dataset) - 1, min(DRAWN_IMAGES, len(dataset))).astype(int).tolist():
        image, target = dataset[index]
        rows = np.flatnonzero(detections.image_ids == dataset.image_ids[index])
        rows = rows[np.argsort(-detections.scores[rows], kind="stable")][: max(1, len(target["labels"]))]
        boxes = detections.xywh[rows]
        boxes[:, 2:] += boxes[:, :2]
        labels, scores = detections.category_ids[rows] - 1, detections.scores[rows]
        pictures.append(draw_boxes(image, boxes, labels, dataset.class_names, scores))
    return contact_sheet(pictures)
