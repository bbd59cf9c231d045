"""A detector is the same after a file in between."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tiny_runs import assert_equal

from aploss.detectors import Detector, build_detector, load, save_detector
from aploss.detectors.checkpoint import Checkpoint, TrainingState
from aploss.errors import RunError
from aploss.evaluation import Calibration

KINDS = [("retinanet-tiny", "ce-ohem"), ("ssdlite", "focal")]


def _detector(name: str = "retinanet-tiny", loss: str = "ap") -> Detector:
    torch.manual_seed(0)
    detector = build_detector(name, class_names=["cat", "dog"], loss=loss).eval()
    detector.calibration = Calibration(x=[0.0, 0.3, 1.0], y=[0.0, 0.7, 0.95])
    detector.draw_threshold = 0.4
    return detector


@pytest.mark.parametrize(("name", "loss"), KINDS)
def test_a_loaded_detector_gives_the_very_same_detections(name: str, loss: str, tmp_path: Path) -> None:
    detector = _detector(name, loss)
    detector.nms_iou, detector.detections_per_image = 0.6, 17
    if detector.keeps_aspect_ratio:
        detector.test_size = (64, 96)
    path = save_detector(detector, tmp_path / "new" / "detector.pt")

    loaded = load(path)

    image = torch.rand(3, 70, 90)
    with torch.no_grad():
        (before,), (after,) = detector([image]), loaded([image])
    assert len(before["scores"]) == 17
    for key in ("boxes", "scores", "labels"):
        assert torch.equal(before[key], after[key])
    assert loaded.class_names == ("cat", "dog")
    assert loaded.loss_name == loss
    assert loaded.draw_threshold == 0.4
    assert loaded.calibration is not None
    assert loaded.calibration([0.3]).tolist() == [0.7]
    assert not loaded.training


def test_a_run_folder_means_its_best_checkpoint_else_its_last(tmp_path: Path) -> None:
    detector = _detector()
    detector.draw_threshold = 0.1
    save_detector(detector, tmp_path / "checkpoints" / "last.pt")
    assert load(tmp_path).draw_threshold == 0.1
    detector.draw_threshold = 0.2
    save_detector(detector, tmp_path / "checkpoints" / "best.pt")
    assert load(tmp_path).draw_threshold == 0.2
    assert load(str(tmp_path / "checkpoints" / "last.pt")).draw_threshold == 0.1


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is it a run folder"):
        load(tmp_path)


def test_a_checkpoint_keeps_all_its_fields(tmp_path: Path) -> None:
    training = TrainingState(
        loop={"step": 3, "seconds": 1.5}, optimizer={"state": {}}, scaler={}, weights=None, averaged_steps=None,
        images=2, threads=1,
    )  # fmt: skip
    for others in ({}, {"step": 2, "metrics": {"AP": 0.5}}, {"step": 3, "training": training}):
        written = Checkpoint.of(_detector(), **others)
        written.write(tmp_path / "a.pt")
        read = Checkpoint.read(tmp_path / "a.pt")
        assert read.source == tmp_path / "a.pt"
        assert_equal(asdict(replace(read, source=None)), asdict(written))


def test_a_detector_of_a_plugin_that_is_not_loaded_names_the_remedy() -> None:
    checkpoint = Checkpoint.of(_detector())
    with pytest.raises(RunError, match="--plugin"):
        replace(checkpoint, config={**checkpoint.config, "loss": "no-such-loss"}).detector()
