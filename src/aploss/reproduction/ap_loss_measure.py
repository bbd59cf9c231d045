"""The plain AP-loss on the training set, watched while a run trains (Figure 4b)."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from aploss.data.batches import Batch, make_training_loader
from aploss.detectors.checkpoint_io import detector_from_record, read_checkpoint
from aploss.detectors.detector import Detector
from aploss.detectors.ranking_labels import label_anchors
from aploss.files import write_json
from aploss.losses import ap_loss
from aploss.reporting.comparison_data import Curve
from aploss.reproduction.measure import Run
from aploss.training.config import TrainConfig
from aploss.training.datasets import load_run_data
from aploss.training.hardware import choose_device
from aploss.training.run import make_detector

__all__ = ["RANKING_AP", "APLossMeasure", "training_ap_loss"]

RANKING_AP = "AP of the ranking"
BATCH = 8  # images ranked together, as in training
FILE = "ap_loss.json"


class APLossMeasure:
    """1 - AP of the ranking of anchors, on images of the training set, at every checkpoint.

    Whatever a run minimises, it is judged by the loss of Eq. (5) with the Heaviside step and
    without interpolation. The images are the same for all runs, not augmented, in batches of 8;
    the loss is the mean over batches.

    Args:
        images: how many images of the training set are looked at.
    """

    def __init__(self, images: int = 64) -> None:
        self.images = images

    def observer(self, config: TrainConfig, folder: Path) -> Callable[[dict[str, Any]], None]:
        """Measures every new checkpoint, and the initial weights."""
        watch = _Watch(config, folder, self.images)
        if not watch.points:
            with torch.random.fork_rng():
                watch.add(0, make_detector(config, watch.class_names))
        return lambda row: watch.look()

    def values(self, run: Run) -> Mapping[str, float | None]:
        return {RANKING_AP: 1 - self._points(run)[-1][1]}

    def curve(self, run: Run) -> Curve:
        points = self._points(run)
        return Curve(steps=[step for step, _ in points], values=[value for _, value in points])

    def score(self, run: Run) -> float | None:
        return self.values(run)[RANKING_AP]

    def _points(self, run: Run) -> list[tuple[int, float]]:
        points = _read(run.folder / FILE)
        assert run.summary is not None
        if not points or points[-1][0] < run.summary.steps:
            watch = _Watch(run.config, run.folder, self.images)
            watch.look()
            points = watch.points
        return points


class _Watch:
    """The measured points of one run, kept in its folder."""

    def __init__(self, config: TrainConfig, folder: Path, images: int) -> None:
        self.file, self.checkpoint = folder / FILE, folder / "checkpoints" / "last.pt"
        self.points = _read(self.file)
        train = load_run_data(config).train
        self.class_names = train.class_names
        loader = make_training_loader(
            train, batch_size=BATCH, seed=0, preset="none", size=config.batches.image_size
        )
        count = math.ceil(images / BATCH)
        self._batches = [batch for _, batch in zip(range(count), loader.epoch(0), strict=False)]
        self._device = choose_device(config.device)
        self._seen = 0

    def look(self) -> None:
        """Measures the last checkpoint if it is a new one."""
        if not self.checkpoint.is_file():
            return
        changed = self.checkpoint.stat().st_mtime_ns
        if changed == self._seen:
            return
        self._seen = changed
        content = read_checkpoint(self.checkpoint)
        step = int(content["training"]["step"])
        if all(step != known for known, _ in self.points):
            self.add(step, detector_from_record(content["detector"]))
            self._write()

    def add(self, step: int, detector: Detector) -> None:
        """Measures a detector."""
        value = training_ap_loss(detector.to(self._device), self._batches)
        self.points = sorted([*self.points, (step, value)])

    def _write(self) -> None:
        write_json(self.file, {"steps": [s for s, _ in self.points],
                               "values": [v for _, v in self.points]})  # fmt: skip


def _read(file: Path) -> list[tuple[int, float]]:
    if not file.is_file():
        return []
    content = json.loads(file.read_text(encoding="utf-8"))
    return list(zip(content["steps"], content["values"], strict=True))


def training_ap_loss(detector: Detector, batches: list[Batch]) -> float:
    """The mean over batches of 1 - AP of their anchors' ranking; batches without objects are left
    out.

    Args:
        detector: with one score for each anchor and class.
        batches: of training images.

    Returns:
        A value in [0, 1]; NaN where no batch has an object.
    """
    device = next(detector.parameters()).device
    values = []
    with torch.no_grad():
        for batch in batches:
            assert batch.images is not None
            images = batch.images.to(device)
            height, width = images.shape[-2:]
            anchors = torch.cat(detector.anchors_for(height, width, device))
            logits, _ = detector.eval().heads(images)
            labels = label_anchors(
                anchors,
                batch.targets,
                positive_iou=detector.criterion.positive_iou,
                negative_iou=detector.criterion.negative_iou,
            )
            if len(labels.boxes):
                targets = labels.ranking_targets(logits.shape[-1])
                values.append(float(ap_loss(logits, targets, delta=0.0, interpolated=False)))
    return math.nan if not values else sum(values) / len(values)
