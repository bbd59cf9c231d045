"""Configs and trials of a comparison, before anything is trained."""

import pytest

from aploss.errors import ConfigError
from aploss.experiments.plan import (
    Search,
    Variant,
    check_varied,
    comparison_config,
    comparison_plan,
    parse_seeds,
    with_length,
)
from aploss.experiments.reproduce import Request, plan_for
from aploss.training.config import FIXED_BY_COMPARISON, RESUMABLE_KEYS


def test_the_end_of_the_schedule_is_measured_on_the_test_split() -> None:
    config = comparison_config("demo", {"data": "builtin"})
    assert config.evaluation.checkpoint == "last"
    assert config.evaluation.split is None  # the recipe has val, which chooses learning rates
    assert config.validation.patience is None
    assert comparison_config("voc-retinanet-r50", {}).evaluation.split == "2007_test"


def test_validations_are_evenly_spaced() -> None:
    every = [comparison_config("demo", {}, steps=steps).validation.every for steps in (None, 50, 3)]
    assert every == [240, 10, 1]  # 1200 / 5, 50 / 5, at least one step
    epochs = comparison_config("voc-retinanet-r50", {}, validations=10).validation
    assert (epochs.every, epochs.unit) == (16, "epochs")


def test_another_length_keeps_the_shape_of_the_schedule() -> None:
    config = comparison_config("voc-retinanet-r50", {}, steps=1600)
    assert (config.schedule.length, config.schedule.unit) == (1600, "steps")
    assert config.schedule.milestones == (1100, 1400)
    assert with_length(config, 160, validations=1).schedule.milestones == (110, 140)


def test_rows_cannot_differ_in_settings_that_are_declared_as_fixed() -> None:
    assert {"evaluation.checkpoint", "validation.every"} <= {*FIXED_BY_COMPARISON}
    for key in (*FIXED_BY_COMPARISON, *RESUMABLE_KEYS):
        with pytest.raises(ConfigError):
            check_varied(key)
    check_varied("batches.size")


def test_rows_of_a_frozen_backbone_are_planned_without_its_weights() -> None:
    plan = comparison_plan(["ap"], recipe="any-cpu", seeds=[0], vary={"criterion.box_weight": [1, 3]})
    assert [one.config.model.weights for one in plan.variants] == ["imagenet"] * 2


def test_shared_runs_are_counted_once() -> None:
    assert comparison_plan(["ap", "focal"], recipe="demo", seeds=[0, 1, 2]).trainings == (6, 0)
    # 2 rows x 3 rates, of which one each is the real run of the first seed
    assert comparison_plan(["ap", "focal"], recipe="demo", seeds=[0, 1, 2], search=Search()).trainings == (6, 4)
    assert comparison_plan(["ap"], recipe="demo", seeds=[0, 1], search=Search(steps=10)).trainings == (2, 3)
    assert plan_for("table3", Request(scale="paper")).trainings == (1, 0)  # two rows, one model


def test_seeds_are_a_number_or_a_list() -> None:
    assert parse_seeds(" 2 ") == (0, 1)
    assert parse_seeds("3,1") == (3, 1)
    assert parse_seeds("1001,") == (1001,)
    arabic_digit = "\u0663"
    for wrong in ("", "x", "-1", "0", "1.5", "1001", "9" * 5000, "99999999999999999,", arabic_digit):
        with pytest.raises(ConfigError) as caught:
            parse_seeds(wrong)
        assert len(str(caught.value)) < 250


def test_a_trial_is_short_and_does_not_look_at_the_test_split() -> None:
    row = Variant(name="ap", config=comparison_config("demo", {"schedule": {"warmup_steps": 400}}, steps=800))
    trial = Search(steps=300).trial_config(row, {"optimizer.learning_rate": 0.009}, seed=3)
    assert (trial.schedule.length, trial.seed, trial.optimizer.learning_rate) == (300, 3, 0.009)
    assert not trial.schedule.exact_warmup  # at most a tenth of the trial
    assert trial.evaluation.split == "none"
    assert Search().trial_config(row, {}, seed=0) == row.config  # a trial of the length of the run is the run
