"""The files of a run folder as plain data; what is missing or broken is noted, not fatal.

The one reader of run folders for pages and comparisons; ``docs/reports.md`` tells which files there are.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from aploss.errors import RunError

Document = TypeVar("Document", dict[str, Any], list[Any])


@dataclass
class RunFiles:
    """What was found in a run folder; empty where a file is not there or cannot be used."""

    folder: Path  # the run folder
    summary: dict[str, Any] = field(default_factory=dict)  # ``summary.json``
    environment: dict[str, Any] = field(default_factory=dict)
    config: str = ""  # the text of ``config.yaml``
    training: list[dict[str, Any]] = field(default_factory=list)  # rows of ``metrics.jsonl``
    validation: list[dict[str, Any]] = field(default_factory=list)
    ground_truth: dict[str, Any] = field(default_factory=dict)  # of ``evaluation/*.json``, as the next four
    detections: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    matches: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # one line for each file that is there but cannot be used
    images: Path | None = None  # the folder that image files may lie in, besides the run folder

    def may_open(self, path: Path) -> bool:
        """Whether an image file lies where images are looked for, with all links followed."""
        real = path.resolve()
        folders = [self.folder] if self.images is None else [self.folder, self.images]
        return any(real.is_relative_to(folder.resolve()) for folder in folders)

    @property
    def threshold(self) -> float:
        """The score from which detections are drawn, on the scale of :attr:`scores`."""
        thresholds = [document.get("draw_threshold") for document in (self.calibration, self.summary)]
        return next((float(one) for one in thresholds if one is not None), 0.5)

    @cached_property
    def scores(self) -> np.ndarray:
        """One score for each detection, calibrated where a calibration was fitted, float64 [n]."""
        calibrated = self.calibration.get("calibrated_scores")
        if calibrated is not None and len(calibrated) == len(self.detections):
            return np.asarray(calibrated, dtype=np.float64)
        return np.array([one["score"] for one in self.detections], dtype=np.float64)

    @cached_property
    def outcomes(self) -> np.ndarray | None:
        """For each detection 1 (right), 0 (wrong) or -1 (ignored), int64 [n]; None: not known."""
        flags = self.matches.get("detections")
        if flags is None or len(flags) != len(self.detections):
            return None
        return np.array([-1 if flag is None else int(flag) for flag in flags], dtype=np.int64)


def read_run(folder: str | Path, *, images: str | Path | None = None) -> RunFiles:
    """Reads the files of a run folder; its image files are only opened there or below ``images``.

    RunError where the folder is not there or holds none of a run's files.
    """
    root = Path(folder)
    if not root.is_dir():
        raise RunError(f"{root}: no such folder; name the folder of a run, such as runs/demo")
    run = RunFiles(root, images=None if images is None else Path(images))
    run.summary = _json(run, "summary.json", {})
    run.environment = _json(run, "environment.json", {})
    run.ground_truth = _json(run, "evaluation/ground_truth.json", {})
    run.detections = _json(run, "evaluation/detections.json", [])
    run.metrics = _json(run, "evaluation/metrics.json", {})
    run.calibration = _json(run, "evaluation/calibration.json", {})
    run.matches = _json(run, "evaluation/matches.json", {})
    run.config = _bytes(run, "config.yaml").decode("utf-8", "replace")
    rows = _metrics_rows(run)
    run.training = [row for row in rows if row.get("kind") == "train"]
    run.validation = [row for row in rows if row.get("kind") == "validation"]
    if not (run.summary or run.config or rows or run.metrics or run.problems):
        raise RunError(f"{root}: not the folder of a run (no summary.json, config.yaml, metrics)")
    return run


def matches_document(
    correct: Sequence[bool] | np.ndarray,
    ignored: Sequence[bool] | np.ndarray,
    objects: Sequence[int] | np.ndarray,
    annotation_ids: Sequence[int],
) -> dict[str, Any]:
    """The content of ``evaluation/matches.json``.

    Args:
        correct: the detection found an object, bool [n].
        ignored: it counts neither as right nor as wrong, bool [n].
        objects: position of the object it was matched with, -1 for none, int [n].
        annotation_ids: the id of each object, [g].

    Example:
        >>> matches_document([True, False], [False, True], [1, -1], [7, 8])
        {'detections': [True, None], 'ground_truth': {'7': None, '8': 0}}
    """
    flags = [None if skip else bool(hit) for hit, skip in zip(correct, ignored, strict=True)]
    found_by: dict[str, int | None] = {str(number): None for number in annotation_ids}
    for row, position in enumerate(objects):
        if position >= 0:
            found_by[str(annotation_ids[int(position)])] = row
    return {"detections": flags, "ground_truth": found_by}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, such as ``metrics.jsonl``; none where there is no file.

    Lines that are not JSON objects are left out: the last one may have been cut by a kill.
    """
    return _parse_lines(_bytes(RunFiles(path.parent), path.name))[0]


def _metrics_rows(run: RunFiles) -> list[dict[str, Any]]:
    rows, bad = _parse_lines(_bytes(run, "metrics.jsonl"))
    if bad:
        run.problems.append(f"metrics.jsonl has {bad} line(s) that are not JSON; they are left out")
    return rows


def _parse_lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The rows, and how many whole lines are not JSON objects."""
    lines = content.split(b"\n")
    rows, bad = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line.decode("utf-8")) if line.strip() else {}
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.extend([row] if row else [])
        elif number < len(lines):  # a last line without its end was cut by a kill
            bad += 1
    return rows, bad


def _json(run: RunFiles, name: str, empty: Document) -> Document:
    content = _bytes(run, name)
    if not content:
        return empty
    try:
        document = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        run.problems.append(f"{name} is not JSON: {error}")
        return empty
    if isinstance(document, type(empty)):
        return document
    wanted = "an object" if isinstance(empty, dict) else "a list"
    run.problems.append(f"{name} holds a {type(document).__name__}, not {wanted}")
    return empty


def _bytes(run: RunFiles, name: str) -> bytes:
    path = run.folder / name
    try:
        if path.exists() and not path.is_file():  # to read a pipe would wait for ever
            raise OSError("not a file")
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        run.problems.append(f"{name} cannot be read: {error.strerror or error}")
        return b""
