"""The end of a run: calibration and evaluation of the final detector, the summary and the report."""

from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from aploss.detectors.checkpoint import Checkpoint
from aploss.detectors.detector import Detector
from aploss.environment import describe_environment
from aploss.evaluation import METRICS
from aploss.evaluation.calibration import calibrate_detections, calibration_report
from aploss.evaluation.matching import precision_recall_curves
from aploss.evaluation.metrics import voc_metrics
from aploss.files import write_json
from aploss.reports.run_files import matches_document, read_json_lines
from aploss.training.distributed import on_main
from aploss.training.loop import Loop
from aploss.training.run_folder import Summary
from aploss.training.splits import RunData, Split


def evaluate_run(loop: Loop) -> Summary:
    """Calibrates and evaluates the final detector of a run; writes ``evaluation/``, the summary and the report.

    The calibration and the drawing threshold are fitted on the validation split, measured on the evaluation split, and
    stored in the evaluated checkpoint. All ranks run the detector; rank 0 writes.
    """

    def load_final() -> Checkpoint:
        is_best = loop.config.evaluation.checkpoint == "best" and loop.folder.best.is_file()
        return Checkpoint.read(loop.folder.best) if is_best else loop.folder.load_last()

    chosen = on_main(loop.accelerator, load_final)
    detector = chosen.detector().to(loop.accelerator.device)
    for split in loop.data.splits:
        if split.step != chosen.step:  # otherwise it was validated with the same weights
            loop.detect(split, detector, f"evaluating on {split.name}")
    return on_main(loop.accelerator, lambda: _measure(loop, chosen, detector))


def _measure(loop: Loop, chosen: Checkpoint, detector: Detector) -> Summary:
    from aploss.reports.run_report import write_run_report

    config, folder, split, state = loop.config, loop.folder, loop.data.evaluation, loop.state
    report = _calibrate(detector, loop.data)
    chosen.with_calibration(detector).write(folder.last if chosen.training is not None else folder.best)
    metrics: dict[str, Any] = {} if split is None else _write_evaluation(loop, detector, split, report)
    after = report.get("after", {})
    rows = [row for row in read_json_lines(folder.metrics_file) if row.get("kind") == "train"]
    speeds = [speed for row in rows if isinstance(speed := row.get("images_per_second"), int | float)]
    environment = describe_environment()
    copied: dict[str, Any] = {name: metrics.get(name) for name in METRICS}
    copied |= {name: getattr(config, name) for name in ("data", "detector", "loss", "seed")}
    copied |= {name: environment[name] for name in ("command", "commit")}
    summary = Summary(
        folder=str(folder.path),
        **copied,
        split=None if split is None else split.name,
        per_class=metrics.get("per_class", {}),
        calibration_error=after.get("all", {}).get("expected_calibration_error"),
        calibration_error_drawn=after.get("expected_calibration_error"),
        calibration_split=report.get("measured_on"),
        calibration_held_out=report.get("held_out"),
        draw_threshold=detector.draw_threshold if report else None,
        steps=state.step,
        epochs=round(loop.epoch, 3),
        best_step=chosen.step or 0,
        stopped_by=str(state.stopped_by),
        bad_steps=state.bad_steps,
        minutes=round(state.seconds / 60, 3),
        images_per_second=round(median(speeds), 2) if speeds else 0.0,
        parameters=sum(parameter.numel() for parameter in detector.parameters()),
        device=str(loop.accelerator.device),
        processes=loop.accelerator.num_processes,
        unreadable_images=state.unreadable,
        resume_changes=state.changes,
    )
    write_json(folder.summary_file, asdict(summary))
    write_run_report(folder.path, images=loop.data.train.root)
    return summary


def _calibrate(detector: Detector, data: RunData) -> dict[str, Any]:
    """Calibrates the detector and chooses its threshold; returns the report on the evaluation split."""
    fitted, measured = data.validation, data.evaluation
    if fitted is None or measured is None:
        return {}
    calibration, threshold = calibrate_detections(fitted.truth, fitted.detections, matches=fitted.matches)
    detector.calibration, detector.draw_threshold = calibration, threshold
    report = calibration_report(measured.truth, measured.detections, calibration, threshold, matches=measured.matches)
    names = {"fitted_on": fitted.name, "measured_on": measured.name}
    return {**report, **names, "held_out": measured is not fitted}


def _write_evaluation(loop: Loop, detector: Detector, split: Split, report: dict[str, Any]) -> dict[str, Any]:
    """Computes the metrics of the evaluation split; writes them with detections, ground truth and matches."""
    table, matches, coco = split.detections, split.matches, split.dataset.to_coco()
    for index, image in enumerate(coco["images"]):
        image["path"] = str(split.dataset.image_path(index).resolve())
    metrics = split.measure(table, detector).as_dict()
    curves = precision_recall_curves(split.truth, table, matches=matches)
    metrics["precision_recall"] = {name: curve.as_dict() for name, curve in curves.items()}
    documents: dict[str, Any] = {
        "ground_truth": coco,
        "detections": table.to_results(),
        "metrics": {**metrics, "ignored_objects": split.ignored_objects},
        "matches": matches_document(matches, [annotation["id"] for annotation in coco["annotations"]]),
    }
    if detector.calibration is not None:
        scores = np.asarray(detector.calibration(table.scores)).tolist()
        documents["calibration"] = {**report, "calibrated_scores": scores}
    for name, document in documents.items():
        write_json(loop.folder.evaluation / f"{name}.json", document, indent=None)
    year = loop.config.evaluation.voc_year
    return {**metrics, "voc_AP50": None if year is None else voc_metrics(split.truth, table, year=year).AP50}
