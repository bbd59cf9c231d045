"""Where a run stands, and how it can end before its time."""

from dataclasses import dataclass, field
from typing import Any

from aploss.errors import RunError

__all__ = ["LoopState", "LostProcessError", "TrainingInterruptedError"]


class TrainingInterruptedError(RunError):
    """Ctrl-C or SIGTERM: everything is saved, the message says how to go on."""


class LostProcessError(RunError):
    """Another process of the run has gone; the run can go on from its last checkpoint."""


@dataclass
class LoopState:
    """What a checkpoint holds of a run, apart from weights and optimizer.

    Attributes:
        step: steps done.
        seconds: spent training so far, over all resumptions.
        validated_step: the last step after which validation took place.
        best_step: step of the best validation, 0 before the first.
        best_value: its metric.
        best_metrics: all metrics of it.
        validations_since_best: for patience.
        bad_in_a_row: steps skipped for bad numbers since the last good one.
        bad_steps: all of them.
        stopped_by: ``"length"``, ``"patience"`` or ``"minutes"`` once training is over.
        window: sums of the losses since the last row of metrics.
        window_steps: steps in them.
    """

    step: int = 0
    seconds: float = 0.0
    validated_step: int = 0
    best_step: int = 0
    best_value: float = float("-inf")
    best_metrics: dict[str, Any] = field(default_factory=dict)
    validations_since_best: int = 0
    bad_in_a_row: int = 0
    bad_steps: int = 0
    stopped_by: str | None = None
    window: dict[str, float] = field(default_factory=dict)
    window_steps: int = 0

    def add_to_window(self, values: dict[str, float]) -> None:
        """Adds the values of a step to the sums of the next row of metrics."""
        for name, value in values.items():
            self.window[name] = self.window.get(name, 0.0) + value
        self.window_steps += 1

    def take_window(self) -> dict[str, float]:
        """The means since the last row; the sums start again."""
        means = {name: total / self.window_steps for name, total in self.window.items()}
        self.window, self.window_steps = {}, 0
        return means

    def judge(self, metrics: dict[str, Any], metric: str) -> None:
        """Notes a validation: the best so far, or one more that is not."""
        self.validated_step = self.step
        value = metrics[metric] or 0.0
        if value > self.best_value:
            self.best_value, self.best_step, self.best_metrics = value, self.step, metrics
            self.validations_since_best = 0
        else:
            self.validations_since_best += 1
