"""A run is a folder: config, environment, metrics, checkpoints, evaluation, report."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from aploss.detectors.checkpoint import Checkpoint
from aploss.environment import describe_environment
from aploss.errors import ConfigError, RunError
from aploss.evaluation import HEADLINE_METRICS, METRICS
from aploss.files import remove_unfinished, write_json, write_text
from aploss.training.config import (
    DEFAULTS_BEFORE_ADDED,
    RESUMABLE_KEYS,
    TrainConfig,
    config_from_dict,
    config_to_dict,
    differing_keys,
    merge,
    nested,
    read_yaml,
)

LOCK_FILE = ".lock"


def default_folder(config: TrainConfig) -> Path:
    """Returns the run folder for a config without one.

    Example:
        >>> str(default_folder(TrainConfig(data="../data/bccd", loss="focal", seed=3)))
        'runs/bccd-retinanet-tiny-focal-seed3'
    """
    data = Path(config.data).resolve().stem if config.data != "builtin" else config.data
    return Path("runs") / f"{data}-{config.detector}-{config.loss}-seed{config.seed}"


class RunFolder:
    """The folder of a run, as ``runs/NAME``.

    ``last`` holds everything needed to resume the run exactly, ``best`` the detector with the best validation.

    Args:
        path: the folder, which need not exist yet.

    Example:
        >>> folder = RunFolder("runs/first")
        >>> folder.create(TrainConfig(data="builtin"))
        >>> folder.exists, folder.read_config().data, folder.best.name
        (True, 'builtin', 'best.pt')
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.summary_file = self.path / "summary.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.evaluation = self.path / "evaluation"
        self.last, self.best = self.path / "checkpoints/last.pt", self.path / "checkpoints/best.pt"
        self._lock = FileLock(self.path / LOCK_FILE)
        self.resume_command = f"aploss train --resume --out {self.path}"

    @property
    def exists(self) -> bool:
        """Whether a run has been started here."""
        return self.config_file.is_file()

    def refuse_if_taken(self) -> None:
        """Raises RunError if a run has saved something here, or something else is in the folder."""
        if self.exists:
            if any(path.exists() for path in (self.last, self.best, self.evaluation)):  # otherwise it can be replaced
                raise RunError(
                    f"{self.path} already holds a run; add --resume to continue it, or choose another folder with --out"
                )
        elif self.path.exists() and not (self.path.is_dir() and {*self.path.iterdir()} <= {self.path / LOCK_FILE}):
            raise RunError(f"{self.path} exists and is not a run folder; choose another folder with --out")

    def create(self, config: TrainConfig) -> None:
        """Starts a run in the folder by writing its config and environment; RunError if the folder is taken."""
        self.refuse_if_taken()
        self._write_config(config)  # it makes the folder a run
        write_json(self.path / "environment.json", describe_environment())

    def _write_config(self, config: TrainConfig) -> None:
        write_text(self.config_file, yaml.safe_dump(config_to_dict(config), sort_keys=False))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out of the folder; the lock is released with the process, even if it is killed.

        A process may lock the folder repeatedly.

        Raises:
            RunError: if another process is training in it, or it is not writable.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=False)
        except Timeout:
            raise RunError(
                f"another process is training in {self.path}; wait for it, or choose another folder with --out"
            ) from None
        except OSError as error:
            raise RunError(
                f"{self.path} is not writable: {error.strerror}; change its permissions, copy it, or choose another "
                "folder with --out"
            ) from error
        try:
            yield
        finally:
            self._lock.release()

    def read_config(self) -> TrainConfig:
        """Reads the config of the run; RunError if there is none.

        Settings that did not exist yet when the run was started take the value they had implicitly.
        """
        if not self.exists:
            raise RunError(f"{self.path} is not a run folder (it has no config.yaml)")
        values = merge(nested(DEFAULTS_BEFORE_ADDED), read_yaml(self.config_file))
        return config_from_dict(values, source=str(self.config_file))

    def resumed_config(self, config: TrainConfig) -> TrainConfig:
        """Returns the config to resume the run with: ``config``, with the warmup that the run was started with.

        Raises:
            ConfigError: if the run was started with other settings that affect what is learned. A run that has
                finished its schedule may get a longer one.
        """
        saved = self.read_config()
        if not config.schedule.exact_warmup:
            steps, exact = saved.schedule.warmup_steps, saved.schedule.exact_warmup
            config = replace(config, schedule=replace(config.schedule, warmup_steps=steps, exact_warmup=exact))
        refused = {*differing_keys(saved, config)} - {*RESUMABLE_KEYS}
        if self.summary_file.is_file() and Summary.read(self.summary_file).stopped_by == "length":
            refused -= {"schedule.length", "schedule.unit", "schedule.milestones"}
        if refused:
            raise ConfigError(
                f"{self.path} was started with another {', '.join(sorted(refused))}; resume it unchanged, "
                "or start a new run with --out"
            )
        return config

    def finished_summary(self, config: TrainConfig) -> "Summary | None":
        """Returns the summary of a finished run, unless ``config`` has another length or more time."""
        if not (self.exists and self.summary_file.is_file()):
            return None
        has_other_length = self.resumed_config(config).schedule != self.read_config().schedule
        summary, limit = Summary.read(self.summary_file), config.max_minutes
        has_time = summary.stopped_by == "minutes" and (limit is None or summary.minutes < limit)
        return None if has_other_length or has_time else summary

    def reopen(self, config: TrainConfig) -> None:
        """Prepares the folder for more training, perhaps with a longer schedule."""
        self.summary_file.unlink(missing_ok=True)  # first: with it, the run counts as finished
        remove_unfinished(self.path)
        self._write_config(replace(self.read_config(), schedule=config.schedule))

    def load_last(self) -> Checkpoint:
        """Reads ``last.pt``; RunError if it is invalid."""
        checkpoint = Checkpoint.read(self.last)
        if checkpoint.training is None:
            raise RunError(f"{self.last} cannot be resumed from: it has no entry 'training'")
        return checkpoint


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run.

    Attributes:
        folder: the run folder.
        data, detector, loss, seed: settings of the run.
        split: the split that the metrics were measured on; a metric is None where it is undefined.
        AP, AP50, AP75, APs, APm, APl, voc_AP50, oLRP: see :data:`aploss.evaluation.METRICS`.
        per_class: class name → its metrics.
        draw_threshold: calibrated score from which detections are drawn.
        calibration_split: the split that calibration was measured on.
        calibration_error: expected calibration error of all detections on it.
        calibration_error_drawn: the same for detections above ``draw_threshold``.
        calibration_held_out: whether ``calibration_split`` differs from the split the calibration was fitted on.
        steps, epochs, minutes, images_per_second: length and speed of the training.
        best_step: step of the evaluated weights.
        stopped_by: ``"length"``, ``"patience"`` or ``"minutes"``.
        bad_steps: steps skipped because of NaN or Inf.
        parameters: number of weights of the detector.
        device, processes, command, commit: how the run was started.
        unreadable_images: images that could not be read, with the reason: replaced by others in training, left out of
            other splits.
        resume_changes: other data or numbers of processes than before, accepted when the run was resumed.

    Example:
        >>> print(Summary.read(Path("runs/first/summary.json")).table())  # doctest: +SKIP
    """

    folder: str
    data: str
    split: str | None
    detector: str
    loss: str
    seed: int
    AP: float | None = None
    AP50: float | None = None
    AP75: float | None = None
    APs: float | None = None
    APm: float | None = None
    APl: float | None = None
    voc_AP50: float | None = None  # noqa: N815
    oLRP: float | None = None  # noqa: N815
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
    unreadable_images: dict[str, str] = field(default_factory=dict)
    resume_changes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Summary":
        """Reads ``summary.json``; ``folder`` becomes its present folder. RunError if it is missing or invalid."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {entry.name: values[entry.name] for entry in fields(cls) if entry.name in values}
            return cls(**known | {"folder": str(path.parent)})
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise RunError(f"{path} is not the summary of a run: {error}") from error

    def table(self) -> str:
        """Formats the metrics for printing at the end of a run."""
        shown = [f"{name} {value:.3f}" for name in METRICS if (value := getattr(self, name)) is not None]
        lines = [f"{self.split or 'no split'}: " + ("  ".join(shown) or "no metrics")]
        if self.per_class:
            width = max(map(len, self.per_class))
            lines.append(f"  {'class':<{width}}  " + " ".join(f"{name:>6}" for name in HEADLINE_METRICS))
            for name, values in self.per_class.items():
                cells = (values.get(metric) for metric in HEADLINE_METRICS)
                row = " ".join(f"{'-':>6}" if cell is None else f"{cell:6.3f}" for cell in cells)
                lines.append(f"  {name:<{width}}  {row}")
        return "\n".join(lines)
