"""Data loading speed: images per second, the time training waits for data, and COCO-sized annotations."""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from aploss.benchmarks import Progress
from aploss.data.annotations import DetectionDataset
from aploss.data.augment import PRESETS
from aploss.data.builtin import CLASS_NAMES, draw_scene
from aploss.data.loader import TrainingBatches, make_training_loader
from aploss.detectors.build import build_detector

WORKERS = (0, 1, 2)
TRAINED = (("paper", 1), ("paper", 2), ("light", 1), ("light", 2))  # preset, workers
BATCH_SIZE = 8
# name → size of the files, their format, side of the training images
SOURCES = {"shapes 128 px": ((128, 128), "png", 128), "photographs 500x375": ((500, 375), "jpg", 300)}
TRAINED_SOURCE = "shapes 128 px"
COCO_IMAGES, COCO_BOXES = 120_000, 860_000


def run(progress: Progress, *, quick: bool = False) -> dict[str, Any]:
    """Measures reading with augmentation, the wait of training, and loading annotations.

    Args:
        progress: called with a description of each measurement.
        quick: a few seconds in total, too few for reliable figures.

    Returns:
        ``rows`` (images a second for each source, preset and number of workers), ``waiting`` (share of a training's
        time that it waits for data) and ``annotations`` (seconds and memory for a file of COCO's size).
    """
    seconds, count, warm_up, steps = (0.05, 16, 1, 1) if quick else (3.0, 320, 4, 40)
    rows, waiting = [], []
    with tempfile.TemporaryDirectory(prefix="aploss-bench-") as scratch:
        for source in [TRAINED_SOURCE] if quick else SOURCES:
            file_size, suffix, side = SOURCES[source]
            dataset = _write_images(Path(scratch) / source.replace(" ", "-"), file_size, suffix, count)
            for preset, workers in itertools.product(PRESETS, WORKERS):
                progress(f"{source}, augmentation '{preset}', {workers} workers")
                rate = _images_per_second(_loader(dataset, preset, side, workers), seconds, warm_up)
                row = {"source": source, "size": side, "preset": preset, "workers": workers}
                rows.append({**row, "images_per_second": rate})
            if source == TRAINED_SOURCE:
                waiting = _training_waits(progress, dataset, side, [("light", 1)] if quick else TRAINED, steps)
        progress("annotations of COCO's size")
        annotations = _load_annotations(Path(scratch) / "coco", share=0.01 if quick else 1.0)
    return {"rows": rows, "waiting": waiting, "annotations": annotations}


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{'images/s':<38}{'0 workers':>12}{'1 worker':>12}{'2 workers':>12}"]
    for (source, preset), group in itertools.groupby(result["rows"], key=lambda row: (row["source"], row["preset"])):
        rates = "".join(f"{row['images_per_second']:>12.0f}" for row in group)
        lines.append(f"{f'{source} → {SOURCES[source][2]}, {preset}':<38}{rates}")
    lines += ["", f"share of training's time spent waiting for data (retinanet-tiny, {TRAINED_SOURCE})"]
    lines += [
        "  {preset:<8}{workers} workers {waiting_share:>8.1%}{images_per_second:>8.0f} images/s".format(**row)
        for row in result["waiting"]
    ]
    loaded = result["annotations"]
    peak = "" if loaded["peak_gigabytes"] is None else ", {peak_gigabytes:.2f} GB at the peak"
    text = "annotations of {images:,} images, {boxes:,} boxes ({file_megabytes:.0f} MB): {seconds:.1f} s" + peak
    return "\n".join([*lines, "", text.format(**loaded)])


def _write_images(folder: Path, size: tuple[int, int], suffix: str, count: int) -> DetectionDataset:
    """Images of the built-in data, scaled to a size and saved in a format."""
    folder.mkdir()
    scenes = [draw_scene(np.random.default_rng([index]), 128) for index in range(count)]
    for index, scene in enumerate(scenes):
        Image.fromarray(scene.pixels).resize(size, Image.Resampling.BICUBIC).save(folder / f"{index}.{suffix}")
    return DetectionDataset(
        root=folder,
        class_names=CLASS_NAMES,
        image_paths=[f"{index}.{suffix}" for index in range(count)],
        image_sizes=[size] * count,
        boxes_per_image=[len(scene.labels) for scene in scenes],
        boxes=np.concatenate([scene.boxes for scene in scenes]) * np.array([*size, *size]) / 128,
        labels=np.concatenate([scene.labels for scene in scenes]),
        split="train",
    )


