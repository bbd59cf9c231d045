"""What is compared, before anything is trained."""

import pytest

from aploss.errors import ConfigError
from aploss.experiments.compare import comparison_plan
from aploss.experiments.plan import Tuning, Variant, comparison_config, parse_seeds, runs_of, trials_of, with_length


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


def test_more_seeds_than_anyone_trains_are_refused() -> None:
    for wrong, part in (
        ("999999999999", "at most 1000 seeds, got 999999999999"),
        ("9" * 5000, "at most 1000 seeds, got 9{30};"),
        ("99999999999999999999999,", "at most 4294967295"),
        ("1001", "at most 1000 seeds, got 1001"),
        ("\u0663", "a number of seeds"),  # a digit, but not one of ours
    ):
        with pytest.raises(ConfigError, match=part) as caught:
            parse_seeds(wrong)
        assert "--seeds" in str(caught.value)
    assert parse_seeds("1001,") == (1001,)


def test_the_warm_up_of_a_trial_takes_its_share_of_the_trial() -> None:
    # demo: 50 of 1200 steps, here of 800; a trial of 300 warms up for 50 * 300 / 800 = 18.75 steps
    row = Variant(name="ap", config=comparison_config("demo", {}, steps=800))
    trials = trials_of(row, Tuning(steps=300), seed=3)
    assert [one.schedule.warmup_steps for one in trials] == [19] * 4
    assert [one.optimizer.learning_rate for one in trials] == [0.000333, 0.001, 0.003, 0.009]
    assert {(one.schedule.length, one.seed) for one in trials} == {(300, 3)}
    assert {one.evaluation.split for one in trials} == {"none"}  # nobody looks at the test split before the choice
    # Trials of the length of the run are the run.
    (same,) = trials_of(row, Tuning(factors=(1.0,)), seed=0)
    assert same == row.config


def test_a_trial_never_warms_up_for_longer_than_the_run_or_a_tenth_of_itself() -> None:
    # 160 epochs of data that is not looked at yet, 500 steps of warm-up
    row = Variant(name="ap", config=comparison_config("voc-retinanet-r50", {}))
    warmup = row.config.schedule.warmup_steps
    for steps, expected in ((300, 30), (100_000, warmup), (5, 0)):
        (trial,) = trials_of(row, Tuning(factors=(1.0,), steps=steps), seed=0)
        assert trial.schedule.warmup_steps == expected
    longer = Variant(name="ap", config=comparison_config("demo", {}, steps=800))
    (trial,) = trials_of(longer, Tuning(factors=(1.0,), steps=1600), seed=0)
    assert trial.schedule.warmup_steps == 50
