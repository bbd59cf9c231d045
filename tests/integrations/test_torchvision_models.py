"""Losses in torchvision's models: the same inference, other gradients."""

import copy
import pickle
import warnings
from collections import OrderedDict
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import FCOS, FasterRCNN, KeypointRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
from torchvision.models.detection.ssd import SSD, SSDHead
from torchvision.models.detection.ssdlite import ssdlite320_mobilenet_v3_large
from torchvision.ops import box_iou, generalized_box_iou_loss
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from aploss.detectors import LOSS_NAMES, make_loss
from aploss.errors import ConfigError
from aploss.integrations import ScoreThresholdWarning, calibrate, use_loss
from aploss.integrations.shared import softmax_log_odds
from aploss.losses import ALRPLoss, APLoss, FocalLoss, OHEMCrossEntropy, RankSortLoss, ap_loss
from aploss.losses.traits import traits_of

pytestmark = pytest.mark.filterwarnings("ignore::aploss.integrations.ScoreThresholdWarning")
Targets = list[dict[str, Tensor]]
DENSE, RCNNS = ["retinanet", "fcos", "ssd"], ["faster", "mask", "keypoint"]
KINDS = [*DENSE, "faster"]
CLASS_TERMS = {"classification", "loss_objectness", "loss_classifier"}
SIZE = {"min_size": 96, "max_size": 96}


def make_model(kind: str) -> Any:
    """A small torchvision model with 3 classes (SSD, R-CNN: background and 3), or the SSDLite that people use."""
    torch.manual_seed(0)
    if kind == "ssdlite320":
        return ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    stages = {"stem": _stage(3, 16, 4), "P3": _stage(16, 16, 2), "P4": _stage(16, 32, 2), "P5": _stage(32, 32, 2)}
    levels = {name: name for name in ("P3", "P4", "P5")}
    body = nn.Sequential(OrderedDict(stages))
    if kind == "ssd":
        boxes = DefaultBoxGenerator([[2]] * 3)
        head = SSDHead([16, 32, 32], boxes.num_anchors_per_location(), 4)
        return SSD(IntermediateLayerGetter(body, levels), boxes, (96, 96), 4, head=head)
    if kind in RCNNS:
        return _make_rcnn(kind, BackboneWithFPN(body, {"P3": "0", "P4": "1", "P5": "2"}, [16, 32, 32], 32))
    backbone = BackboneWithFPN(body, levels, [16, 32, 32], 64, extra_blocks=LastLevelP6P7(64, 64))
    if kind == "fcos":
        return FCOS(backbone, 3, **SIZE)
    anchors = AnchorGenerator(((16, 24), (32, 48), (64, 96), (128,) * 2, (256,) * 2), ((1.0,),) * 5)
    return RetinaNet(backbone, 3, anchor_generator=anchors, **SIZE)


def _make_rcnn(kind: str, backbone: nn.Module) -> Any:
    anchors = AnchorGenerator(((16,), (32,), (64,), (96,)), ((1.0,),) * 4)
    box_head = {"box_head": TwoMLPHead(32 * 7 * 7, 32), "box_predictor": FastRCNNPredictor(32, 4)}
    few = {"box_batch_size_per_image": 64, "rpn_post_nms_top_n_train": 200, "rpn_post_nms_top_n_test": 100}
    options = {**SIZE, **box_head, **few, "rpn_anchor_generator": anchors, "rpn_score_thresh": 0.02}
    if kind == "keypoint":
        head = {"keypoint_head": KeypointRCNNHeads(32, (8,)), "keypoint_predictor": KeypointRCNNPredictor(8, 2)}
        return KeypointRCNN(backbone, num_keypoints=None, **head, **options)
    if kind == "mask":
        return MaskRCNN(backbone, **options, mask_predictor=MaskRCNNPredictor(256, 8, 4))
    return FasterRCNN(backbone, **options)


def _stage(channels: int, out_channels: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU())


