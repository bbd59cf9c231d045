"""Runs, trained once: a run is found again by a hash of its settings."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aploss.data.builtin import VERSION as BUILTIN_VERSION
from aploss.errors import RunError
from aploss.reproduction.measure import Measure, Run, is_main_process
from aploss.training import run as training
from aploss.training.config import TrainConfig, config_to_dict
from aploss.training.loop_state import LostProcessError, TrainingInterruptedError
from aploss.training.metrics_log import read_rows
from aploss.training.run_folder import MAY_CHANGE, default_folder
from aploss.training.summary import Summary

__all__ = ["OutOfTimeError", "Runner", "cache_folder", "settings_hash"]


class OutOfTimeError(Exception):
    """The time limit of a comparison is reached; what was trained is saved."""


def settings_hash(config: TrainConfig) -> str:
    """Ten hexadecimal digits of everything that decides what a run learns.

    Its folder, its time limit and how often it saves are no part of it; a data folder counts by
    where it is, not by how it is written.

    Example:
        >>> one, other = TrainConfig(data="builtin"), TrainConfig(data="builtin", max_minutes=5)
        >>> settings_hash(one) == settings_hash(other) != settings_hash(TrainConfig(data="a"))
        True
    """
    values = config_to_dict(config)
    for key in MAY_CHANGE:
        group, _, name = key.rpartition(".")
        del (values[group] if group else values)[name]
    values["device"] = config.device  # minutes of two devices must not be compared
    is_builtin = config.data == "builtin"
    values["data"] = BUILTIN_VERSION if is_builtin else str(Path(config.data).resolve())
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def cache_folder(config: TrainConfig, cache: Path) -> Path:
    """Where a run is kept: a readable name and the hash of its settings."""
    return cache / f"{default_folder(config).name}-{settings_hash(config)}"


class Runner:
    """Trains what is not there yet, goes on with what is unfinished, reads what is done.

    Args:
        cache: folder of all runs, shared by all comparisons.
        max_minutes: time for all runs together.
        quiet: show nothing of the training itself.
    """

    def __init__(
        self, cache: Path, *, max_minutes: float | None = None, quiet: bool = True
    ) -> None:
        self.cache, self.quiet = cache, quiet
        self._end = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._processes = int(os.environ.get("WORLD_SIZE", "1"))

    def find(self, config: TrainConfig) -> Run | None:
        """A finished run, or None."""
        folder = cache_folder(config, self.cache)
        if not (folder / "summary.json").is_file():
            return None
        summary = Summary.read(folder / "summary.json")
        if summary.stopped_by == "minutes":  # by an earlier time limit: not finished
            return None
        return Run(config=config, folder=folder, summary=summary)

    def run(self, config: TrainConfig, measure: Measure) -> Run:
        """A finished run, trained if need be.

        Args:
            config: its settings; the folder is chosen here.
            measure: watches the training.

        Raises:
            OutOfTimeError: the time limit is reached.
            TrainingInterruptedError: Ctrl-C or SIGTERM; everything is saved.
            RunError: it cannot be trained. A run that diverged is no error: it has no summary.
        """
        folder = cache_folder(config, self.cache)
        with _one_at_a_time(folder):
            # Several processes must agree, though perhaps only one sees the files: train() does.
            done = self.find(config) if self._processes == 1 else None
            if done is not None:
                return done
            limit = self._limit(folder)
            observer = measure.observer(config, folder)
            summary, failure = _train(config, folder, limit, observer, quiet=self.quiet)
        if summary is not None and summary.stopped_by == "minutes":
            raise OutOfTimeError
        return Run(config=config, folder=folder, summary=summary, failure=failure)

    def _limit(self, folder: Path) -> float | None:
        """The minutes of training, earlier ones included, after which a run has to stop."""
        if self._end is None:
            return None
        left = (self._end - time.monotonic()) / 60
        if left <= 0 and self._processes == 1:
            raise OutOfTimeError
        rows = read_rows(folder / "metrics.jsonl")
        spent = rows[-1]["seconds"] / 60 if rows else 0.0
        return spent + max(left, 0.0)


def _train(
    config: TrainConfig,
    folder: Path,
    max_minutes: float | None,
    observer: Callable[[dict[str, Any]], Any] | None,
    *,
    quiet: bool,
) -> tuple[Summary | None, str]:
    config = replace(config, out=str(folder), max_minutes=max_minutes)
    try:
        return training.train(config, resume=True, quiet=quiet, on_progress=observer), ""
    except (TrainingInterruptedError, LostProcessError):
        raise
    except RunError as error:
        if "finite" not in str(error):  # else it diverged: too high a learning rate, perhaps
            raise
        return None, str(error)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits while another comparison trains the same run, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    if not is_main_process():
        yield
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}.lock").open("w")
    except OSError as error:
        raise RunError(f"runs cannot be kept in {folder.parent}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
