"""A run is a folder: config, environment, metrics, checkpoints, evaluation, report."""

import csv
import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from filelock import FileLock, Timeout

from aploss.detectors.checkpoint import detector_record, read_checkpoint
from aploss.detectors.detector import Detector
from aploss.errors import ConfigError, RunError
from aploss.files import keep_as, remove_unfinished, write_json, write_text, write_whole
from aploss.reports.run_files import read_json_lines
from aploss.training.config import RESUMABLE_KEYS, TrainConfig, config_from_dict, config_to_dict, differing_keys
from aploss.training.machine import describe_environment
from aploss.training.recipes import read_yaml

FOLDERS = ("checkpoints", "evaluation", "plots")
LOCK_FILE = ".lock"
CHECKPOINT_FORMAT = 1

CSV_COLUMNS = (
    "kind", "step", "epoch", "loss", "classification", "box", "lr", "gradient_norm",
    "AP", "AP50", "AP75", "APs", "APm", "APl", "images_per_second", "seconds",
)  # fmt: skip


def default_folder(config: TrainConfig) -> Path:
    """Where a run goes that was given no folder.

    Example:
        >>> str(default_folder(TrainConfig(data="../data/bccd", loss="focal", seed=3)))
        'runs/bccd-retinanet-tiny-focal-seed3'
    """
    data = Path(config.data).resolve().stem if config.data != "builtin" else config.data
    return Path("runs") / f"{data}-{config.detector}-{config.loss}-seed{config.seed}"


