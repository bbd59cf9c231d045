"""Thresholds mean precision again after calibration: by hand, and on a trained FCOS."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.models.detection import FCOS, fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.ssdlite import ssdlite320_mobilenet_v3_large

from aploss.data.annotations import DetectionDataset
from aploss.data.builtin import builtin_dataset
from aploss.detectors import build_detector
from aploss.errors import ConfigError, DataError
from aploss.evaluation import DetectionTable, coco_metrics
from aploss.integrations import ScoreThresholdWarning, calibrate, calibration_of, use_loss
from aploss.integrations.shared import fit_precision
from aploss.losses import APLoss

pytestmark = pytest.mark.filterwarnings("ignore::aploss.integrations.ScoreThresholdWarning")
CLASSES = 5  # of the built-in set
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
    assert fit_precision([found, found], targets)[0]([0.01, 0.02]) == pytest.approx([1 / 3, 1 / 3], abs=1e-3)
    many = fit_precision([found, found] * 20, targets * 20)[0]
    assert many([0.01, 0.02]) == pytest.approx([1 / 41, 20 / 41], abs=1e-3)
    crowd = [{**target, "iscrowd": torch.ones(len(target["labels"]))} for target in targets]
    assert fit_precision([found] * 40, crowd * 20)[0]([0.02]) < 0.1
    for wrong in (targets[1:], targets):  # no objects, too many targets
        with pytest.raises(DataError):
            fit_precision([found], wrong)


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
            expected = torch.from_numpy(calibration_of(twin)(one["scores"].numpy())).float()
            assert torch.equal(other["scores"][: len(expected)], expected)
            assert not torch.equal(one["scores"], expected)
        assert calibrate(twin, None).score_thresh == threshold
        with torch.inference_mode():
            again = twin(images)
        for one, other in zip(before, again, strict=True):
            assert torch.equal(one["scores"], other["scores"])
    model.score_thresh = 0.5
    calibrate(model, images, targets, score_thresh=0.5)
    assert model.score_thresh == 1.0  # no detection reaches that precision
    assert use_loss(model, APLoss()).score_thresh == 0.5  # a calibration belongs to its loss
    assert calibration_of(model) is None


def test_a_map_can_keep_the_ap_at_a_threshold() -> None:
    """Scores 0.9 (right), 0.3 (wrong) and 0.2 (right in one of ten images): AP needs what is above 0.1."""
    one = {"boxes": torch.tensor([BOX]), "labels": torch.tensor([0])}
    two = {"boxes": torch.tensor([BOX, ELSEWHERE]), "labels": torch.tensor([0, 0])}
    far = [[0.0, 60.0, 20.0, 90.0], [60.0, 0.0, 90.0, 20.0]]
    found = {
        "boxes": torch.tensor([BOX, far[0], ELSEWHERE, far[1]]),
        "scores": torch.tensor([0.9, 0.3, 0.2, 0.1]),
        "labels": torch.zeros(4, dtype=torch.int64),
    }
    targets = [one] * 9 + [two]
    (plain, least), (kept, same) = (fit_precision([found] * 10, targets, keep_ap_at=at) for at in (None, 0.5))
    scores = np.linspace(0, 1, 101)
    assert least == same == pytest.approx(0.1)
    assert plain([0.2]) < 0.5 < kept([0.2])
    assert kept([0.1]) == pytest.approx(0.5)
    assert (np.diff(kept(scores)) > 0).all()
    assert (kept(scores) >= plain(scores)).all()
    assert (fit_precision([found] * 10, targets, keep_ap_at=1e-3)[0].y == plain.y).all()  # nothing to raise
    with pytest.raises(ConfigError):
        fit_precision([found], targets[:1], keep_ap_at=1.5)


def test_other_models_are_refused() -> None:
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    with pytest.raises(ConfigError):
        calibrate(model, None)
    ssd = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    with pytest.raises(ConfigError):
        calibrate(ssd, [], [], keep_ap_at=0.5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[FCOS, Any, Any]:
    """A weak FCOS, trained with AP-loss for seconds; images to calibrate it on, and others to measure it on."""
    torch.manual_seed(0)
    cache, size = tmp_path_factory.mktemp("builtin"), 64
    train, held_out, others = (
        builtin_dataset(split, cache=cache, image_size=size, counts=(160, 60, 60)) for split in ("train", "val", "test")
    )
    backbone = build_detector("retinanet-tiny", class_names=["a"]).backbone
    anchors = AnchorGenerator(((8,), (16,), (32,), (64,)), ((1.0,),) * 4)
    head = FCOSHead(backbone.out_channels, 1, CLASSES, num_convs=1)
    model = FCOS(backbone, CLASSES, anchor_generator=anchors, head=head, min_size=size, max_size=size)
    use_loss(model, APLoss())
    _train(model, *_samples(train))
    return model, _samples(held_out), others


def test_calibration_keeps_the_ap_that_a_threshold_costs(trained: tuple[FCOS, Any, Any]) -> None:
    """Precision below 0.2 is worth something to AP, so that 0.2 costs AP before and after: the threshold is lowered."""
    model, held_out, others = trained
    at_own_threshold = _ap(model, others)
    model.score_thresh = 0.0
    without = _ap(model, others)
    model.score_thresh = 0.2
    at_precision = _ap(calibrate(model, *held_out, score_thresh=0.2), others)
    with pytest.warns(ScoreThresholdWarning, match=r"lowered to 0\.0"):
        calibrate(model, *held_out)
    assert without > 0.2
    assert at_own_threshold < without - 0.02
    assert at_precision < without - 0.02
    assert _ap(model, others) > without - 0.01
    # neither does it keep everything: most detections are of no use to AP
    assert 0.001 < calibration_of(model)([model.score_thresh]) < 0.2
    assert calibrate(model, None).score_thresh == 0.2


def _train(model: FCOS, images: list[Tensor], targets: list[dict[str, Tensor]], steps: int = 120) -> None:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        batch = torch.randperm(len(images))[:8].tolist()
        optimizer.zero_grad()
        sum(model([images[k] for k in batch], [targets[k] for k in batch]).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _samples(dataset: DetectionDataset) -> tuple[list[Tensor], list[dict[str, Any]]]:
    samples = [dataset[index] for index in range(len(dataset))]
    images = [image.as_subclass(Tensor).float() / 255 for image, _ in samples]
    return images, [{**target, "boxes": target["boxes"].as_subclass(Tensor)} for _, target in samples]


def _ap(model: Any, dataset: DetectionDataset) -> float:
    images, targets = _samples(dataset)
    with torch.inference_mode():
        detections = model.eval()(images)
    found = DetectionTable.from_predictions([target["image_id"] for target in targets], detections)
    return coco_metrics(dataset.to_coco(), found).AP
