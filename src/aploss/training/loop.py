"""The training loop: steps, rows of metrics, validation, checkpoints, and when to stop."""

import itertools
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec
import torch

from aploss.data.loader import TrainingBatches
from aploss.detectors.checkpoint import refuse_non_finite, wrap_untrusted
from aploss.errors import AplossError, DataError, RunError
from aploss.training.callbacks import Callback
from aploss.training.config import TrainConfig
from aploss.training.distributed import StopSignals, TrainingInterruptedError
from aploss.training.evaluate import RunSplits, detect_split
from aploss.training.machine import capture_random_state, choose_workers, restore_random_state
from aploss.training.progress import Progress
from aploss.training.run_folder import MetricsLog, RunFolder
from aploss.training.step import BadNumbers, DivergedError, Stepper, StepResult, non_finite_weight


@dataclass
class LoopState:
    """What a checkpoint holds of a run, apart from weights, optimizer and generators."""

    step: int = 0  # done
    seconds: float = 0.0  # spent training so far, over all resumptions
    validated_step: int = 0  # the last after which validation took place
    best_step: int = 0  # of the best validation, 0 before the first
    best_value: float = float("-inf")  # its metric
    best_metrics: dict[str, Any] = field(default_factory=dict)  # all of them
    validations_since_best: int = 0  # for patience
    bad_in_a_row: int = 0  # steps skipped for NaN or Inf since the last good one
    bad_steps: int = 0  # all of them
    stopped_by: str | None = None  # "length", "patience" or "minutes" once training is over
    window: dict[str, float] = field(default_factory=dict)  # sums of the losses since the last row of metrics
    window_steps: int = 0  # in these sums
    unreadable: dict[str, str] = field(default_factory=dict)  # images that cannot be read: path → reason

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LoopState":
        """The state in a checkpoint, whoever wrote it; ValueError for values of another kind."""
        state = msgspec.convert(values, cls)
        if min(state.step, state.seconds, state.best_step, state.validated_step) < 0:
            raise ValueError(f"a step or time before the first: {state.step}, {state.seconds}")
        return state

    def add_to_window(self, values: dict[str, float]) -> None:
        """Adds the values of a step to the sums of the next row of metrics."""
        for name, value in values.items():
            self.window[name] = self.window.get(name, 0.0) + value
        self.window_steps += 1

    def take_window(self) -> dict[str, float]:
        """The means since the last row; the sums start again."""
        means = {name: total / self.window_steps for name, total in self.window.items()}
        self.window, self.window_steps = {}, 0
        return means

    def add_validation(self, metrics: dict[str, Any], metric: str) -> None:
        """Notes a validation: the best so far, or one more that is not."""
        self.validated_step = self.step
        value = metrics[metric] or 0.0
        if value > self.best_value:
            self.best_value, self.best_step, self.best_metrics = value, self.step, metrics
            self.validations_since_best = 0
        else:
            self.validations_since_best += 1

    def is_over(self, max_minutes: float | None) -> bool:
        """Whether training has ended, and not only for a time limit that is now a later one."""
        more_time = max_minutes is None or self.seconds < 60 * max_minutes
        return self.stopped_by is not None and not (self.stopped_by == "minutes" and more_time)


