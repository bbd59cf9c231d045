"""An exported file alone finds what the detector finds, in onnxruntime, OpenVINO and TorchScript."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from short_detector import register_short_detector

from aploss.detectors import Detector, MultiScale, Network, build_detector, register_detector
from aploss.detectors.export import ExportedDetector, OnnxDetector, export, export_onnx, load_exported
from aploss.detectors.retinanet import TinyRetinaNet
from aploss.errors import ConfigError, RunError
from aploss.evaluation import Calibration

# One of each kind, sigmoid and softmax. The exporter takes most of the time of these tests, and the longer the more
# layers there are: OpenVINO, which reads what was exported to ONNX, gets each kind of layer once.
KINDS = [
    ("retinanet-tiny", "ap", ".onnx"),
    ("retinanet-short", "ap", ".xml"),
    ("retinanet-tiny", "ap", ".ts"),
    ("ssdlite", "ap", ".ts"),
    ("ssd300", "ce-ohem", ".onnx"),
]


@pytest.fixture(scope="module", autouse=True)
def _short() -> None:
    register_short_detector()


def _detector(name: str, loss: str) -> Detector:
    """Random, with scores and boxes that differ enough to be told apart."""
    torch.manual_seed(0)
    detector = build_detector(name, class_names=["cat", "dog"], loss=loss)
    for layer in (detector.head.classification_head, detector.head.regression_head):
        last = list(layer.parameters())[-2:]
        for weight in last if name == "ssd300" else layer.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.05)
    if detector.keeps_aspect_ratio:
        detector.test_size = (96, 160)
    return detector.eval()


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Detector, ExportedDetector]:
    name, loss, suffix = request.param
    if suffix == ".xml":
        pytest.importorskip("openvino", reason="openvino is not installed (extra `export`)")
    if (name, suffix) == ("retinanet-tiny", ".onnx"):
        detector, path = request.getfixturevalue("tiny")
        exported = load_exported(path)
        exported.test_size = detector.test_size
        return detector, exported
    detector = _detector(name, loss)
    return detector, load_exported(export(detector, tmp_path_factory.mktemp("model") / f"model{suffix}"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Detector, Path]:
    """A calibrated detector, and its file for smaller images."""
    detector = _detector("retinanet-tiny", "ap")
    detector.calibration = Calibration(x=[0.0, 0.1, 0.4, 1.0], y=[0.0, 0.5, 0.9, 0.95])
    detector.draw_threshold = 0.55
    return detector, export_onnx(detector, tmp_path_factory.mktemp("onnx") / "tiny.onnx", size=64)


def test_the_exported_detector_gives_the_same_detections(pair: tuple[Detector, ExportedDetector]) -> None:
    detector, exported = pair
    generator = torch.Generator().manual_seed(0)
    # images of any size become the fixed one of an SSD, which takes long; ssdlite has two sizes
    for size in ((100, 130), (140, 90))[: 1 if detector.name == "ssd300" else 2]:
        images = [torch.rand(3, *size, generator=generator) for _ in range(2 if detector.keeps_aspect_ratio else 1)]
        with torch.no_grad():
            expected = detector(images)
        for one, other in zip(expected, exported(images), strict=True):
            assert len(one["scores"]) == 100
            torch.testing.assert_close(other["scores"], one["scores"], rtol=0, atol=1e-4)
            # relative to the image; two detections with all but equal scores may change places
            rows, others = (
                torch.cat([found["boxes"] / max(size), 10.0 * found["labels"][:, None]], dim=1)
                for found in (one, other)
            )
            assert float((rows[:, None] - others).abs().amax(dim=2).amin(dim=1).max()) < 1e-4


def test_calibration_threshold_and_size_are_in_the_file(tiny: tuple[Detector, Path]) -> None:
    detector, path = tiny
    exported = OnnxDetector(path)
    assert exported.class_names == ("cat", "dog")
    assert exported.test_size == (64, 107)
    assert detector.test_size == (96, 160)  # the detector itself is left alone
    detector.test_size = (64, 107)
    pixels = np.random.default_rng(0).integers(0, 256, (80, 100, 3), dtype=np.uint8)
    (expected,), (found,) = detector.predict(pixels), exported.predict(pixels)
    detector.test_size = (96, 160)
    assert 0 < len(expected) < 100
    assert found.class_names == expected.class_names
    torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.boxes, expected.boxes, rtol=1e-4, atol=1e-2)


def test_other_programs_can_read_how_to_use_the_file(tiny: tuple[Detector, Path]) -> None:
    model = onnx.load(tiny[1])
    onnx.checker.check_model(model)
    values = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(values["class_names"]) == ["cat", "dog"]
    assert json.loads(values["scores"]) == "sigmoid"
    assert json.loads(values["test_size"]) == [64, 107]
    assert json.loads(values["draw_threshold"]) == 0.55
    assert json.loads(values["calibration"]) == {"x": [0.0, 0.1, 0.4, 1.0],
                                                 "y": [0.0, 0.5, 0.9, 0.95]}  # fmt: skip
    assert "float32 RGB in [0, 1]" in values["about"]
    session = onnxruntime.InferenceSession(tiny[1], providers=["CPUExecutionProvider"])
    logits, deltas = session.run(None, {"images": np.zeros((1, 3, 64, 96), dtype=np.float32)})
    anchors = 6 * (8 * 12 + 4 * 6 + 2 * 3 + 1 * 2)  # strides 8, 16, 32, 64
    assert logits.shape == (1, anchors, 2)
    assert deltas.shape == (1, anchors, 4)


def test_several_scales_work_with_the_exported_detector(tiny: tuple[Detector, Path]) -> None:
    detector, path = tiny
    image = torch.rand(3, 64, 80)
    exported = OnnxDetector(path)
    exported.test_size = detector.test_size
    multi_scale = MultiScale(scales=(1.0, 1.5))
    with torch.no_grad():
        (expected,), (found,) = multi_scale(detector, [image]), multi_scale(exported, [image])
    torch.testing.assert_close(found["scores"], expected["scores"], rtol=0, atol=1e-4)


def test_a_fixed_size_is_told_when_another_is_asked_for(pair: tuple[Detector, ExportedDetector]) -> None:
    detector, exported = pair
    if detector.keeps_aspect_ratio:
        pytest.skip("takes images of any size")
    side = detector.test_size[0]
    with pytest.raises(ConfigError, match=f"takes images of {side}x{side} pixels only"):
        MultiScale(scales=(2.0,))(exported, [torch.rand(3, 60, 60)])


def test_files_that_are_not_exported_detectors_are_refused(tiny: tuple[Detector, Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no file"):
        OnnxDetector(tmp_path / "missing.onnx")
    (tmp_path / "damaged.onnx").write_bytes(tiny[1].read_bytes()[:1000])
    with pytest.raises(RunError, match="cannot be run by onnxruntime") as caught:
        OnnxDetector(tmp_path / "damaged.onnx")
    assert "\n" not in str(caught.value)
    with pytest.raises(RunError, match="there is no file"):
        load_exported(tmp_path / "missing.ts")
    (tmp_path / "damaged.ts").write_bytes(b"PK not a module")
    with pytest.raises(RunError, match="cannot be run by TorchScript") as caught:
        load_exported(tmp_path / "damaged.ts")
    assert "\n" not in str(caught.value)
    for wrong in (lambda path: export(tiny[0], path), load_exported):
        with pytest.raises(ConfigError, match=r"model\.tflite: end its name in \.onnx, \.xml"):
            wrong(tmp_path / "model.tflite")
    model = onnx.load(tiny[1])
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "foreign.onnx")
    with pytest.raises(RunError, match="was not written by 'aploss export'"):
        OnnxDetector(tmp_path / "foreign.onnx")


class _OtherWhenTraced(torch.nn.Conv2d):
    """What a tracer makes of a branch in Python: only the way that it saw."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        found = super().forward(features)
        return found + 0.1 if torch.jit.is_tracing() else found


def test_what_computes_something_else_than_the_detector_is_refused_and_not_written(tmp_path: Path) -> None:
    @register_detector("retinanet-other-when-traced")
    class OtherWhenTraced(TinyRetinaNet):
        def network(self, **options: Any) -> Network:
            network = super().network(**options)
            head: Any = network.head.classification_head
            plain = head.cls_logits
            head.cls_logits = _OtherWhenTraced(plain.in_channels, plain.out_channels, 3, padding=1)
            return network

    detector = build_detector("retinanet-other-when-traced", class_names=["cat", "dog"])
    (tmp_path / "model.ts").write_bytes(b"of before")
    with pytest.raises(RunError, match=r"gives other logits than the detector \(by 0\.1\): nothing was written"):
        export(detector, tmp_path / "model.ts")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"of before"]


def test_damaged_files_of_openvino_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed (extra `export`)")
    (tmp_path / "damaged.xml").write_text("<net")
    with pytest.raises(RunError, match="cannot be run by OpenVINO") as caught:
        load_exported(tmp_path / "damaged.xml")
    assert "\n" not in str(caught.value)
