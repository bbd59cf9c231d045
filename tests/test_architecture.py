"""The way of a batch, as docs/architecture.md tells it, leads through files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def files_on_the_way():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.split("## The way of a training batch")[1].split("##")[0]
    for row in re.findall(r"^\| *\d+ *\| (.*?) \|", table, flags=re.MULTILINE):
        first, *others = re.findall(r"`([\w/]+\.py)`", row)
        yield first, [str(Path(first).with_name(name)) for name in others]


def test_a_batch_takes_at_most_fifteen_files_and_each_exists():
    way = list(files_on_the_way())
    assert 10 <= len(way) <= 15
    for first, alternatives in way:
        for file in [first, *alternatives]:
            assert (ROOT / "src/aploss" / file).is_file(), file


def test_every_package_is_in_the_picture():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    picture = text.split("```")[1]
    packages = [path.name for path in (ROOT / "src/aploss").iterdir() if (path / "__init__.py").is_file()]
    for package in set(packages) - {"recipes"}:
        assert re.search(rf"\b{package}\b", picture), package
