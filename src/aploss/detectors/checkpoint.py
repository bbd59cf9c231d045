"""Checkpoint files: their format, written atomically and loaded without running any code from the file.

:class:`Checkpoint` is the only reader and writer of the format. A checkpoint always holds a detector; ``best.pt`` of a
run also holds the step and metrics it was selected by, ``last.pt`` everything that a run needs to resume exactly.
"""

import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aploss.detectors.criterion import CUSTOM
from aploss.detectors.detector import DETECTORS, Detector, build_detector
from aploss.errors import AplossError, RunError, listed
from aploss.evaluation import Calibration
from aploss.files import check_archive, write_whole
from aploss.losses.traits import LOSSES

FORMAT = 1
STEPPER_KEYS = ("optimizer", "scaler", "weights", "averaged_steps")
MAX_VALUES = 1_000_000  # in a file, apart from the numbers of its tensors


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of a run apart from the evaluated detector."""

    loop: dict[str, Any]  # counters of the training loop; with "step"
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    weights: dict[str, Tensor] | None  # of the trained detector if an EMA of it is evaluated
    averaged_steps: int | None  # of the EMA
    images: int  # training images
    threads: int

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> "TrainingState":
        """Reads the entry ``training`` of a file; KeyError for a missing key."""
        stepper = {key: content["stepper"][key] for key in STEPPER_KEYS}
        others = ("stepper", "images", "threads", "random", "image_names")  # the last two: in files of older versions
        loop = {key: value for key, value in content.items() if key not in others}
        return cls(loop=loop, images=content["images"], threads=content["threads"], **stepper)

    def to_content(self) -> dict[str, Any]:
        """The inverse of :meth:`from_content`."""
        stepper = {key: getattr(self, key) for key in STEPPER_KEYS}
        return {**self.loop, "stepper": stepper, "images": self.images, "threads": self.threads}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The content of a checkpoint file."""

    config: dict[str, Any]  # rebuilds the detector, see Detector.config
    weights: Mapping[str, Tensor] | None  # its state dict; None for newly initialised weights
    calibration: dict[str, Any] | None = None
    draw_threshold: float | None = None
    step: int | None = None  # of a run
    metrics: dict[str, Any] | None = None  # of the validation that selected it, in best.pt
    training: TrainingState | None = None  # in last.pt
    source: Path | None = None  # the file it was read from, for error messages

    @classmethod
    def of(cls, detector: Detector, **others: Any) -> "Checkpoint":
        """A checkpoint of a detector; ``others`` are further fields."""
        return cls(config=detector.config, weights=detector.state_dict(), **others).with_calibration(detector)

    def with_calibration(self, detector: Detector) -> "Checkpoint":
        """The same checkpoint with the calibration and drawing threshold of ``detector``."""
        calibration = None if detector.calibration is None else detector.calibration.to_dict()
        return replace(self, calibration=calibration, draw_threshold=detector.draw_threshold)

    @classmethod
    def from_content(cls, content: Any, source: Path) -> "Checkpoint | None":
        """Interprets the content of a torch file; None if it was not written by aploss.

        Raises RunError for an incomplete checkpoint, or one of an unknown format version.
        """
        if not isinstance(content, Mapping) or "detector" not in content:
            return None
        if content.get("format", FORMAT) != FORMAT:
            raise RunError(f"{source} has checkpoint format {content['format']!r}; this version reads {FORMAT}")
        with wrap_untrusted(source):
            record, training = content["detector"], content.get("training")
            if not isinstance(record["state"], Mapping):
                raise RunError("its weights are not a state dict")
            state = None if training is None else TrainingState.from_content(training)
            return cls(
                config=record["config"],
                weights=record["state"],
                calibration=record["calibration"],
                draw_threshold=record["draw_threshold"],
                step=content.get("step") if state is None else state.loop["step"],
                metrics=content.get("metrics"),
                training=state,
                source=source,
            )

    @classmethod
    def read(cls, file: Path) -> "Checkpoint":
        """Reads a file; RunError if it is missing, damaged or not a checkpoint of aploss."""
        checkpoint = cls.from_content(read_torch_file(file), file)
        if checkpoint is None:
            raise RunError(
                f"{file} is not a checkpoint of aploss; to initialise a training run from other weights, "
                f"use weights={str(file)!r}"
            )
        return checkpoint

    def write(self, file: Path) -> None:
        """Writes the file, which appears under its name only when it is complete."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "detector": {
                "config": self.config,
                "state": self.weights,
                "calibration": self.calibration,
                "draw_threshold": self.draw_threshold,
            },
        }
        if self.training is not None:
            content["training"] = self.training.to_content()
        elif self.step is not None:
            content |= {"step": self.step, "metrics": self.metrics}
        write_whole(file, lambda handle: torch.save(content, handle))

    def detector(self) -> Detector:
        """Rebuilds the detector in evaluation mode; nothing but this checkpoint is read for it.

        Raises RunError for a detector or loss of a plugin that is not loaded, weights that do not fit or are not
        finite, or any other invalid value.
        """
        with wrap_untrusted(self.source or "the checkpoint"):
            for kind, known in (("name", [*DETECTORS]), ("loss", [*LOSSES, CUSTOM])):
                if (entry := self.config[kind]) not in known:
                    raise RunError(f"{entry!r} is not registered: load its plugin first (--plugin FILE.py)")
            config = {**self.config, "weights": None}
            if self.weights is not None:
                _check_weights(_build_without_memory(config), self.weights)
            detector = build_detector(**config)
            if not (self.draw_threshold is None or 0 <= self.draw_threshold <= 1):
                raise RunError(f"draw_threshold must be between 0 and 1, got {self.draw_threshold!r}")
            detector.calibration = None if self.calibration is None else Calibration.from_dict(self.calibration)
            detector.draw_threshold = self.draw_threshold
            if self.weights is not None:
                detector.load_state_dict(self.weights)
        return detector.eval()


def _build_without_memory(config: dict[str, Any]) -> Detector:
    """The detector of a config on the meta device, since an untrusted config may describe a huge network."""
    try:
        with torch.device("meta"):
            return build_detector(**config)
    except AplossError:
        raise
    except RuntimeError:  # the network of a plugin that needs values while it is built
        return build_detector(**config)


def _check_weights(detector: Detector, state: Mapping[str, Tensor]) -> None:
    """Rejects other names and shapes, and what torch would load silently: other dtypes and layouts, NaN and Inf.

    ``detector`` is one without data, on the meta device, and takes over the weights.
    """
    wanted = detector.state_dict()
    for name, own in wanted.items():
        tensor = state.get(name, torch.empty(0, dtype=own.dtype))  # load_state_dict names the missing ones
        plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_floating_point() != own.is_floating_point():
            raise RunError(f"{name} must be a dense tensor of {own.dtype}")
    # A copy, since torch notes assign=True in the metadata of the state, and every later load would assign, too.
    detector.load_state_dict(dict(state), assign=True)
    refuse_non_finite({name: state[name] for name in wanted})


def refuse_non_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises RunError for weights that are not all finite numbers."""
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise RunError(
            f"NaN or infinite weights in {listed(bad)}: the training diverged or the file is damaged; "
            "use an earlier checkpoint"
        )