class RunFolder:
    """Where everything of a run is: ``runs/NAME``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.summary_file = self.path / "summary.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.evaluation = self.path / "evaluation"
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self.resume_command = f"aploss train --resume --out {self.path}"

    @property
    def exists(self) -> bool:
        """Whether a run has been started here."""
        return self.config_file.is_file()

    def refuse_if_taken(self) -> None:
        """Raises RunError if a run or something else is at this place."""
        if self.exists:
            raise RunError(
                f"{self.path} already holds a run; add --resume to go on with it, or choose another folder with --out"
            )
        taken = self.path.exists()
        if self.path.is_dir():  # what a kill during create() has left is no obstacle
            left = (*FOLDERS, LOCK_FILE, "environment.json")
            taken = any(entry.name not in left for entry in self.path.iterdir())
        if taken:
            raise RunError(f"{self.path} is in the way of the run; choose another folder with --out")

    def create(self, config: TrainConfig) -> None:
        """Makes a new run folder with its config and environment; RunError if something is at this place."""
        self.refuse_if_taken()
        try:
            for folder in FOLDERS:
                (self.path / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"the run folder {self.path} cannot be made: {error}") from error
        write_json(self.path / "environment.json", describe_environment())
        # The config comes last: with it the folder is a run.
        write_text(self.config_file, yaml.safe_dump(config_to_dict(config), sort_keys=False))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out of the folder; the lock goes with the process, even if killed.

        The folder is made for it, and removed again when no run has been started in it.

        Raises:
            RunError: if another process is training in it, or nothing can be written there.
        """
        lock = FileLock(self.path / LOCK_FILE)
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            raise RunError(
                f"another process is training in {self.path}; wait for it, or choose another folder with --out"
            ) from None
        except OSError as error:
            raise RunError(
                f"nothing can be written in {self.path}: {error.strerror}; change its permissions, "
                "copy it, or choose another folder with --out"
            ) from error
        try:
            yield
        finally:
            if made and not self.exists:
                (self.path / LOCK_FILE).unlink(missing_ok=True)
                with suppress(OSError):  # something else is in it now
                    for folder in made:
                        folder.rmdir()
            lock.release()

    def read_config(self) -> TrainConfig:
        """The config of the run that is here; RunError without one."""
        if not self.exists:
            raise RunError(f"{self.path} holds no run (it has no config.yaml)")
        return config_from_dict(read_yaml(self.config_file), source=str(self.config_file))

    def go_on(self, config: TrainConfig) -> None:
        """Makes the folder ready for a resumed run; ConfigError if more differs than what may change on the way."""
        refuse_changes(self, config)
        remove_unfinished(self.path)

    def read_summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None."""
        file = self.summary_file
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def discard(folder: RunFolder) -> None:
    """Removes a run that has come to nothing, so that its folder is free for another try."""
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "metrics.csv", "tracker.json"):
        (folder.path / name).unlink(missing_ok=True)
    for name in ("tensorboard", "wandb"):
        shutil.rmtree(folder.path / name, ignore_errors=True)
    for name in FOLDERS:
        with suppress(OSError):  # something is in it
            (folder.path / name).rmdir()


def refuse_changes(folder: RunFolder, config: TrainConfig) -> None:
    """Raises ConfigError if a run was started with settings that learn something else."""
    changed = [key for key in differing_keys(folder.read_config(), config) if key not in RESUMABLE_KEYS]
    if changed:
        raise ConfigError(
            f"{folder.path} was started with another {', '.join(changed)}; resume it as it was, "
            "or start a new run with --out"
        )


class Checkpoints:
    """The ``checkpoints/`` folder of a run.

    ``last.pt`` holds everything that a run needs to go on as if nothing had happened, ``previous.pt`` the one before
    it, ``best.pt`` the detector with the best validation. All hold the detector under the key ``"detector"``, so that
    :func:`aploss.detectors.load` reads them. Damaged ones, or those of another version, are a RunError.
    """

    def __init__(self, folder: Path) -> None:
        self.last, self.previous, self.best = (folder / f"{name}.pt" for name in ("last", "previous", "best"))

    def save_last(self, detector: Detector, training: dict[str, Any]) -> None:
        """Replaces ``last.pt``, which becomes ``previous.pt``; ``training`` is all but the weights to predict with."""
        if self.last.is_file():
            keep_as(self.last, self.previous)
        self._write(self.last, detector, {"training": training})

    def save_best(self, detector: Detector, *, step: int, metrics: dict[str, Any]) -> None:
        """Replaces ``best.pt``; also used to add the calibration to it."""
        self._write(self.best, detector, {"step": step, "metrics": metrics})

    def load_last(self) -> dict[str, Any]:
        """What ``last.pt`` holds, on the CPU; an error says whether the one before can take its place."""
        try:
            return self._load(self.last, "training")
        except RunError as error:
            step = None
            with suppress(RunError, KeyError, TypeError):
                step = self._load(self.previous, "training")["training"]["step"]
            if step is None:
                raise
            raise RunError(
                f"{error}; the checkpoint before it, of step {step}, is whole: to go on from "
                f"there, first cp {self.previous} {self.last}"
            ) from error

    def load_best(self) -> dict[str, Any]:
        """What ``best.pt`` holds, on the CPU."""
        return self._load(self.best, "step", "metrics")

    def _write(self, path: Path, detector: Detector, content: dict[str, Any]) -> None:
        record = {"format": CHECKPOINT_FORMAT, "detector": detector_record(detector), **content}
        write_whole(path, lambda file: torch.save(record, file))

    def _load(self, path: Path, *content_fields: str) -> dict[str, Any]:
        content = read_checkpoint(path)
        if not isinstance(content, dict) or content.get("format") != CHECKPOINT_FORMAT:
            raise RunError(f"{path} is not a checkpoint of this version of aploss")
        missing = [name for name in ("detector", *content_fields) if name not in content]
        if missing:
            raise RunError(f"{path} is not a whole checkpoint: it has no {', '.join(missing)}")
        return content


class MetricsLog:
    """Appends rows to ``metrics.jsonl`` and ``metrics.csv`` of a run folder, and to the files of what went wrong.

    Rows after the step the run goes on from, 0 for a new one, are cut off, since they are written again.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        self._bad_file, self._unreadable_file = folder / "bad_numbers.jsonl", folder / "unreadable_images.jsonl"
        jsonl, table = folder / "metrics.jsonl", folder / "metrics.csv"
        header = dict(zip(CSV_COLUMNS, CSV_COLUMNS, strict=True))
        write_text(table, "".join(map(_csv_line, [header, *_cut_back(jsonl, step)])))
        for file in (self._bad_file, self._unreadable_file):
            if file.is_file():
                _cut_back(file, step)
        self._jsonl: IO[str] = jsonl.open("a", encoding="utf-8")
        self._csv: IO[str] = table.open("a", encoding="utf-8", newline="")

    def add(self, row: dict[str, Any]) -> None:
        """Writes one row, with ``kind`` and ``step`` in it, to both."""
        for file, line in ((self._jsonl, _json_line(row)), (self._csv, _csv_line(row))):
            file.write(line)
            file.flush()

    def add_bad(self, row: dict[str, Any]) -> None:
        """Writes one row, with ``step`` in it, to the file of skipped steps."""
        _append(self._bad_file, row)

    def add_unreadable(self, row: dict[str, Any]) -> None:
        """Writes one row, with ``step`` in it, to the file of images that cannot be read."""
        _append(self._unreadable_file, row)

    def flush_to_disk(self) -> None:
        """Makes sure that a checkpoint written next has its rows, even after a power cut."""
        for file in (self._jsonl, self._csv):
            os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the files."""
        for file in (self._jsonl, self._csv):
            file.close()


def _cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    rows = [row for row in read_json_lines(path) if isinstance(row.get("step"), int) and row["step"] <= step]
    write_text(path, "".join(map(_json_line, rows)))
    return rows


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_json_line(row))


def _json_line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _csv_line(row: dict[str, Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([row.get(name, "") for name in CSV_COLUMNS])
    return line.getvalue()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run. AP values are those of the split ``split``; None where undefined.

    Attributes:
        folder: of the run.
        calibration_error: expected calibration error of all detections, after calibration, on ``calibration_split``.
        calibration_error_drawn: of those above ``draw_threshold`` alone.
        calibration_held_out: whether that split is another than the calibration was fitted on.
        best_step: step of the evaluated weights.
        stopped_by: ``"length"``, ``"patience"`` or ``"minutes"``.
        bad_steps: steps skipped because of NaN or Inf.
        unreadable_images: images that could not be read, with the reason: others stood in for those of training, those
            of other splits were left out.
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
    unreadable_images: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def write(self, path: Path) -> None:
        """Writes ``summary.json``."""
        write_json(path, self.as_dict())

    @classmethod
    def read(cls, path: Path) -> "Summary":
        """Reads ``summary.json``; the folder is where the file is now. RunError for none, or another version's."""
        try:
            values = {"unreadable_images": {}, **json.loads(path.read_text(encoding="utf-8"))}  # not in older ones
            known = {entry.name: values[entry.name] for entry in fields(cls)}
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
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
