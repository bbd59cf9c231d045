"""Reading and writing files: every failure names the file in one line."""

import json

import pytest

from aploss.errors import DataError
from aploss.evaluation import read_detections, read_ground_truth


def test_files_are_read(tmp_path, simulate):
    truth, results = simulate(0)
    (tmp_path / "gt.json").write_text(json.dumps(truth))
    (tmp_path / "dets.json").write_text(json.dumps(results))
    assert len(read_ground_truth(tmp_path / "gt.json")) == len(truth["annotations"])
    assert len(read_detections(tmp_path / "dets.json")) == len(results)


CONTENTS = {
    "not there": (None, "no such file"),
    "empty": (b"", "not JSON"),
    "cut off": (b'[{"image_id": 1,', ("not JSON", "the ground truth is not")),
    "binary": (b"\xff\xfe\x00\x9c", "not JSON"),
    "too deep": (b'{"images": ' + b"[" * 100_000, ("not JSON", "the detections are not")),
    "the other kind": (b'"text"', "the "),
}


@pytest.mark.parametrize("read", [read_ground_truth, read_detections])
@pytest.mark.parametrize("case", CONTENTS)
def test_a_file_that_cannot_be_used_is_named(case, read, tmp_path):
    content, message = CONTENTS[case]
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path)
    messages = [message] if isinstance(message, str) else message
    assert str(caught.value).startswith(tuple(f"{path}: {one}" for one in messages))
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_detections(tmp_path)
