"""Measures a detector on a split: at every validation, and for the final numbers of a run.

A split is detected once for each set of weights, shared among the ranks; its ground truth is
prepared once, and its detections are matched once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aploss.data.annotations import Annotations, DetectionDataset
from aploss.data.loader import make_evaluation_loader
from aploss.detectors.checkpoint import detector_from_record
from aploss.detectors.detector import Detector
from aploss.errors import DataError
from aploss.evaluation.calibration import calibrate_detections, calibration_report
from aploss.evaluation.coco import coco_metrics
from aploss.evaluation.matching import Matches, curves_as_dict, match_detections, precision_recall_curves
from aploss.evaluation.metrics import Metrics
from aploss.evaluation.tables import DetectionTable
from aploss.evaluation.voc import voc_metrics
from aploss.files import write_json
from aploss.reports.run_files import matches_document
from aploss.training.config import TrainConfig
from aploss.training.distributed import World
from aploss.training.run_folder import RunFolder
from aploss.training.splits import RunData


class Split:
    """A dataset to be measured on.

    Args:
        dataset: the images and their objects.

    Attributes:
        unreadable: images that were left out because they cannot be read: path → reason.
    """

    def __init__(self, dataset: DetectionDataset) -> None:
        self.dataset = dataset
        self.name = dataset.split
        self.unreadable: dict[str, str] = {}
        self.truth: Annotations = dataset.annotations

    def leave_out(self, unreadable: dict[int, str]) -> None:
        """Goes on without some images: index → reason.

        Raises:
            DataError: none is left.
        """
        for index, reason in unreadable.items():
            self.unreadable[str(self.dataset.image_path(index))] = reason
        rest = [index for index in range(len(self.dataset)) if index not in unreadable]
        if not rest:
            raise DataError(f"no image of the split {self.name} can be read: {reason}")
        self.dataset = self.dataset.subset(rest)
        self.truth = self.dataset.annotations

    def to_coco(self) -> dict[str, Any]:
        """The annotations as a COCO dict, with the full path of each image."""
        coco = self.dataset.to_coco()
        for index, image in enumerate(coco["images"]):
            image["path"] = str(self.dataset.image_path(index).resolve())
        return coco

    def measure(self, detections: DetectionTable | None, detector: Detector) -> Metrics:
        """COCO's metrics of what :func:`detect_split` found, on rank 0."""
        assert detections is not None
        limit = detector.detections_per_image
        return coco_metrics(self.truth, detections, max_detections=limit)


class RunSplits:
    """What a run is measured on; a dataset that serves two purposes is one split.

    Args:
        data: the datasets of the run.

    Attributes:
        data: as given.
        validation: for every choice: best checkpoint, calibration, threshold.
        evaluation: for the final numbers.
        held_out: where the calibration is measured.
    """

    def __init__(self, data: RunData) -> None:
        self.data = data
        datasets = (data.validation, data.evaluation, data.held_out)
        known = {id(dataset): Split(dataset) for dataset in datasets if dataset is not None}
        self.validation, self.evaluation, self.held_out = (known.get(id(d)) for d in datasets)

    @property
    def all(self) -> list[Split]:
        """Each split once."""
        splits = (self.validation, self.evaluation, self.held_out)
        return list({id(split): split for split in splits if split is not None}.values())


def detect_split(
    detector: Detector, split: Split, world: World, *, batch_size: int, workers: int = 0
) -> DetectionTable | None:
    """The raw detections of all images of a split, without a score threshold of ours.

    Args:
        detector: on its device; its mode is left as it was.
        split: what to detect; each rank takes its share of the images.
        world: the ranks.
        batch_size: images per forward pass.
        workers: data loader workers.

    Returns:
        On rank 0 the detections in the order of the images, on others None. Images that cannot be
        read are left out of the split from then on.
    """
    ids: list[int] = []
    found: list[dict[str, np.ndarray]] = []
    unreadable: dict[int, str] = {}
    if world.rank < len(split.dataset):  # with fewer images than ranks some have none
        loader = make_evaluation_loader(
            split.dataset,
            batch_size=batch_size,
            workers=workers,
            rank=world.rank,
            world_size=world.size,
            skip_unreadable=True,
        )
        with _evaluating(detector):
            for batch in loader:
                ids += [target["image_id"] for target in batch.targets]
                found += _detect(detector, batch.images)
        unreadable = loader.unreadable
    shares = world.gather((ids, found, unreadable))
    unreadable = world.from_main({i: why for share in shares for i, why in share[2].items()})
    if unreadable:
        split.leave_out(unreadable)
    if not world.is_main:
        return None
    by_image = {i: entry for share in shares for i, entry in zip(*share[:2], strict=True)}
    order = [split.dataset.image_id(index) for index in range(len(split.dataset))]
    return DetectionTable.from_predictions(order, [by_image[image] for image in order])


def _detect(detector: Detector, images: list[Tensor]) -> list[dict[str, np.ndarray]]:
    """Images of one size share a pass: padding would make one's result depend on another."""
    device = next(detector.parameters()).device
    by_size: dict[torch.Size, list[int]] = {}
    for index, image in enumerate(images):
        by_size.setdefault(image.shape, []).append(index)
    found: dict[int, dict[str, np.ndarray]] = {}
    for indices in by_size.values():
        results = detector([images[index].to(device) for index in indices])
        for index, result in zip(indices, results, strict=True):
            found[index] = {key: value.cpu().numpy() for key, value in result.items()}
    return [found[index] for index in range(len(images))]


@contextmanager
def _evaluating(detector: Detector) -> Iterator[None]:
    was_training = detector.training
    detector.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        detector.train(was_training)


# --- the end of a run ---


