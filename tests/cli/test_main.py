"""The program as a whole: commands and their help, errors as one line, exit codes, threads."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aploss.cli import main as cli
from aploss.cli.commands import COMMANDS
from aploss.training import load_config

Refused = Callable[..., str]


def test_the_overview_lists_every_command_without_importing_torch() -> None:
    program = "import sys; from aploss.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(" ".join(command) in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_readable_help_with_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    shown, examples = capsys.readouterr().out.split("examples:")
    assert f"usage: aploss {' '.join(command)}" in shown
    assert f"aploss {' '.join(command)}" in examples
    for word in ("Literal", "<class", "None", "True", "dict[", "==SUPPRESS=="):
        assert word not in shown
    lines = [line for line in shown.splitlines() if "{" not in line]  # choices are not broken
    assert max(map(len, lines)) <= 80
    assert not re.search(r"--[\w.]*_", shown + examples), "options are spelt with dashes"
    assert "--quiet" in shown
    assert "--threads" in shown


@pytest.mark.parametrize("words", [["--help"], ["-h", "--recipe", "voc-ssd512"], ["--recipe", "demo", "--help"]])
def test_the_help_of_train_shows_the_values_of_the_recipe(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", *words, "--optimizer.momentum", "0.75"])
    shown = " ".join(capsys.readouterr().out.split())  # lines are broken anywhere
    assert shown.index("--batch-size") < shown.index("--seed") < shown.index("--optimizer.momentum")
    recipe = re.search(r"come from the recipe ([\w-]+) and", shown)[1]
    assert recipe in words or len(words) == 1
    config = load_config(recipe)
    for text, value in (
        ("peak learning rate of the schedule", config.optimizer.learning_rate), ("over all ranks", config.batches.size),
        ("momentum of sgd", 0.75), (f"length of the training in {config.schedule.unit}", config.schedule.length),
    ):  # fmt: skip
        assert f"{text} [{value}]" in shown


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        ("trian", "'train'"),
        ("data chekc", "'data check'"),
        ("data", "'data show'"),
        ("evaluate runs/demo", "'eval'"),
        ("train --los ap", "'--loss'"),
        ("train --batches.sise=3", "'--batches.size'"),
        ("train --learning_rate 1", "'--optimizer.learning-rate'"),
        ("data check folder --jsn", "'--json'"),
        ("eval --something-else-entirely", None),
        ("''", None),
    ],
)
def test_an_unknown_name_is_one_line_with_the_closest_known_one(
    refused: Refused, words: str, suggestion: str | None
) -> None:
    error = refused(*words.split())
    assert ("did you mean" in error) == (suggestion is not None)
    assert (suggestion or "unknown") in error


def test_debug_prints_the_traceback_before_the_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.json")
    assert cli.main(["eval", "--annotations", gone, "--detections", gone, "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert error.splitlines()[-1].startswith(f"aploss eval: {gone}: ")


def test_an_unexpected_error_is_one_line_and_its_traceback_is_saved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr("aploss.theory.write_studies", fails)
    assert cli.main(["theory", "consistency"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("aploss theory: unexpected ZeroDivisionError: one two; ")
    assert error.count("\n") == 1
    saved = Path(re.search(r"traceback in (\S+)", error).group(1))  # type: ignore[union-attr]
    assert "in fails" in saved.read_text()
    saved.unlink()


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "aploss", "--help"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_threads_are_set_for_torch_and_for_libraries_that_are_not_loaded_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # restored after the test
        monkeypatch.delenv(name)
    try:
        assert cli.main(["train", "--recipe", "demo", "--threads", "3", "--print-config"]) == 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["OMP_NUM_THREADS"]) == ("PASSIVE", "3")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    cli.set_threads(None)
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"  # the user's choice


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other OpenMP libraries")
def test_the_openmp_library_of_torch_finds_its_settings() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    words = [sys.executable, "-m", "aploss", "eval", "--threads", "3", "--annotations", "gone", "--detections", "gone"]
    environment["OMP_DISPLAY_ENV"] = "verbose"  # the library prints its settings when it is loaded
    shown = subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stderr
    for line in ("OMP_NUM_THREADS = '3'", "OMP_WAIT_POLICY = 'PASSIVE'", "GOMP_SPINCOUNT = '0'"):
        assert line in shown
