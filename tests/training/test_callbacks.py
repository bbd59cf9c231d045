"""Callbacks are called from start to end; trackers are tested on fakes of the documented interfaces."""

import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aploss.errors import ConfigError
from aploss.reports.run_files import read_json_lines
from aploss.training import Callback, RunFolder, TrainConfig, train
from aploss.training.callbacks import make_tracker

MakeConfig = Callable[..., TrainConfig]
TRAIN = {"kind": "train", "step": 1, "epoch": 0.5, "loss": 0.5, "box": 2.0, "seconds": 3.0}
VALIDATION = {"kind": "validation", "step": 1, "AP": 0.25, "APs": None}
RESULT = {"AP": 0.5, "AP50": None, "loss": "ap", "minutes": 2.0}
CURVES = {"train/loss": 0.5, "train/box": 2.0}


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
    assert last == ("end", summary.as_dict())
    assert [kind for kind, _ in rows] == ["log", "log", "log", "validation"]
    assert [row for _, row in rows] == read_json_lines(Path(summary.folder) / "metrics.jsonl")


@pytest.mark.usefixtures("no_page")
def test_a_run_that_fails_ends_without_a_result(make_config: MakeConfig) -> None:
    listener = Listener(fails_at=2)
    with pytest.raises(ZeroDivisionError):
        train(make_config(tracker="none"), callbacks=[listener])
    assert listener.calls[-1] == ("end", None)
    assert [kind for kind, *_ in listener.calls].count("end") == 1


def report(tracker: Callback, folder: Path, *, step: int = 0, result: dict[str, Any] | None = RESULT) -> None:
    """Calls a tracker as a short run does."""
    tracker.on_start(TrainConfig(data="builtin"), folder, step)
    tracker.on_log(TRAIN)
    tracker.on_validation(VALIDATION)
    tracker.on_end(result)


def test_tensorboard_events_hold_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = make_tracker("auto")
    report(tracker, tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/box", "validation/AP"}
    assert events.Scalars("validation/AP")[0].value == 0.25


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What fakes of wandb and mlflow are asked for, in order."""
    made: list[tuple[Any, ...]] = []

    def note(name: str, answer: Any = None) -> Callable[..., Any]:
        return lambda *values, **options: made.append((name, *values, options)) or answer

    run = SimpleNamespace(
        id="w1", info=SimpleNamespace(run_id="m1"), log=note("log"), finish=note("finish"),
        summary=SimpleNamespace(update=note("summary")),
    )  # fmt: skip
    names = ("log_params", "log_metrics", "end_run")
    for module in ("wandb", "mlflow"):
        fake = ModuleType(module)
        fake.__spec__ = ModuleSpec(module, None)
        vars(fake).update(init=note("init", run), start_run=note("start_run", run), **{one: note(one) for one in names})
        monkeypatch.setitem(sys.modules, module, fake)
    return made


def test_wandb_gets_curves_config_and_result(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    (tracker,) = make_tracker("wandb")
    report(tracker, tmp_path / "runs")
    (init, started), *rest = calls
    assert (init, started["name"], started["config"]["data"]) == ("init", "runs", "builtin")
    assert rest == [
        ("log", CURVES, {"step": 1}),
        ("log", {"validation/AP": 0.25}, {"step": 1}),
        ("summary", {"final/AP": 0.5, "final/minutes": 2.0}, {}),
        ("finish", {"exit_code": 0}),
    ]
    report(tracker, tmp_path / "runs", step=1, result=None)  # resumed, and interrupted again
    assert calls[5][1] | {"config": None} == {
        "name": "runs", "config": None, "dir": str(tmp_path / "runs"), "id": "w1", "resume": "allow"
    }  # fmt: skip
    assert calls[-1] == ("finish", {"exit_code": 1})


def test_mlflow_gets_curves_settings_and_result(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    (tracker,) = make_tracker("mlflow")
    report(tracker, tmp_path / "runs")
    assert calls[0] == ("start_run", {"run_id": None, "run_name": "runs", "nested": True})
    assert calls[1][1]["optimizer.learning_rate"] == 0.003
    assert calls[2:] == [
        ("log_metrics", CURVES, {"step": 1, "run_id": "m1"}),
        ("log_metrics", {"validation/AP": 0.25}, {"step": 1, "run_id": "m1"}),
        ("log_metrics", {"final/AP": 0.5, "final/minutes": 2.0}, {"run_id": "m1"}),
        ("end_run", "FINISHED", {}),
    ]
    assert json.loads((tmp_path / "runs/tracker.json").read_text()) == {"mlflow": "m1"}
    report(tracker, tmp_path / "runs", step=1, result=None)
    assert calls[6] == ("start_run", {"run_id": "m1", "run_name": "runs", "nested": True})
    assert [name for name, *_ in calls[7:]] == ["log_metrics", "log_metrics", "end_run"]  # settings are there already
    assert calls[-1][1] == "KILLED"


def test_a_tracker_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, extra in (("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "research")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"{name} is missing.*: pip install 'aploss\[{extra}\]'"):
            make_tracker(name)
    assert make_tracker("auto") == make_tracker("none") == []


def test_a_tracker_that_cannot_start_leaves_the_folder_free(
    make_config: MakeConfig, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_account(**options: Any) -> None:
        raise RuntimeError("log in first")

    monkeypatch.setattr(sys.modules["wandb"], "init", no_account)
    config = make_config(tracker="wandb")
    with pytest.raises(ConfigError, match="--tracker wandb cannot start: RuntimeError: log in first"):
        train(config)
    RunFolder(str(config.out)).refuse_if_taken()  # does not raise
