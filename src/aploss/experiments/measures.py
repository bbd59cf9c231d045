"""The numbers that a comparison takes from a run: its AP, its multi-scale AP, or its AP-loss on training images."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from aploss.data.loader import Batch, make_evaluation_loader, make_training_loader
from aploss.detectors.checkpoint import Checkpoint, load
from aploss.detectors.detector import Detector
from aploss.detectors.predict import MultiScale
from aploss.evaluation import METRICS, voc_metrics
from aploss.evaluation.tables import DetectionTable
from aploss.files import write_json
from aploss.losses import ap_loss
from aploss.reports.comparison import TrainingCurve
from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig
from aploss.training.distributed import choose_device, choose_workers
from aploss.training.run import make_detector
from aploss.training.run_folder import Summary
from aploss.training.splits import load_run_data

RANKING_AP = "AP of the ranking"
CLASS_AP = "AP of "  # followed by the name of a class
RANKED_IMAGES = 8  # ranked together, as in training
POINTS_FILE = "ap_loss.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a comparison."""

    config: TrainConfig  # with its seed
    folder: Path
    summary: Summary | None  # None if it diverged
    failure: str = ""  # why it has no summary, in one line


class Measure:
    """How numbers are taken from a run: the final metrics on the evaluation split, and AP on validation on the way.

    Subclasses override its methods. All but :meth:`observer` are called with finished runs.
    """

    def observer(self, config: TrainConfig, folder: Path) -> Callable[[dict[str, Any]], Any] | None:
        """A callback for every row of the metrics while a run trains; None for no callback."""
        return None

    def values(self, run: Run) -> Mapping[str, float | None]:
        """The final numbers by metric, between 0 and 1; those of a class are called ``AP of NAME``."""
        assert run.summary is not None
        classes = {f"{CLASS_AP}{name}": found.get("AP") for name, found in run.summary.per_class.items()}
        return {name: getattr(run.summary, name) for name in METRICS} | classes

    def curve(self, run: Run) -> TrainingCurve:
        """The numbers during training."""
        rows = [row for row in _validations(run) if row["AP"] is not None]
        return TrainingCurve(
            steps=[row["step"] for row in rows],
            values=[row["AP"] for row in rows],
            minutes=[row["seconds"] / 60 for row in rows],
        )

    def score(self, run: Run) -> float | None:
        """The score that chooses learning rates, larger being better; None if unknown."""
        rows = _validations(run)
        return rows[-1]["AP"] if rows else None


def _validations(run: Run) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(run.folder / "metrics.jsonl") if row["kind"] == "validation"]


DETECTION = Measure()


class MultiScaleMeasure(Measure):
    """The final metrics of multi-scale prediction, measured once and kept in the run folder."""

    def curve(self, run: Run) -> TrainingCurve:
        """An empty curve: validations during training have a single scale."""
        return TrainingCurve(steps=[], values=[])

    def values(self, run: Run) -> Mapping[str, float | None]:
        file, scales = run.folder / "evaluation" / "multi_scale.json", MultiScale()
        views = json.loads(json.dumps({"scales": scales.scales, "flip": scales.flip}))
        if file.is_file():
            known = json.loads(file.read_text(encoding="utf-8"))
            if known["views"] == views:
                return {"voc_AP50": known["values"].get("VOC AP50"), **known["values"]}  # older runs
        found = self._measure(run, scales)
        write_json(file, {"views": views, "values": found})
        return found

    def _measure(self, run: Run, scales: MultiScale) -> dict[str, float | None]:
        config, device = run.config, choose_device(run.config.device)
        detector = load(run.folder, device=device).eval()
        split = load_run_data(config).evaluation
        assert split is not None
        workers = choose_workers(config.batches.workers, device, 1)
        ids, found = [], []
        with torch.inference_mode():
            for batch in make_evaluation_loader(split.dataset, batch_size=1, workers=workers):
                ids += [target["image_id"] for target in batch.targets]
                found += scales(detector, [image.to(device) for image in batch.images])
        table, year = DetectionTable.from_predictions(ids, found), config.evaluation.voc_year
        metrics = split.measure(table, detector).as_dict()
        voc_ap50 = None if year is None else voc_metrics(split.truth, table, year=year).AP50
        return {name: metrics.get(name) for name in METRICS} | {"voc_AP50": voc_ap50}


