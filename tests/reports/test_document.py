"""The examples of docs/reports.md do what it says."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "reports.md"


def test_the_examples_run_and_write_what_they_say(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(images=1, steps=100).rename(tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, str(DOCUMENT), "exec"), {})
    for page in ("runs/demo/report.html", "convergence.html"):
        assert (tmp_path / page).is_file()
