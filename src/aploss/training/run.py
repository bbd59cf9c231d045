"""``train(config)``: a whole run from a config to a summary: training, calibration, evaluation and report."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from aploss.data.formats import DataFormat
from aploss.detectors import build_detector
from aploss.detectors.checkpoint import Checkpoint, wrap_untrusted
from aploss.detectors.detector import Detector
from aploss.environment import describe_environment
from aploss.errors import ConfigError, RunError
from aploss.evaluation import METRICS
from aploss.evaluation.calibration import calibrate_detections, calibration_report
from aploss.evaluation.matching import precision_recall_curves
from aploss.evaluation.metrics import voc_metrics
from aploss.files import write_json
from aploss.progress import Progress
from aploss.reports.run_files import matches_document, read_json_lines
from aploss.training.callbacks import RowFunction, make_tracker
from aploss.training.config import TrainConfig
from aploss.training.distributed import (
    StopSignals,
    choose_device,
    emulates_bfloat16,
    keep_freed_memory,
    main_first,
    on_main,
    seeded,
    start_accelerator,
    was_restarted,
)
from aploss.training.loop import Loop
from aploss.training.run_folder import RunFolder, Summary, default_folder
from aploss.training.splits import RunData, Split, load_run_data

WEIGHTS_LOGGER = logging.getLogger("aploss.detectors.weights")


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    quiet: bool = True,
    callbacks: Sequence[RowFunction] = (),
    source: DataFormat | None = None,
) -> Summary:
    """Trains, evaluates and reports one run.

    Under ``torchrun`` every process calls it. On a CPU the same config always gives the same weights and metrics.
    Random generators and switches of torch are restored; the process keeps freed memory, see :func:`keep_freed_memory`.

    Args:
        config: the settings; ``config.out`` is the run folder.
        resume: continue the run in the folder. A finished run is only read, unless ``config`` is longer; if there is
            no run, one is started. Implied if torchrun or SLURM has restarted the process.
        quiet: show only warnings; otherwise a progress bar on a terminal, lines elsewhere.
        callbacks: called on rank 0: functions with every row of metrics, objects of
            :class:`~aploss.training.Callback` also at the start and at the end.
        source: the dataset of ``config.data`` if :func:`~aploss.data.find_source` has found it already.

    Returns:
        The summary, as in ``summary.json``.

    Raises:
        ConfigError: for an invalid setting.
        DataError: for data that cannot be used.
        RunError: if the folder is taken or not writable, a checkpoint is invalid, or data have changed.
        DivergedError: after too many consecutive steps with NaN or Inf.
        FailedRankError: if another rank has died.
        TrainingInterruptedError: after Ctrl-C or SIGTERM; everything is saved.

    Example:
        >>> from aploss.data import builtin_dataset
        >>> from aploss.training import load_config
        >>> data = str(builtin_dataset(cache=".", counts=(4, 2, 2)).root)
        >>> tiny = {"schedule": {"length": 1}, "batches": {"image_size": 64}, "tracker": "none"}
        >>> summary = train(load_config(None, {"data": data, "out": "runs/first", **tiny}))
        >>> summary.folder, summary.split, summary.steps
        ('runs/first', 'test', 1)
    """
    device = choose_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    deterministic = device.type == "cpu" if config.deterministic is None else config.deterministic
    folder = RunFolder(config.out or default_folder(config))
    resume = resume or was_restarted()
    with ExitStack() as stack:
        accelerator = stack.enter_context(start_accelerator(device, advice=f"resume with: {folder.resume_command}"))
        stack.enter_context(seeded(config.seed, deterministic=deterministic))
        signals = stack.enter_context(StopSignals("stopped before the first step"))
        progress = stack.enter_context(Progress(quiet=quiet, is_main=accelerator.is_main_process))
        finished = on_main(accelerator, lambda: folder.finished_summary(config)) if resume else None
        if finished is not None:
            progress.note(f"{folder.path} is already finished")
            return finished
        callbacks = [*make_tracker(config.tracker), *callbacks]  # on all ranks, which must fail together
        loop = _open_run(config, folder, accelerator, progress, callbacks, resume=resume, source=source, stack=stack)
        _print_overview(loop)
        try:
            loop.run(signals)
            summary = _evaluate(loop)
        except BaseException:
            for callback in loop.started:
                with suppress(Exception):  # the first error is the one to report
                    callback.on_end(None)
            raise
        for callback in loop.started:
            callback.on_end(asdict(summary))
    return summary


def _open_run(
    config: TrainConfig,
    folder: RunFolder,
    accelerator: Accelerator,
    progress: Progress,
    callbacks: Sequence[RowFunction],
    *,
    resume: bool,
    source: DataFormat | None,
    stack: ExitStack,
) -> Loop:
    """Starts or resumes the run in a folder, which stays locked by ``stack``."""

    def read() -> tuple[TrainConfig, Checkpoint | None]:
        if not (resume and folder.exists):
            folder.refuse_if_taken()
            return config, None
        stack.enter_context(folder.locked())
        return folder.resumed_config(config), folder.load_last() if folder.last.is_file() else None

    def claim() -> None:
        stack.enter_context(folder.locked())
        (folder.reopen if resume and folder.exists else folder.create)(loop.config)

    config, checkpoint = on_main(accelerator, read)
    if config.model.frozen_backbone and config.model.weights is None:
        raise ConfigError("model.frozen_backbone needs trained weights: add --model.weights imagenet or a file")
    with wrap_untrusted(folder.last):
        names = None if checkpoint is None else tuple(map(str, checkpoint.config["class_names"]))
    # Rank 0 first, because it generates the built-in data.
    data = main_first(accelerator, lambda: load_run_data(config, source, class_names=names))
    # The initial weights of a resumed run are not needed, and may no longer exist.
    detector = checkpoint.detector() if checkpoint is not None else make_detector(config, data.train.class_names)
    if checkpoint is not None and (detector.name, detector.loss_name) != (config.detector, config.loss):
        raise RunError(
            f"{folder.last} holds a {detector.name} trained with {detector.loss_name}, but the run's config has "
            f"{config.detector} and {config.loss}"
        )
    loop = Loop(config, folder, accelerator, progress, callbacks, data, detector.to(accelerator.device))
    loop.restore(checkpoint, on_main(accelerator, data.fingerprints))
    if was_restarted() and checkpoint is not None:
        progress.warn(f"restarted after a failure: {folder.path} continues from step {loop.state.step}")
    on_main(accelerator, claim)  # only now, so that a run that cannot start leaves nothing behind
    return loop


def _print_overview(loop: Loop) -> None:
    """Prints the data, detector and schedule of the run."""
    config, data, note, detector = loop.config, loop.data, loop.progress.note, loop.stepper.detector
    others = {"validation": data.validation, "evaluation": data.evaluation}
    sizes = [f"{len(split.dataset)} for {word} ({split.name})" for word, split in others.items() if split is not None]
    sizes = [f"{len(data.train)} images to train on", *sizes]
    note(f"data      {data.train.name}: {', '.join(sizes)}; {len(detector.class_names)} classes")
    if data.train.problems:
        note(f"          {len(data.train.problems)} problems found: aploss data check lists them")
    for remark in data.remarks:
        note(f"          {remark}")
    device, processes = loop.accelerator.device, loop.accelerator.num_processes
    parameters = sum(parameter.numel() for parameter in detector.parameters())
    note(f"detector  {detector.name}, {parameters / 1e6:.1f} M parameters, loss {config.loss}")
    note(f"training  {loop.total_steps} steps of {loop.batches.batch_size} images on {processes} x {device}")
    if config.precision == "bfloat16" and emulates_bfloat16(device):
        loop.progress.warn(
            "          this CPU has no bfloat16 instructions, and emulates them about ten times slower than float32: "
            "use --precision float32"
        )
    note(f"run       {loop.folder.path}" + (f", resumed at step {loop.state.step}" if loop.state.step else ""))


def make_detector(config: TrainConfig, class_names: tuple[str, ...]) -> Detector:
    """Builds the detector of a config with its initial weights.

    They follow from the seed alone: runs that differ in the loss start from the same weights, wherever the shapes are
    the same. A softmax loss has one more output channel, so that its other layers would draw other random numbers.
    """
    criterion = config.criterion
    own = {"loss_options": criterion.options, "box_weight": criterion.box_weight}
    shared = {name: getattr(criterion, name) for name in ("rank_over", "assigner", "hard_boxes", "box_loss")}
    shared |= {"class_names": class_names, "weights": config.model.weights}
    build: Any = partial(build_detector, config.detector, **shared, **config.model.architecture)
    try:
        torch.manual_seed(config.seed)
        detector: Detector = build(loss=config.loss, **own)
        if detector.uses_softmax:
            torch.manual_seed(config.seed)
            is_quiet, WEIGHTS_LOGGER.disabled = WEIGHTS_LOGGER.disabled, True  # they have been logged
            reference = build(loss=TrainConfig.loss).state_dict()
            WEIGHTS_LOGGER.disabled = is_quiet
            state = detector.state_dict()
            same = {key: value for key, value in reference.items() if state[key].shape == value.shape}
            detector.load_state_dict({**state, **same})
    except TypeError as error:
        raise ConfigError(f"model.options: {error}") from error
    return detector


# --- evaluation ---


def _evaluate(loop: Loop) -> Summary:
    """Calibrates and evaluates the final detector of a run; writes ``evaluation/``, the summary and the report.

    The calibration and the drawing threshold are fitted on the validation split, measured on the evaluation split, and
    stored in the evaluated checkpoint. All ranks run the detector; rank 0 writes.
    """

    def load_final() -> Checkpoint:
        is_best = loop.config.evaluation.checkpoint == "best" and loop.folder.best.is_file()
        return Checkpoint.read(loop.folder.best) if is_best else loop.folder.load_last()

    chosen = on_main(loop.accelerator, load_final)
    detector = chosen.detector().to(loop.accelerator.device)
    for split in loop.data.splits:
        if split.step != chosen.step:  # otherwise it was validated with the same weights
            loop.detect(split, detector, f"evaluating on {split.name}")
    return on_main(loop.accelerator, lambda: _measure(loop, chosen, detector))


def _measure(loop: Loop, chosen: Checkpoint, detector: Detector) -> Summary:
    from aploss.reports.run_report import write_run_report

    config, folder, split, state = loop.config, loop.folder, loop.data.evaluation, loop.state
    report = _calibrate(detector, loop.data)
    chosen.with_calibration(detector).write(folder.last if chosen.training is not None else folder.best)
    metrics: dict[str, Any] = {} if split is None else _write_evaluation(loop, detector, split, report)
    after = report.get("after", {})
    rows = read_json_lines(folder.metrics_file)
    speeds = [speed for row in rows if isinstance(speed := row.get("images_per_second"), int | float)]
    environment = describe_environment()
    copied: dict[str, Any] = {name: metrics.get(name) for name in METRICS}
    copied |= {name: getattr(config, name) for name in ("data", "detector", "loss", "seed")}
    copied |= {name: environment[name] for name in ("command", "commit")}
    summary = Summary(
        folder=str(folder.path),
        **copied,
        split=None if split is None else split.name,
        per_class=metrics.get("per_class", {}),
        calibration_error=after.get("all", {}).get("expected_calibration_error"),
        calibration_error_drawn=after.get("expected_calibration_error"),
        calibration_split=report.get("measured_on"),
        calibration_held_out=report.get("held_out"),
        draw_threshold=detector.draw_threshold if report else None,
        steps=state.step,
        epochs=round(loop.epoch, 3),
        best_step=chosen.step or 0,
        stopped_by=str(state.stopped_by),
        bad_steps=state.bad_steps,
        minutes=round(state.seconds / 60, 3),
        images_per_second=round(median(speeds), 2) if speeds else 0.0,
        parameters=sum(parameter.numel() for parameter in detector.parameters()),
        device=str(loop.accelerator.device),
        processes=loop.accelerator.num_processes,
        unreadable_images=state.unreadable,
        resume_changes=state.changes,
    )
    write_json(folder.summary_file, asdict(summary))
    write_run_report(folder.path, images=loop.data.train.root)
    return summary


def _calibrate(detector: Detector, data: RunData) -> dict[str, Any]:
    """Calibrates the detector and chooses its threshold; returns the report on the evaluation split."""
    fitted, measured = data.validation, data.evaluation
    if fitted is None or measured is None:
        return {}
    calibration, threshold = calibrate_detections(fitted.truth, fitted.detections, matches=fitted.matches)
    detector.calibration, detector.draw_threshold = calibration, threshold
    report = calibration_report(measured.truth, measured.detections, calibration, threshold, matches=measured.matches)
    names = {"fitted_on": fitted.name, "measured_on": measured.name}
    return {**report, **names, "held_out": measured is not fitted}


def _write_evaluation(loop: Loop, detector: Detector, split: Split, report: dict[str, Any]) -> dict[str, Any]:
    """Computes the metrics of the evaluation split; writes them with detections, ground truth and matches."""
    table, matches, coco = split.detections, split.matches, split.dataset.to_coco()
    for index, image in enumerate(coco["images"]):
        image["path"] = str(split.dataset.image_path(index).resolve())
    metrics = split.measure(table, detector).as_dict()
    curves = precision_recall_curves(split.truth, table, matches=matches)
    metrics["precision_recall"] = {name: curve.as_dict() for name, curve in curves.items()}
    documents: dict[str, Any] = {
        "ground_truth": coco,
        "detections": table.to_results(),
        "metrics": {**metrics, "ignored_objects": split.ignored_objects},
        "matches": matches_document(matches, [annotation["id"] for annotation in coco["annotations"]]),
    }
    if detector.calibration is not None:
        scores = np.asarray(detector.calibration(table.scores)).tolist()
        documents["calibration"] = {**report, "calibrated_scores": scores}
    for name, document in documents.items():
        write_json(loop.folder.evaluation / f"{name}.json", document, indent=None)
    year = loop.config.evaluation.voc_year
    return {**metrics, "voc_AP50": None if year is None else voc_metrics(split.truth, table, year=year).AP50}
