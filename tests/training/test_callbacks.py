"""Callbacks are called from start to end; trackers get the curves of a run."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, get_args, get_type_hints

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from aploss.errors import ConfigError
from aploss.reports.run_files import read_json_lines
from aploss.training import Callback, RunFolder, TrainConfig, train
from aploss.training.callbacks import make_tracker

MakeConfig = Callable[..., TrainConfig]
TRAIN = {"kind": "train", "step": 1, "epoch": 0.5, "loss": 0.5, "box": 2.0, "seconds": 3.0}
VALIDATION = {"kind": "validation", "step": 1, "AP": 0.25, "APs": None}
RESULT = {"AP": 0.5, "AP50": None, "loss": "ap", "minutes": 2.0, "steps": 3}


class Listener(Callback):
    """Remembers its calls; fails at a step."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails_at = fails_at

    def on_start(self, config: TrainConfig, folder: Path, step: int) -> None:
        self.calls.append(("start", config.seed, folder, step))

    def on_log(self, row: dict[str, Any]) -> None:
        self.calls.append(("log", row))
        if row["step"] == self.fails_at:
            raise ZeroDivisionError

    def on_validation(self, row: dict[str, Any]) -> None:
        self.calls.append(("validation", row))

    def on_end(self, result: dict[str, Any] | None) -> None:
        self.calls.append(("end", result))


@pytest.mark.usefixtures("no_page")
def test_callbacks_are_called_at_start_for_rows_and_at_end(make_config: MakeConfig) -> None:
    listener, config = Listener(), make_config(schedule={"length": 3})
    summary = train(config, callbacks=[listener, Callback()])
    first, *rows, last = listener.calls
    assert first == ("start", 0, Path(str(config.out)), 0)
    assert last == ("end", asdict(summary))
    assert [kind for kind, _ in rows] == ["log", "log", "log", "validation"]
    assert [row for _, row in rows] == read_json_lines(Path(summary.folder) / "metrics.jsonl")


@pytest.mark.usefixtures("no_page")
def test_a_run_that_fails_ends_without_a_result(make_config: MakeConfig) -> None:
    listener = Listener(fails_at=2)
    with pytest.raises(ZeroDivisionError):
        train(make_config(tracker="none"), callbacks=[listener])
    assert listener.calls[-1] == ("end", None)
    assert [kind for kind, *_ in listener.calls].count("end") == 1


@pytest.mark.usefixtures("no_page")
def test_tensorboard_gets_the_curves_and_pictures_of_detections_at_every_validation(make_config: MakeConfig) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = train(make_config(schedule={"length": 2}, validation={"every": 1}))
    events = EventAccumulator(str(Path(summary.folder) / "tensorboard")).Reload()
    rows = read_json_lines(Path(summary.folder) / "metrics.jsonl")
    for name in ("train/loss", "train/lr", "validation/AP"):
        kind, key = name.split("/")
        expected = [(row["step"], row[key]) for row in rows if row["kind"] == kind]
        assert [(point.step, pytest.approx(point.value)) for point in events.Scalars(name)] == expected
    assert events.Scalars("final/AP")[0].value == pytest.approx(summary.AP)
    pictures = events.Images("validation/detections")
    assert [picture.step for picture in pictures] == [1, 2]
    assert all((picture.width, picture.height) == (536, 536) for picture in pictures)  # four tiles of 256 pixels


class Known(GeneralTracker):
    """A tracker of Accelerate that records its calls; it stands for all that need an account."""

    requires_logging_directory = False
    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        self.calls.append(("init", project, options))

    name, tracker = "wandb", None

    def start(self) -> None:
        if os.environ.get("WANDB_PROJECT") == "closed":
            raise RuntimeError("log in first")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.calls.append(("log", values, step))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> type[Known]:
    """The tracker in place of wandb's, which counts as installed."""
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Known)
    module = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(Known, "calls", [])
    return Known


def test_a_tracker_gets_curves_settings_and_result(tmp_path: Path, known: type[Known]) -> None:
    (tracker,) = make_tracker("wandb")
    tracker.on_start(TrainConfig(data="builtin"), tmp_path / "runs", 0)
    tracker.on_log(TRAIN)
    tracker.on_validation(VALIDATION)
    tracker.on_end(RESULT)
    started, (_, config), *rest = known.calls
    assert started == ("init", "aploss", {"name": "runs", "dir": str(tmp_path / "runs")})
    assert config["optimizer.learning_rate"] == 0.003
    assert all(isinstance(value, str | int | float) for value in config.values())
    assert rest == [
        ("log", {"train/loss": 0.5, "train/box": 2.0}, 1),
        ("log", {"validation/AP": 0.25}, 1),
        ("log", {"final/AP": 0.5, "final/minutes": 2.0}, 3),
        ("finish",),
    ]


def test_every_tracker_of_accelerate_can_be_chosen() -> None:
    choices = get_args(get_type_hints(TrainConfig)["tracker"])
    assert {*choices} == {"auto", "none", *LOGGER_TYPE_TO_CLASS}


def test_a_tracker_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, extra in (("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "research")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"pip install 'aploss\[{extra}\]'"):
            make_tracker(name)
    assert make_tracker("auto") == make_tracker("none") == []


def test_a_tracker_that_cannot_start_leaves_the_folder_free(
    make_config: MakeConfig, known: type[Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "closed")
    config = make_config(tracker="wandb")
    with pytest.raises(ConfigError, match="--tracker wandb cannot start: RuntimeError: log in first"):
        train(config)
    RunFolder(str(config.out)).refuse_if_taken()  # does not raise
