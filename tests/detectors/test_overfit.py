"""Each small detector learns eight images of the built-in set by heart."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from aploss.data.annotations import DetectionDataset
from aploss.data.builtin import builtin_dataset
from aploss.detectors import Detector, build_detector
from aploss.evaluation.metrics import coco_metrics
from aploss.evaluation.tables import DetectionTable

STEPS = 40


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DetectionDataset:
    folder: Path = tmp_path_factory.mktemp("builtin")
    return builtin_dataset("train", cache=folder, counts=(8, 1, 1), image_size=64)


@pytest.mark.parametrize(("name", "loss"), [("retinanet-tiny", "ap"), ("ssdlite", "focal")])
def test_eight_images_are_learnt_by_heart(name: str, loss: str, dataset: DetectionDataset) -> None:
    torch.manual_seed(0)
    samples = [dataset[index] for index in range(len(dataset))]
    images = torch.stack([image.as_subclass(Tensor).float() / 255 for image, _ in samples])
    targets = [target for _, target in samples]
    height, width = images.shape[-2:]
    detector = build_detector(name, class_names=dataset.class_names, loss=loss, test_size=(height, width))
    _train(detector, images, targets)

    detector.eval()
    with torch.inference_mode():
        detections = detector(images)
    table = DetectionTable.from_predictions([t["image_id"] for t in targets], detections)
    assert coco_metrics(dataset.to_coco(), table).AP50 > 0.95


def _train(detector: Detector, images: Tensor, targets: list) -> None:
    optimizer = torch.optim.AdamW(detector.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS, pct_start=0.25)
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum(detector(images, targets).values()).backward()
        torch.nn.utils.clip_grad_norm_(detector.parameters(), 1.0)
        optimizer.step()
        schedule.step()
