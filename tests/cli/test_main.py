"""The command line as a stranger meets it."""

import pytest

from aploss.cli import main as cli
from aploss.errors import DataError


def test_overview_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(" ".join(command) in shown for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS, ids=" ".join)
def test_every_command_has_help_with_examples(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: aploss {' '.join(command)}" in shown
    assert f"aploss {' '.join(command)}" in shown.split("examples:")[1]


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


def test_a_user_error_is_one_line_and_exit_2(capsys, monkeypatch):
    def fail(command, arguments):
        raise DataError("a.json: not JSON")

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["eval"]) == 2
    assert capsys.readouterr().err == "aploss eval: a.json: not JSON\n"


def test_a_wrong_value_is_refused_by_name(capsys):
    assert cli.main(["bench", "everything"]) == 2
    told = capsys.readouterr().err
    assert "everything" in told
    assert told.count("\n") == 1
