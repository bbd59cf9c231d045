"""Several runs one after the other under ``torchrun``: the processes meet once, and one writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from aploss.reproduction.compare import compare, comparison_plan

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


def test_a_comparison_of_two_processes_is_finished(pictures: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(pictures), str(tmp_path / "page")]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "page" / "results.json").read_text())
    assert found["complete"]
    assert [row["values"]["AP"][0] is not None for row in found["rows"]] == [True, True]
