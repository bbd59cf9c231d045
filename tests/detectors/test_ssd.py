"""SSD300, SSD512 and SSDlite: maps and default boxes of the originals, torchvision's weights."""

import copy
import math

import pytest
import torch
from torch import nn
from torchvision.models.detection import ssd300_vgg16, ssdlite320_mobilenet_v3_large
from torchvision.models.detection.image_list import ImageList

from aploss.detectors import build_detector
from aploss.detectors.detector import Detector, feature_shapes
from aploss.detectors.postprocess import BOX_CODER
from aploss.errors import ConfigError

CLASSES = ["a", "b"]


@pytest.fixture(scope="module")
def ssd512() -> Detector:
    return build_detector("ssd512", class_names=CLASSES)


def test_ssd512_has_the_seven_maps_of_the_original(ssd512: Detector) -> None:
    maps = [64, 32, 16, 8, 4, 2, 1]  # conv4_3, conv7, conv8_2 ... conv12_2
    assert [tuple(one[2:]) for one in feature_shapes(ssd512.backbone, 512, 512)] == [(cells, cells) for cells in maps]
    anchors = [4, 6, 6, 6, 6, 4, 4]
    counts = [len(level) for level in ssd512.anchors_for(512, 512)]
    assert counts == [n * cells**2 for n, cells in zip(anchors, maps, strict=True)]
    assert sum(counts) == 24564  # as in the original


def test_ssd512_has_the_default_boxes_of_the_original(ssd512: Detector) -> None:
    first, *_, last = ssd512.anchors_for(512, 512)
    small, large = 35.84, math.sqrt(35.84 * 76.8)  # min_size, and its mean with the next one
    sides = [(small, small), (large, large), (small * 2**0.5, small / 2**0.5)]
    for box, (width, height) in zip(first, sides, strict=False):
        centre = [4 - width / 2, 4 - height / 2, 4 + width / 2, 4 + height / 2]
        assert box.tolist() == pytest.approx(centre, abs=1e-3)
    width = last[0, 2] - last[0, 0]
    assert width.item() == pytest.approx(460.8, abs=1e-2)


def test_conv4_3_is_normalised_and_scaled(ssd512: Detector) -> None:
    backbone = copy.deepcopy(ssd512.backbone)
    backbone.extra = nn.ModuleList()  # the later maps are not needed here, and cost the most
    with torch.inference_mode():
        (first,) = backbone(torch.rand(1, 3, 64, 64)).values()
    norms = first.norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, 20.0), rtol=1e-3, atol=1e-3)
    assert ssd512.backbone.scale_weight.requires_grad


def test_torchvisions_ssd300_weights_fit_and_give_the_same_outputs() -> None:
    theirs = ssd300_vgg16(weights=None, weights_backbone=None, num_classes=3).eval()
    ours = build_detector("ssd300", class_names=CLASSES, loss="ce-ohem").eval()
    ours.load_state_dict(theirs.state_dict())
    image = torch.rand(1, 3, 300, 300)
    with torch.inference_mode():
        logits, deltas = ours.heads(image)
        batch, _ = theirs.transform([image[0]])
        features = list(theirs.backbone(batch.tensors).values())
        expected = theirs.head(features)
        (anchors,) = theirs.anchor_generator(ImageList(batch.tensors, [(300, 300)]), features)
    torch.testing.assert_close(logits, expected["cls_logits"])
    torch.testing.assert_close(deltas, expected["bbox_regression"])
    torch.testing.assert_close(torch.cat(ours.anchors_for(300, 300)), anchors)
    assert BOX_CODER.weights == theirs.box_coder.weights


def test_torchvisions_ssdlite_weights_fit() -> None:
    theirs = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    ours = build_detector("ssdlite", class_names=CLASSES, loss="ce-ohem", norm="batch")
    ours.load_state_dict(theirs.state_dict())
    image = torch.rand(1, 3, 320, 320)
    with torch.inference_mode():
        logits, _ = ours.eval().heads(image)
        batch, _ = theirs.eval().transform([image[0]])
        expected = theirs.head(list(theirs.backbone(batch.tensors).values()))
    torch.testing.assert_close(logits, expected["cls_logits"], rtol=1e-4, atol=1e-5)


def test_images_of_any_shape_are_stretched_to_the_square() -> None:
    detector = build_detector("ssdlite", class_names=CLASSES, test_size=(96, 96)).eval()
    with torch.inference_mode():
        found = detector([torch.rand(3, 50, 120), torch.rand(3, 200, 100)])
    assert detector.resize(torch.rand(3, 50, 120)).shape == (3, 96, 96)
    for detections, (height, width) in zip(found, [(50, 120), (200, 100)], strict=True):
        assert len(detections["scores"]) == 100
        assert detections["boxes"][:, 2].max() <= width + 1e-3
        assert detections["boxes"][:, 3].max() <= height + 1e-3
        assert detections["boxes"][:, 2].max() > 0.9 * width


def test_images_that_are_too_small_are_refused_with_their_size() -> None:
    detector = build_detector("ssd300", class_names=CLASSES)
    target = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    with pytest.raises(ConfigError, match="64x64 pixels"):
        detector(torch.rand(1, 3, 64, 64), [target])


def test_frozen_stages_of_vgg_are_the_first() -> None:
    detector = build_detector("ssd300", class_names=CLASSES, trainable_stages=3)
    frozen = [n for n, p in detector.named_parameters() if not p.requires_grad]
    # conv1_1, conv1_2, conv2_1, conv2_2, each with weight and bias
    assert frozen == [f"backbone.features.{i}.{w}" for i in (0, 2, 5, 7) for w in ("weight", "bias")]


def test_conv4_3_is_scaled_by_a_convolution_as_in_the_paper() -> None:
    detector = build_detector("ssd512", class_names=CLASSES, conv4_3="convolution")
    backbone = detector.backbone
    backbone.extra = nn.ModuleList()
    with torch.inference_mode():
        (first,) = backbone.pyramid([torch.eye(512)[:1, :, None, None]]).values()
        expected = backbone.scale.weight[:, 0, 0, 0] + backbone.scale.bias
    torch.testing.assert_close(first[0, :, 0, 0], expected)
    assert not hasattr(backbone, "scale_weight")
    assert build_detector(**detector.config).backbone.scale.weight.shape == (512, 512, 1, 1)
