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

from aploss.errors import RunError
from aploss.plotting.style import MUTED
from aploss.reports.run_files import read_run
from aploss.reports.run_report import (
    ap_curves,
    class_bars,
    loss_curves,
    reliability_diagram,
    score_histogram,
    step_curve,
    write_run_report,
)

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
    assert plots >= {"loss.svg", "AP.svg", "precision-recall.svg", "reliability.svg", "scores.svg"}
    assert ".svg" not in plots
    text = words(page)
    summary = json.loads((run / "summary.json").read_text())
    for key in ("AP", "AP50", "AP75"):
        assert f"{summary[key]:.3f}" in text
    assert "retinanet-tiny trained with AP-loss on builtin, seed 0" in text
    assert summary["command"] in text
    assert "delta: 1.0" in text
    assert "hardware.processor a processor with a rather long name" in text
    metrics = json.loads((run / "evaluation/metrics.json").read_text())
    for name, row in metrics["per_class"].items():
        assert f"{name} {row['objects']} {row['detections']} {row['AP']:.3f}" in text
    assert "not in the folder" not in text
    assert "could not be" not in text


def test_the_same_run_gives_the_same_page(make_run: MakeRun) -> None:
    run = make_run(images=2, steps=0)
    first = write_run_report(run).read_bytes()
    assert write_run_report(run).read_bytes() == first


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named_and_the_rest_is_shown(make_run: MakeRun, file: str) -> None:
    run = make_run(images=3, steps=0)
    (run / file).unlink()
    text = words(write_run_report(run))
    assert "could not be made" not in text
    if file not in ("summary.json", "evaluation/detections.json"):
        assert f"{file} is not in the folder of this run" in text


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[]", b"{}"])
def test_broken_files_do_not_cost_the_page(make_run: MakeRun, content: bytes) -> None:
    run = make_run(images=2, steps=90)  # ends before its first validation
    for file in FILES:
        if file != "metrics.jsonl":
            (run / file).write_bytes(content)
    text = words(write_run_report(run))
    assert "Training loss" in text
    assert "could not be made" not in text


def test_a_section_with_strange_content_says_so(make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(images=2, steps=90)
    edit(run / "evaluation/metrics.json", lambda one: one.update(per_class={"cat": 3}))
    text = words(write_run_report(run))
    assert "This part could not be made (AttributeError" in text
    assert "Training loss" in text
    assert "section 'Classes' of the report is left out" in caplog.text


def test_a_run_that_was_killed_in_the_middle_has_a_page(make_run: MakeRun) -> None:
    run = make_run(images=2, steps=90)
    shutil.rmtree(run / "evaluation")
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "train", "step": 10')
    text = words(write_run_report(run))
    assert "This run has no summary yet" in text
    assert "Training loss" in text
    assert len(read_run(run).training) == 9


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        write_run_report(tmp_path / "nowhere")
    with pytest.raises(RunError, match="not the folder of a run"):
        write_run_report(tmp_path)


def test_names_from_strangers_stay_text(make_run: MakeRun) -> None:
    evil = "</td><script>alert(1)</script>`"
    run = make_run(images=3, steps=0)
    edit(run / "evaluation/ground_truth.json", lambda one: one["categories"][0].update(name=evil))
    edit(run / "evaluation/ground_truth.json", lambda one: one["images"][0].update(file_name=evil))
    edit(run / "summary.json", lambda one: one.update(data=evil, command=evil, detector=evil))
    edit(run / "environment.json", lambda one: one.update({evil: evil}))
    (run / "config.yaml").write_text(evil)

    def rename(metrics: dict) -> None:
        for key in ("per_class", "precision_recall"):
            metrics[key][evil] = metrics[key].pop("disk")

    edit(run / "evaluation/metrics.json", rename)
    page = write_run_report(run).read_text(encoding="utf-8")
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 5


def test_images_that_are_gone_are_counted(make_run: MakeRun) -> None:
    run = make_run(images=4, steps=0)
    scenes = run / "scenes"
    (scenes / "scene_001.png").unlink()
    (scenes / "scene_002.png").write_bytes(b"no picture")
    text = words(write_run_report(run))
    assert "2 image(s) could not be read, the first: " in text
    assert "scene_003.png: " in text


def test_a_run_with_one_logged_row_draws_its_charts(make_run: MakeRun) -> None:
    run = make_run(images=1, steps=100)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = [next(row for row in rows if row["kind"] == kind) for kind in ("train", "validation")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kinds))
    text = words(write_run_report(run))
    assert "could not be made" not in text
    for name in ("loss", "AP", "AP-over-time", "lr", "gradient_norm"):
        svg = (run / "plots" / f"{name}.svg").read_text()
        # A line through one point is not seen: each series must have a marker of its own colour.
        lines = re.findall(r'<use [^>]*style="fill: #[0-9a-f]{6}', svg)
        marked = [line for line in lines if MUTED not in line]
        assert len(marked) >= (3 if name in ("loss", "AP", "AP-over-time") else 1), name


