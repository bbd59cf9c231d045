"""Detectors in files: saved in one rename, loaded without running any code from the file."""

import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aploss.detectors.build import build_detector
from aploss.detectors.criterion import CUSTOM
from aploss.detectors.detector import DETECTORS, Detector
from aploss.errors import AplossError, RunError, listed
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


def detector_from_record(record: Mapping[str, Any]) -> Detector:
    """The detector of a :func:`detector_record`, in evaluation mode.

    RunError for weights that are NaN, infinite or of another kind; a record that is none can raise anything, which
    :func:`wrap_untrusted` reports.
    """
    detector = detector_without_weights(record)
    _check_weights(detector, record["state"])
    detector.load_state_dict(record["state"])
    return detector


def detector_without_weights(record: Mapping[str, Any]) -> Detector:
    """As :func:`detector_from_record`, with fresh weights in place of the record's.

    Whoever wrote the record, nothing else is opened for it: the weights that the detector was once started from are
    neither read nor fetched.
    """
    detector = build_detector(**{**record["config"], "weights": None})
    calibration, threshold = record["calibration"], record["draw_threshold"]
    if not (threshold is None or 0 <= threshold <= 1):
        raise RunError(f"draw_threshold must be between 0 and 1, got {threshold!r}")
    detector.calibration = None if calibration is None else Calibration.from_dict(calibration)
    detector.draw_threshold = threshold
    return detector.eval()


def _check_weights(detector: Detector, state: Mapping[str, Tensor]) -> None:
    """Refuses what torch would load without a word: other kinds of numbers, and NaN or Inf."""
    for name, own in detector.state_dict().items():
        tensor = state.get(name, own)
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_floating_point() != own.is_floating_point():
            kind = type(tensor).__name__
            if isinstance(tensor, Tensor):
                kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
            raise RunError(f"{name} must be a plain tensor of {own.dtype}, got {kind}")
    refuse_non_finite((name, bool(tensor.isfinite().all())) for name, tensor in state.items())


def refuse_non_finite(tensors: Iterable[tuple[str, bool]]) -> None:
    """Raises RunError for names of weights that are not all finite numbers, given as (name, is finite)."""
    if bad := [name for name, finite in tensors if not finite]:
        raise RunError(
            f"NaN or infinite weights in {listed(bad)}: the training diverged or the file is damaged; "
            "use an earlier checkpoint"
        )


@contextmanager
def wrap_untrusted(source: str | Path) -> Iterator[None]:
    """Whatever a stranger's values cause where a detector is built from them becomes a RunError that names the file."""
    try:
        yield
    except AplossError as error:
        raise RunError(f"{source}: {error}") from error
    except Exception as error:  # there is no end to what wrong types and sizes can raise inside of torch
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = f"it has no {reason}" if isinstance(error, KeyError) else reason
        raise RunError(f"{source} does not fit this version of aploss: {reason[:300]}") from error


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
    with wrap_untrusted(file):
        check_registered(checkpoint["detector"]["config"])
        detector = detector_from_record(checkpoint["detector"])
    return detector.to(device)


def check_registered(config: Mapping[str, Any]) -> None:
    """Raises RunError for the config of a detector or loss that nobody has registered."""
    for kind, name, known in (("detector", config["name"], {*DETECTORS}), ("loss", config["loss"], {*LOSSES, CUSTOM})):
        if name not in known:
            raise RunError(
                f"the {kind} {name!r} is not registered here: load the plugin that brings it first (--plugin FILE.py)"
            )


def read_checkpoint(file: Path) -> Any:
    """What a torch file holds, on the CPU, loaded with ``weights_only=True``.

    RunError for a file that is missing, damaged, or holds more than weights and plain values.
    """
    if not file.is_file():
        raise RunError(f"there is no file {file}")
    if zipfile.is_zipfile(file):
        check_archive(file)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's advice on files of other kinds
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is something else can make the unpickler raise anything
        raise RunError(f"{file} cannot be read as a torch file: {_why_unreadable(file, error)}") from error


def _why_unreadable(file: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if not zipfile.is_zipfile(file):
        return "it is none, or damaged"
    unsafe: list[str] = []
    with suppress(Exception):  # it stumbles over the same damage
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unsafe:
        return f"it holds more than weights and plain values, which could run code: {', '.join(unsafe)}"
    return str(error).partition("\n")[0] or type(error).__name__


def checkpoint_file(path: Path) -> Path:
    """The checkpoint that a path means: a file itself, of a run folder the best, else the last; RunError for none."""
    if not path.exists():
        raise RunError(f"there is no run folder or checkpoint {path}")
    if not path.is_dir():
        return path
    for name in ("checkpoints/best.pt", "checkpoints/last.pt", "best.pt", "last.pt"):
        if (path / name).is_file():
            return path / name
    raise RunError(f"{path} has no checkpoints/best.pt or checkpoints/last.pt: is it a run folder?")
