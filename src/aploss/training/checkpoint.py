"""Checkpoints: everything a run needs to go on as if nothing had happened.

``last.pt`` holds the whole state, ``best.pt`` the detector with the best validation. Both hold the
detector under the key ``"detector"``, so that :func:`aploss.detectors.load` reads either.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from aploss.detectors.checkpoint_io import detector_record, read_checkpoint
from aploss.detectors.detector import Detector
from aploss.errors import RunError
from aploss.files import write_whole

__all__ = ["Checkpoints", "non_finite_weight"]

FORMAT = 1


class Checkpoints:
    """The ``checkpoints/`` folder of a run.

    Args:
        folder: ``runs/NAME/checkpoints``.
    """

    def __init__(self, folder: Path) -> None:
        self.last = folder / "last.pt"
        self.best = folder / "best.pt"

    def save_last(self, detector: Detector, training: dict[str, Any]) -> None:
        """Replaces ``last.pt``.

        Args:
            detector: the weights to evaluate and predict with (the moving average, if there is
                one).
            training: ``step`` and the state of everything else, of tensors and plain values.

        Raises:
            RunError: if a weight is not finite: then the last good checkpoint stays.
        """
        name = non_finite_weight(detector)
        if name is not None:
            raise RunError(
                f"step {training['step']}: the weight {name} is no longer finite; "
                f"{self._kept()}; try a lower optimizer.learning_rate"
            )
        content = {"format": FORMAT, "detector": detector_record(detector), "training": training}
        write_whole(self.last, lambda file: torch.save(content, file))

    def save_best(self, detector: Detector, *, step: int, metrics: dict[str, Any]) -> None:
        """Replaces ``best.pt``; also used to add the calibration to it."""
        content = {
            "format": FORMAT,
            "detector": detector_record(detector),
            "step": step,
            "metrics": metrics,
        }
        write_whole(self.best, lambda file: torch.save(content, file))

    def load_last(self) -> dict[str, Any]:
        """What ``last.pt`` holds, on the CPU.

        Raises:
            RunError: if it is missing, damaged or of another version.
        """
        return self._load(self.last)

    def load_best(self) -> dict[str, Any]:
        """What ``best.pt`` holds, on the CPU."""
        return self._load(self.best)

    def _load(self, path: Path) -> dict[str, Any]:
        content = read_checkpoint(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise RunError(f"{path} is not a checkpoint of this version of aploss")
        return content

    def _kept(self) -> str:
        return f"{self.last} is kept" if self.last.is_file() else "there is no earlier checkpoint"


def non_finite_weight(model: nn.Module) -> str | None:
    """The name of a parameter or buffer with a number that is not finite, or None."""
    for name, value in model.state_dict().items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            return name
    return None
