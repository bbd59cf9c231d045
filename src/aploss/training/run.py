"""``train(config)``: a whole run from a config to a summary."""

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any, cast

import torch

from aploss.data.batches import make_training_loader
from aploss.detectors.detector import Detector
from aploss.training.config import TrainConfig
from aploss.training.datasets import RunData, load_run_data
from aploss.training.distributed import World, is_lost_connection, start_world
from aploss.training.finish import FinalNumbers, evaluate_run
from aploss.training.hardware import choose_device, choose_workers
from aploss.training.loop import Loop
from aploss.training.loop_state import LostProcessError
from aploss.training.metrics_log import read_rows
from aploss.training.progress import Progress, SilentProgress, make_progress
from aploss.training.random_state import seeded
from aploss.training.run_folder import RunFolder, default_folder, describe_environment
from aploss.training.schedule import Schedule
from aploss.training.start_weights import make_detector, silent_weights
from aploss.training.stepper import Stepper
from aploss.training.summary import Summary
from aploss.training.validation import Split

__all__ = ["make_detector", "train"]


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    quiet: bool = True,
    on_progress: Callable[[dict[str, Any]], Any] | None = None,
) -> Summary:
    """Trains, evaluates and reports one run.

    Under ``torchrun`` every process calls it. The same config gives the same weights and numbers
    on a CPU, however often it is called in a process; generators and switches of torch are left as
    they were.

    Args:
        config: what to do; ``config.out`` is the run folder.
        resume: go on with the run that is in the folder. One that is finished is only read, one
            that is not there is started.
        quiet: show nothing; otherwise a live bar on a terminal, lines elsewhere.
        on_progress: called in the main process with every row of the metrics, as it is written.

    Returns:
        The summary, as in ``summary.json``.

    Raises:
        ConfigError: a setting that cannot be.
        DataError: data that cannot be used.
        RunError: the folder is taken, too many numbers were not finite, or a process has gone.
        TrainingInterruptedError: Ctrl-C or SIGTERM; everything is saved.
    """
    device = choose_device(config.device)
    folder = RunFolder(config.out or default_folder(config))
    deterministic = config.deterministic
    deterministic = device.type == "cpu" if deterministic is None else deterministic
    with start_world(device) as world, seeded(config.seed, deterministic=deterministic):
        progress: Progress = SilentProgress()
        if world.is_main:
            progress = make_progress(quiet=quiet, on_progress=on_progress)
        try:
            return _Run(config, folder, device, world, progress).carry_out(resume=resume)
        except RuntimeError as error:
            if world.size > 1 and is_lost_connection(error):
                raise LostProcessError(
                    f"another process of this run has gone; go on from the last checkpoint with "
                    f"--resume --out {folder.path}"
                ) from error
            raise


