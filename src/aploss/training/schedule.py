"""The learning-rate schedule: a function of the step alone, so that a resumed run needs no state for it."""

import math
from dataclasses import dataclass
from functools import cached_property

from aploss.training.config import ScheduleConfig


@dataclass(frozen=True)
class Schedule:
    """Length of a run in steps and the learning-rate factor of each step."""

    config: ScheduleConfig
    steps_per_epoch: float

    def steps(self, amount: float, unit: str) -> int:
        """Converts an amount of epochs or steps to a number of steps, at least one."""
        return max(1, round(amount * (self.steps_per_epoch if unit == "epochs" else 1)))

    @cached_property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps(self.config.length, self.config.unit)

    @cached_property
    def warmup_steps(self) -> int:
        """Steps of the warmup: unless set by the user, at most a tenth of the training; never longer than all of it."""
        wanted, tenth = self.config.warmup_steps, max(1, self.total_steps // 10)
        return wanted if wanted <= (self.total_steps if self.config.exact_warmup else tenth) else tenth

    def factor(self, step: int) -> float:
        """Returns the factor on the learning rate at a step, counted from 0.

        Example:
            >>> paper = ScheduleConfig(length=160, unit="epochs", kind="milestones",
            ...     milestones=(110, 140), warmup_steps=500, warmup_factor=1 / 3)
            >>> schedule = Schedule(paper, steps_per_epoch=1000)
            >>> [round(schedule.factor(s), 4) for s in (0, 250, 500, 109_999, 110_000, 140_000)]
            [0.3333, 0.6667, 1.0, 1.0, 0.1, 0.01]
        """
        config, steps, start = self.config, self.warmup_steps, self.config.warmup_factor
        warmup = 1.0 if step >= steps else start + (1 - start) * step / steps
        if config.kind == "milestones":
            return warmup * float(config.gamma ** sum(step >= self.steps(m, config.unit) for m in config.milestones))
        end, done = config.final_factor, min(step / max(1, self.total_steps - 1), 1.0)
        return warmup * (end + (1 - end) * (1 + math.cos(math.pi * done)) / 2)
