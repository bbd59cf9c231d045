"""Reads the files of a run folder as plain data, for pages and comparisons; ``docs/reports.md`` lists the files.

Files that are missing or invalid are recorded, never fatal.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from aploss.errors import RunError
from aploss.evaluation.matching import Matches, match_detections


@dataclass
class RunFiles:
    """The content of a run folder; empty for files that are missing or invalid."""

    folder: Path
    images: Path | None = None  # a folder that image files may be in, besides the run folder
    summary: dict[str, Any] = field(default_factory=dict)  # ``summary.json``
    environment: dict[str, Any] = field(default_factory=dict)  # ``environment.json``
    config: str = ""  # the text of ``config.yaml``
    training: list[dict[str, Any]] = field(default_factory=list)  # rows of ``metrics.jsonl``
    validation: list[dict[str, Any]] = field(default_factory=list)
    ground_truth: dict[str, Any] = field(default_factory=dict)  # this and the next four: ``evaluation/*.json``
    detections: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    matches: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # one line for each invalid file

    @property
    def threshold(self) -> float:
        """The score from which detections are drawn, on the scale of :attr:`scores`."""
        thresholds = [document.get("draw_threshold") for document in (self.calibration, self.summary)]
        return next((float(one) for one in thresholds if one is not None), 0.5)

    @cached_property
    def scores(self) -> np.ndarray:
        """The score of each detection, calibrated if there is a calibration, float64 [n]."""
        calibrated = self.calibration.get("calibrated_scores")
        if calibrated is not None and len(calibrated) == len(self.detections):
            return np.asarray(calibrated, dtype=np.float64)
        return np.array([one["score"] for one in self.detections], dtype=np.float64)

    @cached_property
    def outcomes(self) -> np.ndarray | None:
        """1 (correct), 0 (wrong) or -1 (ignored) for each detection, int64 [n]; None if unknown."""
        flags = self.matches.get("detections")
        if flags is None or len(flags) != len(self.detections):
            return None
        return np.array([-1 if flag is None else int(flag) for flag in flags], dtype=np.int64)

    @property
    def class_names(self) -> list[str]:
        """The names of the K classes."""
        return [str(category["name"]) for category in self.ground_truth.get("categories", [])]

    @cached_property
    def confusion_matrix(self) -> np.ndarray | None:
        """Objects by annotated class (rows) and detected class (columns), int64 [K + 1, K + 1]; None if unknown.

        The background is last in both. Detections above the threshold are matched with objects of their class, as for
        AP50; the remaining ones are then matched with the remaining objects of any class.
        """
        if self.outcomes is None or not self.ground_truth:
            return None
        try:
            return self._confusion_matrix(self.outcomes)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.problems.append(f"detections and objects cannot be matched ({type(error).__name__}: {error})")
            return None

    def _confusion_matrix(self, outcomes: np.ndarray) -> np.ndarray:
        label_of = {category["id"]: label for label, category in enumerate(self.ground_truth["categories"])}
        background = len(label_of)
        matrix = np.zeros((background + 1, background + 1), np.int64)
        drawn = self.scores >= self.threshold
        objects = []  # that no detection of their class found
        for entry in self.ground_truth["annotations"]:
            if entry.get("iscrowd") or entry.get("difficult"):
                continue
            row, label = self.matches["ground_truth"].get(str(entry["id"])), label_of[entry["category_id"]]
            if row is not None and drawn[row]:
                matrix[label, label] += 1
            else:
                objects.append(entry)
        wrong = [{**self.detections[row], "score": self.scores[row]} for row in np.flatnonzero(drawn & (outcomes == 0))]
        one_class = {"categories": [{"id": 0}], "annotations": [{**entry, "category_id": 0} for entry in objects]}
        pairs = match_detections({**self.ground_truth, **one_class}, [{**entry, "category_id": 0} for entry in wrong])
        for entry, place in zip(wrong, pairs.objects, strict=True):
            annotated = background if place < 0 else label_of[objects[place]["category_id"]]
            matrix[annotated, label_of[entry["category_id"]]] += 1
        for place in np.flatnonzero(~pairs.found):
            matrix[label_of[objects[place]["category_id"]], background] += 1
        return matrix


def read_run(folder: str | Path, *, images: str | Path | None = None) -> RunFiles:
    """Reads a run folder. Image files are only opened inside it or ``images``.

    Raises:
        RunError: if the folder does not exist or contains no file of a run.
    """
    root = Path(folder)
    if not root.is_dir():
        raise RunError(f"{root}: no such folder; give the folder of a run, such as runs/demo")
    run = RunFiles(root, None if images is None else Path(images))
    for name in ("summary", "environment"):
        setattr(run, name, _read_json(run, f"{name}.json", dict))
    for name in ("ground_truth", "detections", "metrics", "calibration", "matches"):
        setattr(run, name, _read_json(run, f"evaluation/{name}.json", list if name == "detections" else dict))
    run.config = _read_bytes(run, "config.yaml").decode("utf-8", "replace")
    rows, invalid = _parse_lines(_read_bytes(run, "metrics.jsonl"))
    if invalid:
        run.problems.append(f"metrics.jsonl has {invalid} line(s) that are not JSON; they are skipped")
    run.training = [row for row in rows if row.get("kind") == "train"]
    run.validation = [row for row in rows if row.get("kind") == "validation"]
    if not (run.summary or run.config or rows or run.metrics or run.problems):
        raise RunError(f"{root}: not a run folder (no summary.json, config.yaml or metrics)")
    return run


def matches_document(matches: Matches, annotation_ids: Sequence[int]) -> dict[str, Any]:
    """The content of ``evaluation/matches.json``: the outcome of each detection, and the detection of each object."""
    flags = [None if skip else hit for hit, skip in zip(matches.correct.tolist(), matches.ignored, strict=True)]
    found_by: dict[str, int | None] = {str(number): None for number in annotation_ids}
    for row in np.flatnonzero(matches.objects >= 0).tolist():
        found_by[str(annotation_ids[matches.objects[row]])] = row
    return {"detections": flags, "ground_truth": found_by}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file such as ``metrics.jsonl``, without invalid lines; empty if there is no file."""
    return _parse_lines(_read_bytes(RunFiles(path.parent), path.name))[0]


def _parse_lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The rows, and the number of invalid lines; an incomplete last line was cut by a kill and is not counted."""
    rows, invalid = [], 0
    *lines, last = content.split(b"\n")
    for line in (*lines, last):
        try:
            row = json.loads(line.decode("utf-8")) if line.strip() else {}
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            invalid += line is not last
    return list(filter(None, rows)), invalid


def _read_json(run: RunFiles, name: str, kind: type) -> Any:
    """A JSON document of the given type, empty if it is missing or invalid."""
    content = _read_bytes(run, name)
    try:
        document = json.loads(content.decode("utf-8")) if content else kind()
    except (ValueError, RecursionError) as error:
        run.problems.append(f"{name} is not JSON: {error}")
        return kind()
    if not isinstance(document, kind):
        run.problems.append(f"{name} holds a {type(document).__name__}, expected a {kind.__name__}")
        return kind()
    return document


def _read_bytes(run: RunFiles, name: str) -> bytes:
    path = run.folder / name
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise OSError("not a file")
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        run.problems.append(f"{name} cannot be read: {error.strerror or error}")
        return b""
