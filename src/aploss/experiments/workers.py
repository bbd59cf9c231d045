"""Where the runs of a comparison are trained: one after another in this process, or several at a time on Ray.

Both ways call :func:`train_run`. Ray schedules the runs and starts those of a killed worker or a lost node again; they
resume from their own checkpoints, so the folder of the runs must be on storage that all nodes share.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from aploss import training
from aploss.errors import AplossError, ConfigError, RunError, require_packages
from aploss.experiments.plan import RATE, Run, Variant, as_typed, settings_hash
from aploss.files import as_file_name
from aploss.progress import describe_seconds
from aploss.registry import load_plugins
from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig
from aploss.training.distributed import StopSignals, TrainingInterruptedError, choose_device
from aploss.training.run_folder import Summary, default_folder
from aploss.training.step import DivergedError

MAX_RETRIES = 5  # of a run whose worker or node died
POLL_S = 1.0
STOP_TIMEOUT_S = 60.0  # for runs to save a checkpoint after Ctrl-C
LINE_INTERVAL_S = 30.0
STORE_BYTES = 100 * 2**20  # of Ray's objects: results are small


@dataclass(frozen=True, kw_only=True)
class Workers:
    """How many runs are trained at a time, and with what.

    Attributes:
        count: runs at a time on this machine; more than one need Ray.
        ray: address of a Ray cluster that trains as many runs at a time as it has resources for, or ``"auto"`` for the
            cluster of this machine.
        cpus: CPUs, and threads, of a run; by default an equal share of this machine, or of a cluster 1 CPU or the CPUs
            that it has for each GPU.
        gpus: GPUs of a run; by default 1 if there are any and the runs may use them.
        plugins: Python files that workers load first.
    """

    count: int = 1
    ray: str | None = None
    cpus: int | None = None
    gpus: float | None = None
    plugins: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.ray is not None and self.count > 1:
            raise ConfigError("--workers is for this machine and --ray for a cluster, which decides by its resources")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError("a comparison starts its runs itself: use --workers or --ray in place of torchrun")
        if not self.uses_ray and self.gpus is not None:
            raise ConfigError("--gpus-per-run needs --workers or --ray")
        if self.uses_ray:
            require_packages("ray")

    @property
    def uses_ray(self) -> bool:
        """Whether runs are trained by other processes."""
        return self.ray is not None or self.count > 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to be trained."""

    variant: Variant
    config: TrainConfig  # with its seed
    label: str  # for the progress display
    settings: Mapping[str, Any] = field(default_factory=dict)  # of a trial, by dotted key
    folder: Path = Path()

    def with_folder(self, cache: Path) -> "Job":
        """The job with its folder in the cache: a readable name with the settings of its row, and the hash of all.

        Only the hash identifies a run: an existing folder keeps the name that another comparison gave it.
        """
        hashed, settings = settings_hash(self.config), {**self.variant.settings, **self.settings}
        name, _, seed = default_folder(self.config).name.rpartition("-seed")
        about = "-".join(key.rpartition(".")[2] + as_typed(value) for key, value in settings.items() if key != RATE)
        words = filter(None, [name, as_file_name(about), f"seed{seed}", hashed])
        return replace(self, folder=min(cache.glob(f"*-{hashed}"), default=cache / "-".join(words)))

    @property
    def progress(self) -> tuple[float, float]:
        """The share of the training that is done, and the seconds it took."""
        rows = read_json_lines(self.folder / "metrics.jsonl")
        done = rows[-1]["epoch" if self.config.schedule.unit == "epochs" else "step"] if rows else 0.0
        return min(1.0, done / self.config.schedule.length), rows[-1]["seconds"] if rows else 0.0


Pool = Callable[[Sequence[Job]], Iterator[tuple[Job, Run]]]


