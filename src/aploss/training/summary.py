"""``summary.json``: a run in one screen of numbers."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from aploss.errors import RunError
from aploss.files import write_json

__all__ = ["Summary"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run. AP values are those of the split ``split``; None where undefined.

    Attributes:
        folder: of the run.
        calibration_error: expected calibration error of all detections, after calibration, on
            ``calibration_split``.
        calibration_error_drawn: of those above ``draw_threshold`` alone.
        calibration_held_out: whether that split is another than the calibration was fitted on.
        best_step: step of the evaluated weights.
        stopped_by: ``"length"``, ``"patience"`` or ``"minutes"``.
        bad_steps: steps skipped because of numbers that were not finite.
    """

    folder: str
    data: str
    split: str | None
    detector: str
    loss: str
    seed: int
    AP: float | None
    AP50: float | None
    AP75: float | None
    APs: float | None
    APm: float | None
    APl: float | None
    voc_AP50: float | None  # noqa: N815
    per_class: dict[str, dict[str, Any]]
    calibration_error: float | None
    calibration_error_drawn: float | None
    calibration_split: str | None
    calibration_held_out: bool | None
    draw_threshold: float | None
    steps: int
    epochs: float
    best_step: int
    stopped_by: str
    bad_steps: int
    minutes: float
    images_per_second: float
    parameters: int
    device: str
    processes: int
    command: str
    commit: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def write(self, path: Path) -> None:
        """Writes ``summary.json``."""
        write_json(path, self.as_dict())

    @classmethod
    def read(cls, path: Path) -> "Summary":
        """Reads ``summary.json``; the folder is where the file is now.

        Raises:
            RunError: if there is none, or it is of another version.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {entry.name: values[entry.name] for entry in fields(cls)}
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError) as error:
            raise RunError(f"{path} is not the summary of a run: {error}") from error
        return cls(**{**known, "folder": str(path.parent)})

    def table(self) -> str:
        """The numbers to print at the end of a run."""
        shown = [
            f"{name} {value:.3f}"
            for name in ("AP", "AP50", "AP75", "APs", "APm", "APl", "voc_AP50")
            if (value := getattr(self, name)) is not None
        ]
        lines = [f"{self.split or 'no split'}: " + ("  ".join(shown) or "nothing to measure")]
        if self.per_class:
            width = max(map(len, self.per_class))
            lines.append(f"  {'class':<{width}}  {'AP':>6} {'AP50':>6} {'AP75':>6}")
            for name, values in self.per_class.items():
                cells = (values.get(metric) for metric in ("AP", "AP50", "AP75"))
                row = " ".join(f"{'-':>6}" if cell is None else f"{cell:6.3f}" for cell in cells)
                lines.append(f"  {name:<{width}}  {row}")
        return "\n".join(lines)
