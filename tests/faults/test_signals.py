"""kill -9, SIGTERM and Ctrl-C at chosen and at random moments: nothing is lost, and the same command goes on.

A command runs in a process of its own, which waits at a gate in the middle of what is to be interrupted: a training
step, a validation, a half-written checkpoint, the final measuring. There the signal finds it.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_runs import SETTINGS, WALL_CLOCK, assert_equal, checkpoint_step, outcome

import aploss.detectors.detector
from aploss.cli.main import main
from aploss.training.config import TrainConfig, config_to_dict, merge
from aploss.training.distributed import TrainingInterruptedError
from aploss.training.run import train

pytestmark = pytest.mark.usefixtures("no_page")
slow = pytest.mark.slow_fault
Spawn = Callable[..., BaseProcess]

# Waits at the gate when its place is reached for the n-th time, until there is a file "go".
GATE = """
os.setsid()
import io, pathlib, signal, time
import aploss.training.loop, aploss.training.run, aploss.training.step
gate, calls = pathlib.Path(values["gate"]), 0

def wait():
    global calls
    calls += 1
    if calls == values["nth"]:
        (gate / "here").touch()
        begun = time.monotonic()
        while not (gate / "go").exists():
            time.sleep(0.01)
            if time.monotonic() > begun + 120:  # whoever was to come is dead
                os._exit(9)

def gated(module, name):
    original = getattr(module, name)
    def function(*arguments, **options):
        wait()
        return original(*arguments, **options)
    setattr(module, name, function)