def train_run(job: Job, on_row: Callable[[Any], Any] | None = None) -> Run:
    """Returns a finished run, which is trained or resumed if necessary; a diverged one has no summary.

    Raises:
        TrainingInterruptedError: Ctrl-C or SIGTERM; everything is saved.
        RunError: the run cannot be trained.
    """
    config, folder, file = job.config, job.folder, job.folder / "summary.json"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock")).acquire()  # another comparison may train it now
    except OSError as error:
        raise RunError(f"cannot write runs to {folder.parent}: {error.strerror}") from error
    with lock:
        if file.is_file() and (known := Summary.read(file)).stopped_by != "minutes":
            return Run(config=config, folder=folder, summary=known)
        observers = [one for one in (job.variant.measure.observer(config, folder), on_row) if one is not None]
        try:
            summary = training.train(replace(config, out=str(folder)), resume=True, callbacks=observers)
        except DivergedError as error:
            return Run(config=config, folder=folder, summary=None, failure=str(error))
    return Run(config=config, folder=folder, summary=summary)


def _run_here(jobs: Sequence[Job], *, cache: Path, quiet: bool) -> Iterator[tuple[Job, Run]]:
    """Trains jobs in this process, one after another."""
    jobs = [job.with_folder(cache) for job in jobs]
    display = Display(jobs, slots=1, quiet=quiet)
    for job in jobs:
        display.say(f"started   {job.label}")
        run = train_run(job, display.refresh)
        display.end(job, run)
        yield job, run


def _run_on_ray(
    jobs: Sequence[Job], *, workers: Workers, cache: Path, device: str, quiet: bool
) -> Iterator[tuple[Job, Run]]:
    """Trains jobs as tasks of Ray, each with its own CPUs and GPUs."""
    import ray

    cpus, gpus, slots = _resources(workers, device)
    # Not retried after an exception: train_run raises none that another attempt would cure.
    options: Any = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": MAX_RETRIES, "retry_exceptions": False}
    task, driver = ray.remote(**options)(_train_on_ray), (str(Path.cwd()), [*sys.argv], workers.plugins, cpus)
    jobs, saved = [job.with_folder(cache.resolve()) for job in jobs], "interrupted; every run has saved a checkpoint"
    display = Display(jobs, slots, quiet=quiet)
    with StopSignals(saved) as signals, signals.deferred():
        pending: dict[Any, Job] = {task.remote(job, *driver): job for job in jobs}
        while pending:
            done, _ = ray.wait(list(pending), timeout=POLL_S)
            if signals.requested:
                _cancel(list(pending))
                raise TrainingInterruptedError(saved)
            for reference in done:
                job = pending.pop(reference)
                try:
                    run = ray.get(reference)
                except ray.exceptions.RayError as error:  # its worker died too often
                    display.end(job, None, type(error).__name__)
                    continue
                if isinstance(run, AplossError):
                    _cancel(list(pending))
                    raise run
                display.end(job, run)
                yield job, run
            display.refresh()


def _train_on_ray(
    job: Job, folder: str, command: Sequence[str], plugins: Sequence[str], threads: int
) -> Run | AplossError:
    """The task of Ray, with the folder and command of the process that started it.

    Errors are returned: Ray would wrap a raised one in its traceback.
    """
    try:
        os.chdir(folder)
        sys.argv[:] = command
        load_plugins(plugins)
        torch.set_num_threads(threads)
        if job.config.batches.workers is None and choose_device(job.config.device).type == "cpu":
            batches = replace(job.config.batches, workers=min(1, threads - 1))
            job = replace(job, config=replace(job.config, batches=batches))
        return train_run(job)
    except TrainingInterruptedError:  # this worker was stopped: the other runs continue
        raise
    except AplossError as error:
        return error
    except OSError as error:
        return RunError(f"{error} on node {os.uname().nodename}: all nodes must share the storage of the comparison")


def _cancel(references: list[Any]) -> None:
    """Interrupts tasks as Ctrl-C would, and waits until their runs are saved."""
    import ray

    for reference in references:
        ray.cancel(reference)
    if references:
        ray.wait(references, num_returns=len(references), timeout=STOP_TIMEOUT_S)


