"""RetinaNet: torchvision's architecture, anchors of the paper, resizing and padding."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from aploss.detectors import build_detector
from aploss.detectors.detector import Detector, feature_shapes
from aploss.errors import DataError

CLASSES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def tiny() -> Detector:
    torch.manual_seed(0)
    return build_detector("retinanet-tiny", class_names=CLASSES, test_size=(128, 256)).eval()


def test_paper_has_six_anchors_a_cell_of_two_octave_scales_and_three_ratios() -> None:
    detector = build_detector("retinanet-r18", class_names=CLASSES)
    levels = detector.anchors_for(256, 256)
    assert [len(level) for level in levels] == [6 * cells**2 for cells in (32, 16, 8, 4, 2)]
    for level, stride in zip(levels, (8, 16, 32, 64, 128), strict=True):
        first = level[:6]
        width, height = (first[:, 2:] - first[:, :2]).unbind(1)
        scale = (width * height).sqrt() / (4 * stride)
        ratio = height / width
        torch.testing.assert_close(scale, torch.tensor([1, 2**0.5] * 3), atol=0.04, rtol=0)
        torch.testing.assert_close(
            ratio, torch.tensor([0.5, 0.5, 1, 1, 2, 2]), atol=0.1, rtol=0
        )  # torchvision rounds to pixels
        assert (level[6] - level[0]).tolist() == [stride, 0, stride, 0]


def test_exact_grid_keeps_the_stride_where_torchvisions_shrinks_it() -> None:
    exact = build_detector("retinanet-r18", class_names=CLASSES)
    fitted = build_detector("retinanet-r18", class_names=CLASSES, anchor_grid="torchvision")
    # 160 pixels are 2 cells of the last level, rounded up: torchvision's step is 80, not 128.
    steps = [d.anchors_for(160, 160)[-1][6] - d.anchors_for(160, 160)[-1][0] for d in (exact, fitted)]
    assert [step[0].item() for step in steps] == [128, 80]


def test_the_paper_options_are_those_of_the_authors_code() -> None:
    torch.manual_seed(0)
    options = {"anchor_grid": "centred", "p6_from": "c5", "initialisation": "paper"}
    detector = build_detector("retinanet-r18", class_names=CLASSES, **options)
    for level, stride in zip(detector.anchors_for(256, 256), (8, 16, 32, 64, 128), strict=True):
        by_hand, cells = [], 256 // stride
        for row in range(cells):
            for column in range(cells):
                x, y = (column + 0.5) * stride, (row + 0.5) * stride
                for ratio in (0.5, 1, 2):
                    for scale in (1, 2**0.5):
                        width, height = 4 * stride * scale / ratio**0.5, 4 * stride * scale * ratio**0.5
                        by_hand.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
        torch.testing.assert_close(level, torch.tensor(by_hand))
    fpn = detector.backbone.fpn
    assert fpn.extra_blocks.p6.in_channels == 512  # C5 of a ResNet-18
    features = {str(index): torch.rand(1, 64 * 2**index, 8, 8) for index in (1, 2, 3)}
    torch.testing.assert_close(fpn(features)["p6"], fpn.extra_blocks.p6(features["3"]))
    assert fpn.extra_blocks.p7.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert fpn.layer_blocks[0][0].weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert detector.head.regression_head.bbox_reg.weight.std().item() == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize(
    ("norm", "kind"), [("frozen-bn", FrozenBatchNorm2d), ("group", nn.GroupNorm), ("batch", nn.BatchNorm2d)]
)
def test_norm_is_the_one_asked_for(norm: str, kind: type) -> None:
    detector = build_detector("retinanet-r18", class_names=CLASSES, norm=norm)
    kinds = (FrozenBatchNorm2d, nn.GroupNorm, nn.BatchNorm2d)
    assert {type(m) for m in detector.modules() if isinstance(m, kinds)} == {kind}


def test_frozen_stages_have_no_gradients() -> None:
    detector = build_detector("retinanet-r18", class_names=CLASSES, trainable_stages=3)
    frozen = {n for n, p in detector.named_parameters() if not p.requires_grad}
    assert frozen
    assert all(n.startswith(("backbone.body.conv1", "backbone.body.bn1", "backbone.body.layer1")) for n in frozen)


def test_feature_sizes_are_those_of_the_real_feature_maps(tiny: Detector) -> None:
    before = copy.deepcopy(tiny.state_dict())
    for height, width in ((64, 64), (96, 160), (33, 70)):
        with torch.inference_mode():
            features = tiny.backbone(torch.rand(1, 3, height, width))
        real = [tuple(feature.shape[-2:]) for feature in features.values()]
        assert [tuple(one[2:]) for one in feature_shapes(tiny.backbone, height, width)] == real
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.state_dict().items())


def test_anchors_seen_first_at_inference_can_be_trained_with(tiny: Detector, make_target: Callable[..., Any]) -> None:
    detector = copy.deepcopy(tiny)
    detector.criterion.box_loss = "giou"  # its backward pass needs the anchors
    with torch.inference_mode():
        detector.detect(torch.rand(1, 3, 128, 128))
    losses = detector.train()(torch.rand(1, 3, 128, 128), [make_target(2, size=128, classes=3)])
    sum(losses.values()).backward()
    assert all(weight.grad.isfinite().all() for weight in detector.parameters())


def test_boxes_are_in_pixels_of_the_images_own_size(tiny: Detector) -> None:
    image = torch.rand(3, 64, 96)
    with torch.inference_mode():
        (of_original,), (of_resized,) = tiny([image]), tiny([tiny.resize(image)])
    assert tiny.resize(image).shape == (3, 128, 192)
    torch.testing.assert_close(of_original["boxes"] * 2, of_resized["boxes"])


def test_resize_keeps_the_aspect_ratio_within_the_longest_side(tiny: Detector) -> None:
    assert tiny.resize(torch.rand(3, 60, 90)).shape == (3, 128, 192)
    assert tiny.resize(torch.rand(3, 400, 100)).shape == (3, 256, 64)
    same = torch.rand(3, 128, 200)
    assert tiny.resize(same) is same


def test_channels_last_gives_the_same_numbers() -> None:
    torch.manual_seed(0)
    plain = build_detector("retinanet-tiny", class_names=CLASSES).eval()
    last = build_detector("retinanet-tiny", class_names=CLASSES, channels_last=True).eval()
    last.load_state_dict(plain.state_dict())
    assert last.backbone.body.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    images = torch.rand(2, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(plain.heads(images), last.heads(images), rtol=1e-4, atol=1e-5)


def test_mistakes_are_refused(tiny: Detector) -> None:
    with pytest.raises(DataError):
        copy.deepcopy(tiny).train()(torch.rand(1, 3, 64, 64))  # no targets
    for wrong in ([], [torch.zeros(3, 128, 128, dtype=torch.uint8)]):
        with pytest.raises(DataError):
            tiny(wrong)
