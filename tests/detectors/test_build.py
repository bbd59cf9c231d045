"""Detectors by name, rebuilt from their config, and a user's own kind in one file."""

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18
from torchvision.models.feature_extraction import create_feature_extractor

import aploss.detectors
from aploss.detectors import (
    DETECTOR_NAMES,
    Detector,
    DetectorConfig,
    build_detector,
    make_loss,
    register_detector,
    retinanet_network,
    save_detector,
)
from aploss.errors import ConfigError
from aploss.losses import APLoss, LossTraits, register_loss


@pytest.mark.parametrize("name", DETECTOR_NAMES)
def test_config_is_plain_and_rebuilds_the_same_detector(name: str) -> None:
    if name == "retinanet":
        pytest.importorskip("timm", reason="timm is not installed (extra `hf`)")
    detector = build_detector(name, class_names=["a", "b"], loss_options={"delta": 0.5}, nms_iou=0.6, assigner="atss")
    detector.detections_per_image = 7
    config = json.loads(json.dumps(detector.config))
    again = build_detector(**config)
    again.load_state_dict(detector.state_dict())
    assert again.config == detector.config
    assert (again.name, again.loss_name, again.nms_iou) == (name, "ap", 0.6)
    assert again.criterion.loss.delta == 0.5
    assert again.detections_per_image == 7
    assert isinstance(again, Detector)


def test_loss_object_is_used_as_it_is() -> None:
    loss = APLoss(delta=2.0)
    detector = build_detector("retinanet-tiny", class_names=["a"], loss=loss)
    assert detector.criterion.loss is loss
    assert detector.config["loss_options"]["delta"] == 2.0
    with pytest.raises(ConfigError):
        build_detector("retinanet-tiny", class_names=["a"], loss=loss, loss_options={"delta": 1.0})


class _Softmax(nn.Module):
    traits = LossTraits(softmax=True)


@pytest.mark.parametrize("loss", [nn.SoftMarginLoss(), _Softmax()])
def test_detector_with_a_loss_of_the_users_own_is_rebuilt_for_inference(loss: nn.Module) -> None:
    detector = build_detector("retinanet-tiny", class_names=["a"], loss=loss)
    assert detector.config["loss"] == "custom"
    again = build_detector(**detector.config).eval()
    again.load_state_dict(detector.state_dict())
    assert again.uses_softmax == isinstance(loss, _Softmax)
    with torch.inference_mode():
        assert len(again(torch.rand(1, 3, 64, 64))) == 1


def test_wrong_names_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="retinanet-tiny has no option 'norm'; it has: anchors"):
        build_detector("retinanet-tiny", class_names=["a"], norm="group")
    for name, classes in (("yolo", ["a"]), ("retinanet-tiny", []), ("retinanet-tiny", "ab")):
        with pytest.raises(ConfigError):
            build_detector(name, class_names=classes)


def test_weights_of_our_own_keep_the_architecture_they_were_trained_with(tmp_path: Path) -> None:
    """Not the frozen batch norm that torchvision's weights get."""
    options = {"norm": "group", "anchors_per_cell": 9}
    trained = build_detector("retinanet-r18", class_names=["a"], **options)
    file = save_detector(trained, tmp_path / "detector.pt")
    further = build_detector("retinanet-r18", class_names=["a", "b"], loss="focal", weights=file)
    assert further.config["norm"] == "group"
    assert further.config["anchors_per_cell"] == 9
    assert torch.equal(further.backbone.body.conv1.weight, trained.backbone.body.conv1.weight)


