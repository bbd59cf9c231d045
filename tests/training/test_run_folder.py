"""The run folder: metrics that are cut back, and a lock."""

import csv
from pathlib import Path

from aploss.training.run_folder import MetricsLog, read_rows


def train_row(step: int) -> dict[str, object]:
    return {"kind": "train", "step": step, "loss": step / 10}


def test_metrics_are_cut_back_to_the_checkpoint_and_go_on(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, step=0)
    for step in (1, 2, 3, 4):
        log.add(train_row(step))
    log.add({"kind": "validation", "step": 4, "AP": None, "AP50": 0.5})
    log.add_bad({"step": 2, "what": "loss"})
    log.add_bad({"step": 4, "what": "loss"})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # torn by a kill
    log = MetricsLog(tmp_path, step=2)
    log.add(train_row(3))
    log.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [row["step"] for row in read_rows(tmp_path / "bad_numbers.jsonl")] == [2]
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["kind"], row["step"], row["loss"]) for row in rows] == [
        ("train", "1", "0.1"),
        ("train", "2", "0.2"),
        ("train", "3", "0.3"),
    ]


def test_tensorboard_events_hold_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, step=0)
    log.add({**train_row(1), "box": 2.0})
    log.add({"kind": "validation", "step": 1, "AP": 0.25, "APs": None})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/box", "validation/AP"}
    assert events.Scalars("validation/AP")[0].value == 0.25
