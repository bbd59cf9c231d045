"""Measures a detector on a split: at every validation, and for the final numbers of a run.

A split is detected once for each set of weights, shared among the ranks, and its detections are matched once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from aploss.data.annotations import Annotations, DetectionDataset
from aploss.data.loader import make_evaluation_loader
from aploss.detectors.checkpoint import detector_from_record
from aploss.detectors.detector import Detector
from aploss.detectors.predict import detect_by_size, evaluation_mode
from aploss.errors import DataError
from aploss.evaluation.calibration import calibrate_detections, calibration_report
from aploss.evaluation.matching import Matches, curves_as_dict, match_detections, precision_recall_curves
from aploss.evaluation.metrics import Metrics, coco_metrics, voc_metrics
from aploss.evaluation.tables import DetectionTable
from aploss.files import write_json
from aploss.reports.run_files import matches_document
from aploss.training.config import TrainConfig
from aploss.training.distributed import World
from aploss.training.progress import Progress
from aploss.training.run_folder import RunFolder
from aploss.training.splits import RunData


class Split:
    """A dataset to be measured on.

    Attributes:
        unreadable: images that were left out because they cannot be read: path → reason.
        validated: the step whose weights detected last here, and what they found (None but on rank 0).
    """

    def __init__(self, dataset: DetectionDataset) -> None:
        self.dataset = dataset
        self.name = dataset.split
        self.unreadable: dict[str, str] = {}
        self.validated: tuple[int, DetectionTable | None] | None = None

    @property
    def truth(self) -> Annotations:
        """The objects of the images that are left."""
        return self.dataset.annotations

    def leave_out(self, unreadable: dict[int, str]) -> None:
        """Goes on without some images (index → reason); DataError where none is left."""
        self.unreadable |= {str(self.dataset.image_path(index)): reason for index, reason in unreadable.items()}
        rest = [index for index in range(len(self.dataset)) if index not in unreadable]
        if not rest:
            raise DataError(f"no image of the split {self.name} can be read: {list(unreadable.values())[-1]}")
        self.dataset = self.dataset.subset(rest)

    def measure(self, detections: DetectionTable | None, detector: Detector) -> Metrics:
        """COCO's metrics of what :func:`detect_split` found, on rank 0."""
        assert detections is not None
        return coco_metrics(self.truth, detections, max_detections=detector.detections_per_image)


class RunSplits:
    """What a run is measured on, see :class:`RunData`; a dataset that serves two purposes is one split."""

    def __init__(self, data: RunData) -> None:
        self.data = data
        datasets = (data.validation, data.evaluation, data.held_out)
        known = {id(dataset): Split(dataset) for dataset in datasets if dataset is not None}
        self.all = list(known.values())
        self.validation, self.evaluation, self.held_out = (known.get(id(dataset)) for dataset in datasets)


def detect_split(
    detector: Detector,
    split: Split,
    world: World,
    *,
    batch_size: int,
    workers: int = 0,
    on_images: Callable[[int, int], Any] | None = None,
) -> DetectionTable | None:
    """The raw detections of all images of a split, without a score threshold of ours.

    Each rank takes its share of the images. Those that cannot be read are left out of the split from then on.
    ``on_images`` is called with how many are done (the other ranks are taken to be as far), and how many there are.

    Returns:
        On rank 0 the detections in the order of the images, on others None.
    """
    found: dict[int, dict[str, np.ndarray]] = {}
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
        with evaluation_mode(detector):
            for batch in loader:
                for target, result in zip(batch.targets, detect_by_size(detector, batch.images), strict=True):
                    found[target["image_id"]] = {key: value.cpu().numpy() for key, value in result.items()}
                if on_images is not None:
                    on_images(min(len(found) * world.size, len(split.dataset)), len(split.dataset))
        unreadable = loader.unreadable
    shares = world.gather((found, unreadable))
    unreadable = world.from_main({index: why for _, share in shares for index, why in share.items()})
    if unreadable:
        split.leave_out(unreadable)
    if not world.is_main:
        return None
    by_image = {image: result for share, _ in shares for image, result in share.items()}
    order = [split.dataset.image_id(index) for index in range(len(split.dataset))]
    return DetectionTable.from_predictions(order, [by_image[image] for image in order])


# --- the end of a run ---


class _Detected(NamedTuple):
    """What was found on a split, and which detections found which object."""

    split: Split
    table: DetectionTable
    matches: Matches


