"""Losses in torchvision's models: the same inference, other gradients."""

import copy
import pickle
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import FCOS, RetinaNet, fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.ssd import SSD, SSDHead
from torchvision.models.detection.ssdlite import ssdlite320_mobilenet_v3_large
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from aploss.detectors import LOSS_NAMES, make_loss
from aploss.errors import ConfigError
from aploss.integrations import ScoreThresholdWarning, use_loss
from aploss.integrations.shared import softmax_log_odds
from aploss.losses import APLoss, FocalLoss, OHEMCrossEntropy, ap_loss

pytestmark = pytest.mark.filterwarnings("ignore::aploss.integrations.ScoreThresholdWarning")
Targets = list[dict[str, Tensor]]
KINDS = ["retinanet", "fcos", "ssd"]
SIZE = {"min_size": 96, "max_size": 96}


def make_model(kind: str) -> Any:
    """A small torchvision model with 3 classes (SSD: background and 3), or the SSDLite that people use."""
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
    backbone = BackboneWithFPN(body, levels, [16, 32, 32], 64, extra_blocks=LastLevelP6P7(64, 64))
    if kind == "fcos":
        return FCOS(backbone, 3, **SIZE)
    anchors = AnchorGenerator(((16, 24), (32, 48), (64, 96), (128,) * 2, (256,) * 2), ((1.0,),) * 5)
    return RetinaNet(backbone, 3, anchor_generator=anchors, **SIZE)


def _stage(channels: int, out_channels: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU())


def make_batch(kind: str) -> tuple[list[Tensor], Targets]:
    first = int(kind.startswith("ssd"))
    boxes = torch.tensor([[5.0, 8.0, 40.0, 44.0], [50.0, 40.0, 90.0, 90.0]])
    targets = [
        {"boxes": boxes, "labels": torch.tensor([first, first + 2])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
    ]
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(3, 96, 96, generator=generator) for _ in range(2)], targets


@pytest.mark.parametrize("kind", [*KINDS, "ssdlite320"])
def test_detections_are_bit_identical_before_and_after(kind: str) -> None:
    model = make_model(kind).eval()
    images, _ = make_batch(kind)
    with torch.inference_mode():
        before = model(images)
        keys = list(model.state_dict())
        assert use_loss(model, APLoss()) is model
        after = model(images)
    assert list(model.state_dict()) == keys
    for one, other in zip(before, after, strict=True):
        for key, value in one.items():
            assert torch.equal(value, other[key])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_every_loss_trains_every_kind(kind: str, name: str) -> None:
    if name == "ce-ohem" and kind != "ssd":
        pytest.skip("softmax needs a background column")
    loss = make_loss(name)
    calls = []
    loss.register_forward_hook(lambda *_: calls.append(name))
    model = use_loss(make_model(kind), loss).train()
    images, targets = make_batch(kind)
    losses = model(images, targets)
    sum(losses.values()).backward()
    assert calls == [name]
    assert {"classification", "bbox_regression"} <= set(losses)
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None and grad.isfinite().all() for grad in trained.values())
    heads = [n for n in trained if "classification_head" in n and trained[n].any()]
    assert heads


@pytest.mark.parametrize("kind", [*KINDS, "ssdlite320"])
def test_other_losses_stay_torchvisions(kind: str) -> None:
    model = make_model(kind).train()
    _freeze_norms(model)
    images, targets = make_batch(kind)
    expected = model(images, targets)
    found = use_loss(model, APLoss())(images, targets)
    assert set(found) == set(expected)
    for key in set(expected) - {"classification"}:
        torch.testing.assert_close(found[key], expected[key])
    assert found["classification"].item() != pytest.approx(expected["classification"].item())


@pytest.mark.parametrize(
    ("kind", "loss"), [("retinanet", FocalLoss()), ("fcos", FocalLoss()), ("ssd", OHEMCrossEntropy())]
)
def test_torchvisions_own_kind_of_loss_swapped_in_changes_nothing(kind: str, loss: nn.Module) -> None:
    model = make_model(kind).train()
    _freeze_norms(model)
    images, targets = make_batch(kind)
    images, targets = images[:1], targets[:1]  # torchvision averages RetinaNet over images
    expected = model(images, targets)["classification"]
    torch.testing.assert_close(use_loss(model, loss)(images, targets)["classification"], expected)


def test_a_loss_of_torch_gets_float_targets() -> None:
    model = use_loss(make_model("fcos"), nn.BCEWithLogitsLoss()).train()
    losses = model(*make_batch("fcos"))
    sum(losses.values()).backward()
    assert 0 < losses["classification"] < 10


