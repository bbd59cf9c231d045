"""What a comparison looks at in a run: its AP, its AP at several scales, or its AP-loss."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from aploss.data.loader import Batch, make_evaluation_loader, make_training_loader
from aploss.detectors.checkpoint import detector_from_record, load, read_checkpoint
from aploss.detectors.detector import Detector
from aploss.detectors.labels import label_anchors
from aploss.detectors.postprocess import MultiScale
from aploss.evaluation.tables import DetectionTable
from aploss.evaluation.voc import voc_metrics
from aploss.files import write_json
from aploss.losses import ap_loss
from aploss.reports.comparison import TrainingCurve
from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig
from aploss.training.evaluate import Split
from aploss.training.machine import choose_device, choose_workers
from aploss.training.run import make_detector
from aploss.training.run_folder import Summary
from aploss.training.splits import load_run_data

VOC_AP50 = "VOC AP50"
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
RANKING_AP = "AP of the ranking"
RANKED_IMAGES = 8  # ranked together, as in training


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a comparison.

    Attributes:
        config: of the run, with its seed.
        folder: where it is.
        summary: its result; None where it diverged.
        failure: why it has none, in one line.
    """

    config: TrainConfig
    folder: Path
    summary: Summary | None
    failure: str = ""


class Measure(Protocol):
    """How numbers are taken from a run; all methods but :meth:`observer` are of finished runs."""

    def observer(self, config: TrainConfig, folder: Path) -> Callable[[dict[str, Any]], Any] | None:
        """What is called with every row of the metrics while a run trains."""

    def values(self, run: Run) -> Mapping[str, float | None]:
        """The final numbers by metric, between 0 and 1."""

    def curve(self, run: Run) -> TrainingCurve:
        """Its way there."""

    def score(self, run: Run) -> float | None:
        """What a learning rate is chosen by, the larger the better; None where not known."""


class DetectionMeasure:
    """The final AP on the evaluation split, and AP on the validation split on the way."""

    def observer(self, config: TrainConfig, folder: Path) -> None:
        """Nothing has to be watched."""

    def values(self, run: Run) -> Mapping[str, float | None]:
        assert run.summary is not None
        found = {name: getattr(run.summary, name) for name in METRICS}
        if run.summary.voc_AP50 is not None:
            found[VOC_AP50] = run.summary.voc_AP50
        return found

    def curve(self, run: Run) -> TrainingCurve:
        rows = [row for row in _validations(run) if row["AP"] is not None]
        return TrainingCurve(
            steps=[row["step"] for row in rows],
            values=[row["AP"] for row in rows],
            minutes=[row["seconds"] / 60 for row in rows],
        )

    def score(self, run: Run) -> float | None:
        rows = _validations(run)
        return rows[-1]["AP"] if rows else None


def _validations(run: Run) -> list[dict[str, Any]]:
    rows = read_json_lines(run.folder / "metrics.jsonl")
    return [row for row in rows if row["kind"] == "validation"]


DETECTION = DetectionMeasure()


