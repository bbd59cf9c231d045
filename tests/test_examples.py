"""Every example runs as it stands, in seconds, and prints what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def _run(name: str, tmp_path: Path, *launcher: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)],
        capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ap_loss_ranks_rare_positives_better_than_cross_entropy(tmp_path: Path) -> None:
    shown = _run("ap_loss_in_your_loop.py", tmp_path)
    precisions = [float(value) for value in re.findall(r"average precision ([\d.]+)", shown)]
    assert len(precisions) == 2
    cross_entropy, ap_loss = precisions
    assert ap_loss > cross_entropy


def test_the_loss_of_a_torchvision_model_is_swapped(tmp_path: Path) -> None:
    shown = _run("swap_loss_in_torchvision.py", tmp_path)
    assert shown.count("bbox_regression") == 4
    classification = [float(value) for value in re.findall(r"classification ([\d.]+)", shown)]
    assert len(classification) == 4
    assert all(0 < value <= 1 for value in classification)  # AP-loss is 1 - AP
    assert "detections" in shown


def test_predictions_are_made_from_python(tmp_path: Path) -> None:
    shown = _run("predict_with_python.py", tmp_path)
    assert len(re.findall(r": \d+ objects", shown)) == 2
    assert re.search(r"  \w+ 0\.\d\d at \[\d+, \d+, \d+, \d+\]", shown)


def test_ap_loss_lowers_in_a_head_of_ones_own(tmp_path: Path) -> None:
    shown = _run("own_head.py", tmp_path)
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", shown)]
    assert len(losses) == 5
    assert losses[0] > 0.8
    assert losses[-1] < 0.2


def test_the_usual_torchvision_loop_ranks_over_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed (extra `detect`)")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    shown = _run("torchvision_reference_loop.py", tmp_path, *launcher)
    values: dict[str, set[str]] = {}
    for batch, value in re.findall(r"batch (\d+): classification ([\d.]+)", shown):
        values.setdefault(batch, set()).add(value)
    assert len(values) == 2
    assert all(len(of_processes) == 1 for of_processes in values.values())  # one ranking for both
    assert shown.count("classification") == 4


def test_rare_positives_are_ranked_by_three_losses_tuned_alike(tmp_path: Path) -> None:
    shown = _run("imbalanced_classification.py", tmp_path)
    areas = [float(value) for value in re.findall(r"area ([\d.]+)", shown)]
    assert len(areas) == 6
    assert all(0.05 < area < 1 for area in areas)  # a random order has an area of 0.01


def test_a_hugging_face_detector_is_trained_by_the_librarys_trainer(tmp_path: Path) -> None:
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed (extra `hf`)")
    shown = _run("hugging_face_trainer.py", tmp_path)
    assert shown.count("'loss'") == 3
    assert "30 detections" in shown


def test_a_lightning_module_trains_with_ap_loss(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    shown = _run("lightning_module.py", tmp_path)
    found = re.search(r"average precision ([\d.]+)", shown)
    assert found
    assert float(found[1]) > 0.7


def test_no_example_is_left_out() -> None:
    tested = re.findall(r'_run\("(\w+\.py)"', Path(__file__).read_text())
    present = [path.name for path in EXAMPLES.glob("*.py")]
    if not present:
        pytest.skip("examples are not part of this installation")
    assert sorted(tested) == sorted(present)
