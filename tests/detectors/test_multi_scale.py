"""Several sizes and the mirrored image, merged by class-wise NMS."""

import pytest
import torch

from aploss.detectors import Detector, MultiScale, build_detector
from aploss.detectors.postprocess import merge_detections
from aploss.errors import ConfigError


@pytest.fixture(scope="module")
def detector() -> Detector:
    torch.manual_seed(0)
    detector = build_detector("retinanet-tiny", class_names=["cat", "dog"], test_size=(96, 128))
    for layer in (detector.head.classification_head, detector.head.regression_head):
        for weight in layer.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.05)
    return detector.eval()


@pytest.fixture(scope="module")
def images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(3, *size, generator=generator) for size in ((50, 70), (96, 128))]


def test_one_scale_without_flip_is_the_ordinary_test(
    detector: Detector, images: list[torch.Tensor]
) -> None:
    with torch.no_grad():
        ordinary, merged = detector(images), MultiScale(scales=(1.0,), flip=False)(detector, images)
    for one, other in zip(ordinary, merged, strict=True):
        for key in ("boxes", "scores", "labels"):
            assert torch.equal(one[key], other[key])


def test_a_mirrored_image_gives_mirrored_detections(
    detector: Detector, images: list[torch.Tensor]
) -> None:
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


def test_a_scale_is_the_detector_at_that_test_size(
    detector: Detector, images: list[torch.Tensor]
) -> None:
    with torch.no_grad():
        (larger, _) = MultiScale(scales=(1.5,), flip=False)(detector, images)
        detector.test_size = (144, 192)
        (expected, _) = detector(images)
        detector.test_size = (96, 128)
    assert torch.equal(larger["boxes"], expected["boxes"])


def test_the_test_size_is_put_back_when_something_goes_wrong(detector: Detector) -> None:
    with pytest.raises(Exception, match=r".+"):
        MultiScale(scales=(2.0,))(detector, [torch.rand(5, 10)])
    assert detector.test_size == (96, 128)


def test_merging_is_class_wise_nms_worked_by_hand() -> None:
    box, shifted, far = [0.0, 0, 10, 10], [1.0, 0, 11, 10], [50.0, 50, 60, 60]
    first = {"boxes": torch.tensor([box, far]), "scores": torch.tensor([0.9, 0.2]),
             "labels": torch.tensor([0, 1])}  # fmt: skip
    second = {"boxes": torch.tensor([shifted, shifted]), "scores": torch.tensor([0.8, 0.7]),
              "labels": torch.tensor([0, 1])}  # fmt: skip
    # IoU of box and shifted is 90 / 110 = 0.82: of class 0 the better stays, class 1 is apart
    merged = merge_detections([first, second], nms_iou=0.5, detections_per_image=100)
    assert merged["boxes"].tolist() == [box, shifted, far]
    torch.testing.assert_close(merged["scores"], torch.tensor([0.9, 0.7, 0.2]))
    assert merged["labels"].tolist() == [0, 1, 1]
    strict = merge_detections([first, second], nms_iou=0.85, detections_per_image=2)
    assert strict["boxes"].tolist() == [box, shifted]
    assert strict["labels"].tolist() == [0, 0]


def test_ssd_is_tested_at_its_own_size_and_larger_by_default() -> None:
    torch.manual_seed(0)
    detector = build_detector("ssdlite", class_names=["cat"], test_size=(96, 96)).eval()
    sizes: list[tuple[int, int]] = []
    resize = detector.resize
    detector.resize = lambda image: (sizes.append(detector.test_size), resize(image))[1]  # type: ignore[method-assign]
    with torch.no_grad():
        (found,) = MultiScale(flip=False)(detector, [torch.rand(3, 60, 80)])
    assert sizes == [(96, 96), (120, 120), (144, 144)]
    assert found["boxes"][:, 2].max() <= 80
    assert found["boxes"][:, 3].max() <= 60


@pytest.mark.parametrize("scales", [(), (0.0,), (1.0, -1.0)])
def test_scales_that_are_no_sizes_are_refused(scales: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="scales above 0"):
        MultiScale(scales=scales)
