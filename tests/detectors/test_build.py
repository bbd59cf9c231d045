"""Detectors by name, and rebuilt from their config."""

import json
from pathlib import Path

import pytest
import torch

from aploss.detectors import DETECTOR_NAMES, LOSS_NAMES, Detector, build_detector, save_detector
from aploss.detectors.build import detector_options
from aploss.errors import ConfigError
from aploss.losses.ap_loss import APLoss


@pytest.mark.parametrize("name", DETECTOR_NAMES)
def test_config_is_plain_and_rebuilds_the_same_detector(name: str) -> None:
    detector = build_detector(
        name, class_names=["a", "b"], loss="ap", loss_options={"delta": 0.5}, nms_iou=0.6
    )
    detector.detections_per_image = 7
    config = json.loads(json.dumps(detector.config))
    again = build_detector(**config)
    again.load_state_dict(detector.state_dict())
    assert again.config == detector.config
    assert (again.name, again.loss_name, again.nms_iou) == (name, "ap", 0.6)
    assert again.criterion.loss.delta == 0.5
    assert again.detections_per_image == 7
    assert isinstance(again, Detector)


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_every_loss_is_rebuilt_by_name(loss: str) -> None:
    detector = build_detector("retinanet-tiny", class_names=["a"], loss=loss)
    again = build_detector(**detector.config)
    assert again.loss_name == detector.loss_name == loss
    assert again.criterion.box_weight == detector.criterion.box_weight
    assert detector.score_threshold is None


def test_loss_object_is_used_as_it_is() -> None:
    loss = APLoss(delta=2.0)
    detector = build_detector("retinanet-tiny", class_names=["a"], loss=loss)
    assert detector.criterion.loss is loss
    assert detector.config["loss_options"]["delta"] == 2.0
    with pytest.raises(ConfigError, match="loss_options go with a loss by name"):
        build_detector("retinanet-tiny", class_names=["a"], loss=loss, loss_options={"delta": 1.0})


def test_detector_with_a_loss_of_the_users_own_is_rebuilt_for_inference() -> None:
    detector = build_detector("retinanet-tiny", class_names=["a"], loss=torch.nn.SoftMarginLoss())
    again = build_detector(**detector.config).eval()
    again.load_state_dict(detector.state_dict())
    with torch.inference_mode():
        assert len(again(torch.rand(1, 3, 64, 64))) == 1


def test_wrong_names_and_options_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="no detector 'yolo'; choose one of: retinanet-tiny"):
        build_detector("yolo", class_names=["a"])
    with pytest.raises(ConfigError, match="retinanet-tiny has no option 'norm'; it has: anchors"):
        build_detector("retinanet-tiny", class_names=["a"], norm="group")
    with pytest.raises(ConfigError, match="class_names is empty"):
        build_detector("retinanet-tiny", class_names=[])


def test_options_of_a_detector_are_told() -> None:
    assert detector_options("retinanet-r50")[:4] == (
        "norm",
        "anchors_per_cell",
        "anchor_grid",
        "trainable_stages",
    )
    assert "test_size" in detector_options("ssd512")


def test_state_has_weights_of_backbone_and_head_alone() -> None:
    state = build_detector("retinanet-tiny", class_names=["a"]).state_dict()
    assert {name.split(".")[0] for name in state} == {"backbone", "head"}


def test_weights_of_our_own_keep_the_architecture_they_were_trained_with(tmp_path: Path) -> None:
    """Not the frozen batch norm that torchvision's weights get."""
    options = {"norm": "group", "anchors_per_cell": 9}
    trained = build_detector("retinanet-r18", class_names=["a"], **options)
    file = save_detector(trained, tmp_path / "detector.pt")
    further = build_detector("retinanet-r18", class_names=["a", "b"], loss="focal", weights=file)
    assert further.config["norm"] == "group"
    assert further.config["anchors_per_cell"] == 9
    assert torch.equal(further.backbone.body.conv1.weight, trained.backbone.body.conv1.weight)


def test_no_weights_can_be_said_in_a_word() -> None:
    detector = build_detector("retinanet-r18", class_names=["a"], weights="none")
    assert "norm" not in detector.config
