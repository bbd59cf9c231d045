"""``train(config)``: a whole run from a config to a summary."""

import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator

from aploss.data.features import StoredFeatures, store_features
from aploss.data.formats import DataFormat
from aploss.data.loader import AugmentedSamples, make_training_loader
from aploss.detectors import build_detector
from aploss.detectors.checkpoint import Checkpoint, wrap_untrusted
from aploss.detectors.detector import Detector
from aploss.errors import ConfigError, RunError
from aploss.files import write_json
from aploss.reports.run_files import read_json_lines
from aploss.training.callbacks import Progress, RowFunction, make_tracker
from aploss.training.config import TrainConfig
from aploss.training.distributed import (
    StopSignals,
    TrainingInterruptedError,
    choose_device,
    choose_workers,
    emulates_bfloat16,
    keep_freed_memory,
    main_first,
    on_main,
    seeded,
    start_accelerator,
    was_restarted,
)
from aploss.training.loop import Loop
from aploss.training.run_folder import RunFolder, Summary, default_folder, describe_environment
from aploss.training.schedule import Schedule
from aploss.training.splits import RunData, evaluate_run, load_run_data
from aploss.training.step import Stepper, any_rank

TOTAL_CACHED_VIEWS = 2000  # a minute of a CPU core; with few images each gets many views
MIN_CACHED_VIEWS, MAX_CACHED_VIEWS = 2, 12
STOPPED_BY = {"patience": "no better validation: validation.patience", "minutes": "time limit: --max-minutes"}


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
        finished = on_main(accelerator, lambda: _finished(config, folder)) if resume else None
        if finished is not None:
            progress.note(f"{folder.path} is already finished")
            return finished
        callbacks = [*make_tracker(config.tracker), *callbacks]  # on all ranks, which must fail together
        loop = _open_run(config, folder, accelerator, progress, callbacks, resume=resume, source=source, stack=stack)
        _print_overview(loop)
        try:
            loop.run(signals)
            summary = _evaluate(loop, signals)
        except BaseException:
            for callback in loop.started:
                with suppress(Exception):  # the first error is the one to report
                    callback.on_end(None)
            raise
        for callback in loop.started:
            callback.on_end(asdict(summary))
    return summary


def _finished(config: TrainConfig, folder: RunFolder) -> Summary | None:
    """Returns the summary of a run that needs no more training."""
    if not (folder.exists and folder.summary_file.is_file()):
        return None
    _, longer = folder.resumed_config(config)
    summary, limit = Summary.read(folder.summary_file), config.max_minutes
    more_time = summary.stopped_by == "minutes" and (limit is None or summary.minutes < limit)
    return None if more_time or longer else summary


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

    def lock_and_read() -> tuple[TrainConfig, Checkpoint | None, bool]:
        if not (resume and folder.exists):
            folder.refuse_if_taken()
            return config, None, False
        stack.enter_context(folder.locked())
        resumed, is_longer = folder.resumed_config(config)
        return resumed, folder.load_last() if folder.last.is_file() else None, is_longer

    def create() -> None:
        # Only now, so that a run that cannot start leaves nothing behind.
        stack.enter_context(folder.locked())
        if not (resume and folder.exists):
            folder.create(loop.config)

    config, checkpoint, is_longer = on_main(accelerator, lock_and_read)
    with wrap_untrusted(folder.last):
        names = None if checkpoint is None else tuple(map(str, checkpoint.config["class_names"]))
    # Rank 0 first, because it generates the built-in data.
    data = main_first(accelerator, lambda: load_run_data(config, source, class_names=names))
    loop = _make_loop(config, data, accelerator, folder, progress, callbacks, checkpoint)
    fingerprints = on_main(accelerator, data.fingerprints)
    if checkpoint is None:
        loop.state.data, loop.state.processes = fingerprints, accelerator.num_processes
        on_main(accelerator, create)
        return loop
    loop.restore(checkpoint, fingerprints)
    step = loop.state.step
    if is_longer:
        if loop.total_steps <= step:
            raise ConfigError(f"{folder.path} has been trained for {step} steps already: give more with --steps")
        loop.state.changes.append(f"step {step}: extended to {loop.total_steps} steps")
    if was_restarted():
        progress.warn(f"restarted after a failure: {folder.path} continues from step {step}")
    on_main(accelerator, lambda: folder.reopen(config, is_longer=is_longer))
    return loop


