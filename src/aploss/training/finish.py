"""After training: calibration on validation, the final numbers, and the page."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from aploss.detectors.checkpoint_io import detector_from_record
from aploss.detectors.detector import Detector
from aploss.evaluation.calibration import calibrate_detections, calibration_report
from aploss.evaluation.curves import curves_as_dict, precision_recall_curves
from aploss.evaluation.detections import DetectionTable
from aploss.evaluation.matching import match_detections
from aploss.evaluation.metrics import Metrics
from aploss.evaluation.voc_metrics import voc_metrics
from aploss.files import write_json
from aploss.reporting.run_files import matches_document
from aploss.training.config import TrainConfig
from aploss.training.distributed import World
from aploss.training.run_folder import RunFolder
from aploss.training.validation import Split, detect_split

__all__ = ["FinalNumbers", "evaluate_run"]


@dataclass(frozen=True)
class FinalNumbers:
    """What is known of a trained detector in the end.

    Attributes:
        metrics: on the evaluation split; None without one.
        voc_AP50: by the rules of Pascal VOC, where asked for.
        split: name of the evaluation split.
        calibration: the report on the held-out split; empty without validation.
        draw_threshold: calibrated score with the best F1 on validation.
        step: of the weights that were evaluated.
    """

    metrics: Metrics | None
    voc_AP50: float | None  # noqa: N815 - as the metric is called
    split: str | None
    calibration: dict[str, Any]
    draw_threshold: float | None
    step: int


class _Detections:
    """Detects each split once, however often it is asked for."""

    def __init__(self, detector: Detector, world: World, batch_size: int, workers: int) -> None:
        self._arguments = {"batch_size": batch_size, "workers": workers}
        self._detector, self._world = detector, world
        self._known: dict[int, DetectionTable | None] = {}

    def of(self, split: Split) -> DetectionTable | None:
        if id(split) not in self._known:
            self._known[id(split)] = detect_split(
                self._detector, split, self._world, **self._arguments
            )
        return self._known[id(split)]


def evaluate_run(
    config: TrainConfig,
    folder: RunFolder,
    world: World,
    *,
    device: torch.device,
    validation: Split | None,
    evaluation: Split | None,
    held_out: Split | None,
    workers: int,
) -> FinalNumbers:
    """Calibrates and measures the detector that a run ends with, and writes ``evaluation/``.

    The calibration and the drawing threshold are fitted on the validation split and stored in
    ``best.pt``; how well they do is measured on the held-out split.

    Args:
        config: of the run.
        folder: with ``last.pt`` and, after a validation, ``best.pt``.
        world: the processes; all take part in detecting, the main one writes.
        device: where to detect.
        validation: to fit on, or None.
        evaluation: for the final numbers, or None.
        held_out: to measure the calibration on; best one that is not the validation split.
        workers: processes that read images.
    """
    best = world.from_main(_chosen_checkpoint(config, folder) if world.is_main else None)
    detector = detector_from_record(best["detector"]).to(device)
    detections = _Detections(detector, world, config.validation.batch_size, workers)
    splits = [split for split in (validation, evaluation, held_out) if split is not None]
    tables = {id(split): detections.of(split) for split in splits}
    numbers = FinalNumbers(None, None, None, {}, None, best["step"])
    if world.is_main:
        report: dict[str, Any] = {}
        if validation is not None and held_out is not None:
            report = _calibrate(detector, validation, held_out, tables)
        folder.checkpoints.save_best(detector, step=best["step"], metrics=best["metrics"])
        numbers = _measure(config, folder, detector, evaluation, tables, report, best["step"])
    return cast(FinalNumbers, world.from_main(numbers))


def _chosen_checkpoint(config: TrainConfig, folder: RunFolder) -> dict[str, Any]:
    """The detector of the best validation, or the last one, with step and metrics."""
    checkpoints = folder.checkpoints
    if config.evaluation.checkpoint == "best" and checkpoints.best.is_file():
        return checkpoints.load_best()
    last = checkpoints.load_last()
    return {"detector": last["detector"], "step": last["training"]["step"], "metrics": {}}


def _calibrate(
    detector: Detector,
    validation: Split,
    held_out: Split,
    tables: dict[int, DetectionTable | None],
) -> dict[str, Any]:
    fitted_on, measured_on = tables[id(validation)], tables[id(held_out)]
    assert fitted_on is not None
    assert measured_on is not None
    calibration, threshold = calibrate_detections(validation.truth, fitted_on)
    detector.calibration, detector.draw_threshold = calibration, threshold.threshold
    report = calibration_report(held_out.truth, measured_on, calibration, threshold.threshold)
    return {
        **report,
        "fitted_on": validation.name,
        "measured_on": held_out.name,
        "held_out": held_out is not validation,
    }


def _measure(
    config: TrainConfig,
    folder: RunFolder,
    detector: Detector,
    evaluation: Split | None,
    tables: dict[int, DetectionTable | None],
    report: dict[str, Any],
    step: int,
) -> FinalNumbers:
    if evaluation is None:
        return FinalNumbers(None, None, None, report, detector.draw_threshold, step)
    found = tables[id(evaluation)]
    assert found is not None
    metrics = evaluation.measure(found, detector)
    voc = None
    if config.evaluation.voc_year is not None:
        voc = voc_metrics(evaluation.truth, found, year=config.evaluation.voc_year).AP50
    if report:
        calibration = detector.calibration
        assert calibration is not None
        # Of the detections that are written beside it, which need not be those it was measured on.
        report = {**report, "calibrated_scores": np.asarray(calibration(found.scores)).tolist()}
        write_json(folder.evaluation / "calibration.json", report)
    _write_evaluation(folder, evaluation, found, metrics)
    return FinalNumbers(metrics, voc, evaluation.name, report, detector.draw_threshold, step)


def _write_evaluation(
    folder: RunFolder, split: Split, found: DetectionTable, metrics: Metrics
) -> None:
    matches = match_detections(split.truth, found)
    curves = precision_recall_curves(split.truth, found, matches=matches)
    ids = [annotation["id"] for annotation in split.coco["annotations"]]
    write_json(folder.evaluation / "ground_truth.json", split.coco, indent=None)
    write_json(folder.evaluation / "detections.json", found.to_results(), indent=None)
    write_json(
        folder.evaluation / "metrics.json",
        {**metrics.as_dict(), "precision_recall": curves_as_dict(curves)},
    )
    document = matches_document(matches.correct, matches.ignored, matches.objects, ids)
    write_json(folder.evaluation / "matches.json", document, indent=None)
