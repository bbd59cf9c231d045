"""The run folder: metrics that are cut back, the lock, and checkpoints that are damaged."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from tiny_runs import CrashError, assert_equal, crash_at

from aploss.detectors.checkpoint import Checkpoint
from aploss.errors import RunError
from aploss.training.config import DEFAULTS_BEFORE_ADDED, TrainConfig, config_to_dict
from aploss.training.run import train
from aploss.training.run_folder import RunFolder, Summary

MakeConfig = Callable[..., TrainConfig]


def test_the_config_of_a_run_from_before_a_setting_was_added_is_read(tmp_path: Path) -> None:
    folder, config = RunFolder(tmp_path / "run"), TrainConfig(data="builtin")
    folder.create(config)
    values = config_to_dict(config)
    for key in DEFAULTS_BEFORE_ADDED:
        group, _, name = key.partition(".")
        del values[group][name]
    folder.config_file.write_text(yaml.safe_dump(values))
    found = folder.read_config()
    assert found.schedule.exact_warmup  # as it was then
    assert replace(found, schedule=config.schedule) == config


@pytest.mark.usefixtures("no_page")
def test_the_loser_of_two_runs_started_together_writes_nothing(make_config: MakeConfig) -> None:
    config = make_config(schedule={"length": 1})
    folder = RunFolder(str(config.out))
    with folder.locked():  # the winner
        for resume in (False, True):
            with pytest.raises(RunError):
                train(config, resume=resume)
            assert [path.name for path in folder.path.iterdir()] == [".lock"]


def test_a_finished_run_is_read_from_a_folder_that_is_not_writable(finished_run: TrainConfig, tmp_path: Path) -> None:
    config = replace(finished_run, out=str(shutil.copytree(str(finished_run.out), tmp_path / "copy")))
    folder = RunFolder(str(config.out))
    (folder.path / ".lock").unlink()
    (folder.path / ".lock").mkdir()  # cannot be opened, even by root
    assert train(config, resume=True) == Summary.read(folder.summary_file)
    folder.summary_file.unlink()
    with pytest.raises(RunError, match="not writable"):
        train(config, resume=True)


# --- checkpoints ---


@pytest.fixture(scope="module")
def stopped(config_in: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that stopped after step 4, with a best checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    config = config_in(folder, schedule={"length": 6}, checkpoint_steps=1, validation={"every": 2})
    with pytest.raises(CrashError):
        train(config, callbacks=[crash_at(5)])
    return config


@pytest.fixture
def copied(stopped: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The same run, to be damaged."""
    return replace(stopped, out=str(shutil.copytree(str(stopped.out), tmp_path / "copy")))


def test_the_format_of_the_previous_version_is_written_and_read(copied: TrainConfig, tmp_path: Path) -> None:
    """The keys are those of runs in the wild: they change with the format number only."""
    folder = Path(str(copied.out)) / "checkpoints"
    last, best = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("last", "best"))
    assert last.keys() == {"format", "detector", "training"}
    assert best.keys() == {"format", "detector", "step", "metrics"}
    assert best["detector"].keys() == {"config", "state", "calibration", "draw_threshold"}
    assert last["training"]["stepper"].keys() == {"optimizer", "scaler", "weights", "averaged_steps"}
    fields = {"step", "images", "threads", "data", "processes", "stopped_by", "window"}
    assert fields <= last["training"].keys()
    for content in (last, best):
        torch.save(content, tmp_path / "again.pt")
        Checkpoint.read(tmp_path / "again.pt").write(tmp_path / "written.pt")
        assert_equal(torch.load(tmp_path / "written.pt", weights_only=True), content)


def test_a_best_checkpoint_that_a_killed_older_version_did_not_write_is_written_when_the_run_is_resumed(
    config_in: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = config_in(tmp_path / "run", schedule={"length": 3}, checkpoint_steps=1, validation={"every": 2})
    folder = RunFolder(str(config.out))
    for resume in (False, True):
        with pytest.raises(CrashError):
            train(config, resume=resume, callbacks=[crash_at(3)])
        assert Checkpoint.read(folder.best).step == 2
        folder.best.unlink()


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"AP": 1}'])
def test_an_invalid_summary_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(RunError):
        Summary.read(tmp_path / "summary.json")