def make_batch(kind: str) -> tuple[list[Tensor], Targets]:
    first = int(kind not in ("retinanet", "fcos"))
    boxes = torch.tensor([[5.0, 8.0, 40.0, 44.0], [50.0, 40.0, 90.0, 90.0]])
    targets = [
        {"boxes": boxes, "labels": torch.tensor([first, first + 2])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
    ]
    for target in targets if kind in RCNNS else ():
        corners = target["boxes"].reshape(-1, 2, 2)
        target["keypoints"] = torch.cat([corners, torch.ones(len(corners), 2, 1)], dim=2)
        target["masks"] = torch.ones(len(corners), 96, 96, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(3, 96, 96, generator=generator) for _ in range(2)], targets


def step(model: Any, kind: str) -> dict[str, Tensor]:
    """The losses of the batch, with the same sample of proposals and frozen norms each time."""
    for module in model.train().modules():
        if isinstance(module, nn.BatchNorm2d | nn.Dropout):
            module.eval()
    torch.manual_seed(1)
    return model(*make_batch(kind))


@pytest.mark.parametrize("kind", [*DENSE, *RCNNS, "ssdlite320"])
def test_detections_are_bit_identical_before_and_after(kind: str) -> None:
    model = make_model(kind).eval()
    model.score_thresh = 0.0  # weights are random; R-CNNs do not look at it
    images, _ = make_batch(kind)
    with torch.inference_mode():
        before = model(images)
        keys = list(model.state_dict())
        assert use_loss(model, APLoss()) is model
        after = model(images)
    assert list(model.state_dict()) == keys
    assert all(len(one["scores"]) for one in before)
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(value, other[key])


@pytest.mark.parametrize(
    ("kind", "name"), [*product(["retinanet", "ssd"], LOSS_NAMES), *product(["fcos", "faster"], ["ap", "alrp"])]
)
def test_every_loss_trains_every_kind(kind: str, name: str) -> None:
    if traits_of(name).softmax and kind in ("retinanet", "fcos"):
        pytest.skip("softmax needs a background column")
    loss = make_loss(name)
    calls = []
    loss.register_forward_hook(lambda *_: calls.append(name))
    model = use_loss(make_model(kind), loss)
    losses = step(model, kind)
    sum(losses.values()).backward()
    assert len(calls) == len(CLASS_TERMS & losses.keys()) == 1 + (kind in RCNNS)
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None and grad.isfinite().all() for grad in trained.values())
    for head in ("rpn.head.cls_logits", "box_predictor.cls_score") if kind in RCNNS else ("classification_head",):
        assert [n for n in trained if head in n and trained[n].any()]


@pytest.mark.parametrize("kind", [*DENSE, *RCNNS, "ssdlite320"])
def test_other_losses_stay_torchvisions(kind: str) -> None:
    model = make_model(kind)
    expected = step(model, kind)
    found = step(use_loss(model, APLoss()), kind)
    assert set(found) == set(expected)
    for key, value in expected.items():
        if key in CLASS_TERMS:
            assert found[key].item() != pytest.approx(value.item())
        else:
            torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize(
    ("kind", "loss"), [("retinanet", FocalLoss()), ("fcos", FocalLoss()), ("ssd", OHEMCrossEntropy())]
)
def test_torchvisions_own_kind_of_loss_swapped_in_changes_nothing(kind: str, loss: nn.Module) -> None:
    model = make_model(kind)
    images, targets = make_batch(kind)
    images, targets = images[:1], targets[:1]  # torchvision averages RetinaNet over images
    step(model, kind)  # freezes the norms
    expected = model(images, targets)["classification"]
    torch.testing.assert_close(use_loss(model, loss)(images, targets)["classification"], expected)


def test_ap_loss_ranks_the_whole_batch_of_torchvisions_matches() -> None:
    model = use_loss(make_model("retinanet"), APLoss(delta=0.7))
    seen: dict[str, Tensor] = {}
    model.head.classification_loss.register_forward_pre_hook(
        lambda _, arguments: seen.update(scores=arguments[0], targets=arguments[1])
    )
    found = step(model, "retinanet")["classification"]
    images_anchors_classes = (2, *seen["scores"].shape[1:2], 3)
    assert seen["scores"].shape == seen["targets"].shape == images_anchors_classes
    positives = (seen["targets"] == 1).sum(dim=(0, 1))
    assert (positives > 0).tolist() == [True, False, True]  # labels are columns
    torch.testing.assert_close(found, ap_loss(seen["scores"], seen["targets"], delta=0.7))


