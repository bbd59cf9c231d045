"""From logits to detections: by hand, and against torchvision's RetinaNet."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection import RetinaNet
from torchvision.models.detection._utils import BoxCoder

from aploss.detectors.build import build_detector
from aploss.detectors.postprocess import class_scores, postprocess

CODER = BoxCoder((10.0, 10.0, 5.0, 5.0))
LEVELS = [
    torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0]]),
    torch.tensor([[0.0, 1.0, 10.0, 10.0]]),
]


def detect(logits: Tensor, size: tuple[int, int] = (64, 64), **options: Any) -> dict[str, Tensor]:
    settings: dict[str, Any] = {
        "box_coder": CODER,
        "softmax": False,
        "score_threshold": None,
        "topk_per_level": 1000,
        "nms_iou": 0.5,
        "detections_per_image": 100,
    }
    deltas = torch.zeros(1, logits.shape[1], 4)
    (found,) = postprocess(logits, deltas, LEVELS, [size], **{**settings, **options})
    return found


def test_nms_drops_the_lower_of_two_boxes_of_a_class_and_keeps_other_classes() -> None:
    logits = torch.tensor([[[2.0, -5.0], [1.0, -6.0], [0.5, 3.0]]])
    found = detect(logits)
    # Class 0: anchor 2 (logit 0.5) overlaps anchor 0 (logit 2) by 0.9 and is dropped.
    # Class 1: anchor 0 (logit -5) overlaps anchor 2 (logit 3) and is dropped.
    assert found["labels"].tolist() == [1, 0, 0, 1]
    expected = torch.tensor([3.0, 2.0, 1.0, -6.0]).sigmoid()
    torch.testing.assert_close(found["scores"], expected)
    assert found["boxes"][0].tolist() == [0.0, 1.0, 10.0, 10.0]


def test_no_threshold_keeps_every_score_and_a_threshold_does_not() -> None:
    logits = torch.tensor([[[-9.0], [-8.0], [-7.0]]])
    assert len(detect(logits, nms_iou=1.0)["scores"]) == 3
    assert len(detect(logits, nms_iou=1.0, score_threshold=0.0005)["scores"]) == 1
    assert len(detect(logits, score_threshold=0.05)["scores"]) == 0


def test_topk_is_taken_of_each_level() -> None:
    logits = torch.tensor([[[3.0], [2.0], [-4.0]]])
    found = detect(logits, nms_iou=1.0, topk_per_level=1)
    torch.testing.assert_close(found["scores"], torch.tensor([3.0, -4.0]).sigmoid())


def test_detections_per_image_are_the_best() -> None:
    logits = torch.tensor([[[1.0, 0.0], [3.0, -1.0], [-4.0, 2.0]]])
    found = detect(logits, detections_per_image=2)
    torch.testing.assert_close(found["scores"], torch.tensor([3.0, 2.0]).sigmoid())


def test_boxes_are_clipped_and_those_in_the_padding_are_dropped() -> None:
    logits = torch.tensor([[[1.0], [3.0], [-4.0]]])
    found = detect(logits, size=(5, 15), nms_iou=1.0)
    assert found["boxes"].tolist() == [[0.0, 0.0, 10.0, 5.0], [0.0, 1.0, 10.0, 5.0]]


def test_softmax_scores_leave_the_background_out() -> None:
    logits = torch.tensor([[[5.0, 1.0, 0.0], [0.0, 4.0, 0.0], [9.0, 0.0, 0.0]]])
    scores = class_scores(logits, softmax=True)
    torch.testing.assert_close(scores, logits.softmax(-1)[..., 1:])
    found = detect(logits, softmax=True, detections_per_image=1)
    assert found["labels"].tolist() == [0]
    assert found["scores"].item() == pytest.approx(
        torch.tensor(4.0).exp() / (torch.tensor(4.0).exp() + 2)
    )


@pytest.mark.parametrize("threshold", [None, 0.0101])
def test_detections_are_torchvisions(threshold: float | None) -> None:
    """The same network with torchvision's RetinaNet around it finds the same objects."""
    torch.manual_seed(0)
    ours = build_detector(
        "retinanet-r18",
        class_names=["a", "b", "c"],
        norm="batch",
        anchors_per_cell=9,
        anchor_grid="torchvision",
        test_size=(160, 224),
        score_threshold=threshold,
    ).eval()
    torch.nn.init.normal_(ours.head.classification_head.cls_logits.weight, std=0.1)
    theirs = RetinaNet(
        ours.backbone,
        3,
        head=ours.head,
        min_size=160,
        max_size=224,
        score_thresh=0.0 if threshold is None else threshold,
        detections_per_img=100,
    ).eval()
    theirs.box_coder = ours.box_coder
    images = [torch.rand(3, 160, 200), torch.rand(3, 160, 200)]  # already of the test size
    with torch.inference_mode():
        expected, found = theirs(images), ours(images)
    for one, other in zip(found, expected, strict=True):
        assert len(one["scores"]) == 100
        for key in ("boxes", "scores", "labels"):
            torch.testing.assert_close(one[key], other[key])