class MultiScaleMeasure(DetectionMeasure):
    """As :class:`DetectionMeasure`, but the final numbers are those of several scales.

    They are measured once and kept in the run folder.

    Args:
        scales: the views of an image; by default those of ``MultiScale``.
    """

    def __init__(self, scales: MultiScale | None = None) -> None:
        self.scales = scales or MultiScale()

    def curve(self, run: Run) -> TrainingCurve:
        """None: on the way there only one scale was looked at."""
        return TrainingCurve(steps=[], values=[])

    def values(self, run: Run) -> Mapping[str, float | None]:
        file = run.folder / "evaluation" / "multi_scale.json"
        views = {"scales": self.scales.scales, "flip": self.scales.flip}
        if file.is_file():
            known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if known["views"] == json.loads(json.dumps(views)):
                return cast(dict[str, float | None], known["values"])
        found = self._measure(run)
        write_json(file, {"views": views, "values": found})
        return found

    def _measure(self, run: Run) -> dict[str, float | None]:
        config = run.config
        device = choose_device(config.device)
        detector = load(run.folder, device=device).eval()
        dataset = load_run_data(config).evaluation
        assert dataset is not None
        workers = choose_workers(config.batches.workers, device, 1)
        ids, found = [], []
        with torch.inference_mode():
            for batch in make_evaluation_loader(dataset, batch_size=1, workers=workers):
                ids += [target["image_id"] for target in batch.targets]
                found += self.scales(detector, [image.to(device) for image in batch.images])
        split, table = Split(dataset), DetectionTable.from_predictions(ids, found)
        metrics = split.measure(table, detector).as_dict()
        values: dict[str, float | None] = {name: metrics[name] for name in METRICS}
        if config.evaluation.voc_year is not None:
            voc = voc_metrics(split.truth, table, year=config.evaluation.voc_year)
            values[VOC_AP50] = voc.AP50
        return values


class APLossMeasure:
    """1 - AP of the ranking of anchors, on images of the training set, at every checkpoint.

    Whatever a run minimises, it is judged by the loss of Eq. (5) with the Heaviside step and
    without interpolation (Figure 4b). The images are the same for all runs, not augmented, in
    batches of 8; the loss is the mean over batches.

    Args:
        images: how many images of the training set are looked at.
    """

    def __init__(self, images: int = 64) -> None:
        self.images = images

    def observer(self, config: TrainConfig, folder: Path) -> Callable[[dict[str, Any]], None]:
        """Measures every new checkpoint, and the initial weights."""
        watch = _APLossWatch(config, folder, self.images)
        if not watch.points:
            with torch.random.fork_rng():
                watch.add(0, make_detector(config, watch.class_names))
        return lambda row: watch.look()

    def values(self, run: Run) -> Mapping[str, float | None]:
        return {RANKING_AP: 1 - self._points(run)[-1][1]}

    def curve(self, run: Run) -> TrainingCurve:
        points = self._points(run)
        return TrainingCurve(steps=[step for step, _ in points], values=[value for _, value in points])

    def score(self, run: Run) -> float | None:
        return self.values(run)[RANKING_AP]

    def _points(self, run: Run) -> list[tuple[int, float]]:
        points = _read_points(run.folder / _APLossWatch.FILE)
        assert run.summary is not None
        if not points or points[-1][0] < run.summary.steps:
            watch = _APLossWatch(run.config, run.folder, self.images)
            watch.look()
            points = watch.points
        return points


class _APLossWatch:
    """The measured points of one run, kept in its folder."""

    FILE = "ap_loss.json"

    def __init__(self, config: TrainConfig, folder: Path, images: int) -> None:
        self.file, self.checkpoint = folder / self.FILE, folder / "checkpoints" / "last.pt"
        self.points = _read_points(self.file)
        train = load_run_data(config).train
        self.class_names = train.class_names
        loader = make_training_loader(
            train, batch_size=RANKED_IMAGES, seed=0, preset="none", size=config.batches.image_size
        )
        count = math.ceil(images / RANKED_IMAGES)
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
            steps, values = zip(*self.points, strict=True)
            write_json(self.file, {"steps": steps, "values": values})

    def add(self, step: int, detector: Detector) -> None:
        """Measures a detector."""
        value = training_ap_loss(detector.to(self._device), self._batches)
        self.points = sorted([*self.points, (step, value)])


def _read_points(file: Path) -> list[tuple[int, float]]:
    if not file.is_file():
        return []
    content = json.loads(file.read_text(encoding="utf-8"))
    return list(zip(content["steps"], content["values"], strict=True))


def training_ap_loss(detector: Detector, batches: Sequence[Batch]) -> float:
    """The mean over batches of 1 - AP of their anchors' ranking.

    Batches without objects are left out.

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
