"""Much at once and for long: predictions in threads, a thousand images, minutes of training in short steps."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import SETTINGS
from torch import Tensor, nn

from aploss.data.images import read_image
from aploss.detectors import DetectorConfig, Network, load, register_detector
from aploss.training.config import TrainConfig, merge
from aploss.training.run import train

LEAK = 12 * 2**20  # bytes that memory may grow by: caches, and what the allocator keeps
TRAINING_MINUTES, FEWEST_STEPS = 3.0, 2000  # a step takes milliseconds, or tens of them on a busy machine


@pytest.fixture(scope="module")
def run(config_in: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aploss.reports.run_report.write_run_report", lambda folder, **options: None)
        train(config_in(folder, **merge(SETTINGS, {"schedule": {"length": 2}})))
    return folder


def test_eight_predictions_at_once_with_one_detector_are_those_of_one(run: Path, rectangles: Path) -> None:
    images = [read_image(path) for path in sorted((rectangles / "val").iterdir())]
    detector = load(run)
    expected = detector.predict(images, threshold=0.0, batch_size=1)

    def work(number: int) -> list[Any]:
        return detector.predict(images[: 1 + number % 6], threshold=0.0, batch_size=1)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    for predictions in found:
        for one, other in zip(predictions, expected, strict=False):
            assert torch.equal(one.boxes, other.boxes)
            assert torch.equal(one.scores, other.scores)


def resident_memory() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# In a process of its own, without what other tests have left in the memory.
PREDICT = """
import runpy
from aploss.cli.main import main
resident_memory = runpy.run_path(values["file"])["resident_memory"]
for words in values["commands"]:
    assert main(words) == 0
    print(resident_memory())
"""


@pytest.mark.slow_fault
def test_a_thousand_images_take_the_memory_of_a_hundred(
    spawn: Callable[..., BaseProcess], run: Path, rectangles: Path, tmp_path: Path
) -> None:
    files, commands = sorted((rectangles / "val").iterdir()), []
    for count in (100, 1000):
        photos, out = tmp_path / f"{count}", tmp_path / f"found-{count}"
        photos.mkdir()
        for number in range(count):
            os.link(files[number % len(files)], photos / f"{number}.png")
        commands.append(["predict", str(run), str(photos), "--out", str(out), "--quiet", "--threshold", "0.05"])
    process = spawn(PREDICT, log=tmp_path / "log", file=__file__, commands=commands)
    process.join(timeout=600)
    printed = (tmp_path / "log").read_text()
    assert process.exitcode == 0, printed
    assert len(json.loads((out / "images.json").read_text())["images"]) == count
    few, many = map(int, printed.split())
    assert many - few < LEAK


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 16, stride=16)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"0": self.layer(images)}


class Head(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"cls_logits": nn.Conv2d(4, columns, 1), "bbox_regression": nn.Conv2d(4, 4, 1)})

    def forward(self, maps: list[Tensor]) -> dict[str, Tensor]:
        return {name: layer(maps[0]).flatten(2).transpose(1, 2) for name, layer in self.layers.items()}


def anchors(height: int, width: int, sizes: Any) -> list[Tensor]:
    rows, columns = sizes[0]
    y, x = torch.meshgrid(torch.arange(rows) * 16.0, torch.arange(columns) * 16.0, indexing="ij")
    return [torch.stack([x, y, x + 24, y + 24], dim=-1).view(-1, 4)]


class Stub(DetectorConfig):
    """Four numbers for each cell of 16 pixels: a step takes about a millisecond."""

    def network(self, *, columns: int, softmax: bool) -> Network:
        return Network(backbone=Maps(), head=Head(columns), anchors=anchors, size_divisor=16)


@pytest.mark.slow_fault
def test_a_long_training_takes_no_more_memory_than_its_first_fifth(make_config, no_page, record_property) -> None:
    """With validations and checkpoints on the way, for minutes, however many steps these are."""
    register_detector("stub")(Stub)
    sizes: dict[int, int] = {}

    def remember(row: dict[str, Any]) -> None:
        sizes[row["step"]] = resident_memory()

    config = make_config(
        detector="stub",
        log_steps=100,
        checkpoint_steps=100,
        batches={"size": 1, "image_size": 32, "augmentation": "none"},
        schedule={"length": 1_000_000, "warmup_steps": 10},
        validation={"every": 200},
        max_minutes=TRAINING_MINUTES,
    )
    train(config, callbacks=[remember])
    last = max(sizes)
    record_property("steps", last)
    assert last >= FEWEST_STEPS
    early = max(size for step, size in sizes.items() if step <= last / 5)
    late = max(size for step, size in sizes.items() if step > last / 5)
    assert late - early < LEAK, sizes
