"""The progress display: lines, a bar, or warnings only."""

import io

import pytest

from aploss.training import callbacks as module
from aploss.training.callbacks import Progress

TRAIN = {"kind": "train", "step": 5, "loss": 1.5, "images_per_second": 80.0}
VALIDATION = {"kind": "validation", "step": 5, "AP": 0.5, "AP50": 0.75, "AP75": None}


def test_a_pipe_gets_lines_at_validations_and_from_time_to_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    shown = Progress(quiet=False)
    shown.begin(total=10, done=0)
    shown.row(TRAIN)  # too soon
    clock[0] = 20.0
    shown.row(TRAIN)
    shown.row(TRAIN)  # too soon again
    shown.row(VALIDATION)
    with shown.images("validating") as show:
        show(10, 50)  # too soon
        clock[0] = 40.0
        show(20, 50)
        show(30, 50)
    shown.end()
    assert capsys.readouterr().out.splitlines() == [
        "step 5/10  loss 1.500  80 images/s  20 s left",
        "step 5/10  validation  AP 0.500  AP50 0.750",
        "validating  20/50 images",
    ]


@pytest.mark.parametrize(("is_main", "warned"), [(True, "trouble\n"), (False, "")])
def test_quiet_shows_warnings_alone_and_other_ranks_show_nothing(
    capsys: pytest.CaptureFixture[str], is_main: bool, warned: str
) -> None:
    quiet = Progress(quiet=is_main, is_main=is_main)
    quiet.begin(total=10, done=0)
    quiet.note("hello")
    quiet.row(TRAIN)
    quiet.row(VALIDATION)
    with quiet.images("validating") as show:
        show(1, 2)
    quiet.warn("trouble")
    quiet.end()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", warned)


def test_a_terminal_gets_a_live_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    bar = Progress(quiet=False)
    bar.begin(total=10, done=0)
    bar.row(TRAIN)
    bar.row(VALIDATION)
    bar.step(5)
    with bar.images("validating") as show:
        show(3, 7)
    bar.note("[not markup] noted")
    bar.warn("trouble")
    bar.end()
    with bar.images("measuring test") as show:
        show(4, 9)
    text = terminal.getvalue()
    parts = ("validating", "3/7", "measuring test", "4/9", "5/10", "loss 1.500", "AP 0.500", "[not markup]", "trouble")
    assert [part for part in parts if part not in text] == []
