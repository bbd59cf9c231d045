"""A full disk, a read-only one, and no permission, for every command that writes: one clear line, nothing half-written.

Each command runs in a process with a file system of its own, mounted where its results are to go.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import yaml
from tiny_runs import SETTINGS

from aploss.training.config import TrainConfig, merge
from aploss.training.run import train

CANNOT = 77  # exit code where the system does not allow what is to be tried
PROGRAM = """
import ctypes, pathlib, shutil
kind, folder = values["kind"], pathlib.Path(values["folder"])
libc = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_USERS, PRIVATE, READ_ONLY, REMOUNT = 0x20000, 0x10000000, 0x44000, 1, 32

def allowed(result):
    if result:
        print("cannot be tried:", os.strerror(ctypes.get_errno()))
        os._exit(values["cannot"])

if kind == "no permission":
    folder.chmod(0o500)
    for path in folder.rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # root may write everywhere, so that it gives up its rights
    allowed(libc.capset(header, (ctypes.c_uint32 * 6)()))
else:
    allowed(libc.unshare(NEW_MOUNTS | (NEW_USERS if os.geteuid() else 0)))
    allowed(libc.mount(b"none", b"/", None, PRIVATE, None))
    inside = folder.with_name("inside")
    shutil.copytree(folder, inside)
    size = b"size=%d" % (sum(p.stat().st_size + 8192 for p in inside.rglob("*") if p.is_file()) + values["free"])
    allowed(libc.mount(b"none", bytes(folder), b"tmpfs", 0, size))
    shutil.copytree(inside, folder, dirs_exist_ok=True)
    if kind == "full" and values["free"] <= 4096:
        (folder / "filler").write_bytes(bytes(values["free"]))
    if kind == "read-only":
        allowed(libc.mount(b"none", bytes(folder), b"tmpfs", REMOUNT | READ_ONLY, None))
os.environ |= values["environment"]
from aploss.cli.main import main
code = main(values["words"])
left = [path.name for path in folder.rglob("*") if path.is_file() and "unfinished" in path.name]
print("left half-written:", left)
sys.exit(code)
"""
SHORT = merge(SETTINGS, {"schedule": {"length": 2}, "validation": {"every": 1}})
# What is written into, and the words of a command that writes there.
COMMANDS: dict[str, list[str]] = {
    "train": ["train", "--quiet", "--recipe", "{recipe}", "--data", "{data}", "--out", "{out}/run"],
    "train --resume": ["train", "--quiet", "--resume", "--out", "{out}/run"],
    "eval": ["eval", "{run}", "--data", "{data}", "--split", "val", "--out", "{out}/scores"],
    "predict": ["predict", "{run}", "{data}/val", "--out", "{out}/found", "--quiet"],
    "export": ["export", "{run}", "--out", "{out}/model.onnx"],
    "data show": ["data", "show", "{data}", "--out", "{out}/sheet.png"],
    "data convert": ["data", "convert", "{data}", "--to", "voc", "--out", "{out}/voc"],
    "compare": [
        "compare", "ap", "--seeds", "1", "--steps", "1", "--quiet", "--recipe", "{recipe}",
        "--data", "{data}", "--out", "{out}/page",
    ],
    "reproduce": [
        "reproduce", "table1b", "--seeds", "1", "--steps", "1", "--no-tune", "--quiet", "--recipe", "{recipe}",
        "--data", "{data}", "--out", "{out}/page",
    ],
    "theory": ["theory", "consistency", "--out", "{out}/theory"],
    "bench": ["bench", "training-step", "--quick", "--out", "{out}/bench"],
    "built-in data": ["data", "show", "builtin", "--count", "1", "--out", "{elsewhere}/sheet.png"],
}  # fmt: skip
KINDS = ("full", "read-only", "no permission")
REASONS = {
    "full": "No space left on device",
    "read-only": "Read-only file system",
    "no permission": "Permission denied",
}
FAST = {("full", "data show"), ("read-only", "predict"), ("no permission", "train")}
FREE = {"train": 1 << 16, "train --resume": 1 << 16, "compare": 1 << 16, "reproduce": 1 << 16}  # enough to begin


@pytest.fixture(scope="module")
def run(config_in: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run, which is not finished."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aploss.reports.run_report.write_run_report", lambda folder, **options: None)
        train(config_in(folder, **merge(SHORT, {"max_minutes": 0.0})))
    return folder


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        pytest.param(kind, command, marks=[] if (kind, command) in FAST else pytest.mark.slow_fault)
        for kind in KINDS
        for command in COMMANDS
    ],
)
def test_what_cannot_be_written_is_one_line_and_nothing_is_left_half_written(
    spawn: Callable[..., BaseProcess], run: Path, rectangles: Path, tmp_path: Path, kind: str, command: str
) -> None:
    out, recipe = tmp_path / "out", tmp_path / "short.yaml"
    out.mkdir()
    recipe.write_text(yaml.safe_dump(SHORT))
    if command == "train --resume":
        shutil.copytree(run, out / "run")
    names = {"out": out, "run": run, "data": rectangles, "recipe": recipe, "elsewhere": tmp_path}
    words = [word.format(**names) for word in COMMANDS[command]]
    environment = {"XDG_CACHE_HOME": str(out)} if command == "built-in data" else {}
    if command.startswith("train"):
        words += ["--max-minutes", "9"]
    process = spawn(
        PROGRAM,
        log=tmp_path / "log",
        kind=kind,
        folder=str(out),
        words=words,
        free=FREE.get(command, 1 << 12),
        environment=environment,
        cannot=CANNOT,
    )
    process.join(timeout=300)
    *printed, left = (tmp_path / "log").read_text().splitlines() or [""]
    if process.exitcode == CANNOT:
        pytest.skip(left)
    errors = [line for line in printed if line.startswith("aploss ")]
    assert process.exitcode == 2, printed
    assert len(errors) == 1, printed
    assert REASONS[kind] in errors[0]
    assert "unexpected" not in errors[0]
    assert not any("Traceback" in line for line in printed), printed
    assert left == "left half-written: []"


@pytest.mark.parametrize("words", [["train", "--recipe", "demo", "--print_config"], ["--help"]])
@pytest.mark.slow_fault
def test_a_full_disk_under_the_output_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "w", encoding="ascii") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-m", "aploss", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1