class Loop:
    """Trains until the schedule, patience, a time limit or a signal ends it; only rank 0 writes."""

    def __init__(
        self,
        config: TrainConfig,
        stepper: Stepper,
        batches: TrainingBatches,
        splits: RunSplits,
        folder: RunFolder,
        progress: Progress,
        callbacks: Callback,
    ) -> None:
        self.config, self.stepper, self.batches = config, stepper, batches
        self.splits, self.images, self.validation = splits, splits.data.train, splits.validation
        self.folder, self.progress, self.callbacks, self.world = folder, progress, callbacks, stepper.world
        self.workers = choose_workers(config.batches.workers, stepper.device, self.world.size)
        self.state = LoopState()
        self.total_steps = stepper.schedule.total_steps
        self._validate_every = stepper.schedule.steps(config.validation.every, config.validation.unit)
        self._log: MetricsLog | None = None
        self._known_unreadable: set[int] = set()  # training images, on this rank
        self._unreadable_now: set[str] = set()  # on all ranks, since the run was started or resumed

    def run(self, signals: StopSignals) -> None:
        """Trains from where the state is to the end.

        Raises:
            TrainingInterruptedError: after Ctrl-C or SIGTERM; the run is saved.
            DivergedError: after too many steps with NaN or Inf; the last good checkpoint is kept.
        """
        if self.world.is_main:
            self._log = MetricsLog(self.folder.path, step=self.state.step)
            self.callbacks.on_start(self.config, self.folder.path, self.state.step)
        self._resumed_at, self._seconds_before = time.monotonic(), self.state.seconds
        self._saved_at = self._row_at = self._resumed_at
        self.progress.begin(self.total_steps, self.state.step)
        try:
            with signals.deferred():
                self._steps(signals)
        finally:
            self.progress.end()
            if self._log is not None:
                self._log.close()

    def _steps(self, signals: StopSignals) -> None:
        state, accumulate, limit = self.state, self.config.batches.accumulate, self.config.max_minutes
        self._validate_and_save()  # an interruption may have come before a validation
        with closing(self.batches.endless(state.step * accumulate)) as batches:
            while state.stopped_by is None:
                result = self.stepper.step(state.step, list(itertools.islice(batches, accumulate)))
                self._after_step(result)
                late = limit is not None and state.seconds >= 60 * limit
                news = len(self.batches.unreadable) > len(self._known_unreadable)
                # What any rank was told or has met, all act on.
                interrupted, out_of_time, unreadable = self.world.sum([signals.requested, late, news])
                if unreadable:
                    self._exchange_unreadable()
                if state.step >= self.total_steps:
                    state.stopped_by = "length"
                elif out_of_time:
                    state.stopped_by = "minutes"
                    if state.step < self.config.log_steps and state.window_steps:  # or nothing would be drawn
                        self._write_training_row(result.learning_rate)
                elif interrupted:
                    self.save()
                    raise TrainingInterruptedError(
                        f"stopped at step {state.step} of {self.total_steps}, everything is saved; "
                        f"go on with: {self.folder.resume_command}"
                    )
                self._validate_and_save()

    @property
    def epoch(self) -> float:
        """Epochs done, with their fraction."""
        return round(self.state.step / self.stepper.schedule.steps_per_epoch, 4)

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._resumed_at

    def _after_step(self, result: StepResult) -> None:
        state = self.state
        state.step += 1
        state.seconds = self._seconds
        self.progress.step(state.step)
        if result.bad is not None:
            self._report_bad(result.bad)
        else:
            state.bad_in_a_row = 0
        if not result.counts:
            return
        state.add_to_window({**result.losses, "gradient_norm": result.gradient_norm})
        if state.step % self.config.log_steps == 0 or state.step == self.total_steps:
            self._write_training_row(result.learning_rate)

    def _write_training_row(self, learning_rate: float) -> None:
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
                "lr": learning_rate,
                "images_per_second": round(images / max(now - self._row_at, 1e-9), 2),
                "seconds": round(self.state.seconds, 3),
            }
        )
        self._row_at = now

    def _add_row(self, row: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.add(row)
            (self.callbacks.on_validation if row["kind"] == "validation" else self.callbacks.on_log)(row)
        self.progress.row(row)

    def _report_bad(self, bad: BadNumbers) -> None:
        self.state.bad_in_a_row += 1
        self.state.bad_steps += 1
        self.progress.warn(f"{bad}; the step is skipped")
        if self._log is not None:
            self._log.add_bad(bad.as_row())
        if self.state.bad_in_a_row >= self.config.bad_steps:
            raise DivergedError(
                f"training stopped after {self.state.bad_in_a_row} steps in a row with NaN or Inf, the last: {bad}; "
                f"{self._kept_checkpoint()}; try a lower optimizer.learning_rate or optimizer.clip_norm, or precision "
                "float32"
            )

    def _kept_checkpoint(self) -> str:
        last = self.folder.checkpoints.last
        return f"the last good checkpoint {last} is kept" if last.is_file() else "nothing was saved before"

    def _exchange_unreadable(self) -> None:
        """Lets all ranks know of images that could not be read for the last step."""
        new = {
            str(self.images.image_path(index)): reason
            for index, reason in self.batches.unreadable.items()
            if index not in self._known_unreadable
        }
        self._known_unreadable = set(self.batches.unreadable)
        shares = self.world.from_main(self.world.gather(new))
        all_new = {path: reason for share in shares for path, reason in share.items()}
        self.note_unreadable(all_new, "the next image of the epoch stands in for it")
        self._unreadable_now |= all_new.keys()
        found, share = len(self._unreadable_now), self.config.batches.max_unreadable
        if found > share * len(self.images):
            self.save()
            raise DataError(
                f"training stopped at step {self.state.step}: {found} of {len(self.images)} training images cannot be "
                f"read, more than batches.max_unreadable ({share:g}); the first: "
                f"{next(iter(self.state.unreadable.values()))}; everything is saved: repair the data, then go on with: "
                f"{self.folder.resume_command}"
            )

    def note_unreadable(self, images: dict[str, str], consequence: str) -> None:
        """Warns of images that cannot be read (path → reason), each once, and remembers them."""
        for path, reason in images.items():
            if path not in self.state.unreadable:
                self.state.unreadable[path] = reason
                self.progress.warn(f"step {self.state.step}: {reason}; {consequence}")
                if self._log is not None:
                    self._log.add_unreadable({"step": self.state.step, "image": path, "reason": reason})

    def _validate_and_save(self) -> None:
        state = self.state
        due = state.step > 0 and (state.step % self._validate_every == 0 or state.stopped_by)
        validates = bool(self.validation and due and state.validated_step != state.step)
        if validates:
            self._validate()
        if validates or state.stopped_by or self._checkpoint_is_due():
            self.save()
        # After last.pt, so that the two can be brought together again after a kill in between.
        if validates and state.best_step == state.step:
            self._save_best()

    def _validate(self) -> None:
        assert self.validation is not None
        state, settings, split, detector = self.state, self.config.validation, self.validation, self.stepper.evaluated
        with self.progress.images("validating") as show:
            found = detect_split(
                detector, split, self.world, batch_size=settings.batch_size, workers=self.workers, on_images=show
            )
        split.validated = (state.step, found)
        self.note_unreadable(split.unreadable, f"it is left out of {split.name}")
        metrics = self.world.on_main(lambda: split.measure(found, detector).as_dict())
        state.add_validation(metrics, settings.metric)
        row = {"kind": "validation", "step": state.step, "epoch": self.epoch, "seconds": round(self._seconds, 3)}
        self._add_row({**row, **{name: value for name, value in metrics.items() if name.startswith("A")}})
        self._row_at = time.monotonic()  # the next row's speed is that of training alone
        if settings.patience is not None and state.validations_since_best >= settings.patience:
            state.stopped_by = state.stopped_by or "patience"

    def _checkpoint_is_due(self) -> bool:
        steps, minutes = self.config.checkpoint_steps, self.config.checkpoint_minutes
        by_steps = steps is not None and self.state.step % steps == 0
        by_time = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return self.state.step > 0 and (by_steps or by_time)

    def save(self) -> None:
        """Writes ``last.pt``: all that a resumed run needs; DivergedError if a weight is NaN or Inf."""
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
        training = {
            **asdict(self.state),
            "stepper": self.stepper.state(),
            "random": capture_random_state(),
            "images": len(self.images),
            "image_names": [self.images.relative_path(i) for i in range(len(self.images))],
            "threads": torch.get_num_threads(),
        }
        self.folder.checkpoints.save_last(detector, training)

    def _save_best(self) -> None:
        """Writes ``best.pt`` with the present weights, if they are the ones to be kept."""
        if self.world.is_main and self.config.evaluation.checkpoint == "best":
            self.folder.checkpoints.save_best(
                self.stepper.evaluated, step=self.state.best_step, metrics=self.state.best_metrics
            )

    def restore(self, checkpoint: dict[str, Any], *, best_step: int | None) -> None:
        """Goes back to where ``last.pt`` was written, beside a ``best.pt`` of ``best_step``.

        Raises:
            RunError: the checkpoint does not fit: other training images, another detector, or fields that are missing.
        """
        last = self.folder.checkpoints.last
        try:
            training = {"unreadable": {}, **checkpoint["training"]}  # not in older ones
            self._check_images(training["images"])
            self.state = LoopState.from_dict({f.name: training[f.name] for f in fields(LoopState)})
            state = checkpoint["detector"]["state"]
            with wrap_untrusted(last):
                refuse_non_finite((name, bool(tensor.isfinite().all())) for name, tensor in state.items())
            self.stepper.load_state(training["stepper"], state)
            restore_random_state(training["random"])
            threads = training["threads"]
        except AplossError:
            raise
        except KeyError as error:
            raise RunError(f"{last} is not a whole checkpoint: it has no {error}") from error
        except Exception as error:  # of values of any kind and size
            reason = " ".join(str(error).split())[:200]
            raise RunError(f"{last} does not fit {self.folder.config_file}: {reason}") from error
        if threads != (now := torch.get_num_threads()):
            self.progress.note(f"the run had {threads} threads, now {now}: numbers may differ in the last digits")
        if self.state.best_step == self.state.step != best_step and self.state.step > 0:
            self._save_best()  # killed after last.pt was written, before best.pt was
        if not self.state.is_over(self.config.max_minutes):
            self.state.stopped_by = None

    def _check_images(self, images: int) -> None:
        if images != len(self.images):
            raise RunError(
                f"{self.folder.path} was started with {images} training images, but the data now has "
                f"{len(self.images)}, so that samples would come in another order; bring the data back, or start a "
                f"new run from these weights with --model.weights {self.folder.checkpoints.last} --out NEW"
            )
