"""The page of a run: what it says, and that nothing missing or broken keeps it from being made."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from aploss.evaluation import METRICS
from aploss.reports.run_files import read_run
from aploss.reports.run_report import (
    PictureSource,
    curve_plot,
    false_positives,
    gallery,
    misses,
    side_by_side,
    write_run_report,
)  # fmt: skip

DOCUMENT = Path(__file__).parents[2] / "docs" / "reports.md"
MakeRun = Callable[..., Path]
FILES = (
    "summary.json", "metrics.jsonl", "config.yaml", "environment.json",
    "evaluation/ground_truth.json", "evaluation/detections.json", "evaluation/metrics.json",
    "evaluation/calibration.json", "evaluation/matches.json",
)  # fmt: skip


def edit(path: Path, change: Callable[[dict], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def words(page: Path) -> str:
    """The page's text without tags and styles, blanks made one."""
    text = re.sub(r"<style>.*?</style>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_the_page_shows_what_is_in_the_files_and_is_of_moderate_size(make_run: MakeRun) -> None:
    run = make_run()
    page = write_run_report(run)
    assert page == run / "report.html"
    assert page.stat().st_size < 1_500_000
    plots = {path.name for path in (run / "plots").iterdir()}
    assert plots == {f"{name}.svg" for name in ("loss", "gradient_norm", "AP", "precision-recall", "reliability")}
    text = words(page)
    summary = json.loads((run / "summary.json").read_text())
    for key in ("AP", "AP50", "AP75"):
        assert f"{key} {100 * summary[key]:.1f} %" in text
    assert "retinanet-tiny trained with AP-loss on builtin, seed 0; evaluated on val (14 images, " in text
    assert summary["command"] in text
    assert "delta: 1.0" in text
    assert '"processor": "a processor with a rather long name"' in text
    metrics = json.loads((run / "evaluation/metrics.json").read_text())
    for name, row in metrics["per_class"].items():
        assert f"{name} {100 * row['AP']:.1f}" in text
    assert "not in the run folder" not in text
    assert "could not be" not in text


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named_and_the_rest_is_shown(make_run: MakeRun, file: str) -> None:
    run = make_run(images=3, steps=0)
    (run / file).unlink()
    text = words(write_run_report(run))
    assert "could not be made" not in text
    if file not in ("summary.json", "evaluation/detections.json"):
        assert f"{file} is not in the run folder" in text


def test_a_section_with_strange_content_says_so(make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(images=2, steps=90)
    edit(run / "evaluation/metrics.json", lambda one: one.update(per_class={"cat": 3}))
    text = words(write_run_report(run))
    assert "could not be made (TypeError" in text
    assert (run / "plots" / "loss.svg").is_file()
    assert "Classes" in caplog.text


def test_images_that_are_gone_are_counted(make_run: MakeRun) -> None:
    run = make_run(images=4, steps=0)
    scenes = run / "scenes"
    (scenes / "scene_001.png").unlink()
    (scenes / "scene_002.png").write_bytes(b"no picture")
    text = words(write_run_report(run))
    assert "2 image(s) could not be read, the first: " in text
    assert "scene_003.png: " in text


def test_a_metric_added_to_the_list_is_on_the_page(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(images=2, steps=0)
    metrics = json.loads((run / "evaluation/metrics.json").read_text())
    assert "AR10" not in words(write_run_report(run))
    monkeypatch.setitem(METRICS, "AR10", "recall of ten detections")
    text = words(write_run_report(run))
    assert "AR10: recall of ten detections" in text
    assert f"{100 * metrics['AR10']:.1f}" in text
    assert "class AP AP50 AP75 APm oLRP AR10 precision recall F1 objects" in text


def test_confusions_precision_and_recall_are_counted_at_the_threshold(
    make_run: MakeRun, write_results: Callable[..., object]
) -> None:
    """Four objects: a disk found, a disk detected as a square, a star missed and one found below the threshold."""
    run = make_run(images=1, steps=0)
    boxes = [[0, 0, 30, 30], [50, 0, 30, 30], [100, 0, 30, 30], [150, 0, 30, 30]]
    classes, image = (1, 1, 4, 4), {"image_id": 1}
    objects = [
        {**image, "id": k, "category_id": c, "bbox": box} for k, (c, box) in enumerate(zip(classes, boxes, strict=True))
    ]
    objects.append({**image, "id": 9, "category_id": 2, "bbox": [0, 100, 30, 30], "difficult": 1})
    # Two more: a square on the background, and one on the difficult object, which counts as nothing.
    found = [(1, boxes[0], 0.9), (2, boxes[1], 0.8), (4, boxes[3], 0.3), (2, [60, 90, 20, 20], 0.7)]
    found.append((2, [0, 100, 30, 30], 0.95))
    detections = [{**image, "category_id": c, "bbox": box, "score": score} for c, box, score in found]
    truth = json.loads((run / "evaluation/ground_truth.json").read_text())
    write_results(run, {**truth, "annotations": objects}, detections)
    edit(run / "evaluation/calibration.json", lambda one: one.update(draw_threshold=0.5, calibrated_scores=None))
    text = words(write_run_report(run))
    assert "Precision 33.3 % score ≥ 0.50 Recall 25.0 % score ≥ 0.50 F1 28.6 %" in text
    expected = np.zeros((6, 6), int)
    expected[[0, 0, 3, 5], [0, 1, 5, 1]] = [1, 1, 2, 1]  # 5: not detected, background
    np.testing.assert_array_equal(read_run(run).confusion_matrix, expected)
    assert "not detected disk 1 1 0 0 0 0 square 0 " in text


def test_many_classes_have_a_list_of_errors_in_place_of_a_matrix(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aploss.reports.run_report.MAX_MATRIX", 3)
    assert "annotated detected as count" in words(write_run_report(make_run(images=3, steps=0)))


def test_curves_of_a_long_run_are_thinned_and_of_no_run_are_empty() -> None:
    rows = [{"step": step, "loss": float(np.sin(step))} for step in range(50_000)]
    assert len(curve_plot(rows, {"loss": "total"})) < 40_000
    assert ElementTree.fromstring(curve_plot([], {"loss": "total"})) is not None


def test_the_examples_of_the_documentation_write_what_they_say(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(images=1, steps=100).rename(tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, str(DOCUMENT), "exec"), {})
    assert Path("runs/demo/report.html").is_file()
    assert Path("convergence.html").is_file()


# --- pictures ---


def test_paths_may_be_relative_to_the_run(make_run: MakeRun) -> None:
    run = make_run(images=2, steps=0)

    def relative(truth: dict) -> None:
        for image in truth["images"]:
            image["path"] = f"scenes/{Path(image['path']).name}"

    edit(run / "evaluation/ground_truth.json", relative)
    assert len(gallery(PictureSource(read_run(run)))) == 2


def test_misses_and_false_positives_are_those_of_the_matching(make_run: MakeRun) -> None:
    """A scene of two objects: one found, one not; and two wrong detections beside them."""
    run = make_run(images=1, steps=100)
    box = {"image_id": 1, "category_id": 1, "iscrowd": 0, "difficult": 0}
    objects = [
        {**box, "id": 5, "bbox": [10, 10, 30, 30]},
        {**box, "id": 6, "bbox": [80, 80, 40, 40]},
        {**box, "id": 7, "bbox": [120, 10, 30, 30], "difficult": 1},
    ]
    rows = [(0.2, [10, 10, 30, 30]), (0.1, [60, 10, 20, 20]), (0.15, [70, 80, 20, 20]),
            (0.3, [120, 10, 30, 30])]  # fmt: skip
    detections = [{"image_id": 1, "category_id": 1, "score": score, "bbox": corners} for score, corners in rows]
    edit(run / "evaluation/ground_truth.json", lambda one: one.update(annotations=objects))
    (run / "evaluation/detections.json").write_text(json.dumps(detections))
    (run / "evaluation/calibration.json").write_text(json.dumps({"draw_threshold": 0.12}))
    matches = {"detections": [True, False, False, None], "ground_truth": {"5": 0, "6": None, "7": 3}}
    (run / "evaluation/matches.json").write_text(json.dumps(matches))
    source = PictureSource(read_run(run))
    assert [picture.caption for picture in misses(source)] == ["disk, not detected: scene_001.png"]
    assert [picture.caption for picture in false_positives(source)] == [
        "disk 0.15: scene_001.png",
        "disk 0.10: scene_001.png",
    ]
    assert [picture.caption for picture in gallery(source)] == ["scene_001.png: objects 3, detections 3, wrong 1"]


def test_two_runs_are_shown_side_by_side(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=4, steps=100)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (run / "scenes" / "scene_001.png").unlink()
    pictures = side_by_side({"focal": read_run(run), "ap": read_run(other, images=tmp_path)}, count=4)
    assert pictures.columns == 2
    assert [picture.caption for picture in pictures.figures] == [
        f"{loss}: scene_{number:03d}.png" for number in (2, 3, 4) for loss in ("Focal loss", "AP-loss")
    ]