# R-CNNs: the RPN ranks all anchors, the box head the sampled proposals


def _rcnn_by_hand(model: Any, kind: str) -> dict[str, tuple[Any, ...]]:
    """Scores, targets [n, K], predicted boxes and boxes of the objects of both stages, from torchvision's methods."""
    seen: dict[str, Any] = {}
    rpn, heads = model.rpn, model.roi_heads
    handles = [
        rpn.head.register_forward_hook(lambda _, __, output: seen.update(rpn=output)),
        rpn.anchor_generator.register_forward_hook(lambda _, __, output: seen.update(anchors=output)),
        heads.box_predictor.register_forward_hook(lambda _, __, output: seen.update(head=output)),
        heads.box_roi_pool.register_forward_pre_hook(lambda _, inputs: seen.update(proposals=inputs[1])),
    ]
    step(model, kind)
    for handle in handles:
        handle.remove()
    _, objects = make_batch(kind)
    objectness, deltas = (
        torch.cat([level.permute(0, 2, 3, 1).reshape(2, -1, columns) for level in levels], dim=1).flatten(0, 1)
        for levels, columns in zip(seen["rpn"], (1, 4), strict=True)
    )
    labels, boxes = rpn.assign_targets_to_anchors(seen["anchors"], objects)
    predicted = rpn.box_coder.decode_single(deltas, torch.cat(seen["anchors"]))
    anchors = objectness, torch.cat(labels)[:, None], predicted, torch.cat(boxes)
    matches, labels = heads.assign_targets_to_proposals(
        seen["proposals"], [one["boxes"] for one in objects], [one["labels"] for one in objects]
    )
    logits, deltas = seen["head"]
    probabilities = logits.softmax(dim=1)[:, 1:]
    targets = torch.nn.functional.one_hot(torch.cat(labels), 4)[:, 1:].float()
    predicted = heads.box_coder.decode(deltas, seen["proposals"])[torch.arange(len(targets)), torch.cat(labels)]
    boxes = torch.cat([objects[0]["boxes"][matches[0]], torch.zeros(len(matches[1]), 4)])
    return {
        "loss_objectness": anchors,
        "loss_classifier": (torch.log(probabilities / (1 - probabilities)), targets, predicted, boxes),
    }


@pytest.mark.parametrize("kind", RCNNS)
def test_rcnn_terms_equal_a_computation_by_hand(kind: str) -> None:
    model = make_model(kind)
    stages = _rcnn_by_hand(model, kind)
    found = step(use_loss(model, APLoss(delta=0.7)), kind)
    for name, (scores, targets, _, _) in stages.items():
        assert 0 < (targets == 1).sum() < (targets == 0).sum()
        torch.testing.assert_close(found[name], ap_loss(scores, targets, delta=0.7), rtol=1e-5, atol=1e-6)
    assert (stages["loss_objectness"][1] == -1).any()  # anchors between the thresholds are ignored


