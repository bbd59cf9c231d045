"""The learning rate as a function of the step."""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, MultiStepLR

from aploss.training.config import ScheduleConfig
from aploss.training.schedule import Schedule


def rates_of(scheduler_type: type, steps: int, **options: object) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = scheduler_type(optimizer, **options)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("config", "scheduler_type", "options"),
    [
        (
            ScheduleConfig(length=16, unit="epochs", kind="milestones", milestones=(11, 14), warmup_steps=0),
            MultiStepLR,
            {"milestones": [55, 70], "gamma": 0.1},
        ),
        (
            ScheduleConfig(length=80, kind="milestones", warmup_steps=50, exact_warmup=True, warmup_factor=1 / 3),
            LinearLR,
            {"start_factor": 1 / 3, "total_iters": 50},
        ),
        (
            ScheduleConfig(length=80, kind="cosine", warmup_steps=0, final_factor=0.02),
            CosineAnnealingLR,
            {"T_max": 79, "eta_min": 0.02},
        ),
    ],
)
def test_schedules_equal_those_of_torch(config: ScheduleConfig, scheduler_type: type, options: dict[str, Any]) -> None:
    schedule = Schedule(config, steps_per_epoch=5)
    assert schedule.total_steps == 80
    assert [schedule.factor(step) for step in range(80)] == pytest.approx(rates_of(scheduler_type, 80, **options))


def test_part_of_an_epoch_is_at_least_one_step() -> None:
    schedule = Schedule(ScheduleConfig(), steps_per_epoch=7.5)
    assert schedule.steps(2, "epochs") == 15
    assert schedule.steps(0.01, "epochs") == 1
    assert schedule.steps(3, "steps") == 3


@pytest.mark.parametrize(
    ("warmup", "exact", "expected"),
    [(500, False, 10), (500, True, 10), (60, False, 10), (60, True, 60), (10, False, 10), (3, False, 3), (0, True, 0)],
)
def test_a_warmup_is_at_most_a_tenth_of_the_training_unless_the_user_sets_it(
    warmup: int, exact: bool, expected: int
) -> None:
    config = ScheduleConfig(length=100, kind="milestones", warmup_steps=warmup, exact_warmup=exact, warmup_factor=0.5)
    schedule = Schedule(config, steps_per_epoch=10)
    assert schedule.warmup_steps == expected
    assert schedule.factor(expected) == schedule.factor(99) == 1.0
    assert schedule.factor(expected // 2) < 1.0 or expected == 0
