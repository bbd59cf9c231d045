"""`aploss data show`: a sheet that opens, the same every time, and one line for mistakes."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aploss.cli.main import main
from aploss.data.builtin import builtin_folder


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> str:
    cache = tmp_path_factory.mktemp("cache")
    return str(builtin_folder(cache=cache, image_size=64, counts=(6, 2, 2)))


def show(folder: str, out: Path, *options: str) -> np.ndarray:
    assert main(["data", "show", folder, "--out", str(out), *options]) == 0
    with Image.open(out) as sheet:
        return np.asarray(sheet.convert("RGB"))


def test_sheet_shows_the_asked_number_of_images_of_the_split(
    shapes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = show(shapes, tmp_path / "new" / "sheet.png", "--split", "train", "--count", "4")
    assert sheet.shape[1] == 2 * 308 + 8
    line = capsys.readouterr().out
    assert "sheet.png" in line
    assert "4 of 6 images" in line
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sheet.png"]
    show(shapes, tmp_path / "all.png", "--split", "val", "--count", "99")
    assert "2 of 2 images" in capsys.readouterr().out


def test_augmented_sheets_differ_from_plain_ones_and_repeat_by_seed(
    shapes: str, tmp_path: Path
) -> None:
    common = ("--split", "train", "--count", "4")
    plain = show(shapes, tmp_path / "a.png", *common)
    paper = show(shapes, tmp_path / "b.png", *common, "--augment", "paper", "--size", "96")
    again = show(shapes, tmp_path / "c.png", *common, "--augment", "paper", "--size", "96")
    other = show(
        shapes, tmp_path / "d.png", *common, "--augment", "paper", "--size", "96", "--seed", "5"
    )
    assert plain.shape == paper.shape
    assert (paper == again).all()
    assert (paper != plain).any()
    assert (paper != other).any()
    wide = show(shapes, tmp_path / "e.png", *common, "--augment", "light", "--size", "48x96")
    assert wide.shape[0] < plain.shape[0]  # half as high as wide


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--count", "0"], "--count 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--size", "64"], "add --augment"),
        (["--augment", "paper", "--size", "64x"], "--size 64x: write 300"),
        (["--augment", "paper", "--size", "1x2x3"], "--size 1x2x3: write 300"),
        (["--augment", "paper", "--size", "2"], "at least 8"),
        (["--split", "nowhere"], "no split 'nowhere'"),
        (["--out", "sheet.txt"], "sheet.txt: no picture format"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(
    shapes: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    out = tmp_path / "sheet.png"
    assert main(["data", "show", shapes, "--out", str(out), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_is_said_in_one_line(
    shapes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["data", "show", shapes, "--out", str(tmp_path / "file" / "sheet.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err
