"""The learning rate as a function of the step alone: a resumed run needs no state for it."""

import math
from dataclasses import dataclass

from aploss.training.config import ScheduleConfig

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """Length of a run in steps and the learning-rate factor of each step.

    Args:
        config: kind, length, milestones and warm-up.
        steps_per_epoch: turns epochs into steps.
    """

    config: ScheduleConfig
    steps_per_epoch: float

    def steps(self, amount: float, unit: str) -> int:
        """An amount of epochs or steps as a number of steps, at least one."""
        return max(1, round(amount * (self.steps_per_epoch if unit == "epochs" else 1)))

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps(self.config.length, self.config.unit)

    def factor(self, step: int) -> float:
        """Share of the learning rate that step number ``step`` (from 0) uses.

        Example:
            >>> paper = ScheduleConfig(length=160, unit="epochs", kind="milestones",
            ...     milestones=(110, 140), warmup_steps=500, warmup_factor=1 / 3)
            >>> schedule = Schedule(paper, steps_per_epoch=1000)
            >>> [round(schedule.factor(s), 4) for s in (0, 250, 500, 109_999, 110_000, 140_000)]
            [0.3333, 0.6667, 1.0, 1.0, 0.1, 0.01]
        """
        return self._warmup(step) * (
            self._milestones(step) if self.config.kind == "milestones" else self._cosine(step)
        )

    def _warmup(self, step: int) -> float:
        steps, start = self.config.warmup_steps, self.config.warmup_factor
        return 1.0 if step >= steps else start + (1 - start) * step / steps

    def _milestones(self, step: int) -> float:
        passed = sum(step >= self.steps(m, self.config.unit) for m in self.config.milestones)
        return float(self.config.gamma**passed)

    def _cosine(self, step: int) -> float:
        end = self.config.final_factor
        done = min(step / max(1, self.total_steps - 1), 1.0)
        return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2
