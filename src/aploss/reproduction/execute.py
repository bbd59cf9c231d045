"""Carries out a plan: learning rates first, then every row with the first seed, the second, ..."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aploss.errors import ConfigError
from aploss.reporting.style import loss_label
from aploss.reproduction.plan import Plan, Tuning, Variant, changed, with_length
from aploss.reproduction.results import Results, Trial
from aploss.reproduction.runner import OutOfTimeError, Runner, settings_hash
from aploss.training.config import TrainConfig

__all__ = ["execute", "runs_of"]

Say = Callable[[str], Any]


def execute(
    results: Results,
    runner: Runner,
    *,
    say: Say = lambda line: None,
    on_run: Callable[[], Any] = lambda: None,
) -> None:
    """Trains all runs of a plan that the cache does not have, into ``results``.

    Seeds are the outer loop, so that an unfinished comparison has whole pairs. The results are
    not ``complete`` where the runner ran out of time.

    Args:
        results: with the plan; filled run by run.
        runner: trains.
        say: told what is going on.
        on_run: called after every run.

    Raises:
        TrainingInterruptedError: Ctrl-C or SIGTERM; everything is saved.
    """
    try:
        if results.plan.tuning is not None:
            _tune(results, runner, results.plan.tuning, say)
        plan, number = results.plan, 0
        total = len(plan.variants) * len(plan.seeds)
        for seed in plan.seeds:
            for variant in plan.variants:
                number += 1
                config = replace(variant.config, seed=seed)
                say(f"run {number} of {total}: {loss_label(variant.name)}, seed {seed}")
                results.runs[variant.name, seed] = runner.run(config, variant.measure)
                on_run()
    except OutOfTimeError:
        say("the time is over; the same command goes on from here")


def _tune(results: Results, runner: Runner, tuning: Tuning, say: Say) -> None:
    """Gives every row of the plan the learning rate that did best on its validation split."""
    plan = results.plan
    chosen = []
    total, number = len(plan.variants) * len(tuning.factors), 0
    for variant in plan.variants:
        scores: dict[float, float] = {}
        for trial in _trials(variant, tuning, plan.seeds[0]):
            number += 1
            rate = trial.config.optimizer.learning_rate
            say(f"trial {number} of {total}: {loss_label(variant.name)}, learning rate {rate:.3g}")
            run = runner.run(trial.config, variant.measure)
            score = None if run.summary is None else variant.measure.score(run)
            if run.summary is not None and score is None:
                raise ConfigError(
                    "learning rates can only be searched with a validation split: name one with "
                    "--splits.validation, or leave out --tune"
                )
            results.trials.append(Trial(name=variant.name, learning_rate=rate, score=score))
            if score is not None:
                scores[rate] = score
        best = max(scores, key=scores.__getitem__, default=variant.config.optimizer.learning_rate)
        chosen.append(_with_rate(variant, best))
    results.plan = replace(plan, variants=chosen)


def _trials(variant: Variant, tuning: Tuning, seed: int) -> list[Variant]:
    rate = variant.config.optimizer.learning_rate
    trials = [_with_rate(variant, float(f"{factor * rate:.3g}")) for factor in tuning.factors]
    return [replace(one, config=_trial_config(one.config, tuning, seed)) for one in trials]


def _trial_config(config: TrainConfig, tuning: Tuning, seed: int) -> TrainConfig:
    config = replace(config, seed=seed)
    return config if tuning.steps is None else with_length(config, tuning.steps, validations=1)


def _with_rate(variant: Variant, rate: float) -> Variant:
    return replace(variant, config=changed(variant.config, {"optimizer": {"learning_rate": rate}}))


def runs_of(plan: Plan) -> int:
    """How many trainings a plan has, those that rows and trials share counted once."""
    rows = len({settings_hash(variant.config) for variant in plan.variants})
    runs = rows * len(plan.seeds)
    if plan.tuning is None:
        return runs
    shared = 1 if plan.tuning.steps is None and 1.0 in plan.tuning.factors else 0
    return runs + rows * (len(plan.tuning.factors) - shared)
