"""Weights from small files made here, placed where torch.hub would have put a download."""

import urllib.error
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import get_weight, mobilenet_v3_large, resnet18
from torchvision.models.detection import retinanet_resnet50_fpn, ssdlite320_mobilenet_v3_large

from aploss.detectors import build_detector, save_detector
from aploss.detectors.detector import DETECTORS
from aploss.detectors.weights import load_weights
from aploss.errors import ConfigError, RunError

RESNET18 = "resnet18-f37072fd.pth"
RETINANET = "retinanet_resnet50_fpn_coco-eeacb38b.pth"
MOBILENET = "mobilenet_v3_large-8738ca79.pth"
SSDLITE = "ssdlite320_mobilenet_v3_large_coco-a79551df.pth"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty torch hub folder, and a machine without network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def no_network(*arguments: object, **options: object) -> None:
        raise urllib.error.URLError("Network is unreachable")

    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def _shake(model: nn.Module) -> nn.Module:
    """Random values everywhere, also where initialisation leaves zeros and ones."""
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.02)
    return model


def _random_resnet18() -> dict[str, torch.Tensor]:
    return _shake(resnet18(weights=None)).state_dict()


def test_imagenet_weights_fill_the_backbone_and_leave_the_rest_as_initialised(hub: Path) -> None:
    state = _random_resnet18()
    torch.save(state, hub / RESNET18)
    torch.manual_seed(0)
    plain = build_detector("retinanet-r18", class_names=["cat"], norm="frozen-bn")
    torch.manual_seed(0)
    detector = build_detector("retinanet-r18", class_names=["cat"], norm="frozen-bn")

    report = load_weights(detector, "imagenet")

    for name, tensor in state.items():
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked"):
            assert torch.equal(detector.backbone.body.state_dict()[name], tensor), name
    for name, tensor in plain.state_dict().items():
        if not name.startswith("backbone.body."):
            assert torch.equal(detector.state_dict()[name], tensor), name
    assert all(name.startswith("backbone.body.") for name in report.loaded)
    assert not report.mismatched
    assert {name.split(".")[1] for name in report.missing if "backbone" in name} == {"fpn"}
    assert report.unused == ["backbone.body.fc.weight", "backbone.body.fc.bias"]


def test_without_network_one_line_says_which_file_to_place_where(hub: Path) -> None:
    with pytest.raises(RunError) as caught:
        build_detector("retinanet-r18", class_names=["cat"], weights="imagenet")
    assert f"https://download.pytorch.org/models/{RESNET18}" in str(caught.value)
    assert str(hub / RESNET18) in str(caught.value)


def test_every_named_weight_exists_in_torchvision() -> None:
    names = [name for _, config in DETECTORS.items() for name in config.named_weights.items()]
    assert {kind for kind, _ in names} == {"imagenet", "coco"}
    assert len(names) == 10
    for _, name in names:
        assert get_weight(name).url.startswith("https://")


@pytest.mark.parametrize("weights", ["imagenet", "imagenett", "ResNet18_Weights.IMAGENET1K_V1"])
def test_unknown_weights_are_refused(weights: str) -> None:
    with pytest.raises(ConfigError):
        build_detector("retinanet-tiny", class_names=["cat"], weights=weights)


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_a_classifier_from_a_training_checkpoint_of_another_tool(key: str, tmp_path: Path) -> None:
    state = _random_resnet18()
    torch.save({key: {f"module.{k}": v for k, v in state.items()}, "epoch": 3}, tmp_path / "mine.pth")
    body = build_detector("retinanet-r18", class_names=["cat"], weights=str(tmp_path / "mine.pth")).backbone.body
    assert torch.equal(body.layer4[1].conv2.weight, state["layer4.1.conv2.weight"])


def test_batch_norm_weights_do_not_go_into_group_norms(hub: Path) -> None:
    torch.save(_random_resnet18(), hub / RESNET18)
    detector = build_detector("retinanet-r18", class_names=["cat"], norm="group")
    report = load_weights(detector, "imagenet")
    assert "backbone.body.bn1.weight" in report.mismatched
    assert "backbone.body.conv1.weight" in report.loaded
    assert torch.equal(detector.backbone.body.bn1.weight, torch.ones(64))


def test_mobilenet_weights_land_where_torchvisions_own_detector_has_them(hub: Path) -> None:
    torch.save(_shake(mobilenet_v3_large(weights=None)).state_dict(), hub / MOBILENET)
    detector = build_detector("ssdlite", class_names=["cat"], weights="imagenet")
    theirs = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone="IMAGENET1K_V1")
    expected, own = theirs.backbone.state_dict(), detector.backbone.state_dict()
    features = [name for name in expected if name.startswith("features.")]
    assert len(features) > 250
    for name in features:
        assert torch.equal(own[name], expected[name]), name


