"""The progress display: lines, a bar, or warnings only."""

import io

import pytest

from aploss import progress as module
from aploss.progress import Progress


def test_a_pipe_gets_notes_and_a_line_of_a_task_from_time_to_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with Progress(quiet=False) as shown:
        with shown.task("training", done=3, text="") as show:
            show(4, 10, "loss 1.500")  # too soon
            clock[0] = 20.0
            show(5, 10)
            show(6, 10)  # too soon again
        shown.note("validation")
        with shown.task("validating") as show:
            show(10, 50)  # too soon
            clock[0] = 40.0
            show(20, 50)
            show(30, 50)
    lines = [line.split("  ")[:2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [["training 5/10", "loss 1.500"], ["validation"], ["validating 20/50", "images"]]


@pytest.mark.parametrize(("is_main", "warned"), [(True, "trouble\n"), (False, "")])
def test_quiet_shows_warnings_alone_and_other_ranks_show_nothing(
    capsys: pytest.CaptureFixture[str], is_main: bool, warned: str
) -> None:
    with Progress(quiet=is_main, is_main=is_main) as quiet:
        quiet.note("hello")
        with quiet.task("validating") as show:
            show(1, 2)
        quiet.warn("trouble")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", warned)


def test_a_terminal_gets_a_live_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with Progress(quiet=False) as bar:
        with bar.task("training") as show_training, bar.task("validating") as show:
            show_training(5, 10, "loss 1.500")
            show(3, 7)
        bar.note("[not markup] noted")
        bar.warn("trouble")
    text = terminal.getvalue()
    parts = ("validating", "3/7", "5/10", "loss 1.500", "[not markup]", "trouble")
    assert [part for part in parts if part not in text] == []
