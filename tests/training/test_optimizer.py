"""Parameter groups and frozen layers."""

import pytest
import torch
from torch import nn

from aploss.detectors.build import build_detector
from aploss.errors import ConfigError
from aploss.training.config import OptimizerConfig
from aploss.training.optimizer import freeze, make_optimizer


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.BatchNorm2d(4))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Conv2d(4, 2, 1)


def test_norms_biases_and_scalars_are_not_decayed() -> None:
    model = Small()
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1))
    assert isinstance(optimizer, torch.optim.AdamW)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    by_name = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    assert by_name == {
        "scale": 0.0,
        "body.0.weight": 0.1,
        "body.0.bias": 0.0,
        "body.1.weight": 0.0,
        "body.1.bias": 0.0,
        "body.2.weight": 0.0,
        "body.2.bias": 0.0,
        "head.weight": 0.1,
        "head.bias": 0.0,
    }


def test_the_papers_sgd_decays_everything_with_momentum() -> None:
    config = OptimizerConfig(
        name="sgd", learning_rate=0.001, weight_decay=1e-4, decay_norms_and_biases=True
    )
    optimizer = make_optimizer(Small(), config)
    assert isinstance(optimizer, torch.optim.SGD)
    assert [(g["weight_decay"], g["momentum"]) for g in optimizer.param_groups] == [(1e-4, 0.9)]


def test_frozen_parameters_are_left_out() -> None:
    detector = build_detector("retinanet-tiny", class_names=["a"])
    everything = sum(1 for _ in detector.parameters())
    frozen = freeze(detector, ["backbone.body", "head.classification_head.conv.*"])
    optimizer = make_optimizer(detector, OptimizerConfig())
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert 0 < frozen == everything - len(trained)
    assert not any(p.requires_grad for p in detector.backbone.body.parameters())


def test_a_pattern_that_matches_nothing_is_an_error_that_helps() -> None:
    with pytest.raises(ConfigError, match=r"'backbon\.\*' matches no parameter; below .*head"):
        freeze(Small(), ["backbon.*"])


def test_nothing_left_to_train_is_an_error() -> None:
    model = Small()
    freeze(model, ["*"])
    with pytest.raises(ConfigError, match="nothing to train"):
        make_optimizer(model, OptimizerConfig())
