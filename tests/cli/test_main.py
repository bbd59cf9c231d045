"""The command line as a stranger meets it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aploss.cli import main as cli


def test_overview_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(" ".join(command) in shown for command in cli.COMMANDS)


@pytest.mark.parametrize("words", [["trian"], ["data", "chekc"], ["--oops"]])
def test_an_unknown_command_is_one_line_and_exit_2(capsys, words):
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words[-1] in error


def test_a_group_without_its_command_lists_the_group(capsys):
    assert cli.main(["data"]) == 2
    shown = capsys.readouterr().out
    assert "data check" in shown
    assert "train" not in shown


def test_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("aploss ")


def test_a_user_error_is_one_line_and_exit_2(capsys, tmp_path):
    broken = tmp_path / "a.json"
    broken.write_text("[{")
    assert cli.main(["eval", "--annotations", str(broken), "--detections", str(broken)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"aploss eval: {broken}: ")
    assert error.count("\n") == 1


def test_debug_shows_the_traceback_before_the_line(capsys, tmp_path):
    gone = str(tmp_path / "gone.json")
    assert cli.main(["eval", "--annotations", gone, "--detections", gone, "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert error.splitlines()[-1] == f"aploss eval: {gone}: no such file"


def test_an_error_of_ours_is_one_line_too_and_its_traceback_is_kept(capsys, monkeypatch):
    def fails(*arguments, **options):
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr("aploss.theory.write_study", fails)
    assert cli.main(["theory", "consistency"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("aploss theory: unexpected ZeroDivisionError: one two; the traceback")
    assert error.count("\n") == 1
    kept = Path(re.search(r"is in (\S+)", error).group(1))
    assert "in fails" in kept.read_text()
    kept.unlink()


def test_an_error_of_the_system_is_one_line(capsys):
    assert cli.main(["data", "check", "x" * 300]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "too long" in error


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["trian"], "aploss train"),
        (["data", "chekc"], "aploss data check"),
        (["check", "folder"], "aploss data check"),
        (["train", "--los", "ap"], "--loss"),
        (["train", "--batches.sise=3"], "--batches.size"),
        (["train", "--learning_rate", "1"], "--optimizer.learning-rate"),
        (["compare", "--loss", "ap"], "--losses"),
        (["predict", "run", "image", "--treshold", "1"], "--threshold"),
        (["data", "check", "folder", "--jsn"], "--json"),
        (["eval", "--something-else-entirely"], None),
    ],
)
def test_a_misspelt_word_is_met_with_the_right_one(capsys, words, meant):
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert ("did you mean" in error) == (meant is not None)
    assert meant is None or meant in error


def test_whoever_stops_reading_ends_the_command_quietly():
    command = f"{sys.executable} -m aploss --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    # A reader that is gone before the first line:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "aploss", "--help"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_wrong_value_is_refused_by_name(capsys):
    assert cli.main(["bench", "everything"]) == 2
    told = capsys.readouterr().err
    assert "everything" in told
    assert told.count("\n") == 1
