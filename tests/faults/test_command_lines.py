"""Wrong command lines: one line that names the mistake, exit code 2, nothing written."""

import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aploss.cli.main import main

# Values that no machine can handle: the line names the setting, not the failure that it causes.
IMPOSSIBLE = {
    "train --data builtin --seed 99999999999999999999999": "seed",
    "train --data builtin --batches.image_size 100000": "image_size",
    "train --data builtin --model.options.test_size []": "test_size",
    "train --data builtin --model.options.test_size [0,0]": "test_size",
    "compare ap --seeds 999999999999": "seeds",
    "train --data builtin --device meta": "meta",
}
WRONG = """
train --data
train --data nowhere
train --data notes.txt
train --data builtin --loss nothing
train --data builtin --detector nothing
train --data builtin --seed x
train --data builtin --device nothing
train --data builtin --precision half
train --data builtin --max-minutes soon
train --data builtin --log_steps 0
train --data builtin --schedule.kind straight
train --data builtin --optimizer.name adam
train --data builtin --optimizer.learning_rate -1
train --data builtin --batches.size 0
train --data builtin --batches.image_size [1,2,3]
train --data builtin --model.frozen nothing
train --data builtin --model.weights nowhere.pt
train --data builtin --model.options.nothing 3
train --data builtin --criterion.options.delta -1
train --data builtin --criterion.options.gamma 2
train --data builtin --splits.train monday
train --data builtin --batches
train --data builtin --=3
train --recipe nowhere.yaml
train --recipe notes.txt
train --recipe nowhere
train --resume --out nowhere
train --plugin nowhere.py --data builtin
eval nowhere --data builtin
eval --annotations nowhere.json --detections nowhere.json
eval runs/demo --data builtin --annotations notes.txt
eval --annotations notes.txt --detections notes.txt --metric voc
eval --annotations gt.json --detections dets.json --iou 2
eval --annotations gt.json --detections dets.json --metric voc12 --max-detections 5
eval --annotations gt.json --detections dets.json --data builtin
predict
predict nowhere photos --out x
predict nowhere.onnx picture.png --out x
predict photos picture.png --out x
predict nowhere picture.png --out x --threshold high
export
export nowhere --out x.onnx
export nowhere --out x.onnx --size 3
export nowhere --out model.pt
data check nowhere
data check notes.txt
data check builtin --format pascal
data show builtin --out x.xyz
data show builtin --count 0
data show builtin --out x.png --augment light --seed -1
data convert nowhere --to coco --out x
data convert builtin --to coco --out notes.txt
compare nothing
compare ap ap
compare ap --seeds 0
compare ap --steps 0
compare ap --data nowhere
reproduce table9
reproduce table2 --scale huge
theory theorem9
bench nothing
""".strip().splitlines()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a text file, a picture and an empty folder; training must never start."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "notes.txt").write_text("just a few words: [\n")
    Image.new("RGB", (8, 8)).save("picture.png")
    truth = {"images": [{"id": 1}], "categories": [{"id": 1, "name": "cell"}], "annotations": []}
    (tmp_path / "gt.json").write_text(json.dumps(truth))
    found = [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 2, 2], "score": 0.5}]
    (tmp_path / "dets.json").write_text(json.dumps(found))

    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("training has started")

    monkeypatch.setattr("aploss.training.loop.Loop.run", never)


def refused(line: str, read: Callable[[], Any]) -> str:
    """Runs a wrong command line and returns its one line of error."""
    before = {path.name for path in Path().iterdir()}
    assert main(shlex.split(line)) == 2, line
    error = read().err
    assert error.count("\n") == 1, error
    assert error.startswith("aploss"), error
    assert "unexpected" not in error, error
    assert "Traceback" not in error, error
    assert {path.name for path in Path().iterdir()} == before, line
    return error


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], line: str) -> None:
    error = refused(line, capsys.readouterr)
    assert len(error) < 1000


@pytest.mark.parametrize("line", IMPOSSIBLE)
def test_an_impossible_value_is_named(capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert IMPOSSIBLE[line] in refused(line, capsys.readouterr)


ESCAPE = "\x1b]0;taken\x07\x9b31m\u202e"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A COCO dataset whose class and image have terminal escapes in their names, and a damaged image."""
    from PIL import Image

    names = [f"a{ESCAPE}.png", f"b{ESCAPE}.png"]
    Image.effect_noise((40, 30), 50).save(tmp_path / "photos" / names[0])
    (tmp_path / "photos" / names[1]).write_bytes(b"not an image")
    images = [{"id": k, "file_name": name, "width": 40, "height": 30} for k, name in enumerate(names, start=1)]
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 10, 12]}
    truth = {"images": images, "annotations": [box], "categories": [{"id": 1, "name": f"cell{ESCAPE}"}]}
    (tmp_path / "photos" / "train.json").write_text(json.dumps(truth))
    return tmp_path / "photos"


@pytest.mark.parametrize("line", ["data check photos", "data show photos --out x.png", f"data check 'photos{ESCAPE}'"])
@pytest.mark.regression("33a370e")
def test_no_control_sequence_of_a_dataset_reaches_the_terminal(
    capsys: pytest.CaptureFixture[str], hostile: Path, line: str
) -> None:
    main(shlex.split(line))
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert not set(text) & set("\x1b\x07\x9b\u202e"), text
    assert r"\x1b" in text or line.startswith("data show")


@pytest.mark.regression("33a370e")
def test_output_in_another_encoding_has_escapes_in_place_of_missing_characters(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hostile / "train.json").write_text((hostile / "train.json").read_text().replace("cell", "\u221a\u7d30\u80de"))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="cp1252", write_through=True))
    assert main(["data", "check", str(hostile)]) == 1
    assert rb"\u7d30" in sys.stdout.buffer.getvalue()
