"""A data set of a few bright rectangles, and a run on it that takes a second or two."""

import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aploss.training.config import TrainConfig
from aploss.training.recipes import load_config, merge

PREAMBLE = """
import os, sys, torch
sys.stdout = sys.stderr = open(log, "w", buffering=1)
torch.set_num_threads(1)
import aploss.reports.run_report
aploss.reports.run_report.write_run_report = lambda folder, **options: None
"""
SIZE = 64
COUNTS = {"train": 16, "val": 6, "test": 6}
SETTINGS: dict[str, Any] = {
    "detector": "retinanet-tiny",
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
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": kind + 1,
                        "bbox": [int(left), int(top), int(width), int(height)],
                        "area": int(width * height),
                        "iscrowd": 0,
                    }
                )
            name = f"{split}-{number}.png"
            Image.fromarray(pixels).save(folder / split / name)
            images.append({"id": number, "file_name": name, "width": SIZE, "height": SIZE})
        document = {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": 1, "name": "red"}, {"id": 2, "name": "green"}],
        }
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(document))
    return folder


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


@pytest.fixture
def make_config(config_in: Callable[..., TrainConfig], tmp_path: Path) -> Callable[..., TrainConfig]:
    """The same by the name of the folder."""

    def make(name: str = "run", **changes: Any) -> TrainConfig:
        return config_in(tmp_path / name, **changes)

    return make


@pytest.fixture(scope="session")
def spawn() -> Callable[..., BaseProcess]:
    """Starts a program in a process of its own, quickly: the imports are made once for all.

    It finds ``values`` in its namespace, writes what it prints to ``log``, and makes no page.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["aploss.cli.train", "aploss.training.run"])

    def start(program: str, *, log: Path, **values: Any) -> BaseProcess:
        setting = {"values": values, "log": str(log)}
        process = context.Process(target=exec, args=(PREAMBLE + program, setting))
        process.start()
        return process

    return start
