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

from aploss.data.images import read_image
from aploss.detectors import load
from aploss.training.config import TrainConfig
from aploss.training.run import train

LEAK = 12 * 2**20  # bytes that memory may grow by: caches, and what the allocator keeps
TRAINING_MINUTES, FEWEST_STEPS = 3.0, 1000  # a step takes tens of milliseconds, or a hundred on a busy machine


def test_eight_predictions_at_once_with_one_detector_are_those_of_one(
    finished_run: TrainConfig, rectangles: Path
) -> None:
    images = [read_image(path) for path in sorted((rectangles / "val").iterdir())]
    detector = load(str(finished_run.out))
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
    spawn: Callable[..., BaseProcess], finished_run: TrainConfig, rectangles: Path, tmp_path: Path
) -> None:
    files, commands = sorted((rectangles / "val").iterdir()), []
    for count in (100, 1000):
        photos, out = tmp_path / f"{count}", tmp_path / f"found-{count}"
        photos.mkdir()
        for number in range(count):
            os.link(files[number % len(files)], photos / f"{number}.png")
        words = ["predict", str(finished_run.out), str(photos), "--out", str(out)]
        commands.append([*words, "--quiet", "--threshold", "0.05"])
    process = spawn(PREDICT, log=tmp_path / "log", file=__file__, commands=commands)
    process.join(timeout=600)
    printed = (tmp_path / "log").read_text()
    assert process.exitcode == 0, printed
    assert len(json.loads((out / "images.json").read_text())["images"]) == count
    few, many = map(int, printed.split())
    assert many - few < LEAK


@pytest.mark.slow_fault
def test_a_long_training_takes_no_more_memory_than_its_first_fifth(make_config, no_page, record_property) -> None:
    """With validations and checkpoints on the way, for minutes, however many steps these are."""
    sizes: dict[int, int] = {}

    def remember(row: dict[str, Any]) -> None:
        sizes[row["step"]] = resident_memory()

    config = make_config(
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
