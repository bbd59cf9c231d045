"""The notebooks run from top to bottom, are stored without output, and show what they promise."""

import json
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra `dev`)")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (extra `dev`)")

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def run(name, tmp_path, monkeypatch, **environment):
    """What the cells of a notebook print, and the number of pictures they show."""
    for key, value in {
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        **environment,
    }.items():
        monkeypatch.setenv(key, value)
    book = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbclient.NotebookClient(
        book, timeout=900, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    return printed, sum("image/png" in output.get("data", {}) for output in outputs)


def test_the_paper_is_walked_through(tmp_path, monkeypatch):
    printed, pictures = run("the-paper.ipynb", tmp_path, monkeypatch)
    assert pictures == 6
    equation, by_hand, call = re.search(r"(0\.\d{4})  (0\.\d{4})  (0\.\d{4})", printed).groups()
    assert equation == by_hand == call
    assert "image by image 0.000, together 0.250" in printed


def test_a_detector_is_trained_and_shown_in_a_notebook(tmp_path, monkeypatch):
    from aploss.data.builtin import builtin_folder

    photographs = str(builtin_folder(cache=tmp_path, counts=(8, 6, 6)))
    printed, pictures = run(
        "your-photographs.ipynb", tmp_path, monkeypatch, APLOSS_PHOTOS=photographs, APLOSS_STEPS="2"
    )
    assert pictures == 2
    assert "8 images of circle" in printed
    assert (tmp_path / "runs/notebook/report.html").is_file()


def test_notebooks_are_stored_without_output():
    files = sorted(NOTEBOOKS.glob("*.ipynb"))
    assert len(files) == 2
    for file in files:
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            assert not cell.get("outputs"), f"{file.name}: clear the output before committing"
