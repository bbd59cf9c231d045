"""The training loop: steps, metrics, validation, checkpoints, and stopping rules."""

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec
import torch
from accelerate.utils import gather_object

from aploss.data.loader import Batch, TrainingBatches
from aploss.detectors.checkpoint import Checkpoint, TrainingState, wrap_untrusted
from aploss.errors import AplossError, DataError, RunError
from aploss.evaluation import METRICS
from aploss.training.callbacks import Callbacks, Progress
from aploss.training.config import TrainConfig
from aploss.training.distributed import (
    StopSignals,
    TrainingInterruptedError,
    capture_random_state,
    on_main,
    restore_random_state,
    sum_over_processes,
)
from aploss.training.evaluate import detect_split, draw_detections
from aploss.training.run_folder import MetricsLog, RunFolder
from aploss.training.splits import RunData, fingerprint_changes
from aploss.training.step import BadNumbers, DivergedError, Stepper, non_finite_weight


@dataclass
class LoopState:
    """The counters of a run, saved in every checkpoint."""

    step: int = 0  # completed steps
    seconds: float = 0.0  # of training, including before a resume
    validated_step: int = 0  # of the last validation
    best_step: int = 0  # of the best validation, 0 before the first
    best_value: float = float("-inf")  # the metric of the best validation
    best_metrics: dict[str, Any] = field(default_factory=dict)  # all metrics of the best validation
    validations_since_best: int = 0  # for patience
    bad_in_a_row: int = 0  # consecutive steps skipped because of NaN or Inf
    bad_steps: int = 0  # all skipped steps
    stopped_by: str | None = None  # "length", "patience" or "minutes" once training is over
    window: dict[str, float] = field(default_factory=dict)  # sums of the losses since the last row of metrics
    window_steps: int = 0  # in these sums
    unreadable: dict[str, str] = field(default_factory=dict)  # images that cannot be read: path → reason
    processes: int | None = None  # None in older checkpoints
    data: dict[str, dict[str, Any]] | None = None  # fingerprint of each split; None in older checkpoints
    changes: list[str] = field(default_factory=list)  # of data and processes, accepted on resume

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LoopState":
        """Validates the counters of an untrusted checkpoint; KeyError or ValueError for missing or invalid ones."""
        older: dict[str, Any] = {"unreadable": {}, "processes": None, "data": None, "changes": []}
        values = {**older, **values}
        state = msgspec.convert({entry.name: values[entry.name] for entry in fields(cls)}, cls)
        if min(state.step, state.seconds, state.best_step, state.validated_step) < 0:
            raise ValueError(f"negative step or time: {state.step}, {state.seconds}")
        return state

    def add_to_window(self, values: dict[str, float]) -> None:
        """Adds the values of a step to the next row of metrics."""
        for name, value in values.items():
            self.window[name] = self.window.get(name, 0.0) + value
        self.window_steps += 1

    def take_window(self) -> dict[str, float]:
        """Returns the means since the last row of metrics and resets the sums."""
        means = {name: total / self.window_steps for name, total in self.window.items()}
        self.window, self.window_steps = {}, 0
        return means

    def add_validation(self, metrics: dict[str, Any], metric: str) -> None:
        """Records a validation and whether it is the best so far."""
        self.validated_step = self.step
        value = metrics[metric] or 0.0
        if value > self.best_value:
            self.best_value, self.best_step, self.best_metrics = value, self.step, metrics
            self.validations_since_best = 0
        else:
            self.validations_since_best += 1

    def continue_if(self, *, more_steps: bool, max_minutes: float | None) -> None:
        """Resumes a training that stopped at a length or time limit which has been raised since."""
        more_time = max_minutes is None or self.seconds < 60 * max_minutes
        if (self.stopped_by == "length" and more_steps) or (self.stopped_by == "minutes" and more_time):
            self.stopped_by = None


