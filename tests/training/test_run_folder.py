"""The run folder: metrics that are cut back, and a lock."""

import csv
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aploss.errors import ConfigError, RunError
from aploss.reports.run_files import read_json_lines
from aploss.training.config import TrainConfig
from aploss.training.run import make_detector, train
from aploss.training.run_folder import MetricsLog, RunFolder, Summary

MakeConfig = Callable[..., TrainConfig]


def assert_equal(first: Any, second: Any) -> None:
    """Bit for bit, through dicts, lists and tensors."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    else:
        assert first == second


def train_row(step: int) -> dict[str, object]:
    return {"kind": "train", "step": step, "loss": step / 10}


def test_metrics_are_cut_back_to_the_checkpoint_and_go_on(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, step=0)
    for step in (1, 2, 3, 4):
        log.add(train_row(step))
    log.add({"kind": "validation", "step": 4, "AP": None, "AP50": 0.5})
    log.add_bad({"step": 2, "what": "loss"})
    log.add_bad({"step": 4, "what": "loss"})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # torn by a kill
    log = MetricsLog(tmp_path, step=2)
    log.add(train_row(3))
    log.close()
    assert [row["step"] for row in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in read_json_lines(tmp_path / "bad_numbers.jsonl")] == [2]
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["kind"], row["step"], row["loss"]) for row in rows] == [
        ("train", "1", "0.1"),
        ("train", "2", "0.2"),
        ("train", "3", "0.3"),
    ]


# --- lock ---


def test_a_lock_leaves_nothing_behind_where_no_run_was_started(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b")
    with folder.locked():
        assert folder.path.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_page")
def test_the_loser_of_two_runs_started_together_writes_nothing(make_config: MakeConfig) -> None:
    """The lock comes first: before the config, and before anything that takes long."""
    config = make_config(schedule={"length": 1})
    folder = RunFolder(str(config.out))
    with folder.locked():  # the winner, which has got no further yet
        for resume in (False, True):
            with pytest.raises(RunError, match="another process is training in"):
                train(config, resume=resume)
            assert [path.name for path in folder.path.iterdir()] == [".lock"]
        folder.create(make_config(seed=5))
        before = folder.config_file.read_bytes()
        with pytest.raises(RunError, match="already holds a run"):
            train(config)
        assert folder.config_file.read_bytes() == before


@pytest.mark.usefixtures("no_page")
def test_resume_where_nothing_can_be_written_is_one_line_and_a_finished_run_is_read(make_config: MakeConfig) -> None:
    config = make_config(schedule={"length": 2})
    summary = train(config)
    folder = Path(str(config.out))
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()  # refuses to be written, also by root
    folder.chmod(0o555)
    try:
        assert train(config, resume=True) == summary
        (folder / "summary.json").rename(folder.parent / "summary.json")
    except PermissionError:  # not root
        folder.chmod(0o755)
        (folder / "summary.json").rename(folder.parent / "summary.json")
        folder.chmod(0o555)
    try:
        with pytest.raises(RunError, match=r"nothing can be written in .*run: ") as error:
            train(config, resume=True)
        assert "\n" not in str(error.value)
    finally:
        folder.chmod(0o755)


# --- checkpoints ---


@pytest.fixture(scope="module")
def stopped(config_in: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that stopped after step 4, with a best checkpoint of step 2."""
    config = config_in(
        tmp_path_factory.mktemp("stopped") / "run",
        schedule={"length": 6}, checkpoint_steps=1, validation={"every": 2},
    )  # fmt: skip

    def stop(row: dict[str, Any]) -> None:
        if row["step"] == 5:
            raise KeyError

    with pytest.raises(KeyError):
        train(config, on_progress=stop)
    return config


