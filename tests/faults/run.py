"""Runs every fault, counts per area, and writes the table into docs/reliability.md: ``make faults``.

A case is one fault; a case with several records their number with ``record_property("faults", n)``, and a search its
duration with ``record_property("seconds", s)``. Exits with 1 on any failure, or if an area tried less than its minimum.
Options go to pytest (``-k images``); the table is then only printed. Faults that are tried beside the code they are
about, outside of this folder, are listed in ``ELSEWHERE``.
"""

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parents[1] / "docs" / "reliability.md"
ELSEWHERE = (
    "data/test_check_faults.py",
    "data/test_images.py",
    "data/test_paths.py",
    "losses/ranking/test_processes.py",
    "training/test_distributed.py::test_a_rank_that_fails_ends_the_run_of_the_others_with_a_message",
    "training/test_distributed.py::test_all_processes_skip_a_step_that_is_bad_in_one",
    "training/test_distributed.py::test_two_processes_equal_one_but_for_rounding[few-objects]",
    "cli/test_app.py",
    "cli/test_eval.py::TestRun::test_objects_of_unknown_classes_are_refused_or_counted",
    "training/test_splits.py::test_validation_objects_of_unknown_classes_are_refused_or_remarked",
    "cli/test_predict.py::test_a_stopped_command_resumes_and_gives_the_same_files",
)
BEGIN, END = "<!-- make faults: begin -->", "<!-- make faults: end -->"


@dataclass
class Area:
    """Files of the suite: their minimum number of faults, and the results."""

    names: str  # NAME of each file test_NAME.py, separated by spaces
    title: str
    least: int
    least_seconds: float = 0  # for a search
    passed: int = 0
    failed: int = 0
    seconds: float = 0
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> faults

    @property
    def tried(self) -> int:
        """Faults that ran, without skipped ones."""
        return self.passed + self.failed

    @property
    def complete(self) -> bool:
        """Whether enough faults ran and all passed."""
        return not self.failed and self.tried >= self.least and self.seconds >= self.least_seconds

    def row(self) -> str:
        """The row of the table."""
        least = f"{self.least:,}" + (f" in {self.least_seconds / 60:g} minutes" if self.least_seconds else "")
        skipped = "; ".join(f"{number} ({reason})" for reason, number in self.skipped.items()) or "0"
        return f"| {self.title} | {least} | {self.tried:,} | {self.passed:,} | {skipped} |"


def areas() -> list[Area]:
    """All areas with their minimum number of faults."""
    return [
        Area("annotations", "annotation files", 50),
        Area("check_faults images", "wrong values in annotations, images", 65),
        Area("eval splits", "objects of unknown classes", 2),
        Area("paths", "paths and special files", 90),
        Area("checkpoints", "checkpoints and run folders", 380),
        Area("signals", "kill -9, SIGTERM, Ctrl-C", 70),
        Area("predict", "interrupted predict", 1),
        Area("resume", "resume: identical, mapped or refused", 27),
        Area("runs", "run folders, workers, records of what ran", 17),
        Area("feature_cache", "damaged feature cache", 46),
        Area("disk", "full disk, read-only, no permission", 36),
        Area("losses", "losses", 1000),
        Area("processes distributed", "several processes", 20),
        Area("command_lines", "wrong command lines, hostile names", 65),
        Area("app", "uploads and requests to the app", 9),
        Area("fuzzing", "fuzzing", 1000, least_seconds=300),
        Area("load", "load", 3),
    ]


def count(report: Path, found: list[Area]) -> None:
    """Adds the cases of a JUnit file to their areas; a case without an area raises KeyError."""
    by_name = {name: area for area in found for name in area.names.split()}
    for case in ElementTree.parse(report).iter("testcase"):
        place = case.get("classname", "").split(".")
        name = next((part.removeprefix("test_") for part in place if part.startswith("test_")), "")
        if name not in by_name:  # a file that fails to import is also a case
            name = case.get("name", "").rpartition(".test_")[2]
        area = by_name[name]
        properties = {entry.get("name"): float(entry.get("value", "")) for entry in case.iter("property")}
        faults = int(properties.get("faults", 1))
        area.seconds += properties.get("seconds", 0)
        skip = case.find("skipped")
        if skip is not None:
            area.skipped[skip.get("message", "")] += faults
        elif case.find("failure") is not None or case.find("error") is not None:
            area.failed += faults
        else:
            area.passed += faults


def table(found: list[Area], minutes: float) -> Iterator[str]:
    """The lines of the table and the summary below it."""
    yield "| area | at least | tried | passed | skipped |"
    yield "|---|---|---|---|---|"
    yield from (area.row() for area in found)
    tried, passed = (sum(getattr(area, name) for area in found) for name in ("tried", "passed"))
    yield ""
    yield f"`make faults`, {minutes:.0f} minutes: {tried:,} faults tried, {passed:,} passed."


def write_into(page: Path, lines: list[str]) -> None:
    """Replaces the text between the two markers."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"]), encoding="utf-8")


def main() -> int:
    """Runs the suite and writes the table; returns 0 on success."""
    found, begun = areas(), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "faults.xml"
        words = ["-n", "auto", "--dist", "worksteal", "--faults", f"--junitxml={report}", "-o", "junit_family=legacy"]
        words += [*sys.argv[1:], str(FOLDER), *(str(FOLDER.parent / test) for test in ELSEWHERE)]
        code = subprocess.call([sys.executable, "-m", "pytest", *words], cwd=FOLDER.parents[1])
        count(report, found)
    lines = list(table(found, (time.monotonic() - begun) / 60))
    print("\n".join(lines))
    if not sys.argv[1:]:  # a selection of cases is not the whole suite
        write_into(PAGE, lines)
    short = [area for area in found if not area.complete]
    for area in short:
        print(f"{area.title}: {area.failed} failed, {area.tried} of at least {area.least} tried", file=sys.stderr)
    return 1 if code or short else 0


if __name__ == "__main__":
    sys.exit(main())
