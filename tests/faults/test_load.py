"""Much at once and for long: predictions in threads, a hundred thousand training steps."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import SETTINGS

from aploss.data.images import read_image
from aploss.detectors import load
from aploss.training.config import TrainConfig, config_to_dict, merge
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


STUB = '''
import torch
from torch import nn
from aploss.detectors import DetectorConfig, Network, register_detector

class Maps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 16, stride=16)

    def forward(self, images):
        return {"0": self.layer(images)}

class Head(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.scores, self.boxes = nn.Conv2d(4, columns, 1), nn.Conv2d(4, 4, 1)

    def forward(self, maps):
        flat = lambda layer: layer(maps[0]).flatten(2).transpose(1, 2)
        return {"cls_logits": flat(self.scores), "bbox_regression": flat(self.boxes)}

def anchors(height, width, sizes):
    rows, columns = sizes[0]
    y, x = torch.meshgrid(torch.arange(rows) * 16.0, torch.arange(columns) * 16.0, indexing="ij")
    return [torch.stack([x, y, x + 24, y + 24], dim=-1).view(-1, 4)]

@register_detector("stub")
class Stub(DetectorConfig):
    """Four numbers for each cell of 16 pixels: a step takes about a millisecond."""

    def network(self, *, columns, softmax):
        return Network(backbone=Maps(), head=Head(columns), anchors=anchors, size_divisor=16)
'''
TRAIN = """
import json, os
from aploss.registry import load_plugins
load_plugins([values["plugin"]])
from aploss.training.config import config_from_dict
from aploss.training.run import train
sizes = {}

def remember(row):
    with open("/proc/self/statm") as file:
        sizes[row["step"]] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

train(config_from_dict(values["config"]), callbacks=[remember])
print(json.dumps(sizes))
"""


@pytest.mark.slow_fault
def test_a_hundred_thousand_steps_take_no_more_memory_than_the_first_thousands(
    spawn: Callable[..., BaseProcess], make_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    """A day of training, with validations and checkpoints on the way."""
    plugin = tmp_path / "stub.py"
    plugin.write_text(STUB)
    values = config_to_dict(
        make_config(
            log_steps=1000,
            checkpoint_steps=1000,
            batches={"size": 1, "image_size": 32, "augmentation": "none"},
            schedule={"length": STEPS, "warmup_steps": 10},
            validation={"every": 10_000},
        )
    )
    values["detector"] = "stub"  # known in the other process alone
    process = spawn(TRAIN, log=tmp_path / "log", plugin=str(plugin), config=values)
    process.join(timeout=3000)
    printed = (tmp_path / "log").read_text()
    assert process.exitcode == 0, printed
    sizes = {int(step): size for step, size in json.loads(printed.splitlines()[-1]).items()}
    assert max(sizes) == STEPS
    early = max(size for step, size in sizes.items() if step <= STEPS // 10)
    late = max(size for step, size in sizes.items() if step > STEPS // 10)
    assert late - early < LEAK, sizes
