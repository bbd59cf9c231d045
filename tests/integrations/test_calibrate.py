"""Thresholds mean precision again after calibration."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.models.detection.ssdlite import ssdlite320_mobilenet_v3_large
from torchvision.ops import box_convert

from aploss.errors import DataError
from aploss.evaluation import DetectionTable, coco_metrics
from aploss.integrations import calibrate, calibration_of, use_loss
from aploss.integrations.shared import fit_precision
from aploss.losses import APLoss

pytestmark = pytest.mark.filterwarnings("ignore::aploss.integrations.ScoreThresholdWarning")
BOX, ELSEWHERE = [10.0, 10.0, 30.0, 30.0], [50.0, 50.0, 80.0, 80.0]


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
    # With Laplace's made-up detections: a correct one at 0.01, a wrong one at 0.02.
    assert fit_precision([found, found], targets)([0.01, 0.02]) == pytest.approx([1 / 3, 1 / 3], abs=1e-3)
    many = fit_precision([found, found] * 20, targets * 20)
    assert many([0.01, 0.02]) == pytest.approx([1 / 41, 20 / 41], abs=1e-3)
    crowd = [{**target, "iscrowd": torch.ones(len(target["labels"]))} for target in targets]
    assert fit_precision([found] * 40, crowd * 20)([0.02]) < 0.1
    for wrong in (targets[1:], targets):  # no objects, too many targets
        with pytest.raises(DataError):
            fit_precision([found], wrong)


def make_model(make: Any, images: list[Tensor], **options: Any) -> Any:
    """A model with random weights, normalised by the statistics of the images: otherwise all scores are equal."""
    torch.manual_seed(0)
    model = make(weights=None, weights_backbone=None, num_classes=3, **options)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    objects = {"boxes": torch.tensor([BOX]), "labels": torch.tensor([1])}
    with torch.no_grad():
        model.train()(images, [objects] * len(images))
    return model.eval()


@pytest.mark.parametrize("make", [ssdlite320_mobilenet_v3_large, fasterrcnn_mobilenet_v3_large_320_fpn])
def test_only_scores_and_threshold_change_and_both_come_back(make: Any) -> None:
    images = list(torch.rand(3, 3, 96, 96, generator=torch.Generator().manual_seed(0)))
    model = make_model(make, images)

    def holder(model: Any) -> Any:
        return getattr(model, "roi_heads", model)

    with torch.inference_mode():
        before = model(images)
    targets = [{"boxes": one["boxes"][:2], "labels": one["labels"][:2]} for one in before]
    names, threshold = list(model.state_dict()), holder(model).score_thresh
    assert calibrate(model.train(), images, targets, score_thresh=0.0, batch_size=2) is model
    assert model.training
    assert list(model.state_dict()) == names
    model.eval()
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.inference_mode():
            after = twin(images)
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one["boxes"], other["boxes"][: len(one["boxes"])])
            expected = torch.from_numpy(calibration_of(twin)(one["scores"].numpy())).float()
            assert torch.equal(other["scores"][: len(expected)], expected)
            assert not torch.equal(one["scores"], expected)
        assert holder(calibrate(twin, None)).score_thresh == threshold
        with torch.inference_mode():
            again = twin(images)
        for one, other in zip(before, again, strict=True):
            assert torch.equal(one["scores"], other["scores"])
    holder(model).score_thresh = 0.5
    calibrate(model, images, targets, score_thresh=0.5)
    assert calibration_of(model)([holder(model).score_thresh])[0] == pytest.approx(0.5)
    assert holder(use_loss(model, APLoss())).score_thresh == 0.5  # a calibration belongs to its loss
    assert calibration_of(model) is None


def test_calibration_keeps_the_ap_that_a_threshold_costs() -> None:
    """Of the best 60 detections every tenth is correct: a precision of about 0.1."""
    images = list(torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    model = make_model(ssdlite320_mobilenet_v3_large, images, score_thresh=0.0)

    def detect() -> list[dict[str, Tensor]]:
        with torch.inference_mode():
            return model(images)

    targets = [{key: one[key][:60:10].clone() for key in ("boxes", "labels")} for one in detect()]
    objects = [
        {"image_id": image, "category_id": label + 1, "bbox": box}
        for image, one in enumerate(targets)
        for label, box in zip(one["labels"].tolist(), box_convert(one["boxes"], "xyxy", "xywh").tolist(), strict=True)
    ]
    truth = {"images": [{"id": 0}, {"id": 1}, {"id": 2}], "categories": [{"id": 2}, {"id": 3}], "annotations": objects}

    def ap() -> float:
        return coco_metrics(truth, DetectionTable.from_predictions(range(3), detect())).AP

    without = ap()
    model.score_thresh = 0.5
    calibrate(model, images, targets, score_thresh=0.5)
    assert ap() < 0.5 * without
    calibrate(model, images, targets)
    assert ap() == pytest.approx(without)
    assert without > 0.05
    assert calibrate(model, None).score_thresh == 0.5
