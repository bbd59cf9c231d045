"""Evaluates a detector on a split: at every validation, and for the final metrics of a run.

Each set of weights is run on a split once, with the images shared among the ranks, and its detections are matched once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from aploss.data.loader import make_evaluation_loader
from aploss.detectors.detector import Detector
from aploss.detectors.predict import detect_by_size, evaluation_mode
from aploss.evaluation import METRICS
from aploss.evaluation.calibration import calibrate_detections, calibration_report
from aploss.evaluation.matching import Matches, match_detections, precision_recall_curves
from aploss.evaluation.metrics import voc_metrics
from aploss.evaluation.tables import DetectionTable
from aploss.files import write_json
from aploss.plotting.pictures import contact_sheet, draw_boxes
from aploss.reports.run_files import matches_document
from aploss.training.callbacks import Progress
from aploss.training.config import TrainConfig
from aploss.training.distributed import on_main
from aploss.training.run_folder import RunFolder
from aploss.training.splits import RunData, Split


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
                for target, result in zip(batch.targets, detect_by_size(detector, batch.images), strict=True):
                    found[target["image_id"]] = {key: value.cpu().numpy() for key, value in result.items()}
                if on_images is not None:
                    on_images(min(len(found) * processes, len(split.dataset)), len(split.dataset))
        unreadable = loader.unreadable
    shares = gather_object([(found, unreadable)])
    unreadable = {index: why for _, share in shares for index, why in share.items()}
    if unreadable:
        split.leave_out(unreadable)
    if not accelerator.is_main_process:
        return None
    by_image = {image: result for share, _ in shares for image, result in share.items()}
    order = [split.dataset.image_id(index) for index in range(len(split.dataset))]
    return DetectionTable.from_predictions(order, [by_image[image] for image in order])


def draw_detections(
    split: Split, detections: DetectionTable, class_names: Sequence[str], *, count: int = 4
) -> Image.Image:
    """Draws detections on images evenly spaced through a split: as many of the best of each as it has objects."""
    pictures, dataset = [], split.dataset
    for index in np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int).tolist():
        image, target = dataset[index]
        rows = np.flatnonzero(detections.image_ids == dataset.image_id(index))
        rows = rows[np.argsort(-detections.scores[rows], kind="stable")][: max(1, len(target["labels"]))]
        boxes = detections.xywh[rows]
        boxes[:, 2:] += boxes[:, :2]
        labels, scores = detections.category_ids[rows] - 1, detections.scores[rows]
        pictures.append(draw_boxes(image, boxes, labels, class_names, scores))
    return contact_sheet(pictures)


# --- the end of a run ---


class _Detected(NamedTuple):
    """The detections on a split, matched with its objects."""

    split: Split
    table: DetectionTable
    matches: Matches


def evaluate_run(
    config: TrainConfig, folder: RunFolder, accelerator: Accelerator, data: RunData, *, workers: int,
    progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Calibrates and evaluates the final detector of a run and writes ``evaluation/``.

    The calibration and the drawing threshold are fitted on the validation split, measured on the held-out split, and
    stored in the evaluated checkpoint. All ranks run the detector; rank 0 writes.

    Returns:
        The fields of :class:`~aploss.training.run_folder.Summary` that are measured.
    """
    chosen = on_main(accelerator, lambda: folder.checkpoints.load_final(config.evaluation.checkpoint))
    detector = chosen.detector().to(accelerator.device)
    size, tables = config.validation.batch_size, []
    for split in data.splits:
        if split.validated is not None and split.validated[0] == chosen.step:  # with the same weights
            tables.append(split.validated[1])
            continue
        with progress.images(f"evaluating on {split.name}") as show:
            tables.append(detect_split(detector, split, accelerator, batch_size=size, workers=workers, on_images=show))

    def measure() -> dict[str, Any]:
        detected = {
            split: _Detected(split, table, match_detections(split.truth, table))
            for split, table in zip(data.splits, tables, strict=True)
            if table is not None  # for the type checker: this is rank 0
        }
        report: dict[str, Any] = {}
        if data.validation is not None and data.held_out is not None:
            report = _calibrate(detector, detected[data.validation], detected[data.held_out])
        folder.checkpoints.write(chosen.with_calibration(detector))
        metrics = _measure(config, folder, detector, detected[data.evaluation], report) if data.evaluation else {}
        after = report.get("after", {})
        return {
            "split": data.evaluation.name if data.evaluation else None,
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


def _calibrate(detector: Detector, validation: _Detected, held_out: _Detected) -> dict[str, Any]:
    """Calibrates the detector and chooses its threshold; returns the report on the held-out split."""
    split, table, matches = validation
    detector.calibration, detector.draw_threshold = calibrate_detections(split.truth, table, matches=matches)
    measured, table, matches = held_out
    return {
        **calibration_report(measured.truth, table, detector.calibration, detector.draw_threshold, matches=matches),
        "fitted_on": split.name,
        "measured_on": measured.name,
        "held_out": measured is not split,
    }


def _measure(
    config: TrainConfig, folder: RunFolder, detector: Detector, evaluation: _Detected, report: dict[str, Any]
) -> dict[str, Any]:
    """Computes the metrics of the evaluation split; writes them with detections, ground truth and matches."""
    split, table, matches = evaluation
    metrics = split.measure(table, detector).as_dict()
    curves = precision_recall_curves(split.truth, table, matches=matches)
    metrics["precision_recall"] = {name: curve.as_dict() for name, curve in curves.items()}
    coco = split.dataset.to_coco()
    for index, image in enumerate(coco["images"]):
        image["path"] = str(split.dataset.image_path(index).resolve())
    ids = [annotation["id"] for annotation in coco["annotations"]]
    pairs = matches_document(matches.correct, matches.ignored, matches.objects, ids)
    if report and detector.calibration is not None:
        # Scores of the detections written next to it, which may be another split than it was measured on.
        scores = np.asarray(detector.calibration(table.scores)).tolist()
        write_json(folder.evaluation / "calibration.json", {**report, "calibrated_scores": scores})
    write_json(folder.evaluation / "ground_truth.json", coco, indent=None)
    write_json(folder.evaluation / "detections.json", table.to_results(), indent=None)
    write_json(folder.evaluation / "metrics.json", {**metrics, "ignored_objects": split.ignored_objects})
    write_json(folder.evaluation / "matches.json", pairs, indent=None)
    year = config.evaluation.voc_year
    return {**metrics, "voc_AP50": None if year is None else voc_metrics(split.truth, table, year=year).AP50}