class _Run:
    """One run in one process."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        device: torch.device,
        world: World,
        progress: Progress,
    ) -> None:
        self.config, self.folder, self.device = config, folder, device
        self.world, self.progress = world, progress
        self.workers = choose_workers(config.batches.workers, device, world.size)

    def carry_out(self, *, resume: bool) -> Summary:
        with ExitStack() as lock:
            return self._carry_out(resume, lock)

    def _carry_out(self, resume: bool, lock: ExitStack) -> Summary:
        checkpoint, best_step = self._look_at_folder(resume, lock)
        if checkpoint is not None and self._is_finished(checkpoint):
            return cast(Summary, self.world.from_main(self._read_summary()))
        with self.world.main_first():  # the built-in data is made by one process only
            data = load_run_data(self.config)
        loop, detector = self._make_loop(data)
        self._start_folder(lock)
        if checkpoint is not None:
            loop.restore(checkpoint, best_step=best_step)
        self._introduce(data, detector, loop)
        loop.run()
        self.progress.note("measuring the result")
        evaluation = loop.validation
        if data.evaluation is not data.validation and data.evaluation is not None:
            evaluation = Split(data.evaluation)
        held_out = evaluation
        if data.held_out is not data.evaluation and data.held_out is not None:
            held_out = Split(data.held_out)
        numbers = evaluate_run(
            self.config,
            self.folder,
            self.world,
            device=self.device,
            validation=loop.validation,
            evaluation=evaluation,
            held_out=held_out,
            workers=self.workers,
        )
        return self._summarise(loop, detector, numbers)

    def _look_at_folder(
        self, resume: bool, lock: ExitStack
    ) -> tuple[dict[str, Any] | None, int | None]:
        """The checkpoint to go on from and the step of the best one, in every process."""
        found: tuple[dict[str, Any] | None, int | None] = (None, None)
        with self.world.main_first():
            if self.world.is_main and resume and self.folder.exists:
                lock.enter_context(self.folder.locked())
                self.folder.go_on(self.config)
                found = self._read_checkpoints()
            elif self.world.is_main:
                self.folder.refuse_if_taken()
        return cast(tuple[dict[str, Any] | None, int | None], self.world.from_main(found))

    def _start_folder(self, lock: ExitStack) -> None:
        """Makes the folder of a new run, once everything else is known to work."""
        with self.world.main_first():
            if self.world.is_main and not self.folder.exists:
                self.folder.create(self.config)
                lock.enter_context(self.folder.locked())

    def _read_checkpoints(self) -> tuple[dict[str, Any] | None, int | None]:
        checkpoints = self.folder.checkpoints
        last = checkpoints.load_last() if checkpoints.last.is_file() else None
        best = checkpoints.load_best()["step"] if checkpoints.best.is_file() else None
        return last, best

    def _is_finished(self, checkpoint: dict[str, Any]) -> bool:
        stopped_by, limit = checkpoint["training"]["stopped_by"], self.config.max_minutes
        more_time = limit is None or checkpoint["training"]["seconds"] < 60 * limit
        summarised = self.world.from_main(self.folder.summary_file.is_file())
        return summarised and stopped_by is not None and not (stopped_by == "minutes" and more_time)

    def _read_summary(self) -> Summary | None:
        if not self.world.is_main:
            return None
        self.progress.note(f"{self.folder.path} is finished already")
        return Summary.read(self.folder.summary_file)

    def _make_loop(self, data: RunData) -> tuple[Loop, Detector]:
        config, world = self.config, self.world
        loader = make_training_loader(
            data.train,
            batch_size=config.batches.size,
            seed=config.seed,
            preset=config.batches.augmentation,
            size=config.batches.image_size,
            workers=self.workers,
            rank=world.rank,
            world_size=world.size,
        )
        with silent_weights(not world.is_main):
            detector = make_detector(config, data.train.class_names).to(self.device)
        schedule = Schedule(config.schedule, loader.batches_per_epoch / config.batches.accumulate)
        stepper = Stepper(
            config, detector, schedule, world, lambda i: data.train.image_path(i).name
        )
        loop = Loop(
            config,
            stepper=stepper,
            loader=loader,
            images=len(data.train),
            validation=None if data.validation is None else Split(data.validation),
            world=world,
            folder=self.folder,
            progress=self.progress,
            workers=self.workers,
        )
        return loop, detector

    def _introduce(self, data: RunData, detector: Detector, loop: Loop) -> None:
        note = self.progress.note
        sizes = [f"{len(data.train)} images to train on"]
        for word, dataset in (("validation", data.validation), ("evaluation", data.evaluation)):
            if dataset is not None:
                sizes.append(f"{len(dataset)} for {word} ({dataset.split})")
        note(
            f"data      {data.train.name}: {', '.join(sizes)}; {len(detector.class_names)} classes"
        )
        if data.train.problems:
            note(
                f"          {len(data.train.problems)} problems in it: aploss data check lists them"
            )
        for remark in data.remarks:
            note(f"          {remark}")
        where = f"{self.device}" + (f", {self.world.size} processes" if self.world.size > 1 else "")
        millions = _parameters(detector) / 1e6
        note(f"detector  {detector.name}, {millions:.1f} M parameters, loss {self.config.loss}")
        note(f"training  {loop.total_steps} steps of {loop.loader.batch_size} images on {where}")
        if self.device.type == "cuda" and torch.cuda.device_count() > self.world.size == 1:
            count = torch.cuda.device_count()
            note(
                f"          {count} GPUs: use all with torchrun --nproc-per-node {count} -m aploss"
            )
        note(
            f"run       {self.folder.path}"
            + (f", from step {loop.state.step}" * (loop.state.step > 0))
        )

    def _summarise(self, loop: Loop, detector: Detector, numbers: FinalNumbers) -> Summary:
        config, state = self.config, loop.state
        metrics = {} if numbers.metrics is None else numbers.metrics.as_dict()
        after = numbers.calibration.get("after", {})
        environment = describe_environment()
        steps_per_epoch = loop.stepper.schedule.steps_per_epoch
        summary = Summary(
            folder=str(self.folder.path),
            data=config.data,
            split=numbers.split,
            detector=config.detector,
            loss=config.loss,
            seed=config.seed,
            **{name: metrics.get(name) for name in ("AP", "AP50", "AP75", "APs", "APm", "APl")},
            voc_AP50=numbers.voc_AP50,
            per_class=metrics.get("per_class", {}),
            calibration_error=after.get("all", {}).get("expected_calibration_error"),
            calibration_error_drawn=after.get("expected_calibration_error"),
            calibration_split=numbers.calibration.get("measured_on"),
            calibration_held_out=numbers.calibration.get("held_out"),
            draw_threshold=numbers.draw_threshold,
            steps=state.step,
            epochs=round(state.step / steps_per_epoch, 3),
            best_step=numbers.step,
            stopped_by=str(state.stopped_by),
            bad_steps=state.bad_steps,
            minutes=round(state.seconds / 60, 3),
            images_per_second=self._usual_speed(),
            parameters=_parameters(detector),
            device=str(self.device),
            processes=self.world.size,
            command=environment["command"],
            commit=environment["commit"],
        )
        if self.world.is_main:
            from aploss.reporting.run_report import write_run_report

            summary.write(self.folder.summary_file)
            write_run_report(self.folder.path)
        self.world.from_main(None)  # nobody leaves before the page is written
        return summary

    def _usual_speed(self) -> float:
        speeds = [
            row["images_per_second"]
            for row in read_rows(self.folder.path / "metrics.jsonl")
            if row["kind"] == "train"
        ]
        return round(median(speeds), 2) if speeds else 0.0


def _parameters(detector: Detector) -> int:
    return sum(parameter.numel() for parameter in detector.parameters())
