"""docs/architecture.md: the packages, the files that a batch passes, and three of its typical changes, made."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def table_rows(title):
    section = DOCUMENT.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| (?!---)(.*) \|$", section, flags=re.MULTILINE)[1:]


def test_every_package_is_in_the_picture():
    picture = DOCUMENT.split("```")[1]
    packages = [path.name for path in (ROOT / "src/aploss").iterdir() if (path / "__init__.py").is_file()]
    for package in set(packages) - {"recipes"}:
        assert re.search(rf"\b{package}\b", picture), package


def test_a_batch_passes_exactly_the_files_of_the_table():
    documented = [re.findall(r"`(.*?)`", row)[0] for row in table_rows("What happens to a training batch")]
    traced = runpy.run_path(str(ROOT / "tools/trace_batch.py"))["trace_batch"]()
    assert documented == list(traced)


def test_the_files_of_typical_changes_exist():
    rows = table_rows("Twelve typical changes")
    assert len(rows) == 12
    for row in rows:
        for file in re.findall(r"`([\w/]+\.py)`", row):
            assert (ROOT / "src/aploss" / file).is_file(), file


# file → (text that is there, text inserted before it)
CHANGES = {
    "evaluation/metrics.py": [
        ('    "APs": Average(', '    "AP90": Average("IoU 0.90", iou=0.9),\n'),
        ("    APs: float = nan", "    AP90: float = nan\n"),
    ],
    "training/run_folder.py": [("    APs: float | None", "    AP90: float | None\n")],
    "training/config.py": [
        ("    log_steps: Count", '    added: Count = setting(9, "an added option", default_before=9)\n')
    ],
    "losses/ranking/rules.py": [
        ('AUC = Rule("auc"', 'FIRST = Rule("first", lambda p, n, negatives, f0, above: n / (1 + n))\n')
    ],
}
LOSS = '''
"""1 - reciprocal rank among the negatives."""
from aploss.losses.autograd import RankingLoss, RankingOperator
from aploss.losses.ranking.rules import FIRST
from aploss.losses.traits import LossTraits, register_loss

OPERATOR = RankingOperator(FIRST)

def first_loss(scores, targets, **options):
    return OPERATOR.rank(scores, targets, **options)[0]

@register_loss("first")
class FirstLoss(RankingLoss):
    traits = LossTraits(label="First loss", colour="#117733")
    _function = staticmethod(first_loss)
'''
PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
import pytest, torch, yaml
from aploss.cli.commands import make_parser
from aploss.data.builtin import builtin_folder
from aploss.errors import AplossError
from aploss.losses import first_loss, use_backend
from aploss.training import Summary, load_config, train

folder = Path(sys.argv[1])
scores, targets = torch.tensor([3.0, 2.0, 0.0, 2.5]), torch.tensor([0, 1, 0, 1])
values = []
for backend in ("cpu", "torch"):
    with use_backend(backend):
        leaf = scores.clone().requires_grad_()
        loss = first_loss.FirstLoss(delta=0)(leaf, targets)
        loss.backward()
        values.append((loss.item(), leaf.grad.tolist()))
assert values[0] == values[1] == (0.5, [0.5, -0.25, 0.0, -0.25]), values

config = load_config("demo", {
    "data": str(builtin_folder(cache=folder / "data", image_size=64, counts=(8, 4, 4))), "out": str(folder / "run"),
    "loss": "first", "device": "cpu", "batches": {"size": 4, "image_size": 64, "workers": 0},
    "model": {"options": {"test_size": [64, 64]}}, "schedule": {"length": 2, "warmup_steps": 1},
})
train(config)
assert Summary.read(folder / "run/summary.json").AP90 is not None
assert "AP90" in (folder / "run/report.html").read_text()
assert "IoU 0.90" in (folder / "run/report.html").read_text()
assert "First loss" in (folder / "run/report.html").read_text()

assert "an added option" in make_parser(("train",)).format_help()
stored = folder / "run/config.yaml"
values = yaml.safe_load(stored.read_text())
assert values.pop("added") == 9
stored.write_text(yaml.safe_dump(values))
train(config, resume=True)  # a run from before the option existed
with pytest.raises(AplossError) as caught:
    train(replace(config, added=3), resume=True)
assert "added" in str(caught.value)
"""


def test_a_metric_a_run_option_and_a_ranking_loss_are_added_in_the_documented_files(tmp_path):
    package = tmp_path / "src/aploss"
    # With the functions that numba has compiled, but without what another process is writing.
    shutil.copytree(ROOT / "src/aploss", package, ignore=shutil.ignore_patterns("*.pyc*", "*.tmp.*"))
    for file, insertions in CHANGES.items():
        text = (package / file).read_text(encoding="utf-8")
        for place, inserted in insertions:
            assert text.count(place) == 1, (file, place)
            text = text.replace(place, inserted + place)
        (package / file).write_text(text, encoding="utf-8")
    (package / "losses/first_loss.py").write_text(LOSS, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