def _loader(dataset: DetectionDataset, preset: str, side: int, workers: int) -> TrainingBatches:
    return make_training_loader(dataset, batch_size=BATCH_SIZE, seed=0, preset=preset, size=side, workers=workers)


def _images_per_second(loader: TrainingBatches, seconds: float, first: int) -> float:
    """Measured after ``first`` batches: by then the workers run, and the batches prepared at the start are used up."""
    batches = loader.endless()
    for _ in range(first):
        next(batches)
    images, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not images:
        images += len(next(batches).indices)
    return images / elapsed


def _training_waits(
    progress: Progress, dataset: DetectionDataset, side: int, cases: Sequence[tuple[str, int]], steps: int
) -> list[dict[str, Any]]:
    """The share of the time of a training of the small detector that it waits for its next batch."""
    rows = []
    for preset, workers in cases:
        progress(f"training with augmentation '{preset}', {workers} workers")
        detector = build_detector("retinanet-tiny", class_names=dataset.class_names)
        optimizer = torch.optim.SGD(detector.parameters(), lr=1e-4)
        batches = _loader(dataset, preset, side, workers).endless()
        waited, start = 0.0, time.perf_counter()
        for step in range(-2, steps):
            if step == 0:
                waited, start = 0.0, time.perf_counter()
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            loss = sum(detector(batch.images, batch.targets).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        elapsed = time.perf_counter() - start
        rates = {"waiting_share": waited / elapsed, "images_per_second": steps * BATCH_SIZE / elapsed}
        rows.append({"preset": preset, "workers": workers, **rates})
    return rows


def _load_annotations(folder: Path, share: float) -> dict[str, Any]:
    """Loads a synthetic COCO file in a process of its own, whose memory is measured."""
    images, boxes = round(COCO_IMAGES * share), round(COCO_BOXES * share)
    file = _write_annotations(folder, images, boxes)
    answer = subprocess.run([sys.executable, "-c", _LOADING, str(folder)], check=True, capture_output=True, text=True)
    measured = json.loads(answer.stdout)
    if (measured["images"], measured["boxes"]) != (images, boxes):
        raise RuntimeError(f"{images} images and {boxes} boxes were written, read: {measured}")
    return {**measured, "file_megabytes": file.stat().st_size / 1e6}


_LOADING = """
import json, sys, time
from aploss.benchmarks import measure_memory
from aploss.data.load import load_dataset

found, start = [], time.perf_counter()
memory = measure_memory(lambda: found.append(load_dataset(sys.argv[1], "train", format="coco")))
print(json.dumps({
    "images": len(found[0]), "boxes": found[0].num_boxes, "seconds": time.perf_counter() - start,
    "peak_gigabytes": memory and memory[1] / 1e9,
}))
"""


def _write_annotations(folder: Path, images: int, boxes: int) -> Path:
    """A file like COCO's own, outlines included, and an (empty) file for every image."""
    names = [f"{number:012d}.jpg" for number in range(1, images + 1)]
    (folder / "train").mkdir(parents=True)
    for name in names:
        (folder / "train" / name).touch()
    head = {
        "categories": [{"id": number, "name": str(number)} for number in range(1, 81)],
        "images": [
            {"id": number, "file_name": name, "width": 640, "height": 480} for number, name in enumerate(names, start=1)
        ],
    }
    file = folder / "annotations" / "instances_train.json"
    file.parent.mkdir()
    with file.open("w", encoding="utf-8") as out:
        out.write(json.dumps(head)[:-1] + ', "annotations": [')
        # One by one: together they would take gigabytes.
        out.writelines(f"{',' if number else ''}{text}" for number, text in enumerate(_annotations(images, boxes)))
        out.write("]}")
    return file


def _annotations(images: int, boxes: int) -> Iterator[str]:
    random = np.random.default_rng(0)
    corners, sides = random.integers(0, 300, (boxes, 2)), random.integers(4, 180, (boxes, 2))
    owners = random.integers(1, images + 1, boxes)
    rows = zip(owners.tolist(), corners.tolist(), sides.tolist(), strict=True)
    for number, (owner, (x, y), (width, height)) in enumerate(rows, start=1):
        entry = {"id": number, "image_id": owner, "category_id": number % 80 + 1, "bbox": [x, y, width, height]}
        outline = [x + 0.25, y + 0.75] * 22  # COCO's have about as many points
        yield json.dumps({**entry, "segmentation": [outline], "area": width * height, "iscrowd": 0})
