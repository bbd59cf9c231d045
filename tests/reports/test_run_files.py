"""Run folders are read whatever is missing or broken in them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aploss.errors import RunError
from aploss.reports.run_files import read_run

MakeRun = Callable[..., Path]
DOCUMENTS = (
    "summary.json", "environment.json", "evaluation/ground_truth.json",
    "evaluation/detections.json", "evaluation/metrics.json", "evaluation/calibration.json",
    "evaluation/matches.json",
)  # fmt: skip


@pytest.mark.parametrize("content", [b"{", b"[1, 2", b"null", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_file_that_cannot_be_read_is_noted(make_run: MakeRun, content: bytes) -> None:
    run = make_run(images=1, steps=100)
    for file in DOCUMENTS:
        (run / file).write_bytes(content)
    found = read_run(run)
    assert [problem.split()[0] for problem in found.problems] == list(DOCUMENTS)
    assert (found.summary, found.detections) == ({}, [])


def test_lines_that_are_not_utf_8_are_left_out_and_noted(make_run: MakeRun) -> None:
    run = make_run(images=1, steps=100)
    rows = len(read_run(run).training)
    with (run / "metrics.jsonl").open("ab") as log:
        log.write(b'{"kind": "train", "note": "\xff"}\n[1]\n\n{"kind": "train", "step": 999}\n')
    found = read_run(run)
    assert len(found.problems) == 1
    assert len(found.training) == rows + 1
    assert found.training[-1]["step"] == 999


def test_the_line_that_a_kill_cut_is_no_problem(make_run: MakeRun) -> None:
    run = make_run(images=1, steps=200)
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "train", "step": 21')
    found = read_run(run)
    assert len(found.training) == 20
    assert found.problems == []
    assert len(found.validation) == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_or_folder_in_the_place_of_a_file_is_noted(make_run: MakeRun) -> None:
    run = make_run(images=1, steps=100)
    for file, make in (("summary.json", os.mkfifo), ("metrics.jsonl", os.mkdir)):
        (run / file).unlink()
        make(run / file)
    assert [problem.split()[0] for problem in read_run(run).problems] == ["summary.json", "metrics.jsonl"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunError):
        read_run(tmp_path)


def test_scores_are_the_calibrated_ones_where_they_fit_the_detections(make_run: MakeRun) -> None:
    run = make_run(images=1, steps=100)
    calibration = json.loads((run / "evaluation/calibration.json").read_text())
    assert read_run(run).scores.tolist() == calibration["calibrated_scores"]
    calibration["calibrated_scores"].pop()
    (run / "evaluation/calibration.json").write_text(json.dumps(calibration))
    found = read_run(run)
    assert found.scores.tolist() == [one["score"] for one in found.detections]
