"""Callbacks of a run, and the experiment trackers, which are callbacks too.

``train(config, callbacks=[...])`` calls them in order, on rank 0 only::

    class Announce(Callback):
        def on_validation(self, row):
            print(row["step"], row["AP"])
"""

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from aploss.errors import ConfigError, require_packages
from aploss.evaluation import METRICS
from aploss.training.config import TrainConfig, config_fields

Row = dict[str, Any]
SKIPPED = ("kind", "step", "epoch", "seconds", "images")  # not plotted


class Callback:
    """Base class: override the events of interest. An exception ends the run and is propagated."""

    def on_start(self, config: TrainConfig, folder: Path, step: int) -> None:
        """Training starts at a step: 0, or later for a resumed run, which repeats the rows after that step."""

    def on_log(self, row: Row) -> None:
        """A row of training metrics was written: means of losses, learning rate, gradient norm, speed."""

    def on_validation(self, row: Row) -> None:
        """A row of validation metrics was written, see :data:`aploss.evaluation.METRICS`."""

    def on_end(self, result: Row | None) -> None:
        """The run has ended: with its summary as plain values, or None if it was interrupted or failed."""


class Callbacks(Callback):
    """Calls several callbacks in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self._started: list[Callback] = []

    def on_start(self, config: TrainConfig, folder: Path, step: int) -> None:
        for callback in self._callbacks:
            callback.on_start(config, folder, step)
            self._started.append(callback)

    def on_log(self, row: Row) -> None:
        for callback in self._callbacks:
            callback.on_log(row)

    def on_validation(self, row: Row) -> None:
        for callback in self._callbacks:
            callback.on_validation(row)

    def on_end(self, result: Row | None) -> None:
        for callback in self._started:
            callback.on_end(result)
        self._started = []


class RowCallback(Callback):
    """Calls a function with every row."""

    def __init__(self, function: Callable[[Row], Any]) -> None:
        self._function = function

    def on_log(self, row: Row) -> None:
        self._function(row)

    on_validation = on_log


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
                self._tracker.store_init_configuration({key: _plain(value) for key, value in values.items()})
        except Exception as error:  # no account, no server
            raise ConfigError(f"--tracker {self._name} cannot start: {type(error).__name__}: {error}") from error

    def on_log(self, row: Row) -> None:
        self._tracker.log(curves(row), step=row["step"])

    on_validation = on_log

    def on_end(self, result: Row | None) -> None:
        if result is not None:
            self._tracker.log(final(result), step=result["steps"])
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


def _plain(value: Any) -> Any:
    """Trackers store text, numbers and switches."""
    return value if isinstance(value, str | int | float) else str(value)


def curves(row: Row) -> dict[str, float]:
    """Returns the values of a row that are plotted over steps, as ``train/loss``.

    Example:
        >>> curves({"kind": "train", "step": 3, "loss": 0.5, "note": "x"})
        {'train/loss': 0.5}
    """
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in SKIPPED}
    return {f"{row['kind']}/{name}": value for name, value in numbers.items()}


def final(result: Row) -> dict[str, float]:
    """Returns the metrics of a summary, as ``final/AP``."""
    names = (*METRICS, "calibration_error", "minutes")
    return {f"final/{name}": result[name] for name in names if result.get(name) is not None}
