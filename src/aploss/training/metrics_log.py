"""The metrics of a run as JSON lines, CSV and TensorBoard events, cut back on resume."""

import csv
import io
import json
import os
from pathlib import Path
from typing import IO, Any

from aploss.files import write_text

__all__ = ["MetricsLog", "read_rows"]

TENSORBOARD_SKIPS = ("kind", "step", "epoch", "seconds", "images")
BAD_FILE = "bad_numbers.jsonl"
CSV_COLUMNS = (
    "kind", "step", "epoch", "loss", "classification", "box", "lr", "gradient_norm",
    "AP", "AP50", "AP75", "APs", "APm", "APl", "images_per_second", "seconds",
)  # fmt: skip


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line torn by a kill is left out."""
    rows: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


class MetricsLog:
    """Appends rows to ``metrics.jsonl``, ``metrics.csv`` and ``tensorboard/``.

    Args:
        folder: the run folder.
        step: the step the run goes on from: rows after it are cut off, because they are about to
            be written again. 0 for a new run.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        jsonl, table, bad = (folder / name for name in ("metrics.jsonl", "metrics.csv", BAD_FILE))
        rows = _cut_back(jsonl, step)
        header = dict(zip(CSV_COLUMNS, CSV_COLUMNS, strict=True))
        write_text(table, "".join(map(_csv_line, [header, *rows])))
        if bad.is_file():
            _cut_back(bad, step)
        self._bad_file = bad
        self._jsonl: IO[str] = jsonl.open("a", encoding="utf-8")
        self._csv: IO[str] = table.open("a", encoding="utf-8", newline="")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, row: dict[str, Any]) -> None:
        """Writes one row, with ``kind`` and ``step`` in it, to all three."""
        self._jsonl.write(_json_line(row))
        self._csv.write(_csv_line(row))
        self._jsonl.flush()
        self._csv.flush()
        for name, value in row.items():
            if name not in TENSORBOARD_SKIPS and isinstance(value, int | float):
                self._board.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def add_bad(self, row: dict[str, Any]) -> None:
        """Writes one row, with ``step`` in it, to the file of skipped steps."""
        with self._bad_file.open("a", encoding="utf-8") as file:
            file.write(_json_line(row))

    def flush_to_disk(self) -> None:
        """Makes sure that a checkpoint written next has its rows, even after a power cut."""
        for file in (self._jsonl, self._csv):
            os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the files."""
        self._jsonl.close()
        self._csv.close()
        self._board.close()


def _cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    rows = [row for row in read_rows(path) if row["step"] <= step]
    write_text(path, "".join(map(_json_line, rows)))
    return rows


def _json_line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _csv_line(row: dict[str, Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([row.get(name, "") for name in CSV_COLUMNS])
    return line.getvalue()
