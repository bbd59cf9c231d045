"""The progress display: lines, a bar, or warnings only."""

import io

import pytest

from aploss.training import callbacks as module
from aploss.training.callbacks import Progress


def test_a_pipe_gets_notes_and_a_line_of_a_task_from_time_to_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with Progress(quiet=False) as shown:
        task = shown.add_task("training", total=10, completed=5, text="")
        shown.show(task, "loss 1.500")  # too soon
        clock[0] = 20.0
        shown.show(task, "loss 1.500")
        shown.show(task, "loss 1.500")  # too soon again
        shown.note("validation")
        with shown.images("validating") as show:
            show(10, 50)  # too soon
            clock[0] = 40.0
            show(20, 50)
            show(30, 50)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["training 5/10", "validation", "validating 20/50"]


@pytest.mark.parametrize(("is_main", "warned"), [(True, "trouble\n"), (False, "")])
def test_quiet_shows_warnings_alone_and_other_ranks_show_nothing(
    capsys: pytest.CaptureFixture[str], is_main: bool, warned: str
) -> None:
    with Progress(quiet=is_main, is_main=is_main) as quiet:
        quiet.note("hello")
        with quiet.images("validating") as show:
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
        task = bar.add_task("training", total=10, text="")
        bar.show(task, "loss 1.500")
        bar.update(task, completed=5)
        with bar.images("validating") as show:
            show(3, 7)
        bar.note("[not markup] noted")
        bar.warn("trouble")
    text = terminal.getvalue()
    parts = ("validating", "3/7", "5/10", "loss 1.500", "[not markup]", "trouble")
    assert [part for part in parts if part not in text] == []
