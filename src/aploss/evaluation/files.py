"""Annotations and detections from COCO's JSON files."""

import json
from pathlib import Path
from typing import Any

from aploss.errors import DataError
from aploss.evaluation.detections import DetectionTable
from aploss.evaluation.ground_truth import GroundTruth

__all__ = ["read_detections", "read_ground_truth"]


def read_ground_truth(path: str | Path) -> GroundTruth:
    """Reads COCO annotations from a JSON file.

    Raises:
        DataError: the file is not there, is not JSON, or an entry is wrong; it names the file.
    """
    document = _read_json(path)
    try:
        return GroundTruth.from_coco(document)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def read_detections(path: str | Path) -> DetectionTable:
    """Reads COCO results from a JSON file. Raises like :func:`read_ground_truth`."""
    document = _read_json(path)
    try:
        return DetectionTable.from_results(document)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error})") from None