def _make_loop(
    config: TrainConfig,
    data: RunData,
    accelerator: Accelerator,
    folder: RunFolder,
    progress: Progress,
    callbacks: Sequence[RowFunction],
    checkpoint: Checkpoint | None,
) -> Loop:
    """Builds everything that trains: batches, detector, optimizer, schedule."""
    settings, features = config.batches, None
    if config.model.frozen_backbone and config.model.weights is None:
        raise ConfigError("model.frozen_backbone would keep random weights: add --model.weights imagenet, or a file")
    if settings.cached_views and not settings.cache_features:
        raise ConfigError("batches.cached_views needs cached features: add --batches.cache_features true")
    if checkpoint is None:
        with quiet_weights(not accelerator.is_main_process):
            detector = make_detector(config, data.train.class_names).to(accelerator.device)
    else:
        # Its initial weights are not needed, and may no longer exist.
        detector = checkpoint.detector().to(accelerator.device)
        if (detector.name, detector.loss_name) != (config.detector, config.loss):
            raise RunError(
                f"{checkpoint.source} holds a {detector.name} trained with {detector.loss_name}, but the run's config "
                f"has {config.detector} and {config.loss}"
            )
    if settings.cache_features:
        features = main_first(accelerator, lambda: _stored_features(config, detector, data, progress))
    workers = choose_workers(settings.workers, accelerator.device, accelerator.num_processes)
    batches = make_training_loader(
        data.train,
        batch_size=settings.size,
        seed=config.seed,
        preset=settings.augmentation,
        size=settings.image_size,
        workers=workers if features is None else 0,  # rows of a file need no process that prepares them
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        skip_unreadable=True,
        features=features,
        pinned=accelerator.device.type == "cuda",
    )
    schedule = Schedule(config.schedule, batches.batches_per_epoch / config.batches.accumulate)
    wanted, warmup = config.schedule.warmup_steps, schedule.warmup_steps
    if warmup < wanted:
        progress.note(f"warmup    {warmup} steps, a tenth of the training, instead of {wanted}")
    # The config states what runs, also in config.yaml.
    exact = replace(config.schedule, warmup_steps=warmup, exact_warmup=True)
    config, schedule = replace(config, schedule=exact), replace(schedule, config=exact)
    stepper = Stepper(config, detector, schedule, accelerator, lambda index: data.train.image_path(index).name)
    return Loop(config, stepper, batches, data, folder, progress, callbacks, workers)


