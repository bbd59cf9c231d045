"""Callbacks of a run, and the experiment trackers, which are callbacks too.

``train(config, callbacks=[...])`` calls them in order, on rank 0 only; a plain function is called with every row.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from aploss.errors import ConfigError, require_packages
from aploss.evaluation import HEADLINE_METRICS, METRICS
from aploss.training.config import TrainConfig, config_fields

Row = dict[str, Any]
RowFunction = Callable[[Row], Any]
SKIPPED = ("kind", "step", "epoch", "seconds", "images")  # not plotted


class Callback:
    """Base class: override the events of interest. An exception ends the run and is propagated.

    Example:
        >>> class PrintAP(Callback):
        ...     def on_validation(self, row):
        ...         print(row["step"], row["AP"])
        >>> PrintAP()({"kind": "validation", "step": 100, "AP": 0.25})  # train(callbacks=...) does
        100 0.25
    """

    def __call__(self, row: Row) -> None:
        """A row of metrics was written; calls ``on_log`` or ``on_validation``."""
        (self.on_validation if row["kind"] == "validation" else self.on_log)(row)

    def on_start(self, config: TrainConfig, folder: Path, step: int) -> None:
        """Training starts at a step: 0, or later for a resumed run, which repeats the rows after that step."""

    def on_log(self, row: Row) -> None:
        """A row of training metrics was written: means of losses, learning rate, gradient norm, speed."""

    def on_validation(self, row: Row) -> None:
        """A row of validation metrics was written, see :data:`aploss.evaluation.METRICS`."""

    def on_picture(self, picture: Image.Image, step: int) -> None:
        """Detections were drawn on some validation images; only drawn if a callback overrides this."""

    def on_end(self, result: Row | None) -> None:
        """The run has ended: with its summary as plain values, or None if it was interrupted or failed."""


# --- trackers ---


class Tracker(Callback):
    """Logs to a tracker of Accelerate, which reads its own environment variables (``WANDB_MODE`` ...)."""

    def __init__(self, name: str) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        self._name, self._class = name, LOGGER_TYPE_TO_CLASS[name]

    def on_start(self, config: TrainConfig, folder: Path, step: int) -> None:
        place = [str(folder)] if self._class.requires_logging_directory else []
        # TensorBoard has a subfolder of the run; others know runs by the name of the folder where they can.
        project = "tensorboard" if self._name == "tensorboard" else os.environ.get("WANDB_PROJECT", "aploss")
        options: dict[str, dict[str, Any]] = {
            "tensorboard": {"purge_step": step + 1},
            "wandb": {"name": folder.name, "dir": str(folder)},
            "mlflow": {"run_name": folder.name, "nested_run": True},
        }
        try:
            self._tracker = self._class(project, *place, **options.get(self._name, {}))
            self._tracker.start()
            if self._name != "tensorboard":  # config.yaml is next to it
                values = {entry.key: attrgetter(entry.key)(config) for entry in config_fields()}
                plain = {key: one if isinstance(one, str | int | float) else str(one) for key, one in values.items()}
                self._tracker.store_init_configuration(plain)
        except Exception as error:  # no account, no server
            raise ConfigError(f"--tracker {self._name} cannot start: {type(error).__name__}: {error}") from error

    def on_log(self, row: Row) -> None:
        curves = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in SKIPPED}
        self._tracker.log({f"{row['kind']}/{name}": value for name, value in curves.items()}, step=row["step"])

    on_validation = on_log

    def on_picture(self, picture: Image.Image, step: int) -> None:
        if hasattr(self._tracker, "log_images"):  # not all trackers have pictures
            options = {"dataformats": "NHWC"} if self._name == "tensorboard" else {}
            self._tracker.log_images({"validation/detections": np.asarray(picture)[None]}, step=step, **options)

    def on_end(self, result: Row | None) -> None:
        if result is not None:
            names = (*METRICS, "calibration_error", "minutes")
            final = {f"final/{name}": result[name] for name in names if result.get(name) is not None}
            self._tracker.log(final, step=result["steps"])
        self._tracker.finish()


def make_tracker(name: str) -> list[Callback]:
    """Returns the callback of a tracker; none for ``none``, and for ``auto`` if TensorBoard is not installed.

    Raises:
        ConfigError: if the package of the tracker is not installed.
    """
    if name == "auto":
        name = "tensorboard" if find_spec("tensorboard") else "none"
    if name == "none":
        return []
    require_packages(name)
    return [Tracker(name)]


def describe_row(row: Row) -> str:
    """Formats a row of metrics as one line."""
    if row["kind"] == "validation":
        values = [f"{name} {row[name]:.3f}" for name in HEADLINE_METRICS if row[name] is not None]
        return "validation  " + ("  ".join(values) or "no objects")
    speed = row["images_per_second"]
    return f"loss {row['loss']:.3f}  {speed:.{int(speed < 10)}f} images/s"