def test_rcnn_losses_get_the_iou_of_the_predicted_boxes_and_replace_box_losses() -> None:
    model = make_model("faster")
    stages = _rcnn_by_hand(model, "faster")
    loss = RankSortLoss()
    seen: list[Tensor] = []
    loss.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    step(use_loss(model, loss), "faster")
    found = step(use_loss(model, ALRPLoss()), "faster")
    names = (("loss_objectness", "loss_rpn_box_reg"), ("loss_classifier", "loss_box_reg"))
    for targets_seen, (name, box_name) in zip(seen, names, strict=True):
        scores, targets, predicted, boxes = stages[name]
        row, _ = (targets == 1).nonzero(as_tuple=True)
        overlaps = box_iou(predicted[row], boxes[row]).diagonal().detach()
        torch.testing.assert_close(targets_seen[targets_seen > 0], overlaps, rtol=1e-4, atol=1e-5)
        box_losses = generalized_box_iou_loss(predicted[row], boxes[row])
        expected = ALRPLoss()(scores, targets, box_losses)
        torch.testing.assert_close((found[name], found[box_name]), tuple(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_dimension_0_rank_each_image_separately(kind: str) -> None:
    loss = APLoss(groups=0)
    seen: list[Any] = []
    loss.register_forward_hook(lambda _, arguments, value: seen.append((*arguments, value)))
    step(use_loss(make_model(kind), loss), kind)
    for scores, targets, value in seen:  # only the first image has objects
        assert len(scores) == 2
        torch.testing.assert_close(value, ap_loss(scores[0], targets[0]))
        assert value < ap_loss(scores, targets)


def test_log_odds_order_as_softmax_scores_do_and_are_those_of_a_binary_sigmoid() -> None:
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 4
    odds, scores = softmax_log_odds(logits), logits.softmax(dim=-1)[:, 1:]
    torch.testing.assert_close(odds.sigmoid(), scores)
    by_hand = logits[:, 2] - torch.logsumexp(logits[:, [0, 1, 3]], dim=1)
    torch.testing.assert_close(odds[:, 1], by_hand, rtol=1e-4, atol=1e-4)
    sure = softmax_log_odds(torch.tensor([[0.0, 200.0, 0.0], [200.0, 0.0, 0.0]]))
    assert sure.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_the_loss_too_and_are_independent(kind: str) -> None:
    model = use_loss(make_model(kind), APLoss())
    wanted = step(model, kind)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(step(twin, kind), wanted)
        use_loss(twin, FocalLoss())
    torch.testing.assert_close(step(model, kind), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_none_gives_the_original_back(kind: str) -> None:
    model = make_model(kind)
    expected, modules = step(model, kind), dict(model.named_modules())

    def attributes() -> list[set[str]]:
        return [set(vars(module)) for module in modules.values()]

    def thresholds() -> list[float]:
        return [one.score_thresh for one in modules.values() if hasattr(one, "score_thresh")]

    before = attributes(), thresholds()
    assert max(thresholds()) > 0
    use_loss(model, APLoss(), score_thresh=0)
    use_loss(model, FocalLoss())
    assert max(thresholds()) == 0
    for _ in range(2):  # a second time changes nothing
        assert use_loss(model, None) is model
        assert (attributes(), thresholds()) == before
        assert dict(model.named_modules()) == modules
        torch.testing.assert_close(step(model, kind), expected)


@pytest.mark.parametrize("kind", DENSE)
def test_a_swapped_model_is_scripted_where_the_plain_one_is(kind: str) -> None:
    images, _ = make_batch(kind)
    model = use_loss(make_model(kind), APLoss()).eval()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch finds scripting out of date
        (expected, *_), (_, (found, *_)) = model(images), torch.jit.script(model)(images)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize("kind", ["retinanet", "faster"])
def test_a_swapped_model_is_compiled_with_its_loss(kind: str) -> None:
    model = use_loss(make_model(kind), APLoss())
    expected = step(model, kind)
    torch.testing.assert_close(step(torch.compile(model, backend="eager"), kind), expected)


def test_a_loss_with_weights_is_a_part_of_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
            return self.scale * ap_loss(scores, targets)

    model = use_loss(make_model("fcos"), Scaled())
    sum(step(model, "fcos").values()).backward()
    assert dict(model.named_parameters())["head.classification_loss.scale"].grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_warning_says_that_the_models_threshold_is_arbitrary_for_the_loss(kind: str) -> None:
    with pytest.warns(ScoreThresholdWarning, match=r"score_thresh=0.*calibrate\(model") as caught:
        use_loss(make_model(kind), APLoss())
    assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_loss(make_model(kind), FocalLoss())  # calibrated
        use_loss(make_model(kind), APLoss(), score_thresh=0)


def test_unsupported_models_losses_and_options_are_refused_at_once() -> None:
    model = use_loss(make_model("retinanet"), FocalLoss())
    with pytest.raises(ConfigError):
        use_loss(nn.Linear(1, 1), APLoss())
    with pytest.raises(ConfigError):
        calibrate(nn.Linear(1, 1), None)
    for wrong in (APLoss, ap_loss, "ap", 1, OHEMCrossEntropy()):
        with pytest.raises(ConfigError):
            use_loss(model, wrong)
    with pytest.raises(ConfigError):
        use_loss(model, APLoss(), weights={"class": 1.0})
    assert isinstance(model.head.classification_loss, FocalLoss)
