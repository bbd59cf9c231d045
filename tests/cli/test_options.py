"""The parser that all commands share: spelling, help and the words for a mistake."""

import os
import re
import subprocess
import sys

import pytest
import torch

from aploss.cli import main as cli
from aploss.cli.options import in_one_line


@pytest.mark.parametrize("command", cli.COMMANDS, ids=" ".join)
@pytest.mark.parametrize("columns", ["80", "120"])
def test_every_command_has_help_with_examples_that_is_free_of_python_and_fits(capsys, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    shown, examples = capsys.readouterr().out.split("examples:")
    assert f"usage: aploss {' '.join(command)}" in shown
    assert f"aploss {' '.join(command)}" in examples
    for word in ("Literal", "<class", "null)", "type:", "dict[", "==SUPPRESS=="):
        assert word not in shown
    lines = [line for line in shown.splitlines() if "{" not in line]  # a list of choices is one word to argparse
    assert max(map(len, lines)) <= int(columns)
    assert not re.search(r"--[\w.]*_", shown + examples), "options are spelt with dashes"
    assert "--quiet" in shown
    assert ("--threads" in shown) == (command[0] != "data")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train --batches.size many", "--batches.size: expected a whole number, got many"),
        ("train --deterministic maybe", "--deterministic: expected true or false or null, got maybe"),
        ("train --schedule.kind x", "--schedule.kind: expected one of 'milestones', 'cosine', got x"),
        ("train --batches.image_size=x", "--batches.image-size: expected a whole number or tuple[int, int], got x"),
        ("train --threads 0 --recipe demo", "--threads 0: must be at least 1"),
        ("data check", "PATH is missing: aploss data check PATH"),
        ("data convert here --to voc", "--out is missing: aploss data convert here --to voc --out"),
    ],
)
def test_a_mistake_is_told_in_plain_words(capsys, words, told):
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_values_that_look_like_options_of_the_detector_keep_their_underscores(capsys):
    words = ["train", "--recipe", "demo", "--model.options.anchors_per_cell=9", "--print-config"]
    assert cli.main(words) == 0
    assert "anchors_per_cell: 9" in capsys.readouterr().out


def test_threads_are_set_for_libraries_still_to_be_loaded_and_for_torch(capsys, monkeypatch):
    before = torch.get_num_threads()
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    try:
        assert cli.main(["train", "--recipe", "demo", "--threads", "3", "--print-config"]) == 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["OMP_NUM_THREADS"]) == ("PASSIVE", "3")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other OpenMP libraries")
def test_the_openmp_library_of_torch_finds_its_threads_asleep():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    words = [sys.executable, "-m", "aploss", "eval", "--threads", "3", "--annotations", "gone", "--detections", "gone"]
    environment["OMP_DISPLAY_ENV"] = "verbose"  # it says what it has found when it is loaded, here for nothing else
    told = subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stderr
    assert "gone: no such file" in told
    for line in ("OMP_NUM_THREADS = '3'", "OMP_WAIT_POLICY = 'PASSIVE'", "GOMP_SPINCOUNT = '0'"):
        assert line in told


def test_a_wait_policy_of_the_user_stays(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    cli.prepare_threads(None)
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_messages_of_the_parser_are_shortened():
    assert in_one_line("argument --a:\n  expected   one argument") == "argument --a: expected one argument"
