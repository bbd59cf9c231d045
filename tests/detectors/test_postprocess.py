"""From logits to detections: by hand, against torchvision's RetinaNet, and in several sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection import RetinaNet

from aploss.detectors import Detector, DetectorConfig, MultiScale, build_detector
from aploss.detectors.postprocess import BOX_CODER, postprocess
from aploss.errors import ConfigError

LEVELS = [torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0]]), torch.tensor([[0.0, 1.0, 10.0, 10.0]])]


def detect(
    logits: Tensor, size: tuple[int, int] = (64, 64), *, softmax: bool = False, **options: Any
) -> dict[str, Tensor]:
    deltas = torch.zeros(1, logits.shape[1], 4)
    (found,) = postprocess(logits, deltas, LEVELS, [size], DetectorConfig(**options), softmax=softmax)
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


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [3.0, 2.0, -8.0]),
        ({"score_threshold": 0.0005}, [3.0, 2.0]),
        ({"score_threshold": 0.99}, []),
        ({"topk_per_level": 1}, [3.0, -8.0]),
        ({"detections_per_image": 1}, [3.0]),
    ],
)
def test_scores_are_kept_by_threshold_level_and_image(options: dict[str, Any], kept: list[float]) -> None:
    found = detect(torch.tensor([[[3.0], [2.0], [-8.0]]]), nms_iou=1.0, **options)
    torch.testing.assert_close(found["scores"], torch.tensor(kept).sigmoid())


def test_boxes_are_clipped_and_those_in_the_padding_are_dropped() -> None:
    logits = torch.tensor([[[1.0], [3.0], [-4.0]]])
    found = detect(logits, size=(5, 15), nms_iou=1.0)
    assert found["boxes"].tolist() == [[0.0, 0.0, 10.0, 5.0], [0.0, 1.0, 10.0, 5.0]]


def test_softmax_scores_leave_the_background_out() -> None:
    logits = torch.tensor([[[5.0, 1.0, 0.0], [0.0, 4.0, 0.0], [9.0, 0.0, 0.0]]])
    everything = detect(logits, softmax=True, nms_iou=1.0)["scores"]
    expected = logits.softmax(-1)[..., 1:].flatten().sort(descending=True).values
    torch.testing.assert_close(everything, expected)
    found = detect(logits, softmax=True, detections_per_image=1)
    assert found["labels"].tolist() == [0]
    assert found["scores"].item() == pytest.approx(torch.tensor(4.0).exp() / (torch.tensor(4.0).exp() + 2))


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
    theirs.box_coder = BOX_CODER
    images = [torch.rand(3, 160, 200), torch.rand(3, 160, 200)]  # already of the test size
    with torch.inference_mode():
        expected, found = theirs(images), ours(images)
    for one, other in zip(found, expected, strict=True):
        assert len(one["scores"]) == 100
        for key in ("boxes", "scores", "labels"):
            torch.testing.assert_close(one[key], other[key])


@pytest.fixture(scope="module")
def images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(3, *size, generator=generator) for size in ((50, 70), (96, 128))]


def test_a_mirrored_image_gives_mirrored_detections(detector: Detector, images: list[torch.Tensor]) -> None:
    multi_scale = MultiScale(scales=(0.75, 1.0, 1.5), flip=True)
    with torch.no_grad():
        straight = multi_scale(detector, images)
        mirrored = multi_scale(detector, [image.flip(-1) for image in images])
    for image, one, other in zip(images, straight, mirrored, strict=True):
        width = image.shape[-1]
        back = other["boxes"][:, [2, 1, 0, 3]] * torch.tensor([-1, 1, -1, 1])
        back += torch.tensor([width, 0, width, 0])
        torch.testing.assert_close(one["scores"], other["scores"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one["boxes"], back, rtol=1e-4, atol=1e-2)
        assert torch.equal(one["labels"], other["labels"])


def test_a_scale_is_the_detector_at_that_test_size(detector: Detector, images: list[torch.Tensor]) -> None:
    with torch.no_grad():
        (larger, _) = MultiScale(scales=(1.5,), flip=False)(detector, images)
        detector.test_size = (144, 192)
        (expected, _) = detector(images)
        detector.test_size = (96, 128)
    assert torch.equal(larger["boxes"], expected["boxes"])


def test_ssd_is_tested_at_its_own_size_and_larger_by_default() -> None:
    torch.manual_seed(0)
    detector, image = build_detector("ssdlite", class_names=["cat"], test_size=(96, 96)).eval(), torch.rand(3, 60, 80)
    with torch.no_grad():
        (found,) = MultiScale(flip=False)(detector, [image])
        (expected,) = MultiScale(scales=(1.0, 1.25, 1.5), flip=False)(detector, [image])
    assert torch.equal(found["boxes"], expected["boxes"])


@pytest.mark.parametrize("scales", [(), (0.0,), (1.0, -1.0)])
def test_scales_that_are_no_sizes_are_refused(scales: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="scales"):
        MultiScale(scales=scales)
