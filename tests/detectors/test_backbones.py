"""RetinaNet on backbones of different kinds: it trains, is saved, loaded and exported."""

import pytest
import torch

from aploss.detectors import build_detector, load, save_detector
from aploss.errors import ConfigError, RunError

KINDS = ["resnet10t", "convnext_atto", "pvt_v2_b0", "swin_tiny_patch4_window7_224"]


@pytest.fixture(scope="module", autouse=True)
def timm():
    """The package, which takes seconds to import."""
    return pytest.importorskip("timm", reason="timm is not installed")


def make(backbone, **options):
    torch.manual_seed(0)
    return build_detector("retinanet", class_names=["cat", "dog"], backbone=backbone, test_size=(64, 64), **options)


@pytest.mark.parametrize("backbone", KINDS)
def test_a_backbone_trains_a_step_and_comes_back_from_a_file(backbone, tmp_path):
    detector = make(backbone)
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    target = {"boxes": torch.tensor([[4.0, 4.0, 44.0, 44.0]]), "labels": torch.tensor([1])}
    optimizer = torch.optim.SGD(detector.parameters(), lr=0.01)
    sum(detector(images, [target, target]).values()).backward()
    moved = [name for name, weight in detector.named_parameters() if weight.grad is not None and weight.grad.any()]
    assert any(name.startswith("backbone.body.model.") for name in moved)
    optimizer.step()
    save_detector(detector, tmp_path / "detector.pt")
    again = load(tmp_path / "detector.pt")
    with torch.inference_mode():
        for mine, theirs in zip(detector.eval()(images), again.eval()(images), strict=True):
            assert torch.equal(mine["scores"], theirs["scores"])
            assert torch.equal(mine["boxes"], theirs["boxes"])


def test_weights_of_the_classifier_go_into_the_backbone(timm, tmp_path):
    classifier = timm.create_model("resnet10t", pretrained=False)
    torch.save(classifier.state_dict(), tmp_path / "resnet10t.pth")
    detector = make("resnet10t", weights=tmp_path / "resnet10t.pth")
    loaded = detector.state_dict()["backbone.body.model.layer1.0.conv1.weight"]
    assert torch.equal(loaded, classifier.layer1[0].conv1.weight)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in detector.backbone.body.modules())


@pytest.mark.parametrize(
    ("backbone", "words"), [("resnet5000", "no model 'resnet5000'"), ("vit_tiny_patch16_224", "strides")]
)
def test_a_backbone_that_does_not_fit_is_refused_by_name(backbone, words):
    with pytest.raises(ConfigError, match=words):
        make(backbone)


def test_without_a_network_the_message_says_what_to_fetch(timm, monkeypatch):
    def no_network(*arguments, **options):
        if options.get("pretrained"):
            raise OSError("no network")
        return create(*arguments, **options)

    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", no_network)
    with pytest.raises(RunError, match="use the file as weights"):
        make("resnet10t", weights="imagenet")