def test_coco_retinanet_gives_torchvisions_own_detections(hub: Path) -> None:
    """Same boxes: the regression is rescaled to our box code; the classes are COCO's."""
    classes = get_weight("RetinaNet_ResNet50_FPN_Weights.COCO_V1").meta["categories"]
    theirs = retinanet_resnet50_fpn(weights=None, weights_backbone=None, min_size=96, max_size=128)
    torch.manual_seed(1)
    for layer in (theirs.head.classification_head.cls_logits, theirs.head.regression_head.bbox_reg):
        nn.init.normal_(layer.weight, std=0.05)
    state = theirs.state_dict()
    old_names = {  # the file on torchvision's server is from before it renamed these
        f"head.{part}_head.conv.{i}.0.{kind}": f"head.{part}_head.conv.{2 * i}.{kind}"
        for part in ("classification", "regression")
        for i in range(4)
        for kind in ("weight", "bias")
    }
    torch.save({old_names.get(k, k): v for k, v in state.items()}, hub / RETINANET)
    detector = build_detector(
        "retinanet-r50", class_names=classes, weights="coco", test_size=(96, 128), score_threshold=0.0
    ).eval()
    theirs.score_thresh = 0.0
    theirs.topk_candidates = theirs.detections_per_img = 10**6
    detector.topk_per_level = detector.detections_per_image = 10**6
    theirs.eval()

    image = torch.rand(3, 96, 128)
    with torch.no_grad():
        own, other = detector([image])[0], theirs([image])[0]

    boxes = other["boxes"]  # torchvision keeps boxes that lie outside of the image
    inside = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(dim=1)
    for label in (18, 1):  # dog and person
        wanted = (other["labels"] == label) & inside
        mine = own["labels"] == label
        assert wanted.sum() > 20
        torch.testing.assert_close(own["scores"][mine], other["scores"][wanted], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(own["boxes"][mine][:20], other["boxes"][wanted][:20], rtol=1e-3, atol=1e-2)


def test_coco_ssdlite_with_a_ranking_loss_gets_a_new_class_layer_and_all_boxes(hub: Path) -> None:
    state = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None).state_dict()
    torch.save(state, hub / SSDLITE)
    detector = build_detector("ssdlite", class_names=["cat"], loss="ap", norm="batch")
    report = load_weights(detector, "coco")
    assert len(report.mismatched) == 12
    assert all("classification_head.module_list" in name for name in report.mismatched)
    box_layer = "head.regression_head.module_list.5.1.weight"
    assert torch.equal(detector.state_dict()[box_layer], state[box_layer])


def test_the_class_head_loads_only_for_the_same_classes_in_the_same_order(tmp_path: Path) -> None:
    trained = build_detector("retinanet-tiny", class_names=["cat", "dog"])
    _shake(trained)
    save_detector(trained, tmp_path / "trained.pt")
    for classes, loads in ((["cat", "dog"], True), (["dog", "cat"], False), (["cat", "horse"], False)):
        detector = build_detector("retinanet-tiny", class_names=classes)
        report = load_weights(detector, tmp_path / "trained.pt")
        assert (not report.mismatched) == loads
        own, theirs = (one.head.classification_head.cls_logits.bias for one in (detector, trained))
        assert torch.equal(own, theirs) == loads
        assert torch.equal(detector.head.regression_head.bbox_reg.weight, trained.head.regression_head.bbox_reg.weight)


def test_a_state_dict_of_ours_is_not_rescaled_and_its_class_head_loads_only_in_the_same_shape(tmp_path: Path) -> None:
    trained = _shake(build_detector("retinanet-tiny", class_names=["cat", "dog"]))
    torch.save(trained.state_dict(), tmp_path / "state.pt")
    layer = "head.classification_head.cls_logits"
    for classes, mismatched in ((["a", "b"], []), (["a", "b", "c"], [f"{layer}.weight", f"{layer}.bias"])):
        detector = build_detector("retinanet-tiny", class_names=classes)
        report = load_weights(detector, tmp_path / "state.pt")
        assert (report.mismatched, report.missing) == (mismatched, [])
        own, theirs = detector.state_dict(), trained.state_dict()
        assert all(torch.equal(own[name], tensor) for name, tensor in theirs.items() if name not in mismatched)
    assert "different shape, kind or classes): head.classification_head (2)" in str(report)


def test_weights_that_fit_nowhere_and_files_without_weights_are_refused(tmp_path: Path) -> None:
    torch.save({"encoder.weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(ConfigError):
        build_detector("retinanet-tiny", class_names=["a"], weights=str(tmp_path / "other.pt"))
    torch.save([1, 2, 3], tmp_path / "list.pt")
    with pytest.raises(RunError):
        build_detector("retinanet-tiny", class_names=["a"], weights=str(tmp_path / "list.pt"))
