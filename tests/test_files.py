"""Files that are there whole or not at all."""

import json
import stat
from pathlib import Path
from typing import IO

import pytest

from aploss.errors import RunError
from aploss.files import remove_unfinished, write_json, write_text, write_whole


def test_a_failed_write_leaves_the_previous_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})

    def fail(file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(RunError, match=r"state\.json cannot be written: disk full; the previous"):
        write_whole(path, fail)
    with pytest.raises(ZeroDivisionError):
        write_whole(path, lambda file: file.write(bytes([1 // 0])))
    assert json.loads(path.read_text()) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    left = tmp_path / "checkpoints" / ".last.pt.123.unfinished"
    left.write_bytes(b"half")
    (tmp_path / "checkpoints" / "last.pt").write_bytes(b"whole")
    remove_unfinished(tmp_path)
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["last.pt"]


def test_folders_are_made_and_everybody_may_read(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "page.html", "Ünïcode\udcff")  # the last has no code in UTF-8
    (path,) = (tmp_path / "new").iterdir()
    assert path.read_text(encoding="utf-8") == "Ünïcode\\udcff"
    assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444


def test_a_name_as_long_as_the_system_allows_can_be_written(tmp_path: Path) -> None:
    for letter in "ab":
        write_text(tmp_path / (letter * 255), letter)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a" * 255: "a", "b" * 255: "b"}