def save(record, file):  # half of the file is on the disk when the signal comes
    buffer = io.BytesIO()
    save_at_once(record, buffer)
    content = buffer.getvalue()
    file.write(content[: len(content) // 2])
    file.flush()
    wait()
    file.write(content[len(content) // 2 :])

if values["place"] == "training":
    gated(aploss.training.step.Stepper, "step")
elif values["place"] == "validation":
    gated(aploss.training.loop, "detect_split")
elif values["place"] == "measuring":
    gated(aploss.training.run, "calibrate_detections")
else:
    save_at_once, torch.save = torch.save, save
from aploss.cli.main import main
sys.exit(main(values["words"]))
"""
# Few steps, with a checkpoint, a validation and the end of an epoch among them.
SHORT = merge(SETTINGS, {"schedule": {"length": 6}, "validation": {"every": 3}, "checkpoint_steps": 2})


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of short runs."""
    path = tmp_path_factory.mktemp("recipe") / "short.yaml"
    path.write_text(yaml.safe_dump(SHORT))
    return path


@pytest.fixture(scope="module")
def words_of(recipe: Path, rectangles: Path) -> Callable[[str, Path], list[str]]:
    """The words of a command whose results go to a folder."""
    common = ["--quiet", "--recipe", str(recipe), "--data", str(rectangles)]
    more = {
        "train": ["--resume"],
        "compare": ["ap", "focal", "--seeds", "1", "--steps", "4", "--validations", "2"],
        "reproduce": ["table1b", "--seeds", "1", "--steps", "3", "--no-tune"],
    }

    def words(command: str, folder: Path) -> list[str]:
        return [command, *more[command], *common, "--out", str(folder / "out")]

    return words


@pytest.fixture(scope="module")
def whole(words_of: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a command leaves that nobody has interrupted."""
    known: dict[str, Any] = {}

    def results(command: str) -> Any:
        if command not in known:
            folder = tmp_path_factory.mktemp(f"whole-{command}")
            assert main(words_of(command, folder)) == 0
            known[command] = left_by(command, folder)
        return known[command]

    return results


def left_by(command: str, folder: Path) -> Any:
    """All that must not depend on interruptions: the bits of the run, or of all runs of a comparison, and its table."""
    assert not list(folder.rglob("*.unfinished"))
    if command == "train":
        return outcome(folder / "out")
    runs = {run.name: outcome(run) for run in (folder / "cache").iterdir() if run.is_dir()}
    results = json.loads((folder / "out" / "results.json").read_text())
    return {"runs": runs, "rows": [without_times(row) for row in results["rows"]]}


def without_times(value: Any) -> Any:
    """A document without what the clock or the place decides."""
    if isinstance(value, dict):
        skipped = (*WALL_CLOCK, "minutes", "folder", "command", "commit")
        return {key: without_times(one) for key, one in value.items() if key not in skipped}
    return [without_times(one) for one in value] if isinstance(value, list) else value


class Gated:
    """A command that waits at a gate for what is done to it."""

    def __init__(self, spawn: Spawn, words: list[str], folder: Path, *, place: str, nth: int = 1) -> None:
        self.gate = folder / f"gate-{time.monotonic_ns()}"
        self.gate.mkdir()
        self.log = self.gate / "log"
        self.process = spawn(GATE, log=self.log, words=words, gate=str(self.gate), place=place, nth=nth)
        deadline = time.monotonic() + 300  # on a busy machine
        while not (self.gate / "here").exists():
            assert self.process.is_alive(), self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        assert self.process.pid is not None
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self) -> str:
        """Lets it go on to its end; what it has printed."""
        time.sleep(0.05)  # the signal is there before the gate opens
        (self.gate / "go").touch()
        self.process.join(timeout=120)
        assert self.process.exitcode is not None, self.log.read_text()
        return self.log.read_text()


# Command, where in it, and the how many-th time.
PLACES = {
    "training": ("train", "training", 4),
    "validation": ("train", "validation", 1),
    "saving": ("train", "saving", 2),
    "measuring": ("train", "measuring", 1),
    "compare": ("compare", "training", 6),  # in the second run
    "reproduce": ("reproduce", "training", 5),
}
SIGNALS = ["SIGTERM", "SIGTERM to the group", "Ctrl-C", "Ctrl-C twice"]


def interruptions() -> list[Any]:
    fast = {("training", "SIGTERM to the group"), ("measuring", "Ctrl-C")}
    return [
        pytest.param(place, kind, id=f"{kind} while {place}", marks=[] if (place, kind) in fast else slow)
        for place in PLACES
        for kind in SIGNALS
    ]


@pytest.mark.parametrize(("place", "kind"), interruptions())
def test_a_signal_ends_a_command_in_order_and_the_same_command_goes_on(
    spawn: Spawn, words_of: Callable[..., list[str]], whole: Callable[[str], Any], tmp_path: Path, place: str, kind: str
) -> None:
    command, where, nth = PLACES[place]
    words = words_of(command, tmp_path)
    # Workers start anew for every split, and import torch: where they are hit once is enough.
    workers = ["--batches.workers", "1"] if (place, kind) == ("training", "SIGTERM to the group") else []
    gated = Gated(spawn, [*words, *workers], tmp_path, place=where, nth=nth)
    if kind.startswith("SIGTERM"):
        gated.send(signal.SIGTERM, group=kind.endswith("group"))
    else:
        gated.send(signal.SIGINT, group=True)  # as a terminal does
    if kind == "Ctrl-C twice":
        time.sleep(1.1)  # earlier it counts as an echo of the first
        if gated.process.is_alive():
            gated.send(signal.SIGINT, group=True)
    output = gated.end()
    assert gated.process.exitcode == 130, output
    if kind != "Ctrl-C twice":
        assert "Traceback" not in output
        way = "--resume --out" if command == "train" else "the same command resumes"
        assert way in output.splitlines()[-1], output
    assert main(words) == 0
    assert_equal(whole(command), left_by(command, tmp_path))


def test_a_signal_is_no_error_of_whatever_it_interrupts(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a check of the size of images, which takes every error for an answer."""
    build = aploss.detectors.detector.feature_shapes

    def interrupted(backbone: torch.nn.Module, *size: int) -> Any:
        backbone.register_forward_pre_hook(lambda *arguments: signal.raise_signal(signal.SIGTERM))
        return build(backbone, *size)

    config = make_config(schedule={"length": 1})
    with monkeypatch.context() as patch:
        patch.setattr("aploss.detectors.retinanet.feature_shapes", interrupted)
        with pytest.raises(TrainingInterruptedError, match=r"^stopped before the first step$"):
            train(config)
    assert not Path(str(config.out)).exists()
    assert train(config).steps == 1


@slow
@pytest.mark.parametrize(("place", "times"), [(p, 4 if p in ("compare", "reproduce") else 3) for p in PLACES])
def test_a_kill_at_the_worst_moment_loses_nothing(
    spawn: Spawn,
    words_of: Callable[..., list[str]],
    whole: Callable[[str], Any],
    tmp_path: Path,
    record_property: Callable[..., None],
    place: str,
    times: int,
) -> None:
    command, where, later = PLACES[place]
    record_property("faults", times)
    words = words_of(command, tmp_path)
    for number in range(times):
        # Once on its way; then as soon as it goes on, where few steps are left, or for "saving" the other way round.
        nth = later if where == "training" and number == 0 else 1
        if place == "saving" and number == 1:
            nth = 2
        gated = Gated(spawn, words, tmp_path, place=where, nth=nth)
        gated.send(signal.SIGKILL, group=True)
        gated.process.join()
    assert main(words) == 0
    assert_equal(whole(command), left_by(command, tmp_path))


KILL_PROGRAM = """
from aploss.training.config import config_from_dict
from aploss.training.run import train
train(config_from_dict(values["config"]), resume=True)
"""


@pytest.mark.parametrize("kills", [3, pytest.param(26, marks=slow)])
def test_killed_runs_always_go_on_and_end_with_the_same_bits(
    make_config: Callable[..., TrainConfig],
    spawn: Spawn,
    tmp_path: Path,
    record_property: Callable[..., None],
    kills: int,
) -> None:
    """At random moments, whatever the run is doing."""
    record_property("faults", kills)
    settings: dict[str, Any] = {
        "schedule": {"length": 6 * kills, "warmup_steps": 2},
        "validation": {"every": 5},
        "checkpoint_steps": 1,
    }
    killed, folder = make_config("killed", **settings), tmp_path / "killed"
    moments = random.Random(0)
    for number in range(kills):
        before = checkpoint_step(folder)
        process = spawn(KILL_PROGRAM, log=tmp_path / f"{number}.log", config=config_to_dict(killed))
        # Every kill hits a run that has got going; every other one after one more step.
        while process.is_alive() and checkpoint_step(folder) <= before + number % 2:
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 0.15))
        process.kill()
        process.join()
        assert checkpoint_step(folder) > before, (tmp_path / f"{number}.log").read_text()
        assert not (folder / "summary.json").is_file()
    train(killed, resume=True)
    train(make_config("whole", **settings))
    assert_equal(outcome(tmp_path / "whole"), outcome(folder))
    assert not list(folder.rglob("*.unfinished"))
