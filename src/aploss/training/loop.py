"""The training loop: steps, metrics, validation, checkpoints, and stopping rules."""

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import InitVar, asdict, dataclass, field, fields, replace
from typing import Annotated, Any

import msgspec
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from msgspec import Meta

from aploss.detectors.checkpoint import Checkpoint, TrainingState, wrap_untrusted
from aploss.detectors.detector import Detector
from aploss.errors import AplossError, ConfigError, DataError, RunError, listed
from aploss.evaluation import METRICS
from aploss.files import write_text
from aploss.progress import Progress
from aploss.reports.run_files import read_json_lines
from aploss.training.callbacks import Callback, RowFunction, describe_row
from aploss.training.config import TrainConfig
from aploss.training.distributed import StopSignals, TrainingInterruptedError, choose_workers, on_main
from aploss.training.run_folder import RunFolder
from aploss.training.schedule import Schedule
from aploss.training.splits import RunData, Split, detect_split, draw_detections, fingerprint_changes, make_batches
from aploss.training.step import DivergedError, Report, Stepper, any_rank

SHOWN_IMAGES = 8
BAD_NUMBERS = "bad_numbers.jsonl"
STOPPED_BY = {"patience": "no better validation: validation.patience", "minutes": "time limit: --max-minutes"}
Counter = Annotated[int, Meta(ge=0)]


@dataclass
class LoopState:
    """The counters of a run, saved in every checkpoint."""

    step: Counter = 0  # completed steps
    seconds: Annotated[float, Meta(ge=0)] = 0.0  # of training, including before a resume
    validated_step: Counter = 0  # of the last validation
    best_step: Counter = 0  # of the best validation, 0 before the first
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
        values = {"unreadable": {}, "processes": None, "data": None, "changes": [], **values}  # the first are newer
        return msgspec.convert({entry.name: values[entry.name] for entry in fields(cls)}, cls)