def evaluate_run(
    config: TrainConfig,
    folder: RunFolder,
    world: World,
    splits: RunSplits,
    *,
    device: torch.device,
    workers: int,
    progress: Progress,
) -> dict[str, Any]:
    """Calibrates and measures the detector that a run ends with, and writes ``evaluation/``.

    The calibration and the drawing threshold are fitted on the validation split and stored in the checkpoint that is
    evaluated; how well they do is measured on the held-out split. All ranks take part in detecting, rank 0 writes.

    Returns:
        The fields of :class:`~aploss.training.run_folder.Summary` that are measured.
    """
    chosen = world.on_main(lambda: _chosen_checkpoint(config, folder))
    detector = detector_from_record(chosen["detector"]).to(device)
    size, tables = config.validation.batch_size, []
    for split in splits.all:
        if split.validated is not None and split.validated[0] == chosen["step"]:  # by these very weights
            tables.append(split.validated[1])
            continue
        with progress.images(f"measuring {split.name}") as show:
            tables.append(detect_split(detector, split, world, batch_size=size, workers=workers, on_images=show))

    def measure() -> dict[str, Any]:
        detected = {
            id(split): _Detected(split, table, match_detections(split.truth, table))
            for split, table in zip(splits.all, tables, strict=True)
            if table is not None  # never on rank 0
        }
        validation, evaluation, held_out = (
            detected.get(id(split)) for split in (splits.validation, splits.evaluation, splits.held_out)
        )
        report = _calibrate(detector, validation, held_out) if validation and held_out else {}
        _store_calibration(folder, chosen, detector)
        metrics = _measure(config, folder, detector, evaluation, report) if evaluation else {}
        after = report.get("after", {})
        return {
            "split": evaluation.split.name if evaluation else None,
            **{name: metrics.get(name) for name in ("AP", "AP50", "AP75", "APs", "APm", "APl", "voc_AP50")},
            "per_class": metrics.get("per_class", {}),
            "calibration_error": after.get("all", {}).get("expected_calibration_error"),
            "calibration_error_drawn": after.get("expected_calibration_error"),
            "calibration_split": report.get("measured_on"),
            "calibration_held_out": report.get("held_out"),
            "draw_threshold": detector.draw_threshold if report else None,
            "best_step": chosen["step"],
        }

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


def _calibrate(detector: Detector, validation: _Detected, held_out: _Detected) -> dict[str, Any]:
    """Gives the detector its calibration and threshold; the report on the held-out split."""
    split, table, matches = validation
    calibration, best = calibrate_detections(split.truth, table, matches=matches)
    detector.calibration, detector.draw_threshold = calibration, best.threshold
    measured, table, matches = held_out
    return {
        **calibration_report(measured.truth, table, calibration, best.threshold, matches=matches),
        "fitted_on": split.name,
        "measured_on": measured.name,
        "held_out": measured is not split,
    }


def _measure(
    config: TrainConfig, folder: RunFolder, detector: Detector, evaluation: _Detected, report: dict[str, Any]
) -> dict[str, Any]:
    """The metrics of the evaluation split, which are written with all they come from."""
    split, table, matches = evaluation
    metrics = split.measure(table, detector).as_dict()
    curves = curves_as_dict(precision_recall_curves(split.truth, table, matches=matches))
    coco = split.dataset.to_coco()
    for index, image in enumerate(coco["images"]):
        image["path"] = str(split.dataset.image_path(index).resolve())
    ids = [annotation["id"] for annotation in coco["annotations"]]
    pairs = matches_document(matches.correct, matches.ignored, matches.objects, ids)
    if report and detector.calibration is not None:
        # Of the detections that are written beside it, which need not be those it was measured on.
        scores = np.asarray(detector.calibration(table.scores)).tolist()
        write_json(folder.evaluation / "calibration.json", {**report, "calibrated_scores": scores})
    write_json(folder.evaluation / "ground_truth.json", coco, indent=None)
    write_json(folder.evaluation / "detections.json", table.to_results(), indent=None)
    write_json(folder.evaluation / "metrics.json", {**metrics, "precision_recall": curves})
    write_json(folder.evaluation / "matches.json", pairs, indent=None)
    year = config.evaluation.voc_year
    return {**metrics, "voc_AP50": None if year is None else voc_metrics(split.truth, table, year=year).AP50}
