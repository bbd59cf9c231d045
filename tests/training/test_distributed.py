"""Two gloo processes: the same loss curve as one, an end when one is killed, a restart by torchrun."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from accelerate import Accelerator
from short_detector import double
from tiny_runs import WITHOUT_PAGES, assert_equal, edit_annotations, keep_objects, outcome, start_two

from aploss.detectors.detector import Detector
from aploss.errors import ConfigError
from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig, config_to_dict, merge
from aploss.training.distributed import start_accelerator
from aploss.training.run import make_detector, train
from aploss.training.schedule import Schedule
from aploss.training.step import Stepper

# Every process trains the configs one after another, in one process group.
PROGRAM = """
os.environ |= values["environment"]
import datetime, signal
import torch.distributed as dist
import aploss.training.distributed
import aploss.training.run as run
from aploss.detectors.detector import Detector
from aploss.errors import AplossError
from aploss.training.config import config_from_dict

from short_detector import double

build, heads, calls = run.make_detector, Detector.heads, []

def fail(self, images):  # process 1, at its third forward pass
    calls.append(1)
    if dist.get_rank() == 1 and len(calls) == 3:
        if mode == "failing":
            raise RuntimeError("my own fault")
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "hanging": signal.SIGSTOP}[mode])
    return heads(self, images)

def spoil(self, images):  # NaN scores in process 1 at its second and third forward pass
    logits, deltas = heads(self, images)
    calls.append(1)
    if dist.get_rank() == 1 and len(calls) in (2, 3):
        logits = logits * float("nan")
    return logits, deltas

if len(values["runs"]) > 1:
    dist.init_process_group("gloo")
try:
    for mode, config in values["runs"]:
        run.make_detector = (lambda *arguments: double(build(*arguments))) if mode == "double" else build
        Detector.heads = {"": heads, "double": heads, "spoiled": spoil}.get(mode, fail)
        if mode == "hanging":
            aploss.training.distributed.STEP_TIMEOUT = datetime.timedelta(seconds=5)
        calls.clear()
        run.train(config_from_dict(config))
except AplossError as error:
    print(f"ended: {error}")
    sys.exit(2)
"""
SETTINGS: dict[str, Any] = {
    "optimizer": {"name": "sgd", "learning_rate": 0.001, "weight_decay": 1e-4},
    "schedule": {"length": 6, "kind": "milestones", "warmup_steps": 3, "warmup_factor": 1 / 3},
    "validation": {"every": 6},
    "criterion": {"rank_over_processes": True},
}
# Large steps, which would soon blow up a difference.
FAST: dict[str, Any] = {
    "optimizer": {"name": "adamw", "learning_rate": 0.003},
    "schedule": {"length": 6, "kind": "cosine", "warmup_steps": 2},
}
BAD: dict[str, Any] = {"schedule": {"length": 4}, "splits": {"validation": "none"}}
Spawn = Callable[..., BaseProcess]


def launch(spawn: Spawn, runs: list[tuple[str, TrainConfig]], logs: Path) -> list[BaseProcess]:
    """Starts two processes that train (mode, config) after (mode, config) together."""
    return start_two(spawn, PROGRAM, logs, runs=[(mode, config_to_dict(config)) for mode, config in runs])


@pytest.fixture(scope="module")
def settings(rectangles: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    """Mode and changes of every run of two processes."""
    fast = merge(SETTINGS, FAST)
    few = {"data": str(shutil.copytree(rectangles, tmp_path_factory.mktemp("few") / "data"))}
    edit_annotations(few["data"], "train", keep_objects(5))  # most batches have none
    edit_annotations(few["data"], "train", lambda document: document["images"].pop())  # one process would have more
    # Validation is gone through by two of the runs: all are measured at their end.
    unchecked = {"splits": {"validation": "none"}}
    averaged = {"loss": "focal", "batches": {"accumulate": 2}, "model": {"ema": 0.9}, **unchecked}
    alone = {"criterion": {"rank_over_processes": False}}
    images = Path(shutil.copytree(rectangles, tmp_path_factory.mktemp("damaged") / "data"))
    for name in ("train/train-3.png", "train/train-7.png", "val/val-2.png"):
        (images / name).write_bytes(b"no image")
    epoch = {"schedule": {"length": 4}}
    damaged = {"data": str(images), "batches": {"max_unreadable": 0.3}, **epoch}
    return {
        "paper": ("", SETTINGS),
        "ap": ("double", fast),
        "few-objects": ("double", merge(fast, {**few, **unchecked})),
        "accumulated": ("double", merge(fast, averaged)),
        "damaged": ("", merge(SETTINGS, damaged)),
        "bad-ap": ("spoiled", merge(SETTINGS, BAD)),
        "bad-alone": ("spoiled", merge(merge(SETTINGS, BAD), alone)),
    }


@pytest.fixture(scope="module")
def two(
    spawn: Spawn,
    settings: dict[str, tuple[str, dict[str, Any]]],
    config_in: Callable[..., TrainConfig],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Folder of the runs of two processes, by name."""
    folder = tmp_path_factory.mktemp("two")
    runs = [(mode, config_in(folder / name, **v)) for name, (mode, v) in settings.items()]
    processes = launch(spawn, runs, folder)
    for process in processes:
        process.join(timeout=600)
    logs = "\n".join((folder / f"{rank}.log").read_text() for rank in (0, 1))
    assert [process.exitcode for process in processes] == [0, 0], logs
    return folder