@dataclass(eq=False)
class Loop:
    """Trains until the schedule, early stopping, a time limit or a signal ends it; only rank 0 writes."""

    config: TrainConfig
    folder: RunFolder
    accelerator: Accelerator
    progress: Progress
    callbacks: Sequence[RowFunction]
    data: RunData
    detector: InitVar[Detector]

    def __post_init__(self, detector: Detector) -> None:
        config, accelerator, data = self.config, self.accelerator, self.data
        self.is_main = accelerator.is_main_process
        self.callbacks = self.callbacks if self.is_main else ()
        self.started: list[Callback] = []  # of the callbacks
        self.state = LoopState()
        self.workers = choose_workers(config.batches.workers, accelerator.device, accelerator.num_processes)
        self.batches = make_batches(config, data.train, detector, accelerator, self.progress, self.workers)
        self.schedule = Schedule(config.schedule, self.batches.batches_per_epoch / config.batches.accumulate)
        self.total_steps = self.schedule.total_steps
        wanted, warmup = config.schedule.warmup_steps, self.schedule.warmup_steps
        if warmup < wanted:
            self.progress.note(f"warmup    {warmup} steps, a tenth of the training, instead of {wanted}")
        # The config states what runs, also in config.yaml.
        exact = replace(config.schedule, warmup_steps=warmup, exact_warmup=True)
        self.config = config = replace(config, schedule=exact)
        self.stepper = Stepper(
            config, detector, self.schedule, accelerator, lambda index: data.train.image_path(index).name
        )
        self._detector_config = self.stepper.evaluated.config
        self._validate_every = self.schedule.steps(config.validation.every, config.validation.unit)

    def run(self, signals: StopSignals) -> None:
        """Trains from the current state to the end.

        Raises:
            TrainingInterruptedError: after Ctrl-C or SIGTERM; the run is saved.
            DivergedError: after too many steps with NaN or Inf; the last good checkpoint is kept.
        """
        state = self.state
        if self.is_main:
            for file in (self.folder.metrics_file, self.folder.path / BAD_NUMBERS):
                if file.is_file():  # rows after the checkpoint will be written again
                    rows = [row for row in read_json_lines(file) if isinstance(row.get("step"), int)]
                    kept = [row for row in rows if row["step"] <= state.step]
                    write_text(file, "".join(json.dumps(row) + "\n" for row in kept))
            for callback in self.callbacks:
                if isinstance(callback, Callback):
                    callback.on_start(self.config, self.folder.path, state.step)
                    self.started.append(callback)
        self._saved_at = self._row_at = time.monotonic()
        self._began = time.monotonic() - state.seconds
        with self.progress.task("training", done=state.step, text="") as self._show, signals.deferred():
            self._steps(signals)
        reason = f" ({STOPPED_BY[state.stopped_by]})" if state.stopped_by in STOPPED_BY else ""
        self.progress.note(f"trained for {state.step} of {self.total_steps} steps{reason}; evaluating")
        signals.message = f"stopped; training is finished, evaluate with: {self.folder.resume_command}"
        if any_rank(self.accelerator, signals.requested)[0]:  # during the last step
            raise TrainingInterruptedError(signals.message)

    def _steps(self, signals: StopSignals) -> None:
        state, config = self.state, self.config
        if state.best_step == state.step > 0:
            self.save()  # aploss 0.2 may have been killed after last.pt was written, before best.pt was
        self._validate_and_save()  # the run may have been interrupted before a validation
        with closing(self.batches.endless(state.step * config.batches.accumulate)) as batches:
            while state.stopped_by is None:
                with self.saved_on_failure():
                    fetched = list(itertools.islice(batches, config.batches.accumulate))
                if threading.current_thread() is threading.main_thread():
                    # torch's handler raises for a dead worker wherever the program is, such as in the middle of a
                    # step; the loader itself notices when the next batch is fetched.
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self.stepper.step(state.step, fetched)
                state.step += 1
                state.seconds = time.monotonic() - self._began
                if state.step % config.log_steps == 0 or state.step == self.total_steps:
                    self._write_training_row()
                late = config.max_minutes is not None and state.seconds >= 60 * config.max_minutes
                # All ranks act on a signal or time limit of any rank.
                interrupted, out_of_time = any_rank(self.accelerator, signals.requested, late)
                if state.step >= self.total_steps:
                    state.stopped_by = "length"
                elif out_of_time:
                    state.stopped_by = "minutes"
                    if state.step < config.log_steps:  # or there would be no curve
                        self._write_training_row()
                elif interrupted:
                    self.save()
                    raise TrainingInterruptedError(
                        f"stopped at step {state.step} of {self.total_steps}, everything is saved; "
                        f"resume with: {self.folder.resume_command}"
                    )
                self._validate_and_save()

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """A block between two steps, which saves the run if it fails: a killed data loader worker, lack of memory.

        One of several processes cannot save without the others: its run resumes from the last checkpoint.
        """
        try:
            yield
        except (RuntimeError, ConnectionError, EOFError) as error:  # the last two if a worker dies while sending
            if isinstance(error, AplossError) or self.accelerator.num_processes > 1:
                raise
            self.save()
            raise RunError(
                f"stopped at step {self.state.step}: {' '.join(str(error).split())[:300]}; everything is saved; "
                f"resume with: {self.folder.resume_command}"
            ) from error

    @property
    def epoch(self) -> float:
        """Completed epochs, fractional."""
        return round(self.state.step / self.schedule.steps_per_epoch, 4)

    def _record_results(self) -> None:
        """Reads the results of the steps since the last call, for which the host waits for a GPU."""
        state, images = self.state, self.data.train
        for result in self.stepper.take_results():
            if isinstance(result, Report):
                self._report_bad(result)
                continue
            state.bad_in_a_row = 0
            if result is not None:
                state.window = {name: state.window.get(name, 0.0) + value for name, value in result.items()}
                state.window_steps += 1
        shares = gather_object([self.batches.unreadable])
        unreadable = {index: reason for share in shares for index, reason in share.items()}
        self.note_unreadable({str(images.image_path(index)): reason for index, reason in unreadable.items()})
        if len(unreadable) > self.config.batches.max_unreadable * len(images):
            self.batches.unreadable.clear()
            self.save()
            raise DataError(
                f"training stopped at step {state.step}: {len(unreadable)} of {len(images)} training images cannot be "
                f"read, more than batches.max_unreadable; the first: {next(iter(unreadable.values()))}; everything is "
                f"saved: repair the data, then resume with: {self.folder.resume_command} --splits.accept-changed true"
            )

    def note_unreadable(self, images: dict[str, str]) -> None:
        """Warns once about each image that cannot be read (path → reason)."""
        for path, reason in images.items():
            if path not in self.state.unreadable:
                self.state.unreadable[path] = reason
                self.progress.warn(f"step {self.state.step}: {reason}; the image is left out")

    def _write_training_row(self) -> None:
        self._record_results()
        state, now = self.state, time.monotonic()
        if not state.window_steps:
            return
        images = state.window_steps * self.batches.batch_size * self.config.batches.accumulate
        means = {name: total / state.window_steps for name, total in state.window.items()}
        state.window, state.window_steps = {}, 0
        row = {"loss": means["classification"] + means["box"], **means}
        row["lr"] = self.stepper.optimizer.param_groups[0]["lr"]
        row["images_per_second"] = round(images / max(now - self._row_at, 1e-9), 2)
        self._add_row("train", {**row, "seconds": round(state.seconds, 3)})
        self._row_at = now

    def _add_row(self, kind: str, values: dict[str, Any]) -> None:
        row = {"kind": kind, "step": self.state.step, "epoch": self.epoch, **values}
        self._append(self.folder.metrics_file.name, row)
        for callback in self.callbacks:
            callback(row)
        if kind == "validation":
            self.progress.note(f"step {row['step']}/{self.total_steps}  {describe_row(row)}")
        else:
            self._show(row["step"], self.total_steps, describe_row(row))

    def _append(self, file: str, row: dict[str, Any]) -> None:
        if self.is_main:
            with (self.folder.path / file).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")

    def _report_bad(self, bad: Report) -> None:
        state = self.state
        state.bad_in_a_row += 1
        state.bad_steps += 1
        text = f"step {bad.step}: {bad.what} is NaN or Inf ({bad.detail}); images: {listed(bad.images, SHOWN_IMAGES)}"
        self.progress.warn(f"{text}; the step is skipped")
        self._append(BAD_NUMBERS, bad._asdict())
        if state.bad_in_a_row >= self.config.bad_steps:
            raise DivergedError(
                f"training stopped after {state.bad_in_a_row} consecutive steps with NaN or Inf, the last: {text}; "
                f"checkpoints before them are kept in {self.folder.last.parent}; try a lower optimizer.learning_rate "
                "or optimizer.clip_norm, or precision float32"
            )

    def _validate_and_save(self) -> None:
        state, config, minutes = self.state, self.config, self.config.checkpoint_minutes
        if state.step == 0:
            return
        due = state.step % self._validate_every == 0 or state.stopped_by
        validates = bool(self.data.validation and due and state.validated_step != state.step)
        if validates:
            self._validate()
        by_steps = config.checkpoint_steps is not None and state.step % config.checkpoint_steps == 0
        by_time = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        if validates or state.stopped_by or by_steps or by_time:
            self.save()

    def _validate(self) -> None:
        self._record_results()
        state, settings, split = self.state, self.config.validation, self.data.validation
        detector = self.stepper.evaluated
        assert split is not None
        self.detect(split, detector, "validating")
        split.step = state.step
        metrics = on_main(self.accelerator, lambda: split.measure(split.detections, detector).as_dict())
        state.validated_step = state.step
        state.validations_since_best += 1
        if (value := metrics[settings.metric] or 0.0) > state.best_value:
            state.best_value, state.best_step, state.best_metrics = value, state.step, metrics
            state.validations_since_best = 0
        seconds = {"seconds": round(time.monotonic() - self._began, 3)}
        self._add_row("validation", seconds | {name: metrics[name] for name in METRICS if name in metrics})
        if listeners := [one for one in self.started if type(one).on_picture is not Callback.on_picture]:
            picture = draw_detections(split)
            for callback in listeners:
                callback.on_picture(picture, state.step)
        self._row_at = time.monotonic()  # validation does not count for the speed of the next row
        if settings.patience is not None and state.validations_since_best >= settings.patience:
            state.stopped_by = state.stopped_by or "patience"

    def detect(self, split: Split, detector: Detector, description: str) -> None:
        """Runs a detector on a split, all ranks together."""
        size = self.config.validation.batch_size
        with self.saved_on_failure(), self.progress.task(description) as show:
            split.detections = detect_split(
                detector, split, self.accelerator, batch_size=size, workers=self.workers, on_images=show
            )
        self.note_unreadable(split.unreadable)

    def save(self) -> None:
        """Writes ``last.pt``, everything needed to resume; DivergedError if a weight is NaN or Inf."""
        self._record_results()
        self._saved_at = time.monotonic()
        detector, state = self.stepper.evaluated, self.state
        for name, value in detector.state_dict().items():  # the same on every rank
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise DivergedError(
                    f"step {state.step}: the weight {name} is NaN or Inf; checkpoints before it are kept in "
                    f"{self.folder.last.parent}; try a lower optimizer.learning_rate"
                )
        if not self.is_main:
            return
        if state.best_step == state.step > 0 and self.config.evaluation.checkpoint == "best":
            # Before last.pt: a run that is killed in between repeats the validation and writes it again.
            Checkpoint.of(detector, step=state.step, metrics=state.best_metrics).write(self.folder.best)
        if self.folder.metrics_file.is_file():  # its rows must survive a power cut, since the checkpoint counts on them
            with self.folder.metrics_file.open("rb+") as file:
                os.fsync(file.fileno())
        state.seconds = time.monotonic() - self._began
        training = TrainingState(
            loop=asdict(state), **self.stepper.state(), images=len(self.data.train), threads=torch.get_num_threads()
        )
        last = Checkpoint(config=self._detector_config, weights=detector.state_dict(), training=training)
        last.write(self.folder.last)

    def restore(self, checkpoint: Checkpoint | None, data: dict[str, dict[str, Any]]) -> None:
        """Restores the state in which ``last.pt`` was written; ``data`` are the present fingerprints.

        Raises:
            ConfigError: if the schedule is now shorter than the training so far.
            RunError: if the data have changed, unless ``splits.accept_changed`` is set, or the checkpoint does not fit
                the config.
        """
        if checkpoint is None:
            self.state.data, self.state.processes = data, self.accelerator.num_processes
            return
        training = checkpoint.training
        assert training is not None
        with wrap_untrusted(self.folder.last):
            self.state = state = LoopState.from_dict(training.loop)
            self.stepper.load_state(training, checkpoint.weights)
        self._accept_changes(training, data)
        if training.threads != (now := torch.get_num_threads()):
            self.progress.note(
                f"the run was started with {training.threads} threads, now {now}: results may differ in the last digits"
            )
        if state.step > self.total_steps:
            raise ConfigError(f"the run has been trained for {state.step} steps already: give more with --steps")
        # The length or time limit at which the run stopped may have been raised since.
        limit = self.config.max_minutes
        if state.stopped_by == "length" and state.step < self.total_steps:
            state.changes.append(f"step {state.step}: extended to {self.total_steps} steps")
            state.stopped_by = None
        elif state.stopped_by == "minutes" and (limit is None or state.seconds < 60 * limit):
            state.stopped_by = None

    def _accept_changes(self, training: TrainingState, data: dict[str, dict[str, Any]]) -> None:
        """Raises RunError if data differ from the checkpoint and the difference is not accepted."""
        state, folder, processes = self.state, self.folder, self.accelerator.num_processes
        before = state.data or data
        if self.config.evaluation.split is not None:  # older versions measured the calibration on another one
            before = {name: one for name, one in before.items() if name in data}
        changes = fingerprint_changes(before, data)
        if training.images != len(self.data.train) and not changes:
            changes = [f"{training.images} training images, now {len(self.data.train)}"]
        if changes and not self.config.splits.accept_changed:
            raise RunError(
                f"the data have changed since {folder.path} was started: {'; '.join(changes)}; restore them, accept "
                "that with --splits.accept-changed true, or start a new run from these weights with --model.weights "
                f"{folder.last} --out NEW"
            )
        if state.processes not in (None, processes):
            changes.append(f"{state.processes} processes, now {processes}")
        for change in changes:
            self.progress.warn(f"step {state.step}: resumed with a change: {change}")
        state.changes += [f"step {state.step}: {change}" for change in changes]
        state.data, state.processes = data, processes
