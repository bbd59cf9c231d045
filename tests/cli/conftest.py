"""Fixtures that the tests of several commands share: a small dataset, a run with random weights, a refused command."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_training import fake_training  # noqa: F401

from aploss.cli.main import main
from aploss.data.builtin import builtin_folder
from aploss.detectors import Detector, build_detector, save_detector
from aploss.evaluation import Calibration


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in dataset with six training, two validation and six test images of 64x64 pixels."""
    return builtin_folder(cache=tmp_path_factory.mktemp("shapes"), image_size=64, counts=(6, 2, 6))


@pytest.fixture(scope="session")
def random_detector(shapes: Path) -> Callable[[int], Detector]:
    """Builds a detector with random weights, calibrated so that about half of its detections are drawn."""
    from aploss.data import load_dataset

    def build(seed: int) -> Detector:
        torch.manual_seed(seed)
        names = load_dataset(shapes, "test").class_names
        detector = build_detector("retinanet-tiny", class_names=names, test_size=(64, 128))
        for weight in detector.head.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.05)
        detector.calibration = Calibration(x=[0.0, 0.07, 1.0], y=[0.0, 0.5, 0.9])
        detector.draw_threshold = 0.5
        return detector.eval()

    return build


@pytest.fixture(scope="session")
def run_folder(random_detector: Callable[[int], Detector], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with nothing but the checkpoint of a random detector."""
    folder = tmp_path_factory.mktemp("run")
    save_detector(random_detector(0), folder / "checkpoints" / "best.pt")
    return folder


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must fail with exit code 2 and one line on stderr, which it returns."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1, captured.err
        assert "unexpected" not in captured.err
        return captured.err

    return run
