"""`aploss export`, and `aploss predict` with the file it wrote."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from short_detector import register_short_detector

from aploss.cli.main import main
from aploss.detectors import build_detector, save_detector
from aploss.evaluation.calibration import Calibration


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    detector = build_detector(register_short_detector(), class_names=["cat", "dog"], test_size=(64, 128))
    for weight in detector.head.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    detector.calibration = Calibration(x=[0.0, 0.05, 1.0], y=[0.0, 0.5, 0.9])
    detector.draw_threshold = 0.5
    folder = tmp_path_factory.mktemp("run")
    save_detector(detector, folder / "checkpoints" / "best.pt")
    return folder


def test_the_file_predicts_what_the_run_predicts(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "new" / "model.onnx"
    assert main(["export", str(run_folder), "--out", str(model)]) == 0
    told = capsys.readouterr().out
    assert "classes: cat, dog" in told
    assert "scores: calibrated" in told
    assert [path.name for path in model.parent.iterdir()] == [model.name]

    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    found = {}
    for name, source in (("run", run_folder), ("file", model)):
        out = tmp_path / name
        code = main(["predict", str(source), str(tmp_path / "image.png"), "--out", str(out),
                     "--device", "cpu"])  # fmt: skip
        assert code == 0
        found[name] = json.loads((out / "detections.json").read_text())
    assert 0 < len(found["run"]) == len(found["file"])
    for one, other in zip(found["run"], found["file"], strict=True):
        assert other["score"] == pytest.approx(one["score"], abs=1e-4)
        assert other["score"] >= 0.5
