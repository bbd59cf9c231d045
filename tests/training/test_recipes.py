"""Recipes: the paper's hold the paper's settings, and everything in them can be built."""

import json
from pathlib import Path
from typing import Any

import pytest

from aploss.detectors import DETECTOR_NAMES, LOSS_NAMES, make_loss
from aploss.detectors.detector import DETECTORS
from aploss.errors import ConfigError
from aploss.training.config import config_from_dict, config_to_dict, load_config, read_recipe, recipe_names

PAPER = ["voc-retinanet-r50", "voc-retinanet-r101", "coco-retinanet-r50", "coco-retinanet-r101", "voc-ssd512"]


@pytest.mark.parametrize("name", PAPER)
def test_paper_recipes_have_the_settings_of_section_4_1(name: str) -> None:
    config = load_config(name)
    assert config.loss == "ap"
    assert config.criterion.options == {"delta": 1.0, "interpolated": True}
    assert config.criterion.rank_over == "batch"
    assert not config.criterion.rank_over_processes  # each GPU ranks its own 8 images
    assert config.batches.size * config.batches.accumulate == 2 * 8
    assert config.batches.image_size == 512
    assert config.batches.augmentation == "paper"
    assert config.model.weights == "imagenet"
    assert config.model.options["nms_iou"] == 0.5
    optimizer, schedule = config.optimizer, config.schedule
    assert (optimizer.name, optimizer.learning_rate) == ("sgd", 0.001)
    assert (optimizer.momentum, optimizer.weight_decay) == (0.9, 0.0001)
    assert (schedule.kind, schedule.unit, schedule.gamma) == ("milestones", "epochs", 0.1)
    assert schedule.warmup_steps == 500
    assert schedule.warmup_factor == pytest.approx(1 / 3)
    assert config.evaluation.checkpoint == "last"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_names_things_that_exist(name: str) -> None:
    for loss in LOSS_NAMES:
        config = load_config(name, {"loss": loss})
        assert config.loss == loss
        make_loss(loss, **config.criterion.options)
        assert config.detector in DETECTOR_NAMES
        assert set(config.model.options) <= set(DETECTORS.get(config.detector).option_names())
    assert set(read_recipe(name).get("losses", {})) <= set(LOSS_NAMES)


def test_what_is_more_particular_wins(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "loss: ap\n"
        "optimizer: {learning_rate: 0.1, momentum: 0.5}\n"
        "losses:\n"
        "  focal: {optimizer: {learning_rate: 0.2}}\n"
    )
    focal = load_config(str(recipe), {"loss": "focal"}).optimizer
    assert (focal.learning_rate, focal.momentum) == (0.2, 0.5)
    assert load_config(str(recipe)).optimizer.learning_rate == 0.1
    own = load_config(str(recipe), {"loss": "focal", "optimizer": {"learning_rate": 0.3}})
    assert own.optimizer.learning_rate == 0.3


@pytest.mark.parametrize(
    "text",
    [
        "a: [1", "- 1", "a: " + "[" * 100_000, "losses: {focal: {optimiser: {}}}", "losses: {focal: 3}",
        "extends: mine.yaml", "extends: other.yaml", "extends: missing.yaml", "extends: voc",
        "extends: [demo, any-cpu]",
    ],
)  # fmt: skip
def test_mistakes_in_recipes_name_the_file_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text + "\n")
    (tmp_path / "other.yaml").write_text("extends: mine.yaml\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml") as error:
        load_config(str(tmp_path / "mine.yaml"), {"loss": "focal"})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["voc", "no.yaml"])
def test_recipes_that_do_not_exist_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no recipe '{name}'; choose from any-cpu"):
        load_config(name)


# --- inheritance ---

# Of the recipes when each was still written out in full: what they stand for must not drift.
RESOLVED: dict[str, Any] = json.loads(Path(__file__).with_name("resolved_recipes.json").read_text(encoding="utf-8"))


def held_by(frozen: Any, values: Any) -> bool:
    """Whether everything frozen is there; settings that came later may be, too."""
    if isinstance(frozen, dict) and isinstance(values, dict):
        return all(key in values and held_by(frozen[key], values[key]) for key in frozen)
    return bool(frozen == values)


@pytest.mark.parametrize("name", RESOLVED)
def test_recipes_that_extend_resolve_to_what_they_were_in_full(name: str) -> None:
    resolved = config_to_dict(load_config(name))
    assert held_by(RESOLVED[name]["config"], resolved)
    # Options are free keys: none may have come in from a base.
    for group in ("model", "criterion"):
        assert resolved[group]["options"] == RESOLVED[name]["config"][group]["options"]
    for loss, expected in RESOLVED[name]["criterion_by_loss"].items():
        config = load_config(name, {"loss": loss})
        assert held_by(expected, config_to_dict(config)["criterion"])


def test_no_recipe_has_been_lost() -> None:
    assert set(RESOLVED) <= set(recipe_names())
    assert not any(name.startswith("_") for name in recipe_names())


def test_a_file_extends_a_packaged_recipe_or_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    base, mine = tmp_path / "base.yaml", tmp_path / "lab" / "mine.yaml"
    base.write_text("extends: voc-ssd512\nbatches: {size: 4}\nlosses: {focal: {seed: 7}}\n")
    mine.write_text("extends: ../base.yaml\nschedule: {length: 3, milestones: []}\n")
    config = load_config(str(mine), {"loss": "focal"})
    assert (config.detector, config.batches.size, config.schedule.length) == ("ssd512", 4, 3)
    assert config.batches.image_size == 512
    assert config.criterion.options == {"alpha": 0.25, "gamma": 1.0}
    assert config.seed == 7


def test_a_config_file_that_extends_is_pointed_to_recipe() -> None:
    with pytest.raises(ConfigError, match="'extends' is only valid in a recipe"):
        config_from_dict({"extends": "demo"})