class APLossMeasure(Measure):
    """1 - AP of the ranking of anchors, on images of the training set, at every checkpoint (Figure 5b).

    Whichever loss a run minimises, it is judged by Eq. (5) with the Heaviside step and without interpolation. The first
    ``images`` images are the same for all runs, not augmented, in batches of 8; the loss is the mean over batches.
    """

    def __init__(self, images: int) -> None:
        self.images = images

    def observer(self, config: TrainConfig, folder: Path) -> Callable[[dict[str, Any]], Any]:
        """Measures the initial weights and every new checkpoint."""
        watch = _APLossWatch(config, folder, self.images)
        if not watch.points:
            with torch.random.fork_rng():
                watch.add(0, make_detector(config, watch.class_names))
        return lambda row: watch.update()

    def values(self, run: Run) -> Mapping[str, float | None]:
        return {RANKING_AP: self.score(run)}

    def curve(self, run: Run) -> TrainingCurve:
        points = self._points(run)
        return TrainingCurve(steps=list(points), values=list(points.values()))

    def score(self, run: Run) -> float:
        return 1 - list(self._points(run).values())[-1]

    def _points(self, run: Run) -> dict[int, float]:
        points = _read_points(run.folder)
        assert run.summary is not None
        if max(points, default=-1) >= run.summary.steps:
            return points
        return _APLossWatch(run.config, run.folder, self.images).update()


class _APLossWatch:
    """The measured points of one run (step → AP-loss), stored in its folder."""

    def __init__(self, config: TrainConfig, folder: Path, images: int) -> None:
        self.folder, self.points = folder, _read_points(folder)
        train = load_run_data(config).train
        self.class_names = train.class_names
        loader = make_training_loader(
            train, batch_size=RANKED_IMAGES, seed=0, preset="none", size=config.batches.image_size
        )
        self._batches = list(islice(loader.epoch(0), math.ceil(images / RANKED_IMAGES)))
        self._device = choose_device(config.device)
        self._modified = 0  # time of the last checkpoint that was read

    def update(self) -> dict[int, float]:
        """Measures the last checkpoint if it is new; returns all points."""
        file = self.folder / "checkpoints" / "last.pt"
        if file.is_file() and (modified := file.stat().st_mtime_ns) != self._modified:
            self._modified, checkpoint = modified, Checkpoint.read(file)
            if checkpoint.step is not None and checkpoint.step not in self.points:
                self.add(checkpoint.step, checkpoint.detector())
                write_json(self.folder / POINTS_FILE, {"steps": [*self.points], "values": [*self.points.values()]})
        return self.points

    def add(self, step: int, detector: Detector) -> None:
        """Measures a detector."""
        value = training_ap_loss(detector.to(self._device), self._batches)
        self.points = dict(sorted({**self.points, step: value}.items()))


def _read_points(folder: Path) -> dict[int, float]:
    if not (folder / POINTS_FILE).is_file():
        return {}
    content = json.loads((folder / POINTS_FILE).read_text(encoding="utf-8"))
    return dict(zip(content["steps"], content["values"], strict=True))


def training_ap_loss(detector: Detector, batches: Sequence[Batch]) -> float:
    """The mean of 1 - AP of the anchors' ranking over the batches with objects, in [0, 1]; NaN without any."""
    device = next(detector.parameters()).device
    criterion, values = detector.criterion, []
    with torch.no_grad():
        for batch in batches:
            assert batch.images is not None
            images = batch.images.to(device)
            height, width = images.shape[-2:]
            anchors = detector.anchors_for(height, width, device)
            logits, _ = detector.eval().heads(images)
            labels = criterion.label(anchors, batch.targets)
            if len(labels.boxes):
                targets = labels.ranking_targets(logits.shape[-1])
                values.append(float(ap_loss(logits, targets, delta=0.0, interpolated=False)))
    return sum(values) / len(values) if values else math.nan