@dataclass(frozen=True)
class FinalNumbers:
    """What is known of a trained detector in the end.

    Attributes:
        step: of the weights that were evaluated.
        split: name of the evaluation split; None without one.
        metrics: on that split.
        voc_AP50: by the rules of Pascal VOC, where asked for.
        calibration: the report on the held-out split; empty without validation.
        draw_threshold: calibrated score with the best F1 on validation.
    """

    step: int
    split: str | None = None
    metrics: Metrics | None = None
    voc_AP50: float | None = None  # noqa: N815 - as the metric is called
    calibration: dict[str, Any] | None = None
    draw_threshold: float | None = None


@dataclass(frozen=True)
class _Detected:
    """The detections of one split."""

    split: Split
    table: DetectionTable

    @cached_property
    def matches(self) -> Matches:
        """Which of them found which object, for all that asks."""
        return match_detections(self.split.truth, self.table)


def evaluate_run(
    config: TrainConfig, folder: RunFolder, world: World, splits: RunSplits, *, device: torch.device, workers: int
) -> FinalNumbers:
    """Calibrates and measures the detector that a run ends with, and writes ``evaluation/``.

    The calibration and the drawing threshold are fitted on the validation split and stored in the
    checkpoint that is evaluated; how well they do is measured on the held-out split.

    Args:
        config: of the run.
        folder: with ``last.pt`` and, after a validation, ``best.pt``.
        world: the ranks; all take part in detecting, rank 0 writes.
        splits: what to fit and measure on.
        device: where to detect.
        workers: data loader workers.
    """
    chosen = world.on_main(lambda: _chosen_checkpoint(config, folder))
    detector = detector_from_record(chosen["detector"]).to(device)
    detected: dict[int, _Detected | None] = {}
    for split in splits.all:
        table = detect_split(detector, split, world, batch_size=config.validation.batch_size, workers=workers)
        detected[id(split)] = None if table is None else _Detected(split, table)
    validation, evaluation, held_out = (
        detected.get(id(split)) for split in (splits.validation, splits.evaluation, splits.held_out)
    )

    def measure() -> FinalNumbers:
        numbers = FinalNumbers(step=chosen["step"])
        if validation is not None and held_out is not None:
            numbers = _calibrate(numbers, detector, validation, held_out)
        _store_calibration(folder, chosen, detector)
        if evaluation is not None:
            numbers = _measure(numbers, config, detector, evaluation)
            _write_evaluation(folder, numbers, detector, evaluation)
        return numbers

    return world.on_main(measure)


def _chosen_checkpoint(config: TrainConfig, folder: RunFolder) -> dict[str, Any]:
    """The checkpoint of the best validation, or the last one, with its step."""
    checkpoints = folder.checkpoints
    if config.evaluation.checkpoint == "best" and checkpoints.best.is_file():
        return checkpoints.load_best()
    last = checkpoints.load_last()
    return {**last, "step": last["training"]["step"]}


def _store_calibration(folder: RunFolder, chosen: dict[str, Any], detector: Detector) -> None:
    """Adds calibration and threshold to the checkpoint that the detector comes from."""
    if "training" in chosen:
        folder.checkpoints.save_last(detector, chosen["training"])
        folder.checkpoints.best.unlink(missing_ok=True)  # of an earlier version: a copy of the last
    else:
        folder.checkpoints.save_best(detector, step=chosen["step"], metrics=chosen["metrics"])


def _calibrate(numbers: FinalNumbers, detector: Detector, validation: _Detected, held_out: _Detected) -> FinalNumbers:
    calibration, best = calibrate_detections(validation.split.truth, validation.table, matches=validation.matches)
    detector.calibration, detector.draw_threshold = calibration, best.threshold
    report = calibration_report(
        held_out.split.truth, held_out.table, calibration, best.threshold, matches=held_out.matches
    )
    report |= {
        "fitted_on": validation.split.name,
        "measured_on": held_out.split.name,
        "held_out": held_out is not validation,
    }
    return replace(numbers, calibration=report, draw_threshold=best.threshold)


def _measure(numbers: FinalNumbers, config: TrainConfig, detector: Detector, evaluation: _Detected) -> FinalNumbers:
    split, table = evaluation.split, evaluation.table
    voc = None
    if config.evaluation.voc_year is not None:
        voc = voc_metrics(split.truth, table, year=config.evaluation.voc_year).AP50
    return replace(numbers, split=split.name, metrics=split.measure(table, detector), voc_AP50=voc)


def _write_evaluation(folder: RunFolder, numbers: FinalNumbers, detector: Detector, evaluation: _Detected) -> None:
    split, table, matches = evaluation.split, evaluation.table, evaluation.matches
    assert numbers.metrics is not None
    curves = precision_recall_curves(split.truth, table, matches=matches)
    coco = split.to_coco()
    ids = [annotation["id"] for annotation in coco["annotations"]]
    pairs = matches_document(matches.correct, matches.ignored, matches.objects, ids)
    metrics = {**numbers.metrics.as_dict(), "precision_recall": curves_as_dict(curves)}
    if numbers.calibration and detector.calibration is not None:
        # Of the detections that are written beside it, which need not be those it was measured on.
        scores = np.asarray(detector.calibration(table.scores)).tolist()
        report = {**numbers.calibration, "calibrated_scores": scores}
        write_json(folder.evaluation / "calibration.json", report)
    write_json(folder.evaluation / "ground_truth.json", coco, indent=None)
    write_json(folder.evaluation / "detections.json", table.to_results(), indent=None)
    write_json(folder.evaluation / "metrics.json", metrics)
    write_json(folder.evaluation / "matches.json", pairs, indent=None)