@contextmanager
def wrap_untrusted(source: str | Path) -> Iterator[None]:
    """Converts any error caused by untrusted checkpoint values into a RunError that names the file."""
    try:
        yield
    except AplossError as error:
        raise RunError(f"{source}: {error}") from error
    except Exception as error:  # wrong types and sizes can raise anything inside of torch
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = f"it has no entry {reason}" if isinstance(error, KeyError) else reason
        raise RunError(f"{source} is damaged or from another version of aploss: {reason[:300]}") from error


def save_detector(detector: Detector, path: str | Path) -> Path:
    """Writes a detector with its calibration and drawing threshold to a file.

    The file appears under its name only when it is complete.

    Args:
        detector: any detector of :func:`~aploss.detectors.build_detector`.
        path: the file to write, such as ``detector.pt``; missing parent folders are created.

    Returns:
        The path that was written.

    Example:
        >>> from aploss.detectors import build_detector
        >>> file = save_detector(build_detector("retinanet-tiny", class_names=["cat", "dog"]), "detector.pt")
        >>> load(file).class_names
        ('cat', 'dog')
    """
    Checkpoint.of(detector).write(Path(path))
    return Path(path)


def load(path: str | Path, *, device: str | torch.device = "cpu") -> Detector:
    """Loads a detector from a file of :func:`save_detector`, a training checkpoint or a run folder.

    Args:
        path: the file, or a run folder: then its ``checkpoints/best.pt``, else ``last.pt``.
        device: where the detector is placed.

    Returns:
        The detector in evaluation mode, with its calibration and drawing threshold.

    Raises:
        RunError: if the file is missing, damaged, not a checkpoint of aploss, or needs a plugin that is not loaded.

    Example:
        >>> from aploss.detectors import build_detector
        >>> load(save_detector(build_detector("retinanet-tiny", class_names=["cat"]), "detector.pt")).loss_name
        'ap'
    """
    return Checkpoint.read(checkpoint_file(Path(path))).detector().to(device)


def read_torch_file(file: Path) -> Any:
    """Loads any torch file on the CPU with ``weights_only=True``.

    Raises RunError if the file is missing, damaged, or holds more than weights and plain values.
    """
    if not file.is_file():
        raise RunError(f"{file} does not exist")
    if zipfile.is_zipfile(file):
        check_archive(file)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's advice on other kinds of files
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # other kinds of files can make the unpickler raise anything
        raise RunError(
            f"{file} cannot be read as a torch file: it is another kind of file, damaged, or holds more than weights "
            "and plain values, which could run code"
        ) from error
    _check_sizes(content, file)
    return content


def _check_sizes(content: Any, file: Path) -> None:
    """Raises RunError for content that would grow: lists inside of each other, and tensors larger than their data."""
    count, stack = 0, [content]
    while stack:
        value = stack.pop()
        if isinstance(value, dict | list | tuple | set):
            count += len(value)
            if count > MAX_VALUES:
                raise RunError(f"{file} holds over {MAX_VALUES:,} values: it is not a checkpoint")
            stack.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu":
            stored = value.untyped_storage().nbytes()
            if value.numel() * value.element_size() > stored:  # it has strides of 0
                raise RunError(f"{file}: a tensor of shape {list(value.shape)} has only {stored} bytes of data")


def checkpoint_file(path: Path) -> Path:
    """Returns the file itself, or for a run folder its best checkpoint, else its last; RunError if there is none."""
    if not path.exists():
        raise RunError(f"{path}: no such run folder or checkpoint")
    if not path.is_dir():
        return path
    for name in ("checkpoints/best.pt", "checkpoints/last.pt", "best.pt", "last.pt"):
        if (path / name).is_file():
            return path / name
    raise RunError(f"{path} has no checkpoints/best.pt or checkpoints/last.pt: is it a run folder?")
