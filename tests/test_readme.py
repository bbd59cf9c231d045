"""Every command and every Python block of the README runs.

Commands that would train for minutes get tiny settings (``TINY``), or print their help, plan or settings (``DRY``).
Setup commands are only looked up in the Makefile, since ``make test`` runs this test.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch

from aploss.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TINY = {  # added options, so that a command takes seconds
    "train": "--recipe demo --steps 2 --batch-size 2 --batches.workers 0 --validation.every 2 --out {run}",
    "train --epochs": "--print-config",
}
DRY = {"app": "--help", "compare": "--help", "reproduce": "--plan", "theory": "--help", "bench": "--help"}


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def command_lines():
    for block in blocks(""):
        yield from (shlex.split(line, comments=True) for line in block.splitlines())


def commands_of(program):
    return [words[1:] for words in command_lines() if words[0] == program]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Values for the placeholders of the README: a few built-in images, a run folder, a folder of photos."""
    from aploss.data.builtin import builtin_folder

    folder = tmp_path_factory.mktemp("readme")
    data = builtin_folder(cache=folder / "cache", counts=(8, 4, 4))
    return {
        "path/to/data": str(data), "runs/NAME": str(folder / "run"), "photos/": str(data / "test"),
        "detected": str(folder / "detected"), "model.onnx": str(folder / "model.onnx"),
    }  # fmt: skip


def test_the_readme_is_short():
    assert len(README.splitlines()) < 120


def test_make_targets_and_extras_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for (target,) in commands_of("make"):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for words in commands_of("pip"):
        assert words[0] == "install"
        for extra in re.findall(r"\[([\w,]+)\]", words[1]):
            assert re.search(rf"^{extra} = \[", project, flags=re.MULTILINE), extra


def test_no_other_program_is_named():
    assert {words[0] for words in command_lines() if words} == {"make", "pip", "aploss"}


def test_every_aploss_command_runs(places, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    commands = commands_of("aploss")
    assert len(commands) >= 9
    for words in commands:
        words = [places.get(word, word) for word in words]
        name = "train --epochs" if "--epochs" in words else words[0]
        added = (TINY | DRY).get(name, "")
        try:
            code = main([*words, *added.format(run=places["runs/NAME"]).split()])
        except SystemExit as end:  # --help
            code = end.code
        assert code == 0, f"{' '.join(words)}: {capsys.readouterr().err}"


def test_the_python_blocks_run():
    pytest.importorskip("torchvision", reason="torchvision is not installed (extra `detect`)")
    targets = torch.zeros(2, 50, 3)
    targets[:, :4, 1] = 1
    names = {"logits": torch.randn(2, 50, 3, requires_grad=True), "targets": targets}
    found = blocks("python")
    assert len(found) == 2
    for block in found:
        exec(compile(block, "README.md", "exec"), names)
    assert 0 < names["loss"].item() <= 1
    assert names["logits"].grad.abs().sum() > 0
    assert names["model"].score_thresh == 0


def test_the_picture_is_there_and_small():
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert 1000 < (ROOT / name).stat().st_size < 150_000