def test_ap_loss_ranks_the_whole_batch_of_torchvisions_matches() -> None:
    model = use_loss(make_model("retinanet"), APLoss(delta=0.7)).train()
    seen: dict[str, Tensor] = {}
    model.head.classification_loss.register_forward_pre_hook(
        lambda _, arguments: seen.update(scores=arguments[0], targets=arguments[1])
    )
    images, targets = make_batch("retinanet")
    found = model(images, targets)["classification"]
    images_anchors_classes = (2, *seen["scores"].shape[1:2], 3)
    assert seen["scores"].shape == seen["targets"].shape == images_anchors_classes
    positives = (seen["targets"] == 1).sum(dim=(0, 1))
    assert (positives > 0).tolist() == [True, False, True]  # labels are columns
    torch.testing.assert_close(found, ap_loss(seen["scores"], seen["targets"], delta=0.7))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_dimension_0_rank_each_image_separately(kind: str) -> None:
    images, targets = make_batch(kind)
    targets[1] = targets[0]
    model = use_loss(make_model(kind), APLoss(groups=0)).train()
    _freeze_norms(model)
    together = model(images, targets)["classification"]
    alone = [model([image], [target])["classification"] for image, target in zip(images, targets, strict=True)]
    torch.testing.assert_close(together, torch.stack(alone).mean())


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
    model = use_loss(make_model(kind), APLoss()).train()
    _freeze_norms(model)
    images, targets = make_batch(kind)
    wanted = model(images, targets)["classification"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(images, targets)["classification"], wanted)
        use_loss(twin, FocalLoss())
    torch.testing.assert_close(model(images, targets)["classification"], wanted)


class MyHead(RetinaNetHead):
    """A head of the user's own."""


class MyRetinaNet(RetinaNet):
    """A model of the user's own."""


def test_loss_of_a_users_own_subclass_can_be_swapped_and_swapped_again() -> None:
    plain = make_model("retinanet")
    model = MyRetinaNet(plain.backbone, 3, anchor_generator=plain.anchor_generator, head=MyHead(64, 2, 3), **SIZE)
    use_loss(model, APLoss())
    use_loss(model, FocalLoss())
    assert (type(model), type(model.head)) == (MyRetinaNet, MyHead)
    assert isinstance(model.head.classification_loss, FocalLoss)
    images, targets = make_batch("retinanet")
    assert model.train()(images, targets)["classification"].isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_none_gives_the_original_back(kind: str) -> None:
    model = make_model(kind).train()
    _freeze_norms(model)
    images, targets = make_batch(kind)
    expected, attributes, threshold = (model(images, targets), set(dir(model.head)), model.score_thresh)
    modules = dict(model.named_modules())
    use_loss(model, APLoss(), score_thresh=0)
    assert use_loss(model, FocalLoss()).score_thresh == 0
    assert use_loss(model, None) is model
    assert use_loss(model, None).score_thresh == threshold  # a second time changes nothing
    assert dict(model.named_modules()) == modules
    assert set(dir(model.head)) == attributes
    torch.testing.assert_close(model(images, targets), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_swapped_model_is_scripted_where_the_plain_one_is(kind: str) -> None:
    images, _ = make_batch(kind)
    model = use_loss(make_model(kind), APLoss()).eval()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch finds scripting out of date
        (expected, *_), (_, (found, *_)) = model(images), torch.jit.script(model)(images)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


def test_a_swapped_model_is_compiled_with_its_loss() -> None:
    model = use_loss(make_model("retinanet"), APLoss()).train()
    _freeze_norms(model)
    images, targets = make_batch("retinanet")
    expected = model(images, targets)
    found = torch.compile(model, backend="eager")(images, targets)
    torch.testing.assert_close(found, expected)


def test_a_loss_with_weights_is_a_part_of_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
            return self.scale * ap_loss(scores, targets)

    model = use_loss(make_model("fcos"), Scaled()).train()
    sum(model(*make_batch("fcos")).values()).backward()
    assert dict(model.named_parameters())["head.classification_loss.scale"].grad is not None


@pytest.mark.parametrize("kind", ["retinanet", "fcos"])
def test_a_warning_says_that_the_models_threshold_is_arbitrary_for_the_loss(kind: str) -> None:
    with pytest.warns(ScoreThresholdWarning, match=r"score_thresh=0.*calibrate\(model") as caught:
        use_loss(make_model(kind), APLoss())
    assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_loss(make_model(kind), FocalLoss())  # calibrated
        assert use_loss(make_model(kind), APLoss(), score_thresh=0).score_thresh == 0


@pytest.mark.parametrize("wrong", [APLoss, ap_loss, "ap", 1])
def test_objects_that_are_not_losses_are_refused_at_once_and_change_nothing(wrong: Any) -> None:
    model = use_loss(make_model("fcos"), FocalLoss())
    with pytest.raises(ConfigError, match=r"a loss object such as APLoss\(\)"):
        use_loss(model, wrong)
    assert isinstance(model.head.classification_loss, FocalLoss)


def test_unsupported_models_losses_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="got FasterRCNN"):
        use_loss(fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None), APLoss())
    with pytest.raises(ConfigError):
        use_loss(make_model("retinanet"), OHEMCrossEntropy())
    with pytest.raises(ConfigError):
        use_loss(make_model("retinanet"), APLoss(), weights={"class": 1.0})


def _freeze_norms(model: nn.Module) -> None:
    """So that two passes over the same images give the same numbers."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.Dropout):
            module.eval()
