"""Configs: what is wrong is named by its key, what is right survives a round trip."""

import math

import pytest
import yaml

from aploss.errors import ConfigError
from aploss.training.config import BatchesConfig, TrainConfig, config_from_dict, config_to_dict


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"losss": "ap"}, "losss"),
        ({"optimizer": {"lr": 0.1}}, "optimizer.lr"),
        ({"batches": {"size": 0}}, "batches.size"),
        ({"batches": 4}, "batches"),
        ({"batches": {"image_size": [320, 16]}}, "batches.image_size"),
        ({"schedule": {"kind": "milestones", "milestones": [3, 2]}}, "schedule.milestones"),
        ({"schedule": {"milestones": [3]}}, "schedule.milestones"),
        ({"schedule": {"kind": "milestones", "milestones": [float("nan")]}}, "schedule.milestones"),
        ({"optimizer": {"learning_rate": math.nan}}, "optimizer.learning_rate"),
        ({"model": {"ema": 1.0}}, "model.ema"),
        ({"seed": -1}, "seed"),
        ({"precision": "int8"}, "precision"),
        ({"validation": {"metric": "mAP"}}, "validation.metric"),
        ({"seed": 10**23}, "seed"),
        ({"batches": {"image_size": 100_000}}, "batches.image_size"),
        ({"validation": {"every": math.inf}}, "validation.every"),
        ({"criterion": {"box_weight": "heavy"}}, "criterion.box_weight"),
        ({"model": {"frozen": "backbone"}}, "model.frozen"),
    ],
)
def test_a_wrong_setting_is_named_by_its_key_in_one_line(values: dict, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_from_dict(values)
    assert key in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_survives_yaml() -> None:
    config = config_from_dict(
        {
            "data": "builtin",
            "batches": {"image_size": [240, 320]},
            "model": {"frozen": ["backbone.*"], "options": {"test_size": [240, 320]}},
            "criterion": {"box_weight": "balanced", "options": {"delta": 0.5}},
            "schedule": {"kind": "milestones", "milestones": [1.5, 2]},
            "optimizer": yaml.safe_load("learning_rate: 1e-3"),  # a string for YAML 1.1
        }
    )
    text = yaml.safe_dump(config_to_dict(config))
    assert config_from_dict(yaml.safe_load(text)) == config
    assert (config.batches.image_size, config.optimizer.learning_rate) == ((240, 320), 0.001)


def test_settings_made_in_python_are_checked_by_the_same_rules() -> None:
    with pytest.raises(ConfigError, match=r"batches\.size = 0: .* >= 1"):
        BatchesConfig(size=0)
    with pytest.raises(ConfigError, match=r"precision = 'int8': .* float32, bfloat16, float16"):
        TrainConfig(precision="int8")  # type: ignore[arg-type]
    assert BatchesConfig(image_size=[64, 96]).image_size == (64, 96)  # type: ignore[arg-type]
    assert TrainConfig(max_minutes=3).max_minutes == 3.0
