"""Thresholds mean precision again after calibration: by hand, and on a trained FCOS."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.models.detection import FCOS, fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.ssdlite import ssdlite320_mobilenet_v3_large

from aploss.data.builtin import builtin_dataset
from aploss.detectors import build_detector, calibrate, use_loss
from aploss.detectors.score_map import ScoreMap, fit_score_map
from aploss.errors import ConfigError, DataError
from aploss.evaluation import Calibration, coco_metrics
from aploss.losses import APLoss

pytestmark = pytest.mark.filterwarnings("ignore::aploss.detectors.ScoreThresholdWarning")
CALIBRATION = Calibration(x=[0.0, 0.1, 0.4, 1.0], y=[0.0, 0.5, 0.9, 0.95])
CLASSES = 5  # of the built-in set
BOX, ELSEWHERE = [10.0, 10.0, 30.0, 30.0], [50.0, 50.0, 80.0, 80.0]


def test_the_map_is_the_calibration_and_has_an_inverse() -> None:
    score_map = ScoreMap(CALIBRATION)
    scores = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(score_map(scores), CALIBRATION(scores.numpy()), rtol=1e-6)
    assert score_map(scores).dtype == torch.float32
    assert score_map(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([0.0, 0.95])
    assert score_map.inverse(0.7) == pytest.approx(0.25)
    assert score_map.inverse(0.99) == 1.0
    assert not score_map.state_dict()


def test_the_map_is_fitted_to_the_precision_of_detections() -> None:
    """Score 0.02 is right in one of two images, score 0.01 in none."""
    found = {
        "boxes": torch.tensor([BOX, ELSEWHERE]),
        "scores": torch.tensor([0.02, 0.01]),
        "labels": torch.tensor([3, 3]),
    }
    targets = [
        {"boxes": torch.tensor([BOX]), "labels": torch.tensor([3])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
    ]
    score_map = fit_score_map([found, found], targets)
    # With Laplace's made-up detections: right one at 0.01, wrong one at 0.02.
    assert score_map(torch.tensor([0.01, 0.02])).tolist() == pytest.approx([1 / 3, 1 / 3], abs=1e-3)
    many = fit_score_map([found, found] * 20, targets * 20)
    assert many(torch.tensor([0.01, 0.02])).tolist() == pytest.approx([1 / 41, 20 / 41], abs=1e-3)
    crowd = [{**target, "iscrowd": torch.ones(len(target["labels"]))} for target in targets]
    assert fit_score_map([found] * 40, crowd * 20)(torch.tensor([0.02])).item() < 0.1
    with pytest.raises(DataError, match="images without any object"):
        fit_score_map([found], targets[1:])
    with pytest.raises(DataError, match="detections of 1 images, but 2 targets"):
        fit_score_map([found], targets)


def test_only_scores_and_threshold_change_and_both_come_back() -> None:
    torch.manual_seed(0)
    model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    images = [torch.rand(3, 96, 96) for _ in range(3)]
    with torch.inference_mode():
        before = model.eval()(images)
    targets = [{"boxes": one["boxes"][:2], "labels": one["labels"][:2]} for one in before]
    names, threshold = list(model.state_dict()), model.score_thresh
    assert calibrate(model.train(), images, targets, score_thresh=0.0, batch_size=2) is model
    assert model.training
    assert list(model.state_dict()) == names
    model.eval()
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.inference_mode():
            after = twin(images)
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one["boxes"], other["boxes"][: len(one["boxes"])])
            expected = twin.score_map(one["scores"])
            assert torch.equal(other["scores"][: len(expected)], expected)
            assert not torch.equal(one["scores"], expected)
        assert calibrate(twin, None).score_thresh == threshold
        with torch.inference_mode():
            again = twin(images)
        for one, other in zip(before, again, strict=True):
            assert torch.equal(one["scores"], other["scores"])
    model.score_thresh = 0.5
    calibrate(model, images, targets)
    assert model.score_thresh == pytest.approx(model.score_map.inverse(0.5))
    assert use_loss(model, APLoss()).score_thresh == 0.5  # a calibration belongs to its loss
    assert not hasattr(model, "score_map")


def test_other_models_are_refused() -> None:
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    with pytest.raises(ConfigError, match=r"RetinaNet, FCOS or SSD, or .*, got FasterRCNN"):
        calibrate(model, None)


def test_calibration_saves_the_ap_that_a_threshold_costs(tmp_path: Path) -> None:
    """AP-loss leaves scores where they started, here near 0; FCOS drops those below 0.2."""
    torch.manual_seed(0)
    images, targets = _samples(builtin_dataset("train", cache=tmp_path, counts=(8, 1, 1)))
    backbone = build_detector("retinanet-tiny", class_names=["a"]).backbone
    model = FCOS(
        backbone,
        CLASSES,
        anchor_generator=AnchorGenerator(((8,), (16,), (32,), (64,)), ((1.0,),) * 4),
        head=FCOSHead(backbone.out_channels, 1, CLASSES, num_convs=1),
        min_size=images[0].shape[-1],
        max_size=images[0].shape[-1],
    )
    torch.nn.init.constant_(model.head.classification_head.cls_logits.bias, -16.0)
    _train(use_loss(model, APLoss()), images, targets)

    at_own_threshold = _ap(model, images, targets)
    model.score_thresh = 0.0
    without = _ap(model, images, targets)
    model.score_thresh = 0.2
    calibrated = _ap(calibrate(model, images, targets), images, targets)
    assert without > 0.8
    assert at_own_threshold < without - 0.1
    assert calibrated > without - 0.01


def _train(model: FCOS, images: list[Tensor], targets: list[dict[str, Tensor]]) -> None:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=2e-3)
    for _ in range(30):
        optimizer.zero_grad()
        sum(model(images, targets).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _samples(dataset: Any) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    samples = [dataset[index] for index in range(len(dataset))]
    images = [image.as_subclass(Tensor).float() / 255 for image, _ in samples]
    targets = [{"boxes": target["boxes"].as_subclass(Tensor), "labels": target["labels"]} for _, target in samples]
    return images, targets


def _ap(model: Any, images: list[Tensor], targets: list[dict[str, Tensor]]) -> float:
    with torch.inference_mode():
        detections = model.eval()(images)
    results, objects = [], []
    for image, (found, target) in enumerate(zip(detections, targets, strict=True)):
        for box, score, label in zip(*(found[key].tolist() for key in found), strict=True):
            results.append({"image_id": image, "category_id": label, "score": score, "bbox": _xywh(box)})
        for box, label in zip(target["boxes"].tolist(), target["labels"].tolist(), strict=True):
            objects.append({"image_id": image, "category_id": label, "bbox": _xywh(box)})
    truth = {
        "images": [{"id": image} for image in range(len(targets))],
        "categories": [{"id": k, "name": str(k)} for k in range(CLASSES)],
        "annotations": objects,
    }
    return coco_metrics(truth, results).AP50


def _xywh(box: list[float]) -> list[float]:
    left, top, right, bottom = box
    return [left, top, right - left, bottom - top]