def _stored_features(config: TrainConfig, detector: Detector, data: RunData, progress: Progress) -> StoredFeatures:
    """Returns the cached feature maps of the frozen backbone for all training images, computed if needed."""
    if not config.model.frozen_backbone:
        raise ConfigError("batches.cache_features needs a frozen backbone: add --model.frozen_backbone true")
    settings = config.batches
    # Not the run's seed: the runs of a comparison share the cache.
    samples = AugmentedSamples(data.train, seed=0, preset=settings.augmentation, size=settings.image_size)
    suitable = min(max(TOTAL_CACHED_VIEWS // len(data.train), MIN_CACHED_VIEWS), MAX_CACHED_VIEWS)
    count = settings.cached_views or (1 if settings.augmentation == "none" else suitable)
    length = config.schedule.length  # of training, which draws one view of an image per epoch
    drawn = length * settings.size * settings.accumulate / len(data.train)
    count = min(count, math.ceil(drawn) if config.schedule.unit == "steps" else length)
    body = detector.body().eval()
    with progress.images("computing features") as show:
        stored = store_features(
            samples,
            detector.features,
            views=count,
            network_digest=_digest(body, detector.image_mean, detector.image_std),
            on_progress=show,
            note=progress.note,
        )
    size, views = f"{stored.bytes / 1e6:.0f} MB", f"{stored.views} views per image"
    progress.note(f"features  of the frozen backbone from {stored.folder} ({size}, {views})")
    return stored


def _digest(body: torch.nn.Module, *others: torch.Tensor) -> str:
    """Identifies a network and its weights."""
    digest = hashlib.sha256(str(body).encode())
    for name, tensor in [*body.state_dict().items(), *(("", other) for other in others)]:
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


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
    note(f"detector  {detector.name}, {_parameters(detector) / 1e6:.1f} M parameters, loss {config.loss}")
    note(f"training  {loop.total_steps} steps of {loop.batches.batch_size} images on {processes} x {device}")
    if config.precision == "bfloat16" and emulates_bfloat16(device):
        loop.progress.warn(
            "          this CPU has no bfloat16 instructions, and emulates them about ten times slower than float32: "
            "use --precision float32"
        )
    note(f"run       {loop.folder.path}" + (f", resumed at step {loop.state.step}" if loop.state.step else ""))


def _evaluate(loop: Loop, signals: StopSignals) -> Summary:
    """Evaluates a trained run and writes its summary and report."""
    from aploss.reports.run_report import write_run_report

    def write() -> None:
        write_json(folder.summary_file, asdict(summary))
        write_run_report(folder.path, images=data.train.root)

    folder, progress, data, state = loop.folder, loop.progress, loop.data, loop.state
    reason = f" ({STOPPED_BY[state.stopped_by]})" if state.stopped_by in STOPPED_BY else ""
    progress.note(f"trained for {state.step} of {loop.total_steps} steps{reason}; evaluating")
    signals.message = f"stopped; training is finished, evaluate with: {folder.resume_command}"
    if any_rank(loop.accelerator, signals.requested)[0]:  # during the last step
        raise TrainingInterruptedError(signals.message)
    with loop.saved_on_failure():
        measured = evaluate_run(loop.config, folder, loop.accelerator, data, workers=loop.workers, progress=progress)
    for split in data.splits:
        loop.note_unreadable(split.unreadable)
    summary = _summarise(loop, measured)
    on_main(loop.accelerator, write)
    return summary


def _summarise(loop: Loop, measured: dict[str, Any]) -> Summary:
    state, config, environment = loop.state, loop.config, describe_environment()
    rows = [row for row in read_json_lines(loop.folder.metrics_file) if row.get("kind") == "train"]
    speeds = [speed for row in rows if isinstance(speed := row.get("images_per_second"), int | float)]
    return Summary(
        folder=str(loop.folder.path),
        **{name: getattr(config, name) for name in ("data", "detector", "loss", "seed")},
        **measured,
        steps=state.step,
        epochs=round(loop.epoch, 3),
        stopped_by=str(state.stopped_by),
        bad_steps=state.bad_steps,
        minutes=round(state.seconds / 60, 3),
        images_per_second=round(median(speeds), 2) if speeds else 0.0,
        parameters=_parameters(loop.stepper.detector),
        device=str(loop.accelerator.device),
        processes=loop.accelerator.num_processes,
        **{name: environment[name] for name in ("command", "commit")},
        unreadable_images=state.unreadable,
        resume_changes=state.changes,
    )


def _parameters(detector: Detector) -> int:
    return sum(parameter.numel() for parameter in detector.parameters())


def make_detector(config: TrainConfig, class_names: tuple[str, ...]) -> Detector:
    """Builds the detector of a config with its initial weights.

    They follow from the seed alone: runs that differ in the loss start from the same weights, wherever the shapes are
    the same. A softmax loss has one more output channel, so that its other layers would draw other random numbers.
    """
    criterion = config.criterion
    own = {"loss_options": criterion.options, "box_weight": criterion.box_weight}
    build: Any = partial(
        build_detector,
        config.detector,
        class_names=class_names,
        rank_over=criterion.rank_over,
        assigner=criterion.assigner,
        hard_boxes=criterion.hard_boxes,
        box_loss=criterion.box_loss,
        weights=config.model.weights,
        **config.model.architecture,
    )
    try:
        torch.manual_seed(config.seed)
        detector: Detector = build(loss=config.loss, **own)
        if detector.uses_softmax:
            torch.manual_seed(config.seed)
            with quiet_weights():  # the report has been logged
                reference = build(loss=TrainConfig.loss).state_dict()
            state = detector.state_dict()
            shared = {key: value for key, value in reference.items() if state[key].shape == value.shape}
            detector.load_state_dict({**state, **shared})
    except TypeError as error:
        raise ConfigError(f"model.options: {error}") from error
    return detector


@contextmanager
def quiet_weights(quiet: bool = True) -> Iterator[None]:
    """Disables the log messages about loaded initial weights."""
    logger = logging.getLogger("aploss.detectors.weights")
    before = logger.disabled
    logger.disabled = before or quiet
    try:
        yield
    finally:
        logger.disabled = before