TRAIN = [
    {"step": step, "loss": 2.0 / step, "classification": 1.5 / step, "box": 0.5 / step,
     "lr": 1e-3, "gradient_norm": 1.0 + step}
    for step in range(1, 200)
]  # fmt: skip
VALIDATION = [
    {"step": 100 * k, "seconds": 30.0 * k, "AP": 0.1 * k, "AP50": 0.15 * k, "AP75": 0.12 * k} for k in range(1, 6)
]
BINS = [
    {"lower": 0.0, "upper": 0.5, "confidence": 0.2, "precision": 0.3, "count": 80},
    {"lower": 0.5, "upper": 1.0, "confidence": None, "precision": None, "count": 0},
]
PLOTS = {
    "losses": lambda: loss_curves(TRAIN),
    "rate": lambda: step_curve(TRAIN, "lr"),
    "norm": lambda: step_curve(TRAIN, "gradient_norm"),
    "AP": lambda: ap_curves(VALIDATION),
    "AP over time": lambda: ap_curves(VALIDATION, against="minutes"),
    "reliability": lambda: reliability_diagram(BINS, BINS, 0.2, 0.01),
    "scores": lambda: score_histogram([0.9, 0.8], [0.1], threshold=0.5),
    "classes": lambda: class_bars({"cat": {"AP": 0.5}, "dog": {"AP": None}}),
}


@pytest.mark.parametrize("name", PLOTS)
def test_every_plot_is_one_well_formed_file_without_dates_or_addresses(name: str) -> None:
    svg = PLOTS[name]()
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert not re.search(r"20\d\d-\d\d-\d\d", svg)
    assert "<image" not in svg
    assert PLOTS[name]() == svg


@pytest.mark.parametrize("draw", [loss_curves, ap_curves])
def test_a_run_without_rows_gives_empty_axes(draw: Callable[[list], str]) -> None:
    assert ElementTree.fromstring(draw([])) is not None


def test_bars_of_many_classes_stay_on_a_page() -> None:
    svg = class_bars({f"class {k:02d}": {"AP": k / 80} for k in range(80)})
    shown = re.findall(r">(class \d\d)<", svg)
    assert len(shown) == 24
    assert shown[0] == "class 79"
    assert shown[-1] == "class 00"


def test_a_long_run_gives_a_small_file() -> None:
    rows = [{"step": step, "loss": float(np.sin(step))} for step in range(50_000)]
    assert len(loss_curves(rows)) < 80_000


def test_the_running_mean_of_a_constant_is_that_constant() -> None:
    constant = [{"step": step, "loss": 2.5} for step in range(300)]
    gaps = [{**row, "loss": float("nan") if row["step"] % 7 else 2.5} for row in constant]
    levels = []
    for rows in (constant, gaps):
        smooth = loss_curves(rows).split('<g id="line2d_')[-1]  # drawn last
        heights = re.findall(r"[ML] \S+ (\S+)", smooth.split("</g>")[0])
        assert len(heights) > 1
        levels.append(set(heights))
    assert levels[0] == levels[1]
    assert len(levels[0]) == 1


def test_images_that_could_not_be_read_are_counted_and_named(make_run: MakeRun) -> None:
    run = make_run(images=1, steps=0)
    edit(run / "summary.json", lambda summary: summary.update(unreadable_images={"a/broken.jpg": "truncated"}))
    text = words(write_run_report(run))
    assert "1 image(s) could not be read; training took others, measuring left them out: broken.jpg." in text
