"""Every `aploss` command in the documentation is valid: its options, settings and their combination.

The commands run as written, in a folder where the files they name exist, until the actual work would start. Inline code
may show part of a command, such as `aploss eval --metric voc07`: the required arguments are then added.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from small_datasets import write_coco, write_voc
from tiny_runs import start_process, write_rectangles

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PLACEHOLDERS = {"NAME": "table2", "PRESET": "light", "SPLIT": "val", "DIR": "new", "RUN": "runs/NAME"}
HAS_RAY = find_spec("ray") is not None  # commands that train on Ray are refused without the extra `cluster`
# Required arguments that inline code may leave out.
REST = {
    "train": "--data PATH", "eval": "--annotations gt.json --detections results.json",
    "predict": "runs/NAME photos/ --out found", "app": "runs/NAME", "export": "runs/NAME --out detector.onnx",
    "data check": "PATH", "data show": "PATH", "data convert": "PATH --to coco --out new",
    "compare": "ap focal", "reproduce": "table2",
}  # fmt: skip
RUN_UNTIL_WORK_STARTS = """
import contextlib, importlib, io, json, os
from pathlib import Path
from aploss.cli.main import main

class WorkStarts(BaseException):
    pass

def work(*arguments, **options):
    raise WorkStarts

for place in (
    "training.run.make_detector", "data.builtin.builtin_folder", "experiments.compare.compare",
    "experiments.compare.compare_runs", "experiments.reproduce.reproduce",
    "cli.eval.read_ground_truth", "cli.eval.read_detections", "cli.eval.load",
    "detectors.checkpoint.checkpoint_file", "detectors.checkpoint.load", "data.check_dataset", "data.contact_sheet",
    "data.convert_dataset",
):
    module, _, name = place.rpartition(".")
    module = importlib.import_module(f"aploss.{module}")
    assert hasattr(module, name), place
    setattr(module, name, work)
theory = importlib.import_module("aploss.theory")
theory.STUDIES |= dict.fromkeys(theory.STUDIES, work)
benchmarks = importlib.import_module("aploss.benchmarks")
benchmarks.BENCHMARKS |= dict.fromkeys(benchmarks.BENCHMARKS, (work, work))
os.chdir(values["folder"])
refused = {}
for command, attempts in values["commands"].items():
    for words in attempts:
        stderr = io.StringIO()
        try:
            with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
                code = main(words)
        except (WorkStarts, SystemExit):
            code = 0
        if code == 0:
            break
    else:
        refused[command] = stderr.getvalue()
Path(log).write_text(json.dumps(refused))
"""


def commands_in(text: str) -> Iterator[tuple[str, bool]]:
    """Command lines of a document, and whether each is in a code block."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
    for language, block in fenced.findall(text):
        if language not in ("python", "yaml", "math"):
            yield from ((line, True) for line in block.replace("\\\n", " ").splitlines())
    yield from ((" ".join(code.split()), False) for code in re.findall(r"`([^`]+)`", fenced.sub("", text)))


def words_of(line: str) -> list[str] | None:
    """The arguments of `aploss` in a line that calls it; variables and `torchrun` before it are left out."""
    called = re.match(r"(?:[A-Z_]+=\S+ )*(?:(?:torchrun|python) .*-m )?aploss (?=[a-z-])(.*)", line)
    if called is None:
        return None
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(called[1], comments=True) if word != "..."]
    words = [re.sub(r"^(\w+)(\|\w+)+$", r"\1", word) for word in words]  # voc|coco|yolo
    return [*words, "--yes"] if "paper" in words and words[0] == "reproduce" else words  # there is no GPU here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data, runs and plugins that the documentation names."""
    here = tmp_path_factory.mktemp("documented")
    write_coco(here / "coco")
    data = write_rectangles(here / "PATH")
    for name in ("photos", "new-photos", "my-photos", "path/to/data", "path/to/bccd", "path/to/SET"):
        shutil.copytree(data, here / name)
    for year, split in (("2007", "test"), ("2012", "trainval")):
        lists = write_voc(here / f"VOCdevkit/VOC{year}") / "ImageSets/Main"
        for one in {split, "trainval"}:
            shutil.copy(lists / "train.txt", lists / f"{one}.txt")
    for run in ("NAME", "demo"):
        (here / f"runs/{run}").mkdir(parents=True)
        (here / f"runs/{run}/config.yaml").write_text("data: photos\n")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/plugins.md").read_text(encoding="utf-8"), re.DOTALL)
    for name, block in zip(("my_loss", "my_detector", "my_format"), blocks, strict=False):
        (here / f"{name}.py").write_text(block)
    for name in ("mine.yaml", "vgg.yaml"):
        (here / name).write_text("extends: demo\n")
    (here / "more").mkdir()
    (here / "more/a.jpg").touch()
    (here / "examples").mkdir()
    shutil.copy(ROOT / "examples/labelme_plugin.py", here / "examples")
    return here


def test_every_command_in_the_documentation_is_valid(folder: Path) -> None:
    commands: dict[str, list[list[str]]] = {}
    for document in DOCUMENTS:
        for line, is_whole in commands_in(document.read_text(encoding="utf-8")):
            if (words := words_of(line)) and (HAS_RAY or not {"--workers", "--ray"} & {*words}):
                name = next((one for one in REST if shlex.join(words).startswith(one)), "")
                rest = [] if is_whole and "..." not in line else [words + REST.get(name, "").split()]
                if [words, *rest] not in commands.values():
                    commands[f"{document.relative_to(ROOT)}: {line}"] = [words, *rest]
    assert len(commands) > 80
    log = folder / "refused.json"
    process = start_process(RUN_UNTIL_WORK_STARTS, log=log, folder=str(folder), commands=commands)
    process.join()
    assert process.exitcode == 0
    refused = json.loads(log.read_text())
    assert not refused, "\n".join(f"{command}\n    {error}" for command, error in refused.items())
