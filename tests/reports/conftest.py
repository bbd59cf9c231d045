"""A synthetic run folder and comparison, and a real browser if one is installed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import browser  # noqa: F401 - a fixture
from PIL import Image, ImageDraw
from small_datasets import coco_annotation

from aploss.evaluation import (
    calibrate_detections,
    calibration_report,
    coco_metrics,
    match_detections,
    precision_recall_curves,
    read_detections,
    read_ground_truth,
)
from aploss.files import write_json
from aploss.reports.comparison import Comparison, Entry, TrainingCurve, paired_difference
from aploss.reports.page import Verdict
from aploss.reports.run_files import matches_document

CLASSES = ("disk", "square", "triangle", "star", "cross")
SIZE = (192, 144)


def make_scenes(folder: Path, generator: np.random.Generator, images: int) -> dict[str, Any]:
    """Pictures of shapes, and their COCO ground truth."""
    colours = ("#e0c060", "#70a0d0", "#b06080", "#60b080", "#d08050")
    truth: dict[str, Any] = {"images": [], "annotations": [], "categories": []}
    for image_id in range(1, images + 1):
        shade = generator.integers(40, 110, size=3)
        noise = generator.normal(0, 12, size=(SIZE[1], SIZE[0], 3))
        picture = Image.fromarray(np.clip(shade + noise, 0, 255).astype(np.uint8))
        pen = ImageDraw.Draw(picture)
        for _ in range(int(generator.integers(1, 5))):
            label = int(generator.integers(len(CLASSES)))
            side = generator.uniform(22, 60)
            corner = generator.uniform((4, 4), (SIZE[0] - side - 4, SIZE[1] - side - 4))
            centre = (*(corner + side / 2), side / 2)
            pen.regular_polygon(centre, n_sides=label + 3, fill=colours[int(generator.integers(len(colours)))])
            box = [*map(float, corner), float(side), float(side)]
            entry = coco_annotation(len(truth["annotations"]) + 1, image_id, label + 1, box)
            truth["annotations"].append({**entry, "difficult": 0})
        path = folder / f"scene_{image_id:03d}.png"
        picture.save(path)
        truth["images"].append(
            {"id": image_id, "file_name": path.name, "path": str(path.resolve()),
             "width": SIZE[0], "height": SIZE[1]}
        )  # fmt: skip
    return truth


def make_detections(truth: dict[str, Any], generator: np.random.Generator) -> list[dict[str, Any]]:
    """Most of the objects, and false positives with lower scores."""
    detections = []
    for entry in truth["annotations"]:
        if generator.random() < 0.93:
            box = (np.array(entry["bbox"]) + generator.normal(0, 1.5, size=4)).tolist()
            detections.append({**entry, "bbox": box, "score": 0.25 * float(generator.beta(3, 1.1))})
    for image in truth["images"]:
        for _ in range(12):
            box = [*generator.uniform((0, 0), (150, 100)), *generator.uniform(12, 50, size=2)]
            category, score = int(generator.integers(1, len(CLASSES) + 1)), 0.25 * float(generator.beta(0.6, 5))
            detections.append({"image_id": image["id"], "category_id": category, "bbox": box, "score": score})
    return [{key: one[key] for key in ("image_id", "category_id", "bbox", "score")} for one in detections]


def write_evaluation(run: Path, truth: dict[str, Any], detections: list[dict[str, Any]]) -> dict[str, Any]:
    """Writes ``evaluation/`` as the end of a training does; returns the metrics."""
    objects, table = read_ground_truth(truth), read_detections(detections)
    matches = match_detections(objects, table)
    calibration, threshold = calibrate_detections(objects, table, matches=matches)
    report = calibration_report(objects, table, calibration, threshold, matches=matches)
    curves = precision_recall_curves(objects, table, matches=matches)
    metrics = coco_metrics(objects, table).as_dict()
    metrics["precision_recall"] = {name: curve.as_dict() for name, curve in curves.items()}
    ids = [entry["id"] for entry in truth["annotations"]]
    documents = {
        "ground_truth": truth,
        "detections": detections,
        "metrics": metrics,
        "calibration": {**report, "calibrated_scores": calibration(table.scores).tolist()},
        "matches": matches_document(matches, ids),
    }
    for name, document in documents.items():
        write_json(run / "evaluation" / f"{name}.json", document)
    return metrics


@pytest.fixture
def write_results() -> Callable[..., dict[str, Any]]:
    """See :func:`write_evaluation`."""
    return write_evaluation


def make_log(generator: np.random.Generator, steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        share = step / steps
        classification = 0.15 + 0.85 * np.exp(-4 * share) + generator.normal(0, 0.03)
        box = 0.1 + 0.5 * np.exp(-3 * share) + generator.normal(0, 0.02)
        rate = 3e-3 * min(1, step / 50) * (0.51 + 0.49 * np.cos(np.pi * share))
        rows.append(
            {"kind": "train", "step": step, "epoch": step // 75, "loss": classification + box,
             "classification": classification, "box": box, "lr": rate,
             "gradient_norm": float(np.exp(generator.normal(0.5, 0.4))),
             "images_per_second": 110.0, "seconds": step * 0.07}
        )  # fmt: skip
        if step % 100 == 0:
            ap = 0.74 * (1 - np.exp(-4 * share)) + generator.normal(0, 0.01)
            rows.append({"kind": "validation", "step": step, "epoch": step // 75,
                         "seconds": step * 0.07, "AP": ap, "AP50": min(1, 1.27 * ap),
                         "AP75": 1.2 * ap})  # fmt: skip
    return rows


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run folder ``runs/shapes-ap`` as a training leaves it."""

    def make(*, images: int = 14, steps: int = 1000, seed: int = 0) -> Path:
        generator = np.random.default_rng(seed)
        run = tmp_path / "runs" / "shapes-ap"
        scenes = run / "scenes"  # elsewhere only where the caller says so
        scenes.mkdir(parents=True)
        truth = make_scenes(scenes, generator, images)
        truth["categories"] = [{"id": number, "name": name} for number, name in enumerate(CLASSES, start=1)]
        metrics = write_evaluation(run, truth, make_detections(truth, generator))
        command = "aploss train --data builtin --loss ap --detector retinanet-tiny --seed 0"
        write_json(
            run / "summary.json",
            {**{key: metrics[key] for key in ("AP", "AP50", "AP75", "APs", "APm", "APl")},
             "loss": "ap", "detector": "retinanet-tiny", "data": "builtin", "split": "val",
             "seed": 0, "steps": steps, "minutes": steps * 0.07 / 60, "images_per_second": 110.4,
             "calibration_error": 0.012, "draw_threshold": 0.42, "command": command},
        )  # fmt: skip
        write_json(
            run / "environment.json",
            {"python": "3.11.9", "torch": "2.9.0", "commit": "0123456789abcdef" * 2,
             "hardware": {"processor": "a processor with a rather long name", "cores": 2}},
        )  # fmt: skip
        (run / "config.yaml").write_text(
            "detector: retinanet-tiny\nloss: ap\nloss_options:\n  delta: 1.0\n"
            "data: builtin\noptimizer:\n  name: adamw\n  lr: 0.003\n"
            "note: a line that is much longer than any telephone is wide, and has to scroll "
            "inside its own box without making the page any wider than the screen\n"
        )
        with (run / "metrics.jsonl").open("w") as log:
            log.writelines(json.dumps(row) + "\n" for row in make_log(generator, steps))
        return run

    return make


