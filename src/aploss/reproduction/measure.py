"""What a comparison looks at in a run."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aploss.reporting.comparison_data import Curve
from aploss.training.config import TrainConfig
from aploss.training.metrics_log import read_rows
from aploss.training.summary import Summary

__all__ = ["DETECTION", "DetectionMeasure", "Measure", "Run", "is_main_process"]

VOC_AP50 = "VOC AP50"
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a comparison.

    Attributes:
        config: of the run, with its seed.
        folder: where it is.
        summary: its result; None where it failed.
        failure: why it failed, in one line.
    """

    config: TrainConfig
    folder: Path
    summary: Summary | None
    failure: str = ""


class Measure(Protocol):
    """How numbers are taken from a run; all methods but :meth:`observer` are of finished runs."""

    def observer(self, config: TrainConfig, folder: Path) -> Callable[[dict[str, Any]], Any] | None:
        """What is called with every row of the metrics while a run trains."""

    def values(self, run: Run) -> Mapping[str, float | None]:
        """The final numbers by metric, between 0 and 1."""

    def curve(self, run: Run) -> Curve:
        """Its way there."""

    def score(self, run: Run) -> float | None:
        """What a learning rate is chosen by, the larger the better; None where not known."""


class DetectionMeasure:
    """The final AP on the evaluation split, and AP on the validation split on the way."""

    def observer(self, config: TrainConfig, folder: Path) -> None:
        """Nothing has to be watched."""

    def values(self, run: Run) -> Mapping[str, float | None]:
        assert run.summary is not None
        found = {name: getattr(run.summary, name) for name in METRICS}
        if run.summary.voc_AP50 is not None:
            found[VOC_AP50] = run.summary.voc_AP50
        return found

    def curve(self, run: Run) -> Curve:
        rows = [row for row in _validations(run) if row["AP"] is not None]
        return Curve(
            steps=[row["step"] for row in rows],
            values=[row["AP"] for row in rows],
            minutes=[row["seconds"] / 60 for row in rows],
        )

    def score(self, run: Run) -> float | None:
        rows = _validations(run)
        return rows[-1]["AP"] if rows else None


def _validations(run: Run) -> list[dict[str, Any]]:
    rows = read_rows(run.folder / "metrics.jsonl")
    return [row for row in rows if row["kind"] == "validation"]


def is_main_process() -> bool:
    """Whether this process writes and talks; under ``torchrun`` only the first does."""
    return os.environ.get("RANK", "0") == "0"


DETECTION = DetectionMeasure()
