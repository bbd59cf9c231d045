"""A detector made of random numbers, and pycocotools without its printing."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_datasets import coco_annotation
from tiny_runs import config_in, no_page, rectangles, short_detector  # noqa: F401

Simulated = tuple[dict[str, Any], list[dict[str, Any]]]


@pytest.fixture
def simulate() -> Callable[..., Simulated]:
    """``simulate(seed, ...)`` gives a COCO ground truth and the results of a made-up detector."""
    return simulated_detector


@pytest.fixture
def pycocotools_evaluation() -> Callable[..., Any]:
    """``evaluate(truth, results, limits)`` gives a pycocotools COCOeval that has run."""
    pytest.importorskip("pycocotools", reason="pycocotools is the oracle of this test")
    return run_pycocotools


def simulated_detector(
    seed: int,
    *,
    images: int = 12,  # some without objects, some without detections
    classes: int = 3,  # one more is in the category list and has no object
    objects: float = 4.0,  # mean number on an image
    detections: int = 20,  # on an image
    grid: int = 0,  # round boxes to multiples of this, so that overlaps are often equal; 0 for no rounding
    crowds: float = 0.0,  # share of the objects
    difficult: float = 0.0,  # share of the objects
    score_steps: int = 0,  # number of different scores, so that many are equal; 0 for no rounding
    near: float = 0.6,  # share of detections that are near an object
    separation: float = 3.0,  # how far the logits of objects are above those of the background
) -> Simulated:
    """Objects on images, and a detector that finds most of them among false positives."""
    generator = np.random.default_rng(seed)
    truth: dict[str, Any] = {
        "images": [{"id": 7 * index + 3, "width": 400, "height": 400} for index in range(images)],
        "categories": [{"id": 2 * index + 1, "name": f"class {index}"} for index in range(classes + 1)],
        "annotations": [],
    }
    results: list[dict[str, Any]] = []
    for image in truth["images"]:
        boxes = _boxes(generator, generator.poisson(objects), grid)
        labels = generator.integers(0, classes, len(boxes))
        for box, label in zip(boxes, labels, strict=True):
            entry = coco_annotation(len(truth["annotations"]) + 1, image["id"], 2 * int(label) + 1, box.tolist())
            entry["area"] *= generator.uniform(0.6, 1.0)
            entry["iscrowd"] = int(generator.random() < crowds)
            truth["annotations"].append({**entry, "difficult": int(generator.random() < difficult)})
        if generator.random() < 0.1:
            continue
        results += _results(generator, image["id"], boxes, labels, classes, detections, grid, near)
    for row in results:
        row["score"] = float(np.float32(1 / (1 + np.exp(4.6 - separation * row["score"]))))
        if score_steps:
            row["score"] = round(row["score"] * score_steps) / score_steps
    return truth, [results[index] for index in generator.permutation(len(results))]


def _boxes(generator: np.random.Generator, count: int, grid: int) -> np.ndarray:
    sizes = np.exp(generator.uniform(np.log(8), np.log(200), (count, 2)))
    boxes = np.concatenate([generator.uniform(0, 400 - sizes), sizes], axis=1)
    if grid:
        boxes = np.round(boxes / grid) * grid
        boxes[:, 2:] = np.maximum(boxes[:, 2:], grid)
    return boxes


def _results(generator, image_id, boxes, labels, classes, count, grid, near) -> list[dict[str, Any]]:
    found = _boxes(generator, count, grid)
    found_labels = generator.integers(0, classes + 1, count)
    strengths = generator.normal(0, 0.4, count)
    seen: set[int] = set()
    for row in np.flatnonzero(generator.random(count) < near) if len(boxes) else ():
        chosen = int(generator.integers(0, len(boxes)))
        moved = boxes[chosen] + generator.normal(0, 0.06, 4) * np.tile(boxes[chosen, 2:], 2)
        found[row] = np.round(moved / grid) * grid if grid else moved
        found[row, 2:] = np.maximum(found[row, 2:], grid or 1)
        if generator.random() < 0.96:
            found_labels[row] = labels[chosen]
        strengths[row] = generator.normal(0.4 if chosen in seen else 1.8, 0.4)
        seen.add(chosen)
    return [
        {"image_id": image_id, "category_id": 2 * label + 1, "bbox": box, "score": strength}
        for label, box, strength in zip(found_labels.tolist(), found.tolist(), strengths.tolist(), strict=True)
    ]


def run_pycocotools(truth: dict, results: list[dict], limits: tuple[int, ...] = (1, 10, 100)) -> Any:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        objects = COCO()
        objects.dataset = truth
        objects.createIndex()
        detections = objects.loadRes([dict(row) for row in results])
        evaluation = COCOeval(objects, detections, "bbox")
        evaluation.params.maxDets = list(limits)
        evaluation.evaluate()
        evaluation.accumulate()
        if limits == (1, 10, 100):
            evaluation.summarize()
    return evaluation
