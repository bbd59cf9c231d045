"""Which images a run trains on, chooses by and is measured on, and settings that suit them."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from aploss.data.annotations import DetectionDataset
from aploss.data.formats import common_split_name
from aploss.data.load import dataset_splits, load_dataset
from aploss.data.paths import DatasetFolder
from aploss.errors import ConfigError, DataError
from aploss.training.config import TrainConfig

NO_SPLIT = "none"
LARGEST_SIDE = 320  # of a square with as many pixels as a CPU trains on in reasonable time
SMALLEST_SIDE = 128
STRIDE = 32  # images are padded to multiples of it anyway


@dataclass(frozen=True)
class RunData:
    """The datasets of a run."""

    train: DetectionDataset
    validation: DetectionDataset | None  # for every choice: best checkpoint, calibration, threshold
    evaluation: DetectionDataset | None  # for the final numbers; may be the validation set
    held_out: DetectionDataset | None  # to measure the calibration; not what it was fitted on, where there is another
    remarks: tuple[str, ...]  # what the user should know about the choice


def load_run_data(config: TrainConfig) -> RunData:
    """Loads the splits that the config names, or that the data set has; DataError with nothing to train on."""
    if not config.data:
        raise ConfigError("no data: give --data a folder, or --data builtin")
    found = dataset_splits(config.data, format=config.splits.format)
    known = {common_split_name(name): name for name in reversed(found)}  # "train" for "train2017"
    train_name = config.splits.train or _training_split(known, config.data)
    train = _load(config, train_name)
    if train.num_boxes == 0:
        raise DataError(f"the split {train_name} of {config.data} has no object to learn from")
    remarks: list[str] = []
    validation: DetectionDataset | None = None
    validation_name = config.splits.validation or _validation_split(known, train_name)
    if validation_name is None:
        train_name, validation_name = _hold_out(train_name, config.splits.holdout)
        train, validation = (_load(config, name, train) for name in (train_name, validation_name))
        remarks.append(f"no validation split: {len(validation)} training images are held out")
    elif validation_name != NO_SPLIT:
        validation = _load(config, validation_name, train)
    test_name = None if "test" in train_name else known.get("test")
    wanted = config.evaluation.split or test_name
    evaluation = None if wanted == NO_SPLIT else validation
    if wanted not in (None, NO_SPLIT, validation_name):
        evaluation = _load(config, wanted, train)
        if config.evaluation.split is None and evaluation.num_boxes == 0:
            remarks.append(f"the split {wanted} has no annotations: measured on validation instead")
            evaluation = validation
    held_out = evaluation
    if evaluation is not None and evaluation is validation and test_name is not None:
        held_out = _load(config, test_name, train)
        held_out = held_out if held_out.num_boxes else validation
    remarks += _shared_images(train, [validation, evaluation])
    return RunData(train, validation, evaluation, held_out, tuple(remarks))


def _load(config: TrainConfig, split: str, train: DetectionDataset | None = None) -> DetectionDataset:
    names = None if train is None else train.class_names
    return load_dataset(config.data, split, format=config.splits.format, class_names=names)


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
    """The split called val, unless it is trained on or the training split is but a part."""
    trained = any("val" in part or "[" in part for part in train_name.split("+"))
    return None if trained else known.get("val")


def _hold_out(name: str, share: float) -> tuple[str, str]:
    """The two parts of a split, or of several joined by ``+``, as the loader understands them."""
    kept = f"{100 * (1 - share):g}%"
    terms = name.split("+")
    return "+".join(f"{t}[:{kept}]" for t in terms), "+".join(f"{t}[{kept}:]" for t in terms)


def _shared_images(train: DetectionDataset, others: list[DetectionDataset | None]) -> list[str]:
    trained = {train.image_path(index) for index in range(len(train))}
    by_split = {other.split: other for other in others if other is not None}
    return [
        f"{shared} of the {len(other)} images of {split} are also trained on: numbers measured there are too good"
        for split, other in by_split.items()
        if (shared := sum(other.image_path(index) in trained for index in range(len(other))))
    ]


def as_started(data: RunData, training: Any, config: TrainConfig) -> RunData:
    """The data with the training images in the order a run was started with, whatever has changed since.

    The order of the samples follows from it. An image that has vanished keeps its place, as one that cannot be read;
    one that has come is left out. ``training`` is of the run's checkpoint; older ones do not name the images. DataError
    where more have vanished than may be unreadable.
    """
    now = data.train
    names = training.get("image_names") if isinstance(training, dict) else None
    for name in names if isinstance(names, list) else ():  # whoever wrote the checkpoint
        DatasetFolder(now.root).inside(str(name), named_in="the run's last.pt")
    present = {now.relative_path(index): index for index in range(len(now))}
    if not isinstance(names, list) or list(present) == names:
        return data
    kept = [name for name in names if name in present]
    gone, come, share = len(names) - len(kept), len(present) - len(kept), config.batches.max_unreadable
    if len(kept) < (1 - share) * len(names):
        raise DataError(
            f"{gone} of the {len(names)} training images of the run have vanished from {config.data}, more than "
            f"batches.max_unreadable ({share:g}); bring them back, or go on without them: aploss train --resume --out "
            f"{config.out} --batches.max-unreadable {math.ceil(100 * gone / len(names)) / 100:g}"
        )
    known, counts = now.subset([present[name] for name in kept]), now.boxes_per_image
    fresh = itertools.count(max(map(now.image_id, range(len(now)))) + 1)
    started = DetectionDataset(
        root=now.root,
        class_names=now.class_names,
        image_paths=names,
        image_sizes=[now.image_size(present[name]) if name in present else (1, 1) for name in names],
        boxes_per_image=[counts[present[name]] if name in present else 0 for name in names],
        boxes=known.annotations.boxes,
        labels=known.annotations.category_ids - 1,
        difficult=known.annotations.difficult,
        crowd=known.annotations.crowd,
        image_ids=[now.image_id(present[name]) if name in present else next(fresh) for name in names],
        problems=now.problems,
        name=now.name,
        split=now.split,
    )
    changes = [f"{gone} training images have vanished since the run was started"] * bool(gone)
    changes += [f"{come} have come, which this run leaves out"] * bool(come)
    remark = "; ".join(changes or ["the training images are in another order than at first"])
    return replace(data, train=started, remarks=(*data.remarks, remark))


# --- without a recipe ---


def suggest_recipe(device: torch.device, detector: str | None = None) -> str:
    """The recipe for data nobody has made one for; a detector that the user names is trained from scratch on a CPU."""
    if device.type == "cuda":
        return "any-gpu"
    return "any-cpu" if detector in (None, "retinanet-lite0") else "scratch-cpu"


def suggest_image_sizes(recipe: str, data: str, *, format: str = "auto") -> dict[str, Any]:
    """Settings of a run that follow from the size and shape of its images.

    On a CPU images are trained on in the shape that most have, so that objects look the same as in testing, and no
    larger than they are. A GPU has pixels to spare and augmentation that changes shapes: there the size of the recipe
    of :func:`suggest_recipe` stays.
    """
    if recipe not in ("any-cpu", "scratch-cpu"):
        return {}
    height, width = usual_size(load_dataset(data, format=format))
    shorter = min(height, width)
    return {"batches": {"image_size": [height, width]}, "model": {"options": {"test_size": [shorter, 2 * shorter]}}}


def usual_size(dataset: DetectionDataset) -> tuple[int, int]:
    """Height and width, multiples of 32, of the usual shape of a dataset's images.

    Example:
        >>> dataset = DetectionDataset(
        ...     root=".", class_names=["a"], image_paths=["1.png"], image_sizes=[(640, 480)],
        ...     boxes_per_image=[0], boxes=[], labels=[])
        >>> usual_size(dataset)
        (288, 384)
    """
    sizes = np.array([dataset.image_size(index) for index in range(len(dataset))], dtype=float)
    side = np.clip(np.median(np.sqrt(sizes.prod(axis=1))), SMALLEST_SIDE, LARGEST_SIDE)
    stretch = np.clip(np.median(sizes[:, 0] / sizes[:, 1]), 0.5, 2.0) ** 0.5  # width over height
    height, width = (max(STRIDE, STRIDE * round(length / STRIDE)) for length in (side / stretch, side * stretch))
    return height, width
