"""Much at once and for long: predictions in threads, a thousand images, a hundred thousand training steps."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

STEPS = 100_000
LEAK = 24 * 2**20  # bytes that memory may grow by: caches, and what the allocator keeps


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


@pytest.mark.slow_fault
def test_a_thousand_images_take_the_memory_of_a_hundred(call_cli, run: Path, rectangles: Path, tmp_path: Path) -> None:
    files, sizes = sorted((rectangles / "val").iterdir()), []
    for count in (100, 1000):
        photos, out = tmp_path / f"{count}", tmp_path / f"found-{count}"
        photos.mkdir()
        for number in range(count):
            os.link(files[number % len(files)], photos / f"{number}.png")
        assert call_cli("predict", run, photos, "--out", out, "--quiet", "--threshold", 0.05).code == 0
        sizes.append(resident_memory())
        assert len(json.loads((out / "images.json").read_text())["images"]) == count
    assert sizes[1] - sizes[0] < LEAK


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
def test_a_hundred_thousand_steps_take_no_more_memory_than_the_first_thousands(make_config, no_page) -> None:
    """A day of training, with validations and checkpoints on the way."""
    register_detector("stub")(Stub)
    sizes: dict[int, int] = {}

    def remember(row: dict[str, Any]) -> None:
        sizes[row["step"]] = resident_memory()

    config = make_config(
        detector="stub",
        log_steps=1000,
        checkpoint_steps=1000,
        batches={"size": 1, "image_size": 32, "augmentation": "none"},
        schedule={"length": STEPS, "warmup_steps": 10},
        validation={"every": 10_000},
    )
    train(config, callbacks=[remember])
    assert max(sizes) == STEPS
    early = max(size for step, size in sizes.items() if step <= STEPS // 10)
    late = max(size for step, size in sizes.items() if step > STEPS // 10)
    assert late - early < LEAK, sizes
