"""The document's commands are understood, and its table names every reproduction."""

import re
import shlex
from importlib import import_module
from pathlib import Path

from jsonargparse import ArgumentParser

from aploss.reproduction.registry import REPRODUCTIONS, reproduction
from aploss.reproduction.request import Request

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reproduction.md"


def test_every_command_is_understood() -> None:
    blocks = re.findall(r"```\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) >= 5
    for words in commands:
        name, *arguments = words[words.index("aploss") + 1 :]
        module = import_module(f"aploss.cli.{name}")
        parser = ArgumentParser(exit_on_error=False)
        module.add_arguments(parser)
        parser.parse_args(arguments)


def test_every_reproduction_has_a_row_with_its_length() -> None:
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if "| `" in line]
    names = [re.findall(r"`(\w+)`", row)[0] for row in rows]
    assert names == list(REPRODUCTIONS)
    for name, row in zip(names, rows, strict=True):
        if stated := re.search(r"(\d+) steps", row):
            config = reproduction(name).plan(Request()).variants[0].config
            assert config.schedule.length == int(stated.group(1)), name