def _resources(workers: Workers, device: str) -> tuple[int, float, int]:
    """CPUs and GPUs of a run, and how many runs they allow at a time."""
    import ray

    present = {"CPU": 0.0, "GPU": 0.0, **ray.cluster_resources()}
    uses_gpus = not device.startswith(("cpu", "mps"))
    gpus = min(1.0, present["GPU"]) * uses_gpus if workers.gpus is None else workers.gpus
    share = present["CPU"] / workers.count if workers.ray is None else 1.0
    if workers.ray is not None and gpus and present["GPU"]:
        share = present["CPU"] / present["GPU"] * gpus
    cpus = workers.cpus or max(1, int(share))
    needed = {kind: wanted for kind, wanted in (("CPU", cpus), ("GPU", gpus)) if wanted}
    for kind, wanted in needed.items():
        if wanted > present[kind]:
            option = f"--{kind.lower()}s-per-run"
            raise ConfigError(f"a run needs {wanted:g} {kind}s ({option}), but Ray has {present[kind]:g}")
    return cpus, gpus, int(min(present[kind] / wanted for kind, wanted in needed.items()))


@contextmanager
def open_pool(workers: Workers, cache: Path, device: str, *, quiet: bool) -> Iterator[Pool]:
    """Opens the pool that trains jobs and yields each with its run; a local Ray cluster is on 127.0.0.1."""
    if not workers.uses_ray:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(workers.cpus or before)
            yield partial(_run_here, cache=cache, quiet=quiet)
        finally:
            torch.set_num_threads(before)
        return
    if ":" in device:
        raise ConfigError(f"--device {device}: Ray chooses the GPU of each run, use {device.partition(':')[0]}")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for name in ("time", "timeout"):  # a node behind a cut link is lost after half a minute, not after seven
        os.environ.setdefault(f"RAY_grpc_client_keepalive_{name}_ms", "15000")
    options: dict[str, Any] = {"address": workers.ray}
    if workers.ray is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # of any system: Ray then listens on 127.0.0.1 only
        cpus = workers.count * (workers.cpus or max(1, (os.cpu_count() or 1) // workers.count))
        options = {"address": "local", "num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(f"--ray {workers.ray}: no cluster answers ({str(error).splitlines()[0][:200]})") from error
    try:
        yield partial(_run_on_ray, workers=workers, cache=cache, device=device, quiet=quiet)
    finally:
        ray.shutdown()


class Display:
    """One progress display for all runs: a line when a run ends, and the state of all from time to time.

    At most ``slots`` runs are training: one that was interrupted or whose worker died waits until it is resumed.
    """

    def __init__(self, jobs: Sequence[Job], slots: int, *, quiet: bool) -> None:
        self._jobs, self._slots, self._quiet, self._finished, self._failed = list(jobs), slots, quiet, 0, 0
        self._next_line = time.monotonic() + LINE_INTERVAL_S

    def say(self, line: str) -> None:
        """Prints a line."""
        if not self._quiet:
            print(line, flush=True)

    def end(self, job: Job, run: Run | None, failure: str = "") -> None:
        """A job is done; without a run, or with a diverged one, it has failed."""
        self._jobs.remove(job)
        if run is None or run.summary is None:
            self._failed += 1
            self.say(f"failed    {job.label}: {run.failure if run else failure}")
            return
        self._finished += 1
        score = "" if run.summary.AP is None else f"AP {100 * run.summary.AP:.1f}, "
        self.say(f"finished  {job.label}: {score}{describe_seconds(60 * run.summary.minutes)}")

    def refresh(self, row: Any = None) -> None:
        """Shows how many runs are running, finished and failed, and the time left."""
        if self._quiet or not self._jobs or time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + LINE_INTERVAL_S
        shares, seconds = zip(*(job.progress for job in self._jobs), strict=True)
        running = min(self._slots, max(1, sum(share > 0 for share in shares)))
        text = f"{running} running, {self._finished} finished, {self._failed} failed"
        if sum(shares) > 0:
            left = sum(seconds) / sum(shares) * (len(shares) - sum(shares)) / running
            text += f", {describe_seconds(left)} left"
        self.say(text)
