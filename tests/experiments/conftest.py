"""A trainer that invents its results at once, and a real data set of a few small pictures."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import config_in, rectangles, short_detector, spawn  # noqa: F401

from aploss.data.builtin import builtin_folder
from aploss.training import Summary, TrainConfig, TrainingInterruptedError
from aploss.training.step import DivergedError

LEVELS = {"ap": 0.74, "focal": 0.71, "ce-ohem": 0.72, "auc": 0.55, "smooth-ap": 0.3, "hinge-ap": 0.2}
BEST_RATE = {"ap": 0.003, "focal": 0.009, "ce-ohem": 0.001, "auc": 0.003}
MINUTES = 2.0


@dataclass
class FakeTraining:
    """Stands in for ``train``; what it was asked for is in ``configs``.

    Attributes:
        interrupt_at: number of the call that Ctrl-C falls into.
        diverges_from: learning rate from which on numbers are no longer finite.
        spent: folder → minutes of training so far.
    """

    configs: list[TrainConfig] = field(default_factory=list)
    interrupt_at: int | None = None
    diverges_from: float = 1.0
    spent: dict[str, float] = field(default_factory=dict)

    def __call__(
        self,
        config: TrainConfig,
        *,
        resume: bool = False,
        quiet: bool = True,
        on_progress: Callable[[dict[str, Any]], Any] | None = None,
    ) -> Summary:
        assert resume
        assert config.out is not None
        self.configs.append(config)
        if len(self.configs) == self.interrupt_at:
            raise TrainingInterruptedError("stopped at step 3 of 10")
        rate = config.optimizer.learning_rate
        if rate >= self.diverges_from:
            raise DivergedError("training stopped after 3 steps in a row with numbers not finite")
        folder = Path(config.out)
        folder.mkdir(parents=True, exist_ok=True)
        minutes = MINUTES - self.spent.get(config.out, 0.0)
        if config.max_minutes is not None:
            minutes = min(minutes, config.max_minutes - self.spent.get(config.out, 0.0))
        self.spent[config.out] = self.spent.get(config.out, 0.0) + minutes
        done = self.spent[config.out] >= MINUTES
        return self._write(config, folder, done)

    def _write(self, config: TrainConfig, folder: Path, done: bool) -> Summary:
        assert config.out is not None
        level = LEVELS[config.loss] + 0.01 * config.seed + 0.002 * (config.seed * 7 % 3)
        if config.loss in BEST_RATE:
            level -= 0.05 * (abs(config.optimizer.learning_rate - BEST_RATE[config.loss]) > 1e-6)
        # With a larger weight of the boxes a higher rate is the best.
        level += 0.06 * (config.criterion.box_weight == 3.0 and config.optimizer.learning_rate == 0.009)
        minutes, length = self.spent[config.out], config.schedule.length
        rows = [
            {
                "kind": "validation",
                "step": length * tenth // 10,
                "seconds": 60 * minutes * tenth / 10,
                "AP": level * tenth / 10 - 0.01,
            }
            for tenth in range(1, 11)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = Summary(
            folder=str(folder), data=config.data, split="test", detector=config.detector,
            loss=config.loss, seed=config.seed, AP=level, AP50=level + 0.2, AP75=level + 0.1,
            APs=None, APm=level, APl=level, voc_AP50=None, per_class={}, calibration_error=None,
            calibration_error_drawn=None, calibration_split=None, calibration_held_out=None,
            draw_threshold=None, steps=length, epochs=1.0, best_step=length,
            stopped_by="length" if done else "minutes", bad_steps=0, minutes=minutes,
            images_per_second=100.0, parameters=1, device="cpu", processes=1, command="",
            commit="0123abc",
        )  # fmt: skip
        summary.write(folder / "summary.json")
        return summary


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    """Puts the invented trainer in the place of the real one."""
    fake = FakeTraining()
    monkeypatch.setattr("aploss.training.train", fake)
    return fake


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the drawing, which takes longer than all the rest."""
    monkeypatch.setattr("aploss.experiments.results.write_comparison_report", lambda comparison, out: out)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A COCO data set of 12 + 4 + 4 pictures of 64 pixels."""
    return builtin_folder(cache=tmp_path_factory.mktemp("pictures"), image_size=64, counts=(12, 4, 4))
