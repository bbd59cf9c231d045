"""Detectors in files: saved in one rename, loaded without running any code from the file."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from aploss.detectors.build import build_detector
from aploss.detectors.detector import DETECTORS, Detector
from aploss.detectors.losses_by_name import CUSTOM
from aploss.errors import RunError
from aploss.evaluation import Calibration
from aploss.files import check_archive, write_whole
from aploss.losses.traits import LOSSES


def detector_record(detector: Detector) -> dict[str, Any]:
    """The plain dict that rebuilds a detector: what a checkpoint holds under ``"detector"``."""
    return {
        "config": detector.config,
        "state": detector.state_dict(),
        "calibration": None if detector.calibration is None else detector.calibration.to_dict(),
        "draw_threshold": detector.draw_threshold,
    }


def detector_from_record(record: dict[str, Any]) -> Detector:
    """The detector of a :func:`detector_record`, in evaluation mode.

    Raises:
        KeyError, RuntimeError, TypeError: if the record is not one; :func:`load` reports these.
    """
    # The state holds every weight: fetching the ones it was once started from would be in vain.
    detector = build_detector(**{**record["config"], "weights": None})
    detector.load_state_dict(record["state"])
    calibration = record["calibration"]
    detector.calibration = None if calibration is None else Calibration.from_dict(calibration)
    detector.draw_threshold = record["draw_threshold"]
    return detector.eval()


def save_detector(detector: Detector, path: str | Path) -> Path:
    """Writes a detector with its calibration and drawing threshold to one file.

    The file appears under its name only when it is complete.

    Args:
        detector: any detector of :func:`~aploss.detectors.build_detector`.
        path: the file to write, such as ``detector.pt``; its folder is made when it is missing.

    Returns:
        The path that was written.
    """
    path, content = Path(path), {"detector": detector_record(detector)}
    write_whole(path, lambda file: torch.save(content, file))
    return path


def load(path: str | Path, *, device: str | torch.device = "cpu") -> Detector:
    """A detector from a file of :func:`save_detector`, a training checkpoint or a run folder.

    Args:
        path: the file, or a run folder: then its ``checkpoints/best.pt``, else ``last.pt``.
        device: where the detector is put.

    Returns:
        The detector in evaluation mode, with its calibration and drawing threshold.

    Raises:
        RunError: if the file is missing, damaged, or holds no detector or one of a plugin that is not loaded.
    """
    file = checkpoint_file(Path(path))
    checkpoint = read_checkpoint(file)
    if not isinstance(checkpoint, dict) or "detector" not in checkpoint:
        raise RunError(
            f"{file} holds no detector of aploss; to start a training from other weights, use weights={str(path)!r}"
        )
    record = checkpoint["detector"]
    try:
        _check_registered(file, record["config"])
        return detector_from_record(record).to(device)
    except RunError:
        raise
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise RunError(f"{file} does not fit this version of aploss: {reason}") from error


def _check_registered(file: Path, config: dict[str, Any]) -> None:
    for kind, name, known in (("detector", config["name"], {*DETECTORS}), ("loss", config["loss"], {*LOSSES, CUSTOM})):
        if name not in known:
            raise RunError(
                f"{file} has the {kind} {name!r}, which is not registered here: "
                "load the plugin that brings it first (--plugin FILE.py)"
            )


def read_checkpoint(file: Path) -> Any:
    """What a torch file holds, on the CPU, loaded with ``weights_only=True``.

    Raises:
        RunError: if the file is missing, damaged, or holds more than weights and plain values.
    """
    if not file.is_file():
        raise RunError(f"there is no file {file}")
    if zipfile.is_zipfile(file):
        check_archive(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(file):
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            reason = f"it holds more than weights and plain values, which could run code: {', '.join(unsafe)}"
        raise RunError(f"{file} cannot be read as a torch file: {reason}") from error


def checkpoint_file(path: Path) -> Path:
    """The checkpoint that a path means: a file itself, of a run folder the best, else the last.

    Raises:
        RunError: if there is none.
    """
    if not path.exists():
        raise RunError(f"there is no run folder or checkpoint {path}")
    if not path.is_dir():
        return path
    for name in ("checkpoints/best.pt", "checkpoints/last.pt", "best.pt", "last.pt"):
        if (path / name).is_file():
            return path / name
    raise RunError(f"{path} has no checkpoints/best.pt or checkpoints/last.pt: is it a run folder?")
