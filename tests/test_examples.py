"""Every example runs as it stands, in seconds, and prints what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def _run(name: str, tmp_path: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
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


def test_no_example_is_left_out() -> None:
    tested = re.findall(r'_run\("(\w+\.py)"', Path(__file__).read_text())
    present = [path.name for path in EXAMPLES.glob("*.py")]
    if not present:
        pytest.skip("examples are not part of this installation")
    assert sorted(tested) == sorted(present)
