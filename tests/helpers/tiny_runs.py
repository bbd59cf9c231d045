"""A dataset of bright rectangles, runs on it that take a second or two, and their expected outcome.

The fixtures are available in every folder whose ``conftest.py`` imports them.
"""

import json
import socket
import subprocess
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import start_process
from short_detector import register_short_detector
from small_datasets import coco_annotation, edit_json

from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig, config_from_dict, config_to_dict, load_config, merge
from aploss.training.run import train

WITHOUT_PAGES = """
import aploss.reports.run_report
aploss.reports.run_report.write_run_report = lambda folder, **options: None
"""
PREAMBLE = f"""
import os, sys, torch
sys.stdout = sys.stderr = open(log, "w", buffering=1)
torch.set_num_threads(1)
{WITHOUT_PAGES}
from short_detector import register_short_detector
register_short_detector()
"""
COMMANDS = """
import os, sys, torch
for number, stream in enumerate(("stdout", "stderr"), start=1):
    os.dup2(os.open(f"{log}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
torch.set_num_threads(1)
os.environ |= values.get("environment", {})
os.chdir(values["folder"])
from aploss.cli.main import main
sys.exit(max([main(words) for words in values["commands"]]))
"""
WALL_CLOCK = ("seconds", "images_per_second")
SIZE = 64
COUNTS = {"train": 16, "val": 6, "test": 6}
SETTINGS: dict[str, Any] = {
    "detector": "retinanet-short",
    "log_steps": 1,
    "batches": {"size": 4, "image_size": SIZE, "augmentation": "light", "workers": 0},
    "model": {"options": {"test_size": [SIZE, SIZE]}},
    "schedule": {"length": 6, "warmup_steps": 2},
    "validation": {"every": 3, "unit": "steps"},
}


def write_rectangles(folder: Path) -> Path:
    """COCO annotations and PNG images; one training image has no object at all."""
    random = np.random.default_rng(0)
    (folder / "annotations").mkdir(parents=True)
    for split, count in COUNTS.items():
        (folder / split).mkdir()
        images, annotations = [], []
        for number in range(1, count + 1):
            pixels = random.integers(0, 60, (SIZE, SIZE, 3), dtype=np.uint8)
            objects = 0 if (split, number) == ("train", 1) else int(random.integers(1, 4))
            for _ in range(objects):
                width, height = random.integers(14, 30, 2)
                left, top = random.integers(0, SIZE - 30, 2)
                kind = int(random.integers(0, 2))
                pixels[top : top + height, left : left + width, kind] = 240
                box = list(map(int, (left, top, width, height)))
                annotations.append(coco_annotation(len(annotations) + 1, number, kind + 1, box))
            name = f"{split}-{number}.png"
            Image.fromarray(pixels).save(folder / split / name)
            images.append({"id": number, "file_name": name, "width": SIZE, "height": SIZE})
        categories = [{"id": 1, "name": "red"}, {"id": 2, "name": "green"}]
        document = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(document))
    return folder


