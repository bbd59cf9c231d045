"""Comparisons on Ray: the same runs as in one process, also after a worker is killed."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import SETTINGS, assert_equal, outcome

from aploss.errors import ConfigError
from aploss.experiments.compare import Workers, compare
from aploss.experiments.plan import Plan, Variant
from aploss.experiments.workers import Display, Job
from aploss.training.config import TrainConfig

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
# Loaded by every worker, whose process id it leaves in the folder PIDS.
PLUGIN = """
import os, sys
from pathlib import Path
import aploss.reports.run_report
sys.path.insert(0, HELPERS)
from short_detector import register_short_detector
register_short_detector()
aploss.reports.run_report.write_run_report = lambda folder, **options: None
(Path(PIDS) / str(os.getpid())).touch()
"""


def kill_a_worker(pids: Path, cache: Path) -> None:
    """Waits for the first checkpoint, then kills one of the workers."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        if list(cache.glob("*/checkpoints/last.pt")):
            os.kill(int(min(pids.iterdir()).name), signal.SIGKILL)
            return
        time.sleep(0.05)


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'aploss[cluster]'")
def test_a_killed_worker_changes_nothing_but_the_time(
    config_in: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aploss.reports.run_report.write_run_report", lambda folder, **options: None)
    changes: dict[str, Any] = {"schedule": {**SETTINGS["schedule"], "length": 12}, "checkpoint_steps": 1}
    variants = [
        Variant(name=loss, config=config_in(tmp_path / "unused", loss=loss, **changes)) for loss in ("ap", "focal")
    ]
    plan = Plan(variants=variants, seeds=(0, 1))
    (tmp_path / "pids").mkdir()
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"HELPERS, PIDS = {str(HELPERS)!r}, {str(tmp_path / 'pids')!r}\n{PLUGIN}")
    alone = compare(plan, tmp_path / "alone", cache=tmp_path / "one", workers=Workers(cpus=1))
    killer = threading.Thread(target=kill_a_worker, args=(tmp_path / "pids", tmp_path / "two"))
    killer.start()
    workers = Workers(count=2, cpus=1, plugins=(str(plugin),))
    together = compare(plan, tmp_path / "together", cache=tmp_path / "two", workers=workers)
    killer.join()
    assert len(list((tmp_path / "pids").iterdir())) >= 3  # another worker has taken over
    assert together.complete
    for key, run in alone.runs.items():
        assert together.runs[key].folder.parent != run.folder.parent
        assert_equal(outcome(together.runs[key].folder), outcome(run.folder))
        assert together.runs[key].summary.AP == run.summary.AP


def test_a_run_that_waits_after_its_worker_was_killed_does_not_count_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("aploss.experiments.workers.LINE_INTERVAL_S", 0.0)
    row, jobs = Variant(name="ap", config=TrainConfig()), []
    for seed in range(3):
        jobs.append(Job(variant=row, config=row.config, label="", folder=tmp_path / str(seed)))
        jobs[-1].folder.mkdir()
        (jobs[-1].folder / "metrics.jsonl").write_text(json.dumps({"step": 100, "epoch": 1.0, "seconds": 10.0}) + "\n")
    Display(jobs, slots=2, quiet=False).refresh()
    assert capsys.readouterr().out.startswith("2 running, 0 finished")


def test_ray_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aploss.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"aploss\[cluster\]"):
        Workers(count=2)
    assert not Workers().uses_ray
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        Workers()
