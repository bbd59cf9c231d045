"""A trainer that invents its results at once; the fixture is available where a ``conftest.py`` imports it."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from aploss.training import Summary, TrainConfig
from aploss.training.step import DivergedError

LEVELS = {"ap": 0.74, "focal": 0.71, "ce-ohem": 0.72, "auc": 0.55, "smooth-ap": 0.3, "hinge-ap": 0.2}
BEST_RATE = {"ap": 0.003, "focal": 0.009, "ce-ohem": 0.001, "auc": 0.003}
MINUTES = 2.0


@dataclass
class FakeTraining:
    """Stands in for ``train``.

    Attributes:
        configs: the config of each call.
        errors: number of a call → what it raises.
        diverges_from: learning rate from which on numbers are no longer finite.
    """

    configs: list[TrainConfig] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    diverges_from: float = 1.0

    def __call__(self, config: TrainConfig, *, resume: bool, **options: Any) -> Summary:
        assert resume
        assert config.out is not None
        self.configs.append(config)
        if error := self.errors.get(len(self.configs)):
            raise error
        rate = config.optimizer.learning_rate
        if rate >= self.diverges_from:
            raise DivergedError("training stopped after 3 steps in a row with numbers not finite")
        minutes = MINUTES if config.max_minutes is None else min(MINUTES, config.max_minutes)
        level = LEVELS[config.loss] + 0.01 * config.seed + 0.002 * (config.seed * 7 % 3)
        level -= 0.05 * (abs(rate - BEST_RATE.get(config.loss, rate)) > 1e-6)
        # With a larger weight of the boxes a higher rate is the best.
        level += 0.06 * (config.criterion.box_weight == 3.0 and rate == 0.009)
        length, values = config.schedule.length, {one.name: None for one in fields(Summary)}
        folder = Path(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {"kind": "validation", "step": length * tenth // 10, "seconds": 6 * minutes * tenth,
             "AP": level * tenth / 10 - 0.01}
            for tenth in range(1, 11)
        ]  # fmt: skip
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        values |= {
            "folder": config.out, "data": config.data, "split": "test", "detector": config.detector,
            "loss": config.loss, "seed": config.seed, "AP": level, "AP50": level + 0.2, "AP75": level + 0.1,
            "per_class": {}, "steps": length, "stopped_by": "length" if minutes == MINUTES else "minutes",
            "minutes": minutes, "processes": 1, "commit": "0123abc",
        }  # fmt: skip
        summary = Summary(**values)  # type: ignore[arg-type]
        (folder / "summary.json").write_text(json.dumps(asdict(summary)))
        return summary


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    """Puts the invented trainer in the place of the real one."""
    fake = FakeTraining()
    monkeypatch.setattr("aploss.training.train", fake)
    return fake
