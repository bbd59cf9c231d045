"""What is compared, before anything is trained."""

import pytest

from aploss.errors import ConfigError
from aploss.reproduction.compare import comparison_plan
from aploss.reproduction.execute import runs_of
from aploss.reproduction.plan import Tuning, comparison_config, parse_seeds, with_length
from aploss.training.config import differing_keys


def test_rows_differ_in_the_loss_alone() -> None:
    plan = comparison_plan(["ap", "focal", "ce-ohem"], recipe="demo", seeds=[0])
    first = plan.variants[0].config
    for variant in plan.variants[1:]:
        assert differing_keys(first, variant.config) == ["loss"]


def test_a_recipes_settings_of_a_loss_are_taken() -> None:
    plan = comparison_plan(["ap", "focal"], recipe="voc-ssd512", seeds=[0])
    assert plan.variants[1].config.criterion.options == {"alpha": 0.25, "gamma": 1.0}


def test_the_end_of_the_schedule_is_measured_on_the_test_split() -> None:
    config = comparison_config("demo", {"data": "builtin"})
    assert config.evaluation.checkpoint == "last"
    assert config.evaluation.split is None  # the recipe has val, which learning rates see
    assert config.validation.patience is None
    assert comparison_config("voc-retinanet-r50", {}).evaluation.split == "2007_test"


def test_validations_are_spread_over_the_training() -> None:
    assert comparison_config("demo", {}).validation.every == 120  # 1200 / 10
    assert comparison_config("demo", {}, steps=50).validation.every == 5
    assert comparison_config("demo", {}, steps=5).validation.every == 1
    epochs = comparison_config("voc-retinanet-r50", {}).validation
    assert (epochs.every, epochs.unit) == (16, "epochs")


def test_another_length_keeps_the_shape_of_the_schedule() -> None:
    config = comparison_config("voc-retinanet-r50", {}, steps=1600)
    assert (config.schedule.length, config.schedule.unit) == (1600, "steps")
    assert config.schedule.milestones == (1100, 1400)
    assert with_length(config, 160, validations=1).schedule.milestones == (110, 140)


def test_runs_are_counted_once() -> None:
    assert runs_of(comparison_plan(["ap", "focal"], recipe="demo", seeds=[0, 1, 2])) == 6
    # 2 rows x 4 rates, of which one each is the real run of the first seed
    tuned = comparison_plan(["ap", "focal"], recipe="demo", seeds=[0, 1, 2], tuning=Tuning())
    assert runs_of(tuned) == 12
    short = comparison_plan(["ap"], recipe="demo", seeds=[0, 1], tuning=Tuning(steps=10))
    assert runs_of(short) == 6


def test_seeds_are_a_number_or_a_list() -> None:
    assert parse_seeds(" 2 ") == (0, 1)
    assert parse_seeds("3,1") == (3, 1)
    for wrong in ("", "x", "-1", "0", "1,1", "1.5"):
        with pytest.raises(ConfigError, match="--seeds"):
            parse_seeds(wrong)


def test_unknown_and_repeated_losses_are_refused() -> None:
    with pytest.raises(ConfigError, match="no loss 'fokal'; choose of: ap"):
        comparison_plan(["ap", "fokal"], recipe="demo", seeds=[0])
    for losses in ([], ["ap", "ap"]):
        with pytest.raises(ConfigError, match="rows of different names"):
            comparison_plan(losses, recipe="demo", seeds=[0])
