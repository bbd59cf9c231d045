"""Comparisons of losses: what is trained, and several runs in a row under ``torchrun``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aploss.errors import ConfigError
from aploss.experiments.compare import comparison_plan
from aploss.training.config import differing_keys

SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from aploss.experiments.compare import compare, comparison_plan

data, out = sys.argv[1:]
tiny = {
    "data": data, "device": "cpu", "splits": {"train": "train", "validation": "val"},
    "batches": {"size": 4, "image_size": 64, "workers": 0},
    "model": {"options": {"test_size": [64, 64]}}, "evaluation": {"split": "test"},
}
plan = comparison_plan(["ap", "focal"], recipe="any-cpu", seeds=[0], changes=tiny, steps=2,
                       validations=1)
results = compare(plan, out)
assert results.complete
assert all(run.summary.processes == 2 for run in results.runs.values())
"""


def test_rows_differ_in_the_loss_alone() -> None:
    plan = comparison_plan(["ap", "focal", "ce-ohem"], recipe="demo", seeds=[0])
    first = plan.variants[0].config
    for variant in plan.variants[1:]:
        assert differing_keys(first, variant.config) == ["loss"]


def test_a_recipes_settings_of_a_loss_are_taken() -> None:
    plan = comparison_plan(["ap", "focal"], recipe="voc-ssd512", seeds=[0])
    assert plan.variants[1].config.criterion.options == {"alpha": 0.25, "gamma": 1.0}


def test_unknown_and_repeated_losses_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no loss .fokal.; choose one of: .* did you mean .focal."):
        comparison_plan(["ap", "fokal"], recipe="demo", seeds=[0])
    for losses in ([], ["ap", "ap"]):
        with pytest.raises(ConfigError, match="rows of different names"):
            comparison_plan(losses, recipe="demo", seeds=[0])


def test_a_comparison_of_two_processes_is_finished(pictures: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(pictures), str(tmp_path / "page")]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "page" / "results.json").read_text())
    assert found["complete"]
    assert [row["values"]["AP"][0] is not None for row in found["rows"]] == [True, True]