@pytest.fixture
def comparison() -> Comparison:
    """Four losses, three seeds, numbers of the size a small comparison has."""
    generator = np.random.default_rng(3)
    entries = []
    levels = {"ce-ohem": (0.718, 0.494), "focal": (0.708, 0.520),
              "auc": (0.520, 0.412), "ap": (0.738, 0.586)}  # fmt: skip
    for loss, (level, paper) in levels.items():
        curves, finals = [], []
        for _ in range(3):
            share = np.linspace(0.1, 1, 10)
            values = level * (1 - np.exp(-4 * share)) + generator.normal(0, 0.006, size=10)
            speed = generator.uniform(0.95, 1.05)
            curves.append(
                TrainingCurve(steps=(1000 * share).tolist(), values=values.tolist(),
                      minutes=(1.2 * speed * share).tolist())
            )  # fmt: skip
            finals.append(float(values[-1]))
        entries.append(
            Entry(
                name=loss,
                values={"AP": finals, "AP50": [min(1, 1.28 * one) for one in finals],
                        "AP75": [1.2 * one for one in finals]},
                minutes=[1.2, 1.25, 1.18], paper={"AP": paper}, curves=curves, note="lr 0.003",
            )
        )  # fmt: skip
    differences = [
        paired_difference(entries[-1].values["AP"], entry.values["AP"], name="ap", baseline=entry.name)
        for entry in entries[:-1]
    ]
    return Comparison(
        title="Table 2: RetinaNet with four losses",
        entries=entries,
        summary="The same detector, data order and initial weights; only the loss differs.",
        differences=differences,
        verdicts=[Verdict(True, "AP-loss is first, by at least 1 AP over focal loss"),
                  Verdict(False, "AUC-loss is last"), Verdict(None, "the order of the others")],
        command="aploss reproduce table2 --scale small --seeds 3",
        paper="PASCAL VOC 2007 test, RetinaNet-50, 512 pixels",
        notes="The paper trains from pretrained weights at 512 pixels; this is a small detector.",
        provenance={"commit": "0123abc", "seeds": "0, 1, 2", "processor": "2 cores"},
    )  # fmt: skip
