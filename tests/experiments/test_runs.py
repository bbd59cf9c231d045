"""Real trainings, a few steps on a few small pictures, through all that needs a detector."""

import json
from pathlib import Path

import pytest
import torch
from sklearn.metrics import average_precision_score

from aploss.data.formats import load_dataset
from aploss.data.loader import make_training_loader
from aploss.detectors import build_detector
from aploss.detectors.labels import label_anchors
from aploss.experiments.paper import RANKING_AP, training_ap_loss
from aploss.experiments.reproduce import Request, page_for, reproduce
from aploss.reports.run_files import read_json_lines

RECIPE = """
detector: retinanet-short
splits: {train: train, validation: val}
log_steps: 1
batches: {size: 4, image_size: 64, workers: 0}
model: {options: {test_size: [64, 64]}}
schedule: {warmup_steps: 2}
evaluation: {split: test}
"""


@pytest.fixture(autouse=True)
def no_page_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the page at the end of each run, which takes longer than the run; that of the comparison is drawn."""
    monkeypatch.setattr("aploss.reports.run_report.write_run_report", lambda folder, **options: None)


@pytest.fixture(scope="module")
def asked(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Request:
    recipe = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    recipe.write_text(RECIPE)
    return Request(data=str(pictures), recipe=str(recipe), seeds=(0,), steps=2, tune=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests here, as a user has."""
    return tmp_path_factory.mktemp("runs") / "cache"


def test_losses_share_weights_and_data_and_their_pictures_are_side_by_side(
    asked: Request, cache: Path, tmp_path: Path
) -> None:
    results = reproduce("figure6", asked, tmp_path / "page", cache=cache)
    assert results.complete
    first_rows = []
    for run in results.runs.values():
        rows = read_json_lines(run.folder / "metrics.jsonl")
        first_rows.append(next(row for row in rows if row["kind"] == "train"))
        assert sum(row["kind"] == "validation" for row in rows) == 2
    # The box loss of the first step is a function of initial weights and batch alone.
    assert first_rows[0]["box"] == first_rows[1]["box"]
    assert first_rows[0]["classification"] != first_rows[1]["classification"]
    page = (tmp_path / "page/report.html").read_text()
    assert page.count("data:image/jpeg") == 2 * 4  # all four test images, by both models
    assert "Left: focal loss, right: AP-loss" in page


def test_several_scales_are_measured_once(
    asked: Request, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = reproduce("table3", asked, tmp_path / "page", cache=cache)
    folders = {run.folder for run in results.runs.values()}
    assert len(folders) == 1  # both rows are one run, the one of figure6
    run = next(iter(results.runs.values()))
    one, several = (row.measure.score(run) for row in results.plan.variants)
    assert one == several is not None  # so that a search chooses the same learning rate for both
    file = next(iter(folders)) / "evaluation/multi_scale.json"
    kept = json.loads(file.read_text())
    assert results.values("several scales", "AP") == [kept["values"]["AP"]]
    assert "| 42.1 |" in (tmp_path / "page/table.md").read_text()  # the paper's, on COCO
    monkeypatch.setattr("aploss.experiments.paper.load", lambda *a, **k: pytest.fail("measured again"))
    again = reproduce("table3", asked, tmp_path / "page", cache=cache)
    assert again.values("several scales", "AP") == [kept["values"]["AP"]]


def test_the_ap_loss_of_the_training_set_is_watched(asked: Request, cache: Path, tmp_path: Path) -> None:
    results = reproduce("figure5b", asked, tmp_path / "page", cache=cache)
    assert results.complete
    starts = set()
    for name in ("ap", "smooth-ap", "hinge-ap"):
        (run,) = results.finished_runs(name)
        points = json.loads((run.folder / "ap_loss.json").read_text())
        assert points["steps"] == [0, 1, 2]
        assert all(0 <= value <= 1 for value in points["values"])
        starts.add(points["values"][0])
        assert results.values(name, RANKING_AP) == [1 - points["values"][-1]]
        rows = [row for row in read_json_lines(run.folder / "metrics.jsonl") if row["kind"] == "train"]
        assert all(row["box"] == 0 for row in rows)
    assert len(starts) == 1  # the same initial weights, judged by the same loss
    (curve,) = page_for("figure5b", asked, results).entries[0].curves
    assert list(curve.steps) == [0, 1, 2]


def test_the_watched_loss_is_that_of_scikit_learn(pictures: Path) -> None:
    dataset = load_dataset(pictures, "train")
    loader = make_training_loader(dataset, batch_size=4, seed=0, preset="none", size=64)
    batches = list(loader.epoch(0))
    torch.manual_seed(0)
    detector = build_detector("retinanet-tiny", class_names=dataset.class_names).eval()
    expected = []
    for batch in batches:
        with torch.no_grad():
            scores = detector.heads(batch.images)[0]
        labels = label_anchors(torch.cat(detector.anchors_for(64, 64)), batch.targets)
        targets = labels.ranking_targets(scores.shape[-1])
        counted = targets >= 0
        expected.append(1 - average_precision_score(targets[counted], scores[counted]))
    assert training_ap_loss(detector, batches) == pytest.approx(sum(expected) / 3, abs=1e-6)
