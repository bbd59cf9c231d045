"""The training loop: steps, rows of metrics, validation, checkpoints, and when to stop."""

import itertools
import time
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch

from aploss.data.batches import TrainingBatches
from aploss.errors import RunError
from aploss.training.bad_numbers import BadNumbers
from aploss.training.config import TrainConfig
from aploss.training.distributed import World
from aploss.training.loop_state import LoopState, TrainingInterruptedError
from aploss.training.metrics_log import MetricsLog
from aploss.training.progress import Progress
from aploss.training.random_state import capture_random_state, restore_random_state
from aploss.training.run_folder import RunFolder
from aploss.training.signals import StopSignals
from aploss.training.stepper import Stepper, StepResult
from aploss.training.validation import Split, detect_split

__all__ = ["Loop"]


class Loop:
    """Trains until the schedule, patience, a time limit or a signal ends it.

    Args:
        config: of the run.
        stepper: does the steps.
        loader: gives the batches.
        images: how many images are trained on, to notice on resume that they are others.
        validation: split to validate on, or None.
        world: the processes.
        folder: of the run; only the main process writes.
        progress: what the user sees.
        workers: processes that read images for validation.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        stepper: Stepper,
        loader: TrainingBatches,
        images: int,
        validation: Split | None,
        world: World,
        folder: RunFolder,
        progress: Progress,
        workers: int,
    ) -> None:
        self.config, self.stepper, self.loader, self.images = config, stepper, loader, images
        self.validation, self.world, self.folder = validation, world, folder
        self.progress, self.workers = progress, workers
        self.state = LoopState()
        self.total_steps = stepper.schedule.total_steps
        settings = config.validation
        self._validate_every = stepper.schedule.steps(settings.every, settings.unit)
        self._log: MetricsLog | None = None

    def run(self) -> None:
        """Trains from where the state is to the end.

        Raises:
            TrainingInterruptedError: after Ctrl-C or SIGTERM; the run is saved.
            RunError: after too many bad numbers in a row; the last good checkpoint is kept.
        """
        if self.world.is_main:
            self._log = MetricsLog(self.folder.path, step=self.state.step)
        self._resumed_at, self._seconds_before = time.monotonic(), self.state.seconds
        self._saved_at = self._row_at = self._resumed_at
        self.progress.begin(self.total_steps, self.state.step)
        try:
            with StopSignals() as signals:
                self._steps(signals)
        finally:
            self.progress.end()
            if self._log is not None:
                self._log.close()

    def _steps(self, signals: StopSignals) -> None:
        state = self.state
        self._validate_and_save()  # an interruption may have come before a validation
        with closing(self.loader.endless(state.step * self.config.batches.accumulate)) as batches:
            while state.stopped_by is None:
                step_batches = list(itertools.islice(batches, self.config.batches.accumulate))
                self._after_step(self.stepper.step(state.step, step_batches))
                interrupted, out_of_time = self._asked_to_stop(signals)
                if state.step >= self.total_steps:
                    state.stopped_by = "length"
                elif out_of_time:
                    state.stopped_by = "minutes"
                elif interrupted:
                    self._interrupt()
                self._validate_and_save()

    @property
    def _epoch(self) -> float:
        done = self.state.step * self.config.batches.accumulate
        return round(done / self.loader.batches_per_epoch, 4)

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
        images = self.state.window_steps * self.loader.batch_size * self.config.batches.accumulate
        means = self.state.take_window()
        now = time.monotonic()
        self._add_row(
            {
                "kind": "train",
                "step": self.state.step,
                "epoch": self._epoch,
                "loss": means["classification"] + means["box"],
                "classification": means["classification"],
                "box": means["box"],
                "lr": learning_rate,
                "gradient_norm": means["gradient_norm"],
                "images_per_second": round(images / max(now - self._row_at, 1e-9), 2),
                "seconds": round(self.state.seconds, 3),
            }
        )
        self._row_at = now

    def _add_row(self, row: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.add(row)
        self.progress.row(row)

    def _report_bad(self, bad: BadNumbers) -> None:
        self.state.bad_in_a_row += 1
        self.state.bad_steps += 1
        self.progress.warn(f"{bad}; the step is skipped")
        if self._log is not None:
            self._log.add_bad(bad.as_row())
        if self.state.bad_in_a_row >= self.config.bad_steps:
            last = self.folder.checkpoints.last
            kept = f"the last good checkpoint is {last}" if last.is_file() else "nothing was saved"
            raise RunError(
                f"training stopped after {self.state.bad_in_a_row} steps in a row with numbers "
                f"not finite, the last: {bad}; {kept}; try a lower optimizer.learning_rate or "
                "optimizer.clip_norm, or float32"
            )

    def _asked_to_stop(self, signals: StopSignals) -> tuple[bool, bool]:
        limit = self.config.max_minutes
        late = limit is not None and self.state.seconds >= 60 * limit
        interrupted, out_of_time = self.world.sum([float(signals.requested), float(late)])
        return interrupted > 0, out_of_time > 0

    def _interrupt(self) -> None:
        self.save()
        raise TrainingInterruptedError(
            f"stopped at step {self.state.step} of {self.total_steps}, everything is saved; "
            f"go on with: aploss train --resume --out {self.folder.path}"
        )

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
            self.save_best()

    def _validate(self) -> None:
        assert self.validation is not None
        state, settings = self.state, self.config.validation
        detector = self.stepper.evaluated
        found = detect_split(
            detector,
            self.validation,
            self.world,
            batch_size=settings.batch_size,
            workers=self.workers,
        )
        metrics: dict[str, Any] = {}
        if found is not None:
            metrics = self.validation.measure(found, detector).as_dict()
        metrics = self.world.from_main(metrics)
        state.judge(metrics, settings.metric)
        row = {"kind": "validation", "step": state.step, "epoch": self._epoch}
        averages = {name: value for name, value in metrics.items() if name.startswith("A")}
        self._add_row({**row, "seconds": round(self._seconds, 3), **averages})
        self._row_at = time.monotonic()  # the next row's speed is that of training alone
        if settings.patience is not None and state.validations_since_best >= settings.patience:
            state.stopped_by = state.stopped_by or "patience"

    def _checkpoint_is_due(self) -> bool:
        steps, minutes = self.config.checkpoint_steps, self.config.checkpoint_minutes
        if self.state.step == 0:
            return False
        if steps is not None and self.state.step % steps == 0:
            return True
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def save(self) -> None:
        """Writes ``last.pt``: everything that a resumed run needs."""
        self._saved_at = time.monotonic()
        if not self.world.is_main:
            return
        if self._log is not None:
            self._log.flush_to_disk()
        self.state.seconds = self._seconds
        training = {
            **asdict(self.state),
            "stepper": self.stepper.state(),
            "random": capture_random_state(),
            "images": self.images,
            "threads": torch.get_num_threads(),
        }
        self.folder.checkpoints.save_last(self.stepper.evaluated, training)

    def save_best(self) -> None:
        """Writes ``best.pt`` with the present weights."""
        if self.world.is_main:
            self.folder.checkpoints.save_best(
                self.stepper.evaluated, step=self.state.best_step, metrics=self.state.best_metrics
            )

    def restore(self, checkpoint: dict[str, Any], *, best_step: int | None) -> None:
        """Goes back to where a checkpoint was written.

        Args:
            checkpoint: what ``last.pt`` holds.
            best_step: the step of ``best.pt``, None without one.

        Raises:
            RunError: if the training images are not those of the checkpoint.
        """
        training = checkpoint["training"]
        if training["images"] != self.images:
            raise RunError(
                f"{self.folder.path} was started with {training['images']} training images, but "
                f"the data now has {self.images}"
            )
        if training["threads"] != torch.get_num_threads():
            self.progress.note(
                f"the run had {training['threads']} threads, now {torch.get_num_threads()}: "
                "numbers may differ in the last digits"
            )
        self.state = LoopState(**{name: training[name] for name in asdict(LoopState())})
        self.stepper.load_state(training["stepper"], checkpoint["detector"]["state"])
        restore_random_state(training["random"])
        if self.state.best_step == self.state.step != best_step and self.state.step > 0:
            self.save_best()  # killed after last.pt was written, before best.pt was
        limit = self.config.max_minutes
        if self.state.stopped_by == "minutes" and (
            limit is None or training["seconds"] < 60 * limit
        ):
            self.state.stopped_by = None
