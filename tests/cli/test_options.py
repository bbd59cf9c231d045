"""The parser that all commands share: its help, spelling and the settings of a run."""

import re

import pytest

from aploss.cli import main as cli
from aploss.training import load_config


@pytest.mark.parametrize("command", cli.COMMANDS, ids=" ".join)
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
    lines = [line for line in shown.split("Defaults are")[0].splitlines() if "{" not in line]  # choices are not broken
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
        ("peak learning rate", config.optimizer.learning_rate), ("images per forward pass", config.batches.size),
        ("momentum of sgd", 0.75), (f"length of the training in {config.schedule.unit}", config.schedule.length),
    ):  # fmt: skip
        assert f"{text} [{value}]" in shown