@pytest.fixture
def copied(stopped: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The same run, to be damaged."""
    folder = shutil.copytree(str(stopped.out), tmp_path / "copy")
    return replace(stopped, out=str(folder))


def test_changed_bytes_of_a_checkpoint_never_load(copied: TrainConfig) -> None:
    """One bit at 100 places: it is noticed, or it changes nothing that is loaded."""
    last = RunFolder(str(copied.out)).checkpoints
    last.previous.unlink()  # or every error looks whether that one is whole
    whole = last.last.read_bytes()
    expected, places, noticed = last.load_last(), random.Random(0), 0
    for _ in range(100):
        place = places.randrange(len(whole))
        changed = bytearray(whole)
        changed[place] ^= 1 << places.randrange(8)
        last.last.write_bytes(changed)
        try:
            found = last.load_last()
        except RunError:
            noticed += 1
        else:
            assert_equal(found, expected)
    assert noticed > 90


@pytest.mark.usefixtures("no_page")
def test_the_checkpoint_before_a_damaged_one_is_offered_and_goes_on(copied: TrainConfig) -> None:
    checkpoints = RunFolder(str(copied.out)).checkpoints
    content = bytearray(checkpoints.last.read_bytes())
    content[len(content) // 2] ^= 8
    checkpoints.last.write_bytes(content)
    with pytest.raises(RunError, match=r"damaged.*of step 3, is whole.*cp .*previous\.pt") as error:
        train(copied, resume=True)
    subprocess.run(str(error.value).split("first ")[1].split(), check=True)
    assert train(copied, resume=True).steps == 6


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = torch.load(path, weights_only=True)
    edit(content)
    torch.save(content, path)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("last", lambda c: c.pop("training"), "has no training"),
        ("last", lambda c: c.pop("detector"), "has no detector"),
        ("last", lambda c: c["training"].pop("step"), "has no 'step'"),
        ("last", lambda c: c["training"].pop("stepper"), "has no 'stepper'"),
        ("last", lambda c: c["training"].pop("random"), "has no 'random'"),
        ("last", lambda c: c["training"].update(stepper=3), "does not fit"),
        ("last", lambda c: c.update(training=[1]), "does not fit"),
        ("last", lambda c: c["training"].update(random={"torch": 1}), "does not fit"),
        ("last", lambda c: c["detector"]["state"].clear(), "does not fit"),
        ("last", lambda c: c.update(detector=None), "does not fit"),
        ("best", lambda c: c.pop("step"), "has no step"),
        ("best", lambda c: c.pop("metrics"), "has no metrics"),
    ],
)
def test_a_checkpoint_with_fields_missing_is_one_line(
    copied: TrainConfig, name: str, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    checkpoints = RunFolder(str(copied.out)).checkpoints
    change(checkpoints.last.with_name(f"{name}.pt"), edit)
    checkpoints.previous.unlink()
    with pytest.raises(RunError, match=message) as error:
        train(copied, resume=True)
    assert f"{name}.pt" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_architecture_is_one_line(
    copied: TrainConfig, config_in: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    other = config_in(
        tmp_path / "other", detector="ssdlite", schedule={"length": 1}, model={"options": {}},
        splits={"validation": "none"}, evaluation={"split": "val"},
    )  # fmt: skip
    other = replace(other, model=replace(other.model, options={}))
    from aploss.detectors.checkpoint import detector_record

    record = detector_record(make_detector(other, ("red", "green")))
    last = RunFolder(str(copied.out)).checkpoints.last
    change(last, lambda content: content.update(detector=record))
    with pytest.raises(RunError, match=r"last\.pt does not fit .*config\.yaml") as error:
        train(copied, resume=True)
    assert "\n" not in str(error.value)


def test_a_config_that_is_nested_too_deeply_is_one_line(copied: TrainConfig) -> None:
    (Path(str(copied.out)) / "config.yaml").write_text("a: " + "[" * 50_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        train(copied, resume=True)


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"AP": 1}'])
def test_a_summary_that_is_none_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(RunError, match="is not the summary of a run"):
        Summary.read(tmp_path / "summary.json")
