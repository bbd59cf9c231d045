"""``train(config)``: a whole run from a config to a summary."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from aploss.data.features import StoredFeatures, Views, store_features
from aploss.data.loader import AugmentedSamples, make_training_loader
from aploss.detectors.build import build_detector
from aploss.detectors.checkpoint import wrap_untrusted
from aploss.detectors.detector import DETECTORS, Detector
from aploss.errors import ConfigError
from aploss.reports.run_files import read_json_lines
from aploss.training.callbacks import Callback, Callbacks, RowCallback, make_tracker
from aploss.training.config import TrainConfig
from aploss.training.distributed import StopSignals, TrainingInterruptedError, World, start_world
from aploss.training.evaluate import RunSplits, evaluate_run
from aploss.training.loop import Loop, LoopState
from aploss.training.machine import choose_device, choose_workers, describe_environment, seeded
from aploss.training.progress import Progress, make_progress
from aploss.training.run_folder import RunFolder, Summary, default_folder, discard, refuse_changes
from aploss.training.splits import RunData, as_started, load_run_data
from aploss.training.step import Schedule, Stepper

VIEWS_IN_ALL = 2000  # whose features are stored: a minute of a CPU core; few images get many views each
FEWEST_VIEWS, MOST_VIEWS = 2, 12


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    quiet: bool = True,
    on_progress: Callable[[dict[str, Any]], Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Summary:
    """Trains, evaluates and reports one run.

    Under ``torchrun`` every process calls it. The same config gives the same weights and numbers on a CPU, however
    often it is called in a process; generators and switches of torch are left as they were.

    Args:
        config: what to do; ``config.out`` is the run folder.
        resume: go on with the run that is in the folder. One that is finished is only read, one that is not there is
            started.
        quiet: show only warnings; otherwise a live bar on a terminal, lines elsewhere.
        on_progress: called on rank 0 with every row of the metrics, as it is written.
        callbacks: told on rank 0 of start, rows, validations and end; see :class:`~aploss.training.Callback`.

    Returns:
        The summary, as in ``summary.json``.

    Raises:
        ConfigError: a setting that cannot be.
        DataError: data that cannot be used.
        RunError: the folder is taken or cannot be written, or a checkpoint cannot be read.
        DivergedError: too many steps in a row with NaN or Inf.
        LostProcessError: another rank has gone.
        TrainingInterruptedError: Ctrl-C or SIGTERM; everything is saved.
    """
    device = choose_device(config.device)
    deterministic = device.type == "cpu" if config.deterministic is None else config.deterministic
    folder = RunFolder(config.out or default_folder(config))
    advice = f"go on from the last checkpoint with --resume --out {folder.path}"
    with ExitStack() as stack:
        world = stack.enter_context(start_world(device, advice=advice))
        stack.enter_context(seeded(config.seed, deterministic=deterministic))
        signals = stack.enter_context(StopSignals("stopped before the first step"))
        progress = make_progress(quiet=quiet, is_main=world.is_main)

        finished = world.on_main(lambda: _finished(config, folder) if resume else None)
        if finished is not None:
            progress.note(f"{folder.path} is finished already")
            return finished
        observers = [] if on_progress is None else [RowCallback(on_progress)]
        wanted = [*make_tracker(config.tracker), *observers, *callbacks]  # on all ranks, which must fail together
        told = Callbacks(wanted if world.is_main else [])
        checkpoint, best_step = world.on_main(lambda: _claim(config, folder, resume, stack))

        data = world.main_first(lambda: load_run_data(config))  # rank 0 makes the built-in data
        if checkpoint is not None:
            data = as_started(data, checkpoint["training"], config)
        loop = _make_loop(config, data, device, world, folder, progress, told, checkpoint)
        if checkpoint is not None:
            loop.restore(checkpoint, best_step=best_step)
        else:
            stack.enter_context(_new_run(config, folder, loop))

        stack.callback(told.on_end, None)  # for those who have not heard of an end
        _introduce(config, folder, data, loop)
        loop.run(signals)
        progress.note(_why_stopped(config, folder, loop))

        signals.message = f"stopped; training is done, measure with: {folder.resume_command}"
        if any(world.sum([signals.requested])):  # in the last step
            raise TrainingInterruptedError(signals.message)
        progress.note("measuring the result")
        measured = evaluate_run(
            config, folder, world, loop.splits, device=device, workers=loop.workers, progress=progress
        )
        for split in loop.splits.all:
            loop.note_unreadable(split.unreadable, f"it is left out of {split.name}")
        summary = _summarise(config, folder, loop, measured)
        progress.note("writing the report")
        world.on_main(lambda: _write_report(folder, summary, data))
        told.on_end(summary.as_dict())
    return summary


def _finished(config: TrainConfig, folder: RunFolder) -> Summary | None:
    """The summary of a run that needs no more training."""
    if not (folder.exists and folder.summary_file.is_file() and folder.checkpoints.last.is_file()):
        return None
    refuse_changes(folder, config)
    training = folder.checkpoints.load_last()["training"]
    try:
        state = LoopState.from_dict({name: training[name] for name in ("stopped_by", "seconds")})
    except (KeyError, TypeError, ValueError):
        return None  # restoring it says what is wrong
    return Summary.read(folder.summary_file) if state.is_over(config.max_minutes) else None


def _claim(
    config: TrainConfig, folder: RunFolder, resume: bool, stack: ExitStack
) -> tuple[dict[str, Any] | None, int | None]:
    """Locks the folder until the stack ends; the checkpoint to go on from, and the best step."""
    if not (resume and folder.exists):
        folder.refuse_if_taken()
    stack.enter_context(folder.locked())
    if not folder.exists:
        return None, None
    if not resume:
        folder.refuse_if_taken()  # another process was faster
    folder.go_on(config)
    checkpoints = folder.checkpoints
    last = checkpoints.load_last() if checkpoints.last.is_file() else None
    best = checkpoints.load_best()["step"] if checkpoints.best.is_file() else None
    return last, best


def _make_loop(
    config: TrainConfig,
    data: RunData,
    device: torch.device,
    world: World,
    folder: RunFolder,
    progress: Progress,
    callbacks: Callbacks,
    checkpoint: dict[str, Any] | None,
) -> Loop:
    """Everything that trains: batches, detector, optimizer, schedule; the checkpoint is one to go on from."""
    if config.model.frozen_backbone and config.model.weights is None:
        raise ConfigError("model.frozen_backbone would keep random weights: add --model.weights imagenet, or a file")
    with quiet_weights(not world.is_main):
        start = config if checkpoint is None else _without_start_weights(config, folder, checkpoint)
        detector = make_detector(start, data.train.class_names).to(device)
    settings, features = config.batches, None
    if settings.cached_views and (not settings.cache_features or settings.augmentation in ("flip", "none")):
        raise ConfigError(
            "batches.cached_views is for stored features of augmented images: add --batches.cache_features true and "
            "--batches.augmentation light or paper"
        )
    if settings.cache_features:
        features = world.main_first(lambda: _stored_features(config, detector, data, progress))
    batches = make_training_loader(
        data.train,
        batch_size=settings.size,
        seed=config.seed,
        preset=settings.augmentation,
        size=settings.image_size,
        # Rows of a file need no process that prepares them.
        workers=choose_workers(settings.workers, device, world.size) if features is None else 0,
        rank=world.rank,
        world_size=world.size,
        skip_unreadable=True,
        features=features,
    )
    schedule = Schedule(config.schedule, batches.batches_per_epoch / config.batches.accumulate)
    stepper = Stepper(config, detector, schedule, world, lambda index: data.train.image_path(index).name)
    return Loop(config, stepper, batches, RunSplits(data), folder, progress, callbacks)


def _stored_features(config: TrainConfig, detector: Detector, data: RunData, progress: Progress) -> StoredFeatures:
    """The maps of the frozen backbone for all training images, computed if no run has done it before."""
    if not config.model.frozen_backbone:
        raise ConfigError(
            "batches.cache_features is for a backbone that stays as it is: add --model.frozen_backbone true"
        )
    settings, drawn = config.batches, None
    if settings.augmentation not in ("flip", "none"):
        # Not the run's seed: the runs of a comparison share the views.
        samples = AugmentedSamples(data.train, seed=0, preset=settings.augmentation, size=settings.image_size)
        count = settings.cached_views or min(max(VIEWS_IN_ALL // len(data.train), FEWEST_VIEWS), MOST_VIEWS)
        drawn = Views(settings.augmentation, count, samples.__getitem__)
    body = detector.body().eval()
    with progress.images("computing features, once") as show:
        stored = store_features(
            data.train,
            detector.features,
            network_digest=_digest(body, detector.image_mean, detector.image_std),
            size=settings.image_size,
            drawn=drawn,
            on_progress=show,
        )
    words = {"none": "no augmentation", "flip": "augmentation: sideways flips"}
    views = words.get(settings.augmentation, f"{stored.views} views of each image, drawn by '{settings.augmentation}'")
    progress.note(f"features  of the frozen backbone from {stored.file.parent} ({stored.bytes / 1e6:.0f} MB); {views}")
    return stored


def _digest(body: torch.nn.Module, *others: torch.Tensor) -> str:
    """Names the network and its weights."""
    digest = hashlib.sha256(str(body).encode())
    for name, tensor in [*body.state_dict().items(), *(("", other) for other in others)]:
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _without_start_weights(config: TrainConfig, folder: RunFolder, checkpoint: dict[str, Any]) -> TrainConfig:
    """The config of a run to go on with, which needs no start weights: they may be gone, or be named by a stranger.

    The options that were taken over from them stand in the checkpoint. A frozen backbone is theirs, to the bit.
    """
    if config.model.weights is None or config.model.frozen_backbone:
        return config
    options = DETECTORS.get(config.detector).option_names()
    with wrap_untrusted(folder.checkpoints.last):
        saved = {name: value for name, value in checkpoint["detector"]["config"].items() if name in options}
    model = replace(config.model, weights=None, backbone=None, options={**saved, **config.model.architecture})
    return replace(config, model=model)


@contextmanager
def _new_run(config: TrainConfig, folder: RunFolder, loop: Loop) -> Iterator[None]:
    """Makes the folder; when not even one step could be done, it is free again."""
    is_new = loop.world.is_main and not folder.exists
    loop.world.on_main(lambda: folder.create(config) if is_new else None)
    try:
        yield
    except BaseException:  # a signal, too
        if is_new and loop.state.step == 0:
            discard(folder)
        raise


def _introduce(config: TrainConfig, folder: RunFolder, data: RunData, loop: Loop) -> None:
    """Prints what is about to be done."""
    note, world, detector = loop.progress.note, loop.world, loop.stepper.detector
    sizes = [f"{len(data.train)} images to train on"]
    others = {"validation": data.validation, "evaluation": data.evaluation}
    sizes += [f"{len(other)} for {word} ({other.split})" for word, other in others.items() if other is not None]
    note(f"data      {data.train.name}: {', '.join(sizes)}; {len(detector.class_names)} classes")
    if data.train.problems:
        note(f"          {len(data.train.problems)} problems in it: aploss data check lists them")
    for remark in data.remarks:
        note(f"          {remark}")
    device, gpus = loop.stepper.device, torch.cuda.device_count()
    where = f"{device}" + (f", {world.size} processes" if world.size > 1 else "")
    note(f"detector  {detector.name}, {_parameters(detector) / 1e6:.1f} M parameters, loss {config.loss}")
    warmup, wanted = loop.stepper.schedule.warmup_steps, config.schedule.warmup_steps
    if warmup < wanted:
        note(f"          the warm-up of {wanted} steps is longer than the training: shortened to {warmup}")
    note(f"training  {loop.total_steps} steps of {loop.batches.batch_size} images on {where}")
    if device.type == "cuda" and gpus > world.size == 1:
        note(f"          {gpus} GPUs: use all with torchrun --nproc-per-node {gpus} -m aploss")
    resumed = f", from step {loop.state.step}" if loop.state.step > 0 else ""
    note(f"run       {folder.path}{resumed}")


def _why_stopped(config: TrainConfig, folder: RunFolder, loop: Loop) -> str:
    state, validation, at = loop.state, config.validation, f"stopped at step {loop.state.step} of {loop.total_steps}"
    if state.stopped_by == "patience":
        waited = f"{state.validations_since_best} validations without a better {validation.metric}"
        return f"{at}: {waited} than at step {state.best_step} (validation.patience)"
    if state.stopped_by == "minutes":
        return f"{at}: the {config.max_minutes:g} minutes are over; more: {folder.resume_command} --max-minutes N"
    return f"finished: all {state.step} steps are done"


def _summarise(config: TrainConfig, folder: RunFolder, loop: Loop, measured: dict[str, Any]) -> Summary:
    state, environment = loop.state, describe_environment()
    rows = [row for row in read_json_lines(folder.metrics_file) if row.get("kind") == "train"]
    speeds = [speed for row in rows if isinstance(speed := row.get("images_per_second"), int | float)]
    return Summary(
        folder=str(folder.path),
        data=config.data,
        detector=config.detector,
        loss=config.loss,
        seed=config.seed,
        **measured,
        steps=state.step,
        epochs=round(loop.epoch, 3),
        stopped_by=str(state.stopped_by),
        bad_steps=state.bad_steps,
        minutes=round(state.seconds / 60, 3),
        images_per_second=round(median(speeds), 2) if speeds else 0.0,
        parameters=_parameters(loop.stepper.detector),
        device=str(loop.stepper.device),
        processes=loop.world.size,
        command=environment["command"],
        commit=environment["commit"],
        unreadable_images=state.unreadable,
    )


def _write_report(folder: RunFolder, summary: Summary, data: RunData) -> None:
    from aploss.reports.run_report import write_run_report

    summary.write(folder.summary_file)
    write_run_report(folder.path, images=data.train.root)


def _parameters(detector: Detector) -> int:
    return sum(parameter.numel() for parameter in detector.parameters())


def make_detector(config: TrainConfig, class_names: tuple[str, ...]) -> Detector:
    """The detector of a config with its initial weights.

    They follow from the seed alone: runs that differ in the loss start from the same weights, wherever the shapes are
    the same (a softmax loss has one column more).
    """
    detector = _build(config, class_names, config.loss)
    if detector.uses_softmax:  # the random numbers drawn for its extra column shift the ones of later layers
        with quiet_weights():  # the report has been logged
            reference = _build(config, class_names, TrainConfig.loss).state_dict()
        own = detector.state_dict()
        shared = {k: v for k, v in reference.items() if k in own and own[k].shape == v.shape}
        detector.load_state_dict({**own, **shared})
    return detector


def _build(config: TrainConfig, class_names: tuple[str, ...], loss: str) -> Detector:
    criterion, is_own = config.criterion, loss == config.loss
    torch.manual_seed(config.seed)
    try:
        return build_detector(
            config.detector,
            class_names=class_names,
            loss=loss,
            loss_options=criterion.options if is_own else None,
            rank_over=criterion.rank_over,
            assigner=criterion.assigner,
            box_loss=criterion.box_loss,  # type: ignore[arg-type]
            box_weight=criterion.box_weight if is_own else None,
            weights=config.model.weights,
            **config.model.architecture,
        )
    except TypeError as error:
        raise ConfigError(f"model.options: {error}") from error


@contextmanager
def quiet_weights(quiet: bool = True) -> Iterator[None]:
    """Logs nothing of which start weights were loaded."""
    logger = logging.getLogger("aploss.detectors.weights")
    before = logger.disabled
    logger.disabled = before or quiet
    try:
        yield
    finally:
        logger.disabled = before