def test_the_backbone_may_give_a_list_of_maps_and_its_strides_are_found() -> None:
    body = create_feature_extractor(resnet18(weights=None), {"layer1": "a", "layer2": "b"})
    network = retinanet_network(_AsList(body), columns=2, softmax=False, channels=32)
    assert network.size_divisor == 8
    assert [len(level) for level in network.anchors(64, 64, [(16, 16), (8, 8), (4, 4), (2, 2)])] == [
        6 * cells**2 for cells in (16, 8, 4, 2)
    ]
    assert network.head.classification_head.cls_logits.out_channels == 6 * 2
    skipping = create_feature_extractor(resnet18(weights=None), {"layer1": "a", "layer3": "b"})
    with pytest.raises(ConfigError, match="got strides 4, 16"):
        retinanet_network(skipping, columns=2, softmax=False)
    for wrong in ({"anchors_per_cell": 3}, {"anchor_grid": "torch"}, {"p6_from": "c4"}, {"initialisation": "caffe"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            retinanet_network(_AsList(body), columns=2, softmax=False, **wrong)  # type: ignore[arg-type]


class _AsList(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor) -> list[Tensor]:
        return list(self.body(images).values())


def test_names_are_taken_once_and_only_configs_are_detectors() -> None:
    with pytest.raises(ConfigError):

        @register_detector("ssd300")
        class Mine(DetectorConfig):
            pass

    with pytest.raises(ConfigError):
        register_detector("linear")(nn.Linear)  # type: ignore[type-var]


def test_the_config_of_a_detector_is_frozen_and_checked() -> None:
    architecture = build_detector("ssd300", class_names=["a"]).architecture
    with pytest.raises(FrozenInstanceError):
        architecture.nms_iou = 0.9  # type: ignore[misc]
    of_all = {"test_size": (0, 100), "nms_iou": 2, "topk_per_level": True, "detections_per_image": 0}
    of_resnets = {
        "norm": "layer",
        "anchors_per_cell": 3,
        "anchor_grid": "other",
        "p6_from": "c4",
        "trainable_stages": 6,
    }
    wrong = {
        "ssd300": {**of_all, "anchor_scales": (0.1, 0.2)},
        "ssdlite": {"norm": "layer"},
        "retinanet-r18": of_resnets,
    }
    for name, options in wrong.items():
        for option, value in options.items():
            with pytest.raises(ConfigError, match=option):
                build_detector(name, class_names=["a"], **{option: value})


@pytest.mark.parametrize("loss", ["ap", "focal", "ce-ohem"])
@pytest.mark.parametrize("name", ["retinanet-tiny", "retinanet-r18", "ssdlite"])
def test_sigmoid_scores_start_at_the_prior_and_a_softmax_has_a_background_column(name: str, loss: str) -> None:
    torch.manual_seed(0)
    detector = build_detector(name, class_names=["a", "b"], loss=loss)
    with torch.inference_mode():
        logits, deltas = detector.heads(torch.rand(1, 3, 96, 96))
    assert logits.shape[:2] == deltas.shape[:2] == (1, sum(map(len, detector.anchors_for(96, 96))))
    assert logits.shape[2] == (3 if detector.uses_softmax else 2)
    if not detector.uses_softmax:
        assert logits.sigmoid().median().item() == pytest.approx(0.01, abs=0.003)
    elif name != "ssdlite":  # its head keeps torchvision's initialisation
        assert detector.head.classification_head.cls_logits.bias.abs().max() == 0


def test_a_config_of_earlier_versions_builds_the_same_detector() -> None:
    """They stored options of the architecture only where they had been given."""
    config = {
        "name": "retinanet-r18", "anchors_per_cell": 9, "class_names": ["a", "b"], "loss": "ap",
        "loss_options": {"delta": 0.5, "interpolated": True, "max_positives": None}, "rank_over": "batch",
        "box_loss": "smooth-l1", "box_weight": 1.0, "test_size": [600, 1000],
        "score_threshold": None, "topk_per_level": 1000, "nms_iou": 0.5,
        "detections_per_image": 100, "channels_last": False,
    }  # fmt: skip
    detector = build_detector(**config)
    loss_options = detector.config["loss_options"]
    assert (loss_options["delta"], loss_options["interpolated"]) == (0.5, True)
    assert {**detector.config, "test_size": [600, 1000]} == {
        **config, "norm": "group", "anchor_grid": "exact", "p6_from": "p5",
        "initialisation": "torchvision", "trainable_stages": 5, "assigner": "iou",
        "hard_boxes": "ignore",
        "loss_options": loss_options,
    }  # fmt: skip


def test_a_registered_loss_is_built_described_and_listed() -> None:
    @register_loss("mean-of-positives")
    class MeanOfPositives(nn.Module):
        traits = LossTraits(box_loss="giou", box_weight=2.0)

        def __init__(self, scale: float = 1.0, *, offset: int = 0, process_group: Any = None):
            super().__init__()
            self.scale, self.process_group = scale, process_group  # offset is not kept

        def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
            return -self.scale * scores[targets == 1].mean()

    assert "mean-of-positives" in aploss.detectors.LOSS_NAMES
    detector = build_detector(
        "retinanet-tiny", class_names=["a"], loss="mean-of-positives", loss_options={"scale": 3.0}
    )
    detector.criterion.loss.process_group = object()
    assert (detector.criterion.box_loss, detector.criterion.box_weight) == ("giou", 2.0)
    assert detector.config["loss"] == detector.loss_name == "mean-of-positives"
    assert detector.config["loss_options"] == {"scale": 3.0}
    with pytest.raises(ConfigError):
        make_loss("mean-of-positives", process_group=None)


def test_the_initial_weights_do_not_depend_on_the_loss() -> None:
    """Also if a loss draws random numbers for parameters of its own."""

    @register_loss("random-scale")
    class RandomScale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(3))

    states = []
    for loss in ("ap", "focal", "random-scale"):
        torch.manual_seed(0)
        states.append(build_detector("retinanet-tiny", class_names=["a"], loss=loss).head.state_dict())
    assert all(torch.equal(value, other[name]) for other in states[1:] for name, value in states[0].items())
