"""Callbacks of a run, the experiment trackers, which are callbacks too, and the progress display.

``train(config, callbacks=[...])`` calls them in order, on rank 0 only::

    class Announce(Callback):
        def on_validation(self, row):
            print(row["step"], row["AP"])
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from aploss.errors import ConfigError, require_packages
from aploss.evaluation import HEADLINE_METRICS, METRICS
from aploss.terminal import printable, terminal
from aploss.training.config import TrainConfig, config_fields

if TYPE_CHECKING:
    from PIL.Image import Image

Row = dict[str, Any]
SKIPPED = ("kind", "step", "epoch", "seconds", "images")  # not plotted
SECONDS_BETWEEN_LINES = 15.0


class Callback:
    """Base class: override the events of interest. An exception ends the run and is propagated."""

    def on_start(self, config: TrainConfig, folder: Path, step: int) -> None:
        """Training starts at a step: 0, or later for a resumed run, which repeats the rows after that step."""

    def on_log(self, row: Row) -> None:
        """A row of training metrics was written: means of losses, learning rate, gradient norm, speed."""

    def on_validation(self, row: Row) -> None:
        """A row of validation metrics was written, see :data:`aploss.evaluation.METRICS`."""

    def on_picture(self, picture: "Image", step: int) -> None:
        """Detections were drawn on some validation images; only drawn if a callback overrides this."""

    def on_end(self, result: Row | None) -> None:
        """The run has ended: with its summary as plain values, or None if it was interrupted or failed."""


class Callbacks:
    """Calls several callbacks in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self._started: list[Callback] = []
        self.want_pictures = any(type(one).on_picture is not Callback.on_picture for one in callbacks)

    def start(self, config: TrainConfig, folder: Path, step: int) -> None:
        """Calls ``on_start``."""
        for callback in self._callbacks:
            callback.on_start(config, folder, step)
            self._started.append(callback)

    def call(self, event: str, *arguments: Any) -> None:
        """Calls the method of an event, such as ``"on_log"``."""
        for callback in self._callbacks:
            getattr(callback, event)(*arguments)

    def end(self, result: Row | None) -> None:
        """Calls ``on_end`` of those that have been started, once."""
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
                plain = {key: one if isinstance(one, str | int | float) else str(one) for key, one in values.items()}
                self._tracker.store_init_configuration(plain)
        except Exception as error:  # no account, no server
            raise ConfigError(f"--tracker {self._name} cannot start: {type(error).__name__}: {error}") from error

    def on_log(self, row: Row) -> None:
        self._tracker.log(curves(row), step=row["step"])

    on_validation = on_log

    def on_picture(self, picture: "Image", step: int) -> None:
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


def curves(row: Row) -> dict[str, float]:
    """Returns the values of a row that are plotted over steps, as ``train/loss``.

    Example:
        >>> curves({"kind": "train", "step": 3, "loss": 0.5, "note": "x"})
        {'train/loss': 0.5}
    """
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in SKIPPED}
    return {f"{row['kind']}/{name}": value for name, value in numbers.items()}


# --- progress ---


class Progress:
    """The progress display: a live bar on a terminal, a line from time to time elsewhere.

    Args:
        quiet: show warnings only.
        is_main: False to show nothing at all, on all ranks but rank 0.
    """

    def __init__(self, *, quiet: bool, is_main: bool = True) -> None:
        self._shows, self._warns = is_main and not quiet, is_main
        self._is_live = self._shows and sys.stdout.isatty()
        self._console = Console(file=terminal(sys.stdout), soft_wrap=True)
        columns = "{task.description}", BarColumn(bar_width=None), MofNCompleteColumn(), "{task.fields[text]}"
        left = TimeRemainingColumn(compact=True)
        self._bar = RichProgress(*columns, left, console=self._console, expand=True)
        self._task = self._bar.add_task("training", total=None, text="", visible=False)
        self._total = self._first = 0
        self._started = self._last_line = time.monotonic()

    def begin(self, total: int, done: int) -> None:
        """Training starts at step ``done`` of ``total``."""
        self._total, self._first = total, done
        self._started = self._last_line = time.monotonic()
        self._bar.update(self._task, total=total, completed=done, visible=True)
        if self._is_live:
            self._bar.start()

    def step(self, done: int) -> None:
        """A step is done."""
        self._bar.update(self._task, completed=done)

    def row(self, row: Row) -> None:
        """A row of metrics was written."""
        step = row["step"]
        if row["kind"] == "validation":
            self.note(f"step {step}/{self._total}  {describe_row(row)}")
            return
        self._bar.update(self._task, text=describe_row(row))
        seconds = (time.monotonic() - self._started) / max(1, step - self._first) * (self._total - step)
        self._note_rarely(f"step {step}/{self._total}  {describe_row(row)}  {describe_seconds(seconds)} left")

    @contextmanager
    def images(self, task: str) -> Iterator[Callable[[int, int], None]]:
        """Shows a task over images, such as validating; yields a function of the number of images done and their total.

        On a terminal this is a second bar below that of training, or a single one outside of training.
        """
        alone = self._is_live and not self._bar.live.is_started
        if alone:
            self._bar.start()
        bar = self._bar.add_task(task, total=None, text="images")

        def show(done: int, total: int) -> None:
            self._bar.update(bar, completed=done, total=total)
            self._note_rarely(f"{task}  {done}/{total} images")

        try:
            yield show
        finally:
            if self._is_live:
                self._bar.refresh()
            self._bar.remove_task(bar)
            if alone:
                self._bar.stop()

    def note(self, text: str) -> None:
        """Shows a line of information."""
        if self._shows:
            self._last_line = time.monotonic()
            self._console.print(printable(text), highlight=False, markup=False)

    def _note_rarely(self, text: str) -> None:
        if not self._is_live and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self.note(text)

    def warn(self, text: str) -> None:
        """Shows a warning, also if quiet."""
        if self._is_live:
            self._console.print(printable(text), style="yellow", highlight=False, markup=False)
        elif self._warns:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Training has ended, for any reason."""
        self._bar.update(self._task, visible=False)
        if self._is_live:
            self._bar.stop()


def describe_row(row: Row) -> str:
    """Formats a row of metrics as one line."""
    if row["kind"] == "validation":
        values = [f"{name} {row[name]:.3f}" for name in HEADLINE_METRICS if row[name] is not None]
        return "validation  " + ("  ".join(values) or "no objects")
    speed = row["images_per_second"]
    return f"loss {row['loss']:.3f}  {speed:.{int(speed < 10)}f} images/s"


def describe_seconds(seconds: float) -> str:
    """Formats a duration in readable units.

    Example:
        >>> describe_seconds(45), describe_seconds(150), describe_seconds(8000), describe_seconds(1e6)
        ('45 s', '2 min 30 s', '2 h 13 min', '12 days')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{round(minutes / 1440)} days"
