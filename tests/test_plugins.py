"""Custom losses, detectors and data formats, each in one file outside the package.

The commands run in separate processes, since plugins stay registered.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_runs import COMMANDS, WITHOUT_PAGES, run_commands, start_process, start_two

DOCUMENT = Path(__file__).parents[1] / "docs" / "plugins.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugins of the documentation, and a dataset in the format of one of them."""
    folder = tmp_path_factory.mktemp("plugins")
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    for name, text in zip(("loss", "detector", "format"), blocks, strict=True):
        (folder / f"my_{name}.py").write_text(text)
    (folder / "photos").mkdir()
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        rows = []
        for number in range(count):
            pixels = generator.integers(0, 120, (64, 64, 3), dtype=np.uint8)
            x, y = (int(corner) for corner in generator.integers(0, 36, 2))
            pixels[y : y + 24, x : x + 24] = 250
            Image.fromarray(pixels).save(folder / "photos" / f"{split}{number}.png")
            rows.append(f"{split}{number}.png,patch,{x},{y},{x + 24},{y + 24}")
        (folder / "photos" / f"{split}.csv").write_text("\n".join(rows) + "\n")
    return folder


def plugins(*names: str) -> list[str]:
    return [word for name in names for word in ("--plugin", f"my_{name}.py")]


ALL = plugins("loss", "detector", "format")
SHORT = [
    "--recipe", "scratch-cpu", "--data", "photos", "--device", "cpu",
    "--batches.size", "3", "--batches.image_size", "64", "--batches.workers", "0",
    "--model.options", '{"test_size": [64, 64]}',
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """A run with all three plugins."""
    words = ["train", *ALL, *SHORT, "--loss", "margin", "--criterion.options", '{"margin": 0.5}']
    words += ["--detector", "my-mobilenet", "--model.options", '{"test_size": [64, 64], "width": 0.5}']
    words += ["--schedule.length", "3", "--out", "run", "--quiet"]
    done = run_commands(folder, words)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_is_trained_and_has_its_page(trained: Path) -> None:
    summary = json.loads((trained / "run/summary.json").read_text())
    assert (summary["loss"], summary["detector"]) == ("margin", "my-mobilenet")
    assert (summary["steps"], summary["split"]) == (3, "val")
    assert "Margin loss" in (trained / "run/report.html").read_text()


def test_every_process_of_a_run_loads_the_plugins(folder: Path, tmp_path: Path) -> None:
    words = ["train", *plugins("loss", "format"), *SHORT, "--batches.size", "2", "--loss", "margin"]
    words += ["--schedule.length", "2", "--out", "run-of-two", "--quiet"]
    processes = start_two(start_process, WITHOUT_PAGES + COMMANDS, tmp_path, folder=str(folder), commands=[words])
    for process in processes:
        process.join(timeout=300)
    assert [process.exitcode for process in processes] == [0, 0], (tmp_path / "0.log.stderr").read_text()
    summary = json.loads((folder / "run-of-two/summary.json").read_text())
    assert (summary["loss"], summary["processes"], summary["steps"]) == ("margin", 2, 2)


def test_a_run_predicts_exports_and_resumes(trained: Path) -> None:
    done = run_commands(
        trained,
        ["predict", "run", "photos", "--out", "found", "--threshold", "0", *ALL],
        ["export", "run", "--out", "model.onnx", *ALL],
        ["predict", "model.onnx", "photos", "--out", "found-again", "--threshold", "0"],
        ["train", "--resume", "--out", "run", "--quiet", *ALL],
    )
    assert done.returncode == 0, done.stderr
    found, again = (json.loads((trained / name / "detections.json").read_text()) for name in ("found", "found-again"))
    assert len(found) == len(again) > 0
    assert again[0]["score"] == pytest.approx(found[0]["score"], abs=1e-3)


def test_losses_of_both_kinds_are_compared(folder: Path) -> None:
    words = ["compare", "margin", "ap", "--seeds", "1", "--steps", "2", "--quiet", *plugins("loss", "format")]
    done = run_commands(folder, [*words, *SHORT, "--out", "compared"], before=WITHOUT_PAGES)
    assert done.returncode == 0, done.stderr
    assert "| Margin loss |" in done.stdout
    assert "| AP-loss |" in done.stdout
    page = (folder / "compared/report.html").read_text()
    assert "Margin loss" in page


def test_data_of_the_format_is_checked_shown_and_converted(folder: Path) -> None:
    own = plugins("format")
    done = run_commands(
        folder,
        ["data", "check", "photos", *own],
        ["data", "show", "photos", "--out", "sheet.png", *own],
        ["data", "convert", "photos", "--to", "coco", "--out", "as-coco", *own],
        ["data", "check", "as-coco"],
    )
    assert done.returncode == 0, done.stderr
    assert "csv dataset, classes: 1" in done.stdout
    assert "coco dataset, classes: 1" in done.stdout
    assert (folder / "sheet.png").is_file()


def test_a_plugin_comes_from_the_command_line_alone(trained: Path) -> None:
    # Nothing in the run folder says where the code is, and nothing loads it.
    for words in (
        ["predict", "run", "photos", "--out", "other"],
        ["train", *SHORT, "--loss", "margin", "--out", "other"],
        ["data", "check", "photos"],
    ):
        done = run_commands(trained, words)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
    assert not (trained / "other").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "mine.py"),
        ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("def broken(:", "SyntaxError"),
        ("import torch\nfrom aploss.losses import register_loss\nregister_loss('ap')(torch.nn.Identity)", "'ap'"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    done = run_commands(tmp_path, ["train", "--plugin", "mine.py", "--recipe", "demo", "--print_config"])
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
