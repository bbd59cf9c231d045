"""A run that was interrupted and resumed ends with the same bits as one that was not."""

from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import CrashError, assert_equal, crash_at, outcome, start_two

from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig, config_to_dict
from aploss.training.recipes import merge
from aploss.training.run import train

pytestmark = pytest.mark.usefixtures("no_page")

# An epoch is 4 steps: a checkpoint at step 3 is in the middle of one. The rows are means over 2 steps, so that it is
# also in the middle of a row.
SETTINGS: dict[str, Any] = {
    "schedule": {"length": 8},
    "validation": {"every": 4},
    "checkpoint_steps": 3,
    "log_steps": 2,
}
Crashes = list[Callable[[dict[str, Any]], None]]
slow = pytest.mark.slow_fault


@pytest.mark.parametrize(
    ("changes", "crashes"),
    [
        pytest.param({}, [crash_at(4)], id="in the middle of an epoch", marks=slow),
        pytest.param({"checkpoint_steps": 4}, [crash_at(6)], id="at the end of an epoch", marks=slow),
        # Before any checkpoint, in the middle of an epoch, in a validation, right after a resume.
        pytest.param(
            {"model": {"ema": 0.99}},
            [crash_at(2), crash_at(6), crash_at(4, "validation"), crash_at(8)],
            id="with EMA, four times",
        ),
        pytest.param({}, [crash_at(4), crash_at(8)], id="after two interruptions", marks=slow),
        pytest.param({"precision": "bfloat16"}, [crash_at(4)], id="with bfloat16", marks=slow),
        pytest.param(
            {"precision": "float16", "model": {"ema": 0.9}}, [crash_at(4)], id="with float16 and its loss scale"
        ),
        pytest.param(
            {"batches": {"accumulate": 2, "size": 2}, "model": {"ema": 0.9}},
            [crash_at(4)],
            id="accumulated",
            marks=slow,
        ),
        pytest.param({"batches": {"workers": 2}}, [crash_at(4)], id="with workers", marks=slow),
        pytest.param({"evaluation": {"checkpoint": "last"}}, [crash_at(6)], id="of the last weights", marks=slow),
        pytest.param(
            {"loss": "rank-sort", "precision": "bfloat16", "batches": {"accumulate": 2}, "model": {"ema": 0.9}},
            [crash_at(4), crash_at(6)],
            id="with everything at once",
            marks=slow,
        ),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    make_config: Callable[..., TrainConfig], changes: dict[str, Any], crashes: Crashes
) -> None:
    whole, broken = (make_config(name, **merge(SETTINGS, changes)) for name in ("whole", "broken"))
    train(whole)
    for crash in crashes:
        with pytest.raises(CrashError):
            train(broken, resume=True, on_progress=crash)
    train(broken, resume=True)
    assert_equal(outcome(whole.out), outcome(broken.out))


# All trainings in one process group; the signal of rank 0 is all ranks' reason to stop.
TWO_PROCESSES = """
os.environ |= values["environment"]
import signal
import torch.distributed as dist
from aploss.training.config import config_from_dict
from aploss.training.distributed import TrainingInterruptedError
from aploss.training.run import train

def stop_at(step):
    def on_progress(row):
        if (row["kind"], row["step"]) == ("train", step):
            signal.raise_signal(signal.SIGTERM)
    return on_progress

dist.init_process_group("gloo")
whole, broken = map(config_from_dict, values["configs"])
train(whole)
for step in values["stops"]:
    try:
        train(broken, resume=True, on_progress=stop_at(step))
    except TrainingInterruptedError as stop:
        print(stop)
train(broken, resume=True)
"""


@pytest.mark.slow_fault
@pytest.mark.parametrize("ranked", [False, True], ids=["ranked alone", "ranked over processes"])
def test_two_processes_resume_to_the_same_bits(
    make_config: Callable[..., TrainConfig], spawn: Callable[..., BaseProcess], tmp_path: Path, ranked: bool
) -> None:
    changes = {"log_steps": 1, "criterion": {"rank_over_processes": ranked}}
    whole, broken = (make_config(name, **merge(SETTINGS, changes)) for name in ("whole", "broken"))
    configs = [config_to_dict(config) for config in (whole, broken)]
    processes = start_two(spawn, TWO_PROCESSES, tmp_path, configs=configs, stops=[2, 5])
    for process in processes:
        process.join(timeout=300)
    logs = "\n".join((tmp_path / f"{rank}.log").read_text() for rank in (0, 1))
    assert [process.exitcode for process in processes] == [0, 0], logs
    assert logs.count("everything is saved") == 4, logs
    assert len(read_json_lines(Path(str(broken.out)) / "metrics.jsonl")) == 10
    assert_equal(outcome(whole.out), outcome(broken.out))
