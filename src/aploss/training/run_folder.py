"""A run is a folder: config, environment, metrics, checkpoints, evaluation, report."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from aploss.errors import ConfigError, RunError
from aploss.files import remove_unfinished, write_json, write_text
from aploss.training.checkpoint import Checkpoints
from aploss.training.config import (
    TrainConfig,
    config_from_dict,
    config_to_dict,
    differing_keys,
)
from aploss.training.recipes import read_yaml

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["RunFolder", "default_folder", "describe_environment"]

FOLDERS = ("checkpoints", "evaluation", "plots")
LOCK_FILE = ".lock"
FIRST_ENTRIES = (*FOLDERS, LOCK_FILE, "environment.json")

# What may differ when a run goes on: none of it changes what is learned.
MAY_CHANGE = (
    "out", "device", "max_minutes", "checkpoint_minutes", "checkpoint_steps", "bad_steps",
    "batches.workers", "validation.batch_size", "data",
)  # fmt: skip
PACKAGES = ("aploss", "torch", "torchvision", "numpy", "numba", "faster-coco-eval", "scikit-learn")


def default_folder(config: TrainConfig) -> Path:
    """Where a run goes that was given no folder.

    Example:
        >>> str(default_folder(TrainConfig(data="../data/bccd", loss="focal", seed=3)))
        'runs/bccd-retinanet-tiny-focal-seed3'
    """
    data = Path(config.data).resolve().stem if config.data != "builtin" else config.data
    return Path("runs") / f"{data}-{config.detector}-{config.loss}-seed{config.seed}"


class RunFolder:
    """Where everything of a run is.

    Args:
        path: ``runs/NAME``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.summary_file = self.path / "summary.json"
        self.evaluation = self.path / "evaluation"
        self.checkpoints = Checkpoints(self.path / "checkpoints")

    @property
    def exists(self) -> bool:
        """Whether a run has been started here."""
        return self.config_file.is_file()

    def refuse_if_taken(self) -> None:
        """Raises RunError if a run or something else is at this place."""
        if self.exists:
            raise RunError(
                f"{self.path} already holds a run; add --resume to go on with it, or choose "
                "another folder with --out"
            )
        taken = self.path.exists() and not self.path.is_dir()
        if self.path.is_dir():  # what a kill during create() has left is no obstacle
            taken = any(entry.name not in FIRST_ENTRIES for entry in self.path.iterdir())
        if taken:
            raise RunError(
                f"{self.path} is in the way of the run; choose another folder with --out"
            )

    def create(self, config: TrainConfig) -> None:
        """Makes a new run folder with its config and environment.

        Raises:
            RunError: if there is already something at this place.
        """
        self.refuse_if_taken()
        try:
            for folder in FOLDERS:
                (self.path / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"the run folder {self.path} cannot be made: {error}") from error
        write_json(self.path / "environment.json", describe_environment())
        # The config comes last: with it the folder is a run.
        write_text(self.config_file, yaml.safe_dump(config_to_dict(config), sort_keys=False))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out of the folder; the lock goes with the process, even if killed.

        Raises:
            RunError: if another process is training in it.
        """
        with (self.path / LOCK_FILE).open("w") as file:
            try:
                if fcntl is not None:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise RunError(
                    f"another process is training in {self.path}; wait for it, or choose another "
                    "folder with --out"
                ) from None
            except OSError:
                pass  # a file system without locks
            yield

    def read_config(self) -> TrainConfig:
        """The config of the run that is here.

        Raises:
            RunError: if there is no run.
        """
        if not self.exists:
            raise RunError(f"{self.path} holds no run (it has no config.yaml)")
        return config_from_dict(read_yaml(self.config_file), source=str(self.config_file))

    def go_on(self, config: TrainConfig) -> None:
        """Makes the folder ready for a resumed run with this config.

        Raises:
            ConfigError: if the config differs in more than what may change on the way.
        """
        different = [
            key for key in differing_keys(self.read_config(), config) if key not in MAY_CHANGE
        ]
        if different:
            raise ConfigError(
                f"{self.path} was started with another {', '.join(different)}; resume it as it "
                "was, or start a new run with --out"
            )
        remove_unfinished(self.path)

    def read_summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None."""
        if not self.summary_file.is_file():
            return None
        return dict(json.loads(self.summary_file.read_text(encoding="utf-8")))


def describe_environment() -> dict[str, Any]:
    """Versions, commit, hardware and command of this process."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of aploss's own source, with a '+' where it has changes; None when installed."""
    source = Path(__file__).resolve().parents[3]
    if not (source / ".git").exists():
        return None

    def git(*words: str) -> str:
        command = ["git", "-C", str(source), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
