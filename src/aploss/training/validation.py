"""Detects the objects of a whole split, shared among the processes, and scores them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aploss.data.batches import make_evaluation_loader
from aploss.data.dataset import DetectionDataset
from aploss.detectors.detector import Detector
from aploss.evaluation.coco_metrics import coco_metrics
from aploss.evaluation.detections import DetectionTable
from aploss.evaluation.ground_truth import GroundTruth, as_ground_truth
from aploss.evaluation.metrics import Metrics
from aploss.training.distributed import World

__all__ = ["Split", "detect_split"]


class Split:
    """A dataset to be measured on, its ground truth made ready once.

    Args:
        dataset: the images and their objects.
    """

    def __init__(self, dataset: DetectionDataset) -> None:
        self.dataset = dataset
        self.name = dataset.split
        self.coco: dict[str, Any] = dataset.to_coco()
        for index, image in enumerate(self.coco["images"]):
            image["path"] = str(dataset.image_path(index).resolve())
        self.truth: GroundTruth = as_ground_truth(self.coco)

    def measure(self, detections: DetectionTable, detector: Detector) -> Metrics:
        """COCO's metrics of detections on this split."""
        limit = detector.detections_per_image
        return coco_metrics(self.truth, detections, max_detections=limit)


def detect_split(
    detector: Detector, split: Split, world: World, *, batch_size: int, workers: int = 0
) -> DetectionTable | None:
    """The raw detections of all images of a split, without any threshold of ours.

    Args:
        detector: on its device; its mode is left as it was.
        split: what to detect; each process takes its share of the images.
        world: the processes.
        batch_size: images detected at a time.
        workers: processes that read images.

    Returns:
        In the main process the detections in the order of the images, in others None.
    """
    ids: list[int] = []
    found: list[dict[str, np.ndarray]] = []
    if world.rank < len(split.dataset):  # fewer images than processes: some have none
        loader = make_evaluation_loader(
            split.dataset,
            batch_size=batch_size,
            workers=workers,
            rank=world.rank,
            world_size=world.size,
        )
        with _evaluating(detector):
            for batch in loader:
                ids += [target["image_id"] for target in batch.targets]
                found += _detect(detector, batch.images)
    shares = world.gather((ids, found))
    if not world.is_main:
        return None
    by_image = {i: entry for share in shares for i, entry in zip(*share, strict=True)}
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
