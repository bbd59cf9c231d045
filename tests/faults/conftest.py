"""Runs commands for the fault suite. Each case is one fault."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import pytest
from tiny_runs import config_in, finished_run, make_config, no_page, rectangles, short_detector, spawn  # noqa: F401

SECONDS = 120  # limit for every command


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", action="store_true", help="also run the slow faults")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow_fault: only run with --faults")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--faults", default=False):
        return
    slow = [item for item in items if item.get_closest_marker("slow_fault")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow_fault")]


@dataclass(frozen=True)
class Finished:
    """A finished command."""

    code: int
    stdout: str
    stderr: str

    def assert_refused(self, *words: object, codes: tuple[int, ...] = (2,)) -> None:
        """One line on stderr that contains all ``words``, no traceback, and one of the exit codes.

        An unexpected error is also one line, with exit code 1; it never counts as refused.
        """
        assert self.code in codes, (self.code, self.stderr)
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        assert "Traceback" not in self.stdout
        assert "unexpected" not in lines[0], lines[0]
        assert [word for word in words if str(word) not in lines[0]] == [], lines[0]

    def assert_no_traceback(self) -> None:
        """Neither a traceback nor an unexpected error, whatever the exit code."""
        assert "Traceback" not in self.stdout + self.stderr, self.stderr
        assert "unexpected" not in self.stderr, self.stderr


@pytest.fixture
def call_cli(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Finished]]:
    """Calls the command line in this process, which saves the import of torch."""
    from aploss.cli.main import main

    def hangs(*_: object) -> NoReturn:
        pytest.fail(f"not finished after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, hangs)

    def call(*arguments: object) -> Finished:
        capfd.readouterr()  # discard earlier output
        signal.alarm(SECONDS)
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # --help
            code = int(stop.code or 0)
        finally:
            signal.alarm(0)
        captured = capfd.readouterr()
        return Finished(code, captured.out, captured.err)

    yield call
    signal.signal(signal.SIGALRM, before)