class Loop:
    """Trains until the schedule, early stopping, a time limit or a signal ends it; only rank 0 writes."""

    def __init__(
        self,
        config: TrainConfig,
        stepper: Stepper,
        batches: TrainingBatches,
        data: RunData,
        folder: RunFolder,
        progress: Progress,
        callbacks: Callbacks,
        workers: int,
    ) -> None:
        self.config, self.stepper, self.batches = config, stepper, batches
        self.data, self.images, self.validation = data, data.train, data.validation
        self.folder, self.progress, self.callbacks, self.accelerator = folder, progress, callbacks, stepper.accelerator
        self.workers = workers
        self.state = LoopState()
        self.total_steps = stepper.schedule.total_steps
        self._validate_every = stepper.schedule.steps(config.validation.every, config.validation.unit)
        self._log: MetricsLog | None = None
        self._known_unreadable: set[int] = set()  # training images of this rank
        self._unreadable_now: set[str] = set()  # of all ranks, since the run was started or resumed

    def run(self, signals: StopSignals) -> None:
        """Trains from the current state to the end.

        Raises:
            TrainingInterruptedError: after Ctrl-C or SIGTERM; the run is saved.
            DivergedError: after too many steps with NaN or Inf; the last good checkpoint is kept.
        """
        if self.accelerator.is_main_process:
            self._log = MetricsLog(self.folder.path, step=self.state.step)
            self.callbacks.start(self.config, self.folder.path, self.state.step)
        self._resumed_at, self._seconds_before = time.monotonic(), self.state.seconds
        self._saved_at = self._row_at = self._resumed_at
        self.progress.begin(self.total_steps, self.state.step)
        try:
            with signals.deferred():
                self._steps(signals)
        finally:
            self.progress.end()

    def _steps(self, signals: StopSignals) -> None:
        state, accumulate, limit = self.state, self.config.batches.accumulate, self.config.max_minutes
        self._validate_and_save()  # the run may have been interrupted before a validation
        with closing(self.batches.endless(state.step * accumulate)) as batches:
            while state.stopped_by is None:
                self.stepper.step(state.step, self._fetch(batches))
                self._after_step()
                late = limit is not None and state.seconds >= 60 * limit
                news = len(self.batches.unreadable) > len(self._known_unreadable)
                # All ranks act on a signal, time limit or unreadable image of any rank.
                interrupted, out_of_time, unreadable = sum_over_processes(
                    self.accelerator, [signals.requested, late, news]
                )
                if unreadable:
                    self._exchange_unreadable()
                if state.step >= self.total_steps:
                    state.stopped_by = "length"
                elif out_of_time:
                    state.stopped_by = "minutes"
                    self._record_results()
                    if state.step < self.config.log_steps and state.window_steps:  # or there would be no curve
                        self._write_training_row()
                elif interrupted:
                    self.save()
                    raise TrainingInterruptedError(
                        f"stopped at step {state.step} of {self.total_steps}, everything is saved; "
                        f"resume with: {self.folder.resume_command}"
                    )
                self._validate_and_save()

    def _fetch(self, batches: Iterator[Batch]) -> list[Batch]:
        """Returns the batches of a step."""
        with self.saved_on_failure():
            fetched = list(itertools.islice(batches, self.config.batches.accumulate))
        if threading.current_thread() is threading.main_thread():
            # torch's handler raises for a dead worker wherever the program is, such as in the middle of a step; the
            # loader itself notices when the next batch is fetched.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return fetched

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """A block between two steps, which saves the run if it fails: a killed data loader worker, lack of memory."""
        try:
            yield
        except (RuntimeError, ConnectionError, EOFError) as error:  # the last two if a worker dies while sending
            if isinstance(error, AplossError):
                raise
            self.save()
            reason = " ".join(str(error).split())[:300]
            raise RunError(
                f"stopped at step {self.state.step}: {reason}; everything is saved; "
                f"resume with: {self.folder.resume_command}"
            ) from error

    @property
    def epoch(self) -> float:
        """Completed epochs, fractional."""
        return round(self.state.step / self.stepper.schedule.steps_per_epoch, 4)

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._resumed_at

    def _after_step(self) -> None:
        state = self.state
        state.step += 1
        state.seconds = self._seconds
        self.progress.step(state.step)
        if state.step % self.config.log_steps == 0 or state.step == self.total_steps:
            self._record_results()
            if state.window_steps:
                self._write_training_row()

    def _record_results(self) -> None:
        """Reads the results of the steps since the last call, for which the host waits for a GPU."""
        for result in self.stepper.take_results():
            if result.bad is not None:
                self._report_bad(result.bad)
            else:
                self.state.bad_in_a_row = 0
            if result.counts:
                self.state.add_to_window({**result.losses, "gradient_norm": result.gradient_norm})

    def _write_training_row(self) -> None:
        images = self.state.window_steps * self.batches.batch_size * self.config.batches.accumulate
        means = self.state.take_window()
        now = time.monotonic()
        self._add_row(
            {
                "kind": "train",
                "step": self.state.step,
                "epoch": self.epoch,
                "loss": means["classification"] + means["box"],
                **means,
                "lr": self.stepper.learning_rate(self.state.step - 1),
                "images_per_second": round(images / max(now - self._row_at, 1e-9), 2),
                "seconds": round(self.state.seconds, 3),
            }
        )
        self._row_at = now

    def _add_row(self, row: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.add(row)
            self.callbacks.call("on_validation" if row["kind"] == "validation" else "on_log", row)
        self.progress.row(row)

    def _report_bad(self, bad: BadNumbers) -> None:
        self.state.bad_in_a_row += 1
        self.state.bad_steps += 1
        self.progress.warn(f"{bad}; the step is skipped")
        if self._log is not None:
            self._log.add(bad.as_row(), MetricsLog.BAD)
        if self.state.bad_in_a_row >= self.config.bad_steps:
            raise DivergedError(
                f"training stopped after {self.state.bad_in_a_row} consecutive steps with NaN or Inf, the last: {bad}; "
                f"{self._kept_checkpoint()}; try a lower optimizer.learning_rate or optimizer.clip_norm, or precision "
                "float32"
            )

    def _kept_checkpoint(self) -> str:
        last = self.folder.checkpoints.last
        return f"the last good checkpoint is {last}" if last.is_file() else "no checkpoint was saved"

    def _exchange_unreadable(self) -> None:
        """Shares with all ranks which images could not be read in the last step."""
        new = {
            str(self.images.image_path(index)): reason
            for index, reason in self.batches.unreadable.items()
            if index not in self._known_unreadable
        }
        self._known_unreadable = set(self.batches.unreadable)
        shares = gather_object([new])
        all_new = {path: reason for share in shares for path, reason in share.items()}
        self.note_unreadable(all_new, "replaced by the next image of the epoch")
        self._unreadable_now |= all_new.keys()
        found, share = len(self._unreadable_now), self.config.batches.max_unreadable
        if found > share * len(self.images):
            self.save()
            raise DataError(
                f"training stopped at step {self.state.step}: {found} of {len(self.images)} training images cannot be "
                f"read, more than batches.max_unreadable ({share:g}); the first: "
                f"{next(iter(self.state.unreadable.values()))}; everything is saved: repair the data, "
                f"then resume with: {self.folder.resume_command} --splits.accept-changed true"
            )

    def note_unreadable(self, images: dict[str, str], consequence: str) -> None:
        """Warns once about each image that cannot be read (path → reason)."""
        for path, reason in images.items():
            if path not in self.state.unreadable:
                self.state.unreadable[path] = reason
                self.progress.warn(f"step {self.state.step}: {reason}; {consequence}")
                if self._log is not None:
                    row = {"step": self.state.step, "image": path, "reason": reason}
                    self._log.add(row, MetricsLog.UNREADABLE)

    def _check_changes(self, training: TrainingState, data: dict[str, dict[str, Any]], processes: int) -> None:
        """Raises RunError if data or processes differ from the checkpoint and the difference is not accepted."""
        state = self.state
        changes = fingerprint_changes(state.data, data) if state.data is not None else []
        if training.images != len(self.images) and not changes:
            changes = [f"{training.images} training images, now {len(self.images)}"]
        if changes and not self.config.splits.accept_changed:
            raise RunError(
                f"the data have changed since {self.folder.path} was started: {'; '.join(changes)}; restore them, "
                f"accept that with --splits.accept-changed true, or start a new run from these weights with "
                f"--model.weights {self.folder.checkpoints.last} --out NEW"
            )
        if state.data is None:
            self.progress.note("the run is from an older version, which did not record whether its data change")
        if state.processes not in (None, processes):
            changes.append(f"{state.processes} processes, now {processes}")
        for change in changes:
            self.progress.warn(f"step {state.step}: resumed with a change: {change}")
        state.changes += [f"step {state.step}: {change}" for change in changes]
        state.data, state.processes = data, processes

    def _validate_and_save(self) -> None:
        state = self.state
        due = state.step > 0 and (state.step % self._validate_every == 0 or state.stopped_by)
        validates = bool(self.validation and due and state.validated_step != state.step)
        if validates:
            self._validate()
        if validates or state.stopped_by or self._checkpoint_is_due():
            self.save()
        # After last.pt, from which restore() can rewrite it if the process is killed in between.
        if validates and state.best_step == state.step:
            self._save_best()

    def _validate(self) -> None:
        assert self.validation is not None
        self._record_results()
        state, settings, split, detector = self.state, self.config.validation, self.validation, self.stepper.evaluated
        with self.saved_on_failure(), self.progress.images("validating") as show:
            found = detect_split(
                detector, split, self.accelerator, batch_size=settings.batch_size, workers=self.workers, on_images=show
            )
        split.validated = (state.step, found)
        self.note_unreadable(split.unreadable, f"left out of {split.name}")
        metrics = on_main(self.accelerator, lambda: split.measure(found, detector).as_dict())
        state.add_validation(metrics, settings.metric)
        row = {"kind": "validation", "step": state.step, "epoch": self.epoch, "seconds": round(self._seconds, 3)}
        self._add_row({**row, **{name: metrics[name] for name in METRICS if name in metrics}})
        if found is not None and self.callbacks.want_pictures:
            self.callbacks.call("on_picture", draw_detections(split, found, detector.class_names), state.step)
        self._row_at = time.monotonic()  # validation does not count for the speed of the next row
        if settings.patience is not None and state.validations_since_best >= settings.patience:
            state.stopped_by = state.stopped_by or "patience"

    def _checkpoint_is_due(self) -> bool:
        steps, minutes = self.config.checkpoint_steps, self.config.checkpoint_minutes
        by_steps = steps is not None and self.state.step % steps == 0
        by_time = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return self.state.step > 0 and (by_steps or by_time)

    def save(self) -> None:
        """Writes ``last.pt``, everything needed to resume; DivergedError if a weight is NaN or Inf."""
        self._record_results()
        self._saved_at = time.monotonic()
        detector = self.stepper.evaluated
        name = non_finite_weight(detector)  # the same on every rank
        if name is not None:
            kept = self._kept_checkpoint()
            raise DivergedError(
                f"step {self.state.step}: the weight {name} is NaN or Inf; {kept}; try a lower optimizer.learning_rate"
            )
        if self._log is None:
            return
        self._log.flush_to_disk()
        self.state.seconds = self._seconds
        training = TrainingState(
            loop=asdict(self.state),
            **self.stepper.state(),
            random=capture_random_state(),
            images=len(self.images),
            threads=torch.get_num_threads(),
        )
        self.folder.checkpoints.write(Checkpoint.of(detector, training=training))

    def _save_best(self) -> None:
        """Writes ``best.pt`` with the current weights, if it will be evaluated."""
        if self.accelerator.is_main_process and self.config.evaluation.checkpoint == "best":
            state = self.state
            self.folder.checkpoints.write(
                Checkpoint.of(self.stepper.evaluated, step=state.best_step, metrics=state.best_metrics)
            )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores the state in which ``last.pt`` was written.

        Raises:
            RunError: if the data have changed, unless ``splits.accept_changed`` is set, or the checkpoint does not fit
                the config.
        """
        training, checkpoints = checkpoint.training, self.folder.checkpoints
        assert training is not None
        fingerprints, processes = self.state.data or {}, self.accelerator.num_processes
        with wrap_untrusted(checkpoints.last):
            self.state = LoopState.from_dict(training.loop)
            self.stepper.load_state(training, checkpoint.weights)
            restore_random_state(training.random)
        self._check_changes(training, fingerprints, processes)
        if training.threads != (now := torch.get_num_threads()):
            self.progress.note(
                f"the run was started with {training.threads} threads, now {now}: results may differ in the last digits"
            )
        if self.accelerator.is_main_process and self.state.best_step == self.state.step > 0:
            saved = Checkpoint.read(checkpoints.best).step if checkpoints.best.is_file() else None
            if saved != self.state.step:
                self._save_best()  # killed after last.pt was written, before best.pt was
        self.state.continue_if(more_steps=self.state.step < self.total_steps, max_minutes=self.config.max_minutes)
