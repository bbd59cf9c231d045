"""An exported file alone finds what the detector finds, in onnxruntime."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from short_detector import ShortRetinaNet, register_short_detector

from aploss.detectors import Detector, MultiScale, Network, build_detector, register_detector
from aploss.detectors.export import OnnxDetector, export_onnx
from aploss.errors import ConfigError, RunError
from aploss.evaluation import Calibration

Pair = tuple[Detector, OnnxDetector]


def _detector(name: str, loss: str) -> Detector:
    """Random, with scores and boxes that differ clearly."""
    torch.manual_seed(0)
    detector = build_detector(name, class_names=["cat", "dog"], loss=loss)
    for layer in (detector.head.classification_head, detector.head.regression_head):
        last = list(layer.parameters())[-2:]
        for weight in last if name == "ssd300" else layer.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.2 if name == "retinanet-short" else 0.05)
    if detector.keeps_aspect_ratio:
        detector.test_size = (96, 160)
    return detector.eval()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Detector, Path]:
    """A calibrated detector, and its file for smaller images."""
    detector = _detector(register_short_detector(), "ap")
    detector.calibration = Calibration(x=[0.0, 0.1, 0.4, 1.0], y=[0.0, 0.5, 0.9, 0.95])
    detector.draw_threshold = 0.55
    return detector, export_onnx(detector, tmp_path_factory.mktemp("onnx") / "tiny.onnx", size=64)


@pytest.fixture(scope="module")
def ssd(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """With softmax scores, a fixed size of images and no file suffix."""
    detector = _detector("ssd300", "ce-ohem")
    return detector, OnnxDetector(export_onnx(detector, tmp_path_factory.mktemp("onnx") / "ssd"))


def _assert_same(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]], size: int) -> None:
    for one, other in zip(expected, found, strict=True):
        assert len(one["scores"]) == 100
        torch.testing.assert_close(other["scores"], one["scores"], rtol=0, atol=1e-4)
        # two detections with almost equal scores may change places
        rows, others = (
            torch.cat([found["boxes"] / size, 10.0 * found["labels"][:, None]], dim=1) for found in (one, other)
        )
        assert float((rows[:, None] - others).abs().amax(dim=2).amin(dim=1).max()) < 1e-4


def test_the_exported_detector_gives_the_same_detections_for_any_batch_and_size(tiny: tuple[Detector, Path]) -> None:
    detector, exported = tiny[0], OnnxDetector(tiny[1])
    exported.test_size = detector.test_size
    for count, size in ((1, (100, 130)), (2, (140, 90))):
        images = [torch.rand(3, *size, generator=torch.Generator().manual_seed(count)) for _ in range(count)]
        with torch.no_grad():
            _assert_same(exported(images), detector(images), max(size))
            _assert_same(MultiScale()(exported, images), MultiScale()(detector, images), max(size))


def test_an_exported_ssd_gives_the_same_detections_at_its_own_size_only(ssd: Pair) -> None:
    detector, exported = ssd
    images = [torch.rand(3, 100, 130, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        _assert_same(exported(images), detector(images), 130)
    with pytest.raises(ConfigError, match="300x300 pixels only"):
        MultiScale(scales=(2.0,))(exported, images)


def test_calibration_threshold_and_size_are_in_the_file(tiny: tuple[Detector, Path]) -> None:
    detector, exported = tiny[0], OnnxDetector(tiny[1])
    assert exported.class_names == ("cat", "dog")
    assert exported.test_size == (64, 107)
    assert detector.test_size == (96, 160)  # the detector itself is not changed
    exported.test_size = detector.test_size
    pixels = np.random.default_rng(0).integers(0, 256, (80, 100, 3), dtype=np.uint8)
    (expected,), (found,) = detector.predict(pixels), exported.predict(pixels)
    assert 0 < len(expected) < 100
    assert found.class_names == expected.class_names
    torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.boxes, expected.boxes, rtol=1e-4, atol=1e-2)


def test_other_programs_can_read_how_to_use_the_file(tiny: tuple[Detector, Path]) -> None:
    model = onnx.load(tiny[1])
    onnx.checker.check_model(model)
    values = {entry.key: entry.value for entry in model.metadata_props}
    assert "float32 RGB in [0, 1]" in values.pop("about")
    read = {key: json.loads(value) for key, value in values.items()}
    assert (read["class_names"], read["scores"], read["test_size"]) == (["cat", "dog"], "sigmoid", [64, 107])
    assert read["draw_threshold"] == 0.55
    assert read["calibration"] == tiny[0].calibration.to_dict()
    session = onnxruntime.InferenceSession(tiny[1], providers=["CPUExecutionProvider"])
    logits, deltas = session.run(None, {"images": np.zeros((1, 3, 64, 96), dtype=np.float32)})
    anchors = 6 * (8 * 12 + 4 * 6 + 2 * 3 + 1 * 2)  # strides 8, 16, 32, 64
    assert (logits.shape, deltas.shape) == ((1, anchors, 2), (1, anchors, 4))


def test_openvino_runs_the_file_as_documented(tiny: tuple[Detector, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Executes the paragraph of docs/prediction.md."""
    pytest.importorskip("openvino", reason="openvino is not installed")
    text = (Path(__file__).parents[2] / "docs" / "prediction.md").read_text()
    code = text.partition("import openvino")[2].partition("```")[0]
    images = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    monkeypatch.chdir(tiny[1].parent)
    values: dict[str, Any] = {"images": images.numpy()}
    exec("import openvino" + code.replace("detector.onnx", tiny[1].name), values)
    with torch.no_grad():
        expected = tiny[0].heads(images)
    for found, one in zip((values["logits"], values["deltas"]), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(found), one, rtol=1e-3, atol=1e-3)


def test_files_that_are_not_exported_detectors_are_refused(tiny: tuple[Detector, Path], tmp_path: Path) -> None:
    (tmp_path / "damaged.onnx").write_bytes(tiny[1].read_bytes()[:1000])
    model = onnx.load(tiny[1])
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "foreign.onnx")
    for name in ("missing.onnx", "damaged.onnx", "foreign.onnx"):
        with pytest.raises(RunError, match=name) as caught:
            OnnxDetector(tmp_path / name)
        assert "\n" not in str(caught.value)


class _OtherWhenExported(torch.nn.Conv2d):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        found = super().forward(features)
        return found + 0.1 if torch.compiler.is_exporting() else found


def test_a_model_that_computes_something_else_is_not_written(tmp_path: Path) -> None:
    @register_detector("retinanet-other-when-exported")
    class OtherWhenExported(ShortRetinaNet):
        def network(self, **options: Any) -> Network:
            network = super().network(**options)
            head: Any = network.head.classification_head
            head.cls_logits = _OtherWhenExported(16, head.cls_logits.out_channels, 3, padding=1)
            return network

    detector = build_detector("retinanet-other-when-exported", class_names=["cat", "dog"])
    (tmp_path / "model.onnx").write_bytes(b"before")
    with pytest.raises(RunError, match=r"logits .* by 0\.1"):
        export_onnx(detector, tmp_path / "model.onnx")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]
