"""Callbacks of a run, and the experiment trackers, which are callbacks too.

``train(config, callbacks=[...])`` calls them in order, on rank 0 only::

    class Announce(Callback):
        def on_validation(self, row):
            print(row["step"], row["AP"])
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from aploss.errors import ConfigError, require_packages
from aploss.evaluation import METRICS
from aploss.files import write_json
from aploss.training.config import TrainConfig, config_fields, config_to_dict

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


class TensorBoardTracker(Callback):
    """Writes ``tensorboard/`` in the run folder."""

    def on_start(self, config: TrainConfig, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def on_log(self, row: Row) -> None:
        for name, value in curves(row).items():
            self._board.add_scalar(name, value, row["step"])

    on_validation = on_log

    def on_end(self, result: Row | None) -> None:
        self._board.close()


class WandbTracker(Callback):
    """Logs to Weights & Biases, as its own environment variables say (``WANDB_PROJECT``, ``WANDB_MODE`` ...)."""

    def on_start(self, config: TrainConfig, folder: Path, step: int) -> None:
        known = _known_run(folder, "wandb") if step > 0 else None
        resume = {} if known is None else {"id": known, "resume": "allow"}
        with _starting("wandb"):
            wandb = import_module("wandb")
            self._run = wandb.init(name=folder.name, config=config_to_dict(config), dir=str(folder), **resume)
        _remember_run(folder, "wandb", self._run.id)

    def on_log(self, row: Row) -> None:
        self._run.log(curves(row), step=row["step"])

    on_validation = on_log

    def on_end(self, result: Row | None) -> None:
        if result is not None:
            self._run.summary.update(final(result))
        self._run.finish(exit_code=0 if result is not None else 1)


class MlflowTracker(Callback):
    """Logs to MLflow, as its own environment variables say (``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``)."""

    def on_start(self, config: TrainConfig, folder: Path, step: int) -> None:
        known = _known_run(folder, "mlflow") if step > 0 else None
        with _starting("mlflow"):
            self._mlflow = import_module("mlflow")
            self._run = self._mlflow.start_run(run_id=known, run_name=folder.name, nested=True)
        _remember_run(folder, "mlflow", self._run.info.run_id)
        if known is None:
            self._mlflow.log_params({entry.key: attrgetter(entry.key)(config) for entry in config_fields()})

    def on_log(self, row: Row) -> None:
        self._mlflow.log_metrics(curves(row), step=row["step"], run_id=self._run.info.run_id)

    on_validation = on_log

    def on_end(self, result: Row | None) -> None:
        if result is not None:
            self._mlflow.log_metrics(final(result), run_id=self._run.info.run_id)
        self._mlflow.end_run("FINISHED" if result is not None else "KILLED")


TRACKERS: dict[str, type[Callback]] = {
    "tensorboard": TensorBoardTracker, "wandb": WandbTracker, "mlflow": MlflowTracker
}  # fmt: skip


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
    return [TRACKERS[name]()]


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


@contextmanager
def _starting(tracker: str) -> Iterator[None]:
    """Converts a failure to start a tracker (no account, no server) into a ConfigError before training."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"--tracker {tracker} cannot start: {type(error).__name__}: {error}") from error


def _known_run(folder: Path, tracker: str) -> str | None:
    """Returns the id under which a tracker knows the run of a folder."""
    file = folder / "tracker.json"
    return json.loads(file.read_text(encoding="utf-8")).get(tracker) if file.is_file() else None


def _remember_run(folder: Path, tracker: str, name: str) -> None:
    write_json(folder / "tracker.json", {tracker: name})
