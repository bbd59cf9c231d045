"""The environment of a process, for the record of a run or measurement: versions, commit, hardware, command."""

import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("aploss", "torch", "torchvision", "numpy", "numba", "faster-coco-eval", "scikit-learn")


def describe_environment() -> dict[str, Any]:
    """Describes versions, commit, hardware and command of this process."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "aploss"), *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: next((one.version for one in distributions(name=name)), None) for name in PACKAGES},
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def _commit() -> str | None:
    """Returns the commit of the source tree, with a '+' if it has changes; None for an installed package."""
    source = Path(__file__).resolve().parents[2]
    words = ["git", "-C", str(source), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    with suppress(OSError, subprocess.CalledProcessError):
        if (source / ".git").exists():
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.+)", info.read_text(encoding="utf-8"), re.MULTILINE) if info.exists() else None
    return name[1].strip() if name else platform.processor() or platform.machine()
