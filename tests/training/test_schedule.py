"""The learning rate, against torch's own schedulers."""

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


def test_milestones_in_epochs_equal_multi_step_lr() -> None:
    config = ScheduleConfig(
        length=16, unit="epochs", kind="milestones", milestones=(11, 14), warmup_steps=0
    )
    schedule = Schedule(config, steps_per_epoch=5)
    assert schedule.total_steps == 80
    expected = rates_of(MultiStepLR, 80, milestones=[55, 70], gamma=0.1)
    assert [schedule.factor(step) for step in range(80)] == pytest.approx(expected)


def test_warmup_from_a_third_equals_linear_lr() -> None:
    config = ScheduleConfig(length=1000, kind="milestones", warmup_steps=500, warmup_factor=1 / 3)
    schedule = Schedule(config, steps_per_epoch=10)
    expected = rates_of(LinearLR, 600, start_factor=1 / 3, total_iters=500)
    assert [schedule.factor(step) for step in range(600)] == pytest.approx(expected)


def test_cosine_ends_at_its_final_share() -> None:
    config = ScheduleConfig(length=101, kind="cosine", warmup_steps=0, final_factor=0.02)
    schedule = Schedule(config, steps_per_epoch=10)
    expected = rates_of(CosineAnnealingLR, 101, T_max=100, eta_min=0.02)
    assert [schedule.factor(step) for step in range(101)] == pytest.approx(expected)
    assert schedule.factor(100) == pytest.approx(0.02)


def test_part_of_an_epoch_is_at_least_one_step() -> None:
    schedule = Schedule(ScheduleConfig(), steps_per_epoch=7.5)
    assert schedule.steps(2, "epochs") == 15
    assert schedule.steps(0.01, "epochs") == 1
    assert schedule.steps(3, "steps") == 3