def make_double_detector(*arguments: Any) -> Detector:
    """As in PROGRAM."""
    return double(make_detector(*arguments))


def curve(folder: Path | str) -> list[float]:
    rows = read_json_lines(Path(folder) / "metrics.jsonl")
    return [row["loss"] for row in rows if row["kind"] == "train"]


def compare(one: Path, two: Path, *, tolerance: float) -> None:
    expected, found = curve(one), curve(two)
    assert len(found) == len(expected) >= 6
    assert found == pytest.approx(expected, abs=tolerance, rel=0)
    states = [
        torch.load(folder / "checkpoints/last.pt", weights_only=True)["detector"]["state"] for folder in (one, two)
    ]
    for key, value in states[0].items():
        assert torch.allclose(value, states[1][key], rtol=0, atol=tolerance), key
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, two)]
    assert [summary["processes"] for summary in summaries] == [1, 2]
    assert summaries[1]["AP"] == pytest.approx(summaries[0]["AP"], abs=1e-3)
    detections = json.loads((two / "evaluation/detections.json").read_text())
    assert {row["image_id"] for row in detections} == set(range(1, 7))


@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize("name", ["paper", "ap", "few-objects", "accumulated"])
def test_two_processes_equal_one_but_for_rounding(
    two: Path,
    settings: dict[str, tuple[str, dict[str, Any]]],
    config_in: Callable[..., TrainConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The paper's optimizer in float32, others in float64; the box loss is float32 all the same.

    In float32 rounding soon makes a difference with large steps: AdamW divides by the size of a
    gradient, so the last digit of one near zero becomes a whole step.
    """
    mode, changes = settings[name]
    if mode == "double":
        monkeypatch.setattr("aploss.training.run.make_detector", make_double_detector)
    train(config_in(tmp_path / "one", **changes))
    compare(tmp_path / "one", two / name, tolerance=2e-6 if mode == "double" else 1e-5)


@pytest.mark.parametrize("name", ["bad-ap", "bad-alone"])
def test_all_processes_skip_a_step_that_is_bad_in_one(two: Path, name: str) -> None:
    bad = read_json_lines(two / name / "bad_numbers.jsonl")
    assert [(row["step"], row["what"]) for row in bad] == [(2, "score"), (3, "score")]
    assert all("got nan" in row["detail"] for row in bad)
    assert all(len(row["images"]) == 2 for row in bad)  # of the process that found it
    assert len(curve(two / name)) == 2


def test_images_that_one_process_cannot_read_are_named_for_all(two: Path) -> None:
    summary = json.loads((two / "damaged" / "summary.json").read_text())
    names = {Path(path).name for path in summary["unreadable_images"]}
    assert names == {"train-3.png", "train-7.png", "val-2.png"}
    assert summary["steps"] == 4


@pytest.mark.parametrize("fault", ["killed", "failing", "hanging"])
def test_a_rank_that_fails_ends_the_run_of_the_others_with_a_message(
    spawn: Spawn, config_in: Callable[..., TrainConfig], tmp_path: Path, fault: str
) -> None:
    """Killed, with an error of its own, or stuck, within the time limit of a collective."""
    endless = {"schedule": {"length": 100_000}, "checkpoint_steps": 2, "validation": {"every": 9e9}}
    processes = launch(spawn, [(fault, config_in(tmp_path / "run", **merge(SETTINGS, endless)))], tmp_path)
    processes[0].join(timeout=60)
    if fault == "hanging":
        processes[1].kill()
    processes[1].join(timeout=60)
    codes = {"killed": -9, "failing": 2, "hanging": -9}
    assert [process.exitcode for process in processes] == [2, codes[fault]]
    output = (tmp_path / "0.log").read_text()
    assert "rank 0 cannot continue" in output
    assert "resume with: aploss train --resume --out" in output
    assert ("my own fault" in (tmp_path / "1.log").read_text()) == (fault == "failing")
    assert torch.load(tmp_path / "run/checkpoints/last.pt", weights_only=True)["training"]["step"] == 2


def test_losses_that_cannot_rank_over_processes_refuse_it(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config(loss="smooth-ap", criterion={"rank_over_processes": True})
    detector = make_detector(config, ("red", "green"))
    two = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="smooth-ap cannot rank over processes"):
        Stepper(config, detector, Schedule(config.schedule, 4), cast(Accelerator, two), str)


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED"])
def test_engines_that_shard_the_weights_are_refused(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(ConfigError, match=f"(?i){engine} is not supported"), start_accelerator(torch.device("cpu")):
        pass


def test_the_accelerator_of_a_calling_program_does_not_change_the_precision(
    spawn: Spawn, config_in: Callable[..., TrainConfig], finished_run: TrainConfig, tmp_path: Path
) -> None:
    program = """
from accelerate import Accelerator
from aploss.training.config import config_from_dict
from aploss.training.run import train
own = Accelerator(cpu=True, mixed_precision="bf16")
train(config_from_dict(values["config"]))
assert own.mixed_precision == "bf16" and own.native_amp
"""
    config = config_in(tmp_path / "run", schedule={"length": 3})
    process = spawn(program, log=tmp_path / "log", config=config_to_dict(config))
    process.join(timeout=120)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    assert_equal(outcome(finished_run.out), outcome(tmp_path / "run"))


# --- started by a launcher ---

PLUGIN = f"""{WITHOUT_PAGES}
import os, signal
import aploss.training.run as run
from short_detector import double, register_short_detector
from aploss.detectors.checkpoint import Checkpoint
from aploss.training.step import Stepper
register_short_detector()
build, load, step = run.make_detector, Checkpoint.detector, Stepper.step
run.make_detector = lambda *arguments: double(build(*arguments))
Checkpoint.detector = lambda self: double(load(self))

def killed_once(self, number, batches):
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if "KILL" in os.environ and first and os.environ["RANK"] == "1" and number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, number, batches)

Stepper.step = killed_once
"""
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
# Without --multi_gpu it would start processes on CPUs by mpirun alone; the device is the config's.
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]


def run_launcher(launcher: list[str], config: TrainConfig, folder: Path, **environment: str) -> str:
    """Runs ``aploss train`` in two processes; returns what they print."""
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "config.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
    words = ["-m", "aploss", "train", "--quiet", "--tracker", "none", "--plugin", "plugin.py"]
    words += ["--recipe", "config.yaml"]
    helpers = str(Path(__file__).parents[1] / "helpers")
    path = os.pathsep.join([helpers, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def launched(config_in: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that accelerate launch started and nothing disturbed."""
    folder = tmp_path_factory.mktemp("launched")
    run_launcher(ACCELERATE, config_in(folder / "run", **SETTINGS, checkpoint_steps=2), folder)
    return folder / "run"


@pytest.mark.usefixtures("no_page")
def test_two_processes_of_accelerate_launch_have_the_curve_of_one(
    launched: Path, config_in: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exact ranking; those of torchrun have the same bits, see below."""
    monkeypatch.setattr("aploss.training.run.make_detector", make_double_detector)
    train(config_in(tmp_path / "one", **SETTINGS))
    assert len(curve(launched)) == 6
    assert curve(launched) == pytest.approx(curve(tmp_path / "one"), abs=0, rel=2e-7)


def test_torchrun_restarts_a_killed_worker_and_trains_to_the_same_bits_as_accelerate_launch(
    launched: Path, config_in: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = config_in(tmp_path / "run", **SETTINGS, checkpoint_steps=2)
    shown = run_launcher(TORCHRUN, config, tmp_path, KILL="1")
    assert shown.count("continues from step 4") == 1, shown
    assert_equal(outcome(launched), outcome(tmp_path / "run"))