def edit_annotations(data: Path | str, split: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the COCO document of a split."""
    edit_json(Path(data) / "annotations" / f"instances_{split}.json", change)


def keep_objects(*images: int) -> Callable[[dict[str, Any]], None]:
    """A change that leaves the objects of some images only."""

    def change(document: dict[str, Any]) -> None:
        document["annotations"] = [entry for entry in document["annotations"] if entry["image_id"] in images]

    return change


@pytest.fixture(scope="session", autouse=True)
def short_detector() -> str:
    """The name of the detector of the runs, which is known from now on."""
    return register_short_detector()


@pytest.fixture(scope="session")
def rectangles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the data set."""
    return write_rectangles(tmp_path_factory.mktemp("rectangles") / "data")


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the page at the end of a run, which takes longer than the run."""
    monkeypatch.setattr("aploss.reports.run_report.write_run_report", lambda folder, **options: None)


@pytest.fixture(scope="session")
def config_in(rectangles: Path) -> Callable[..., TrainConfig]:
    """Makes the config of a short run into a folder, with nested changes."""

    def make(folder: Path, **changes: Any) -> TrainConfig:
        own = {"data": str(rectangles), "out": str(folder)}
        return load_config(None, merge(merge(SETTINGS, own), changes))

    return make


def config_values(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """The config with nested values replaced."""
    return config_from_dict(merge(config_to_dict(config), changes))


@pytest.fixture(scope="session")
def finished_run(config_in: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The config of one finished run, shared by all tests that only read its folder."""
    config = config_in(tmp_path_factory.mktemp("finished") / "run", schedule={"length": 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aploss.reports.run_report.write_run_report", lambda folder, **options: None)
        train(config)
    return config


@pytest.fixture
def make_config(config_in: Callable[..., TrainConfig], tmp_path: Path) -> Callable[..., TrainConfig]:
    """The same by the name of the folder."""

    def make(name: str = "run", **changes: Any) -> TrainConfig:
        return config_in(tmp_path / name, **changes)

    return make


@pytest.fixture(scope="session")
def spawn() -> Callable[..., BaseProcess]:
    """Starts a program in a process of its own.

    It finds ``values`` in its namespace, writes what it prints to ``log``, and makes no page.
    """

    def start(program: str, *, log: Path, **values: Any) -> BaseProcess:
        return start_process(PREAMBLE + program, log=log, **values)

    return start


def run_commands(folder: Path, *commands: list[str], before: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs commands one after the other in a folder, in one process of their own, after some code."""
    log = folder / "commands"
    process = start_process(before + COMMANDS, log=log, folder=str(folder), commands=commands)
    process.join()
    shown = (Path(f"{log}.{stream}").read_text(encoding="utf-8") for stream in ("stdout", "stderr"))
    return subprocess.CompletedProcess(commands, process.exitcode or 0, *shown)


def start_two(start: Callable[..., BaseProcess], program: str, logs: Path, **values: Any) -> list[BaseProcess]:
    """Starts a program in two processes that find each other as those of ``torchrun`` do; logs are 0.log and 1.log.

    The program has to take over ``values["environment"]`` itself, as ``COMMANDS`` does.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        start(program, log=logs / f"{rank}.log", environment={**shared, "RANK": str(rank)}, **values) for rank in (0, 1)
    ]


# --- interruptions ---


class CrashError(Exception):
    """What stands for a kill, inside this process."""


def crash_at(step: int, kind: str = "train") -> Callable[[dict[str, Any]], None]:
    def on_progress(row: dict[str, Any]) -> None:
        if row["step"] >= step and row["kind"] == kind:
            raise CrashError

    return on_progress


def checkpoint_step(folder: Path) -> int:
    """The step of last.pt, which must be readable at every moment; -1 before the first."""
    last = folder / "checkpoints" / "last.pt"
    if not last.is_file():
        return -1
    stat = last.stat()
    return _step_of(last, stat.st_ino, stat.st_mtime_ns)


@lru_cache(maxsize=1)
def _step_of(checkpoint: Path, number: int, changed: int) -> int:
    """Each file is read once: whoever waits for the next one leaves the processor to the run."""
    return int(torch.load(checkpoint, weights_only=True)["training"]["step"])


def outcome(folder: Path | str | None) -> dict[str, Any]:
    """Everything of a run that must not depend on interruptions."""
    folder = Path(str(folder))
    last = torch.load(folder / "checkpoints/last.pt", weights_only=True)
    best = folder / "checkpoints/best.pt"
    rows = [
        {key: value for key, value in row.items() if key not in WALL_CLOCK}
        for row in read_json_lines(folder / "metrics.jsonl")
    ]
    training = {key: value for key, value in last["training"].items() if key != "seconds"}
    return {
        "detector": last["detector"],
        "training": training,
        "best": torch.load(best, weights_only=True) if best.is_file() else None,
        "rows": rows,
        "detections": json.loads((folder / "evaluation/detections.json").read_text()),
        "calibration": json.loads((folder / "evaluation/calibration.json").read_text()),
    }


def assert_equal(first: Any, second: Any, where: str = "") -> None:
    """Bit for bit, through dicts, lists and tensors."""
    assert type(first) is type(second), where
    if isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            assert_equal(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_equal(one, other, f"{where}[{index}]")
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    else:
        assert first == second, where
