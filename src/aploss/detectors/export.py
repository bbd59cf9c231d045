"""Detectors as ONNX, OpenVINO or TorchScript files that say how to use them, and runners for these files.

The graph is everything that has weights: images in, class logits and box regressions out. What
follows (anchors, decoding, NMS, calibration) is described in the file's metadata and done by :class:`ExportedDetector`
with the code that the detector itself uses. OpenVINO reads the ONNX graph, TorchScript is traced; whatever the format,
nothing is written before its output was compared with the detector's.
"""

import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aploss.detectors.checkpoint import Checkpoint, refuse_non_finite, wrap_untrusted
from aploss.detectors.detector import Detector
from aploss.detectors.predict import Detections, ObjectDetector
from aploss.errors import ConfigError, RunError, require_packages
from aploss.files import write_whole

FORMAT = 1  # of the metadata
INPUT, OUTPUTS = "images", ("logits", "deltas")
ABOUT = (
    "images: float32 RGB in [0, 1], [batch, 3, height, width], resized to test_size and padded at the right and bottom "
    "to a multiple of size_divisor. logits: [batch, anchors, columns]. deltas: [batch, anchors, 4], boxes relative to "
    "the anchors. aploss.detectors.export.load_exported does the rest."
)
METADATA = "aploss"  # where OpenVINO and TorchScript files have it
TOLERANCE = 1e-3  # of logits, between torch and another runtime: float32 sums in another order


def export(detector: Detector, path: str | Path, *, size: int | None = None) -> Path:
    """Writes a detector in the format that the name of the file ends in, after comparing it with the detector.

    The number of images is open; so is their size, except for SSD with its fixed square.

    Args:
        detector: any detector; it is not changed.
        path: the file to write: ``.onnx`` for ONNX, ``.xml`` for OpenVINO (its weights go beside it, as ``.bin``),
            ``.ts`` for TorchScript.
        size: shorter side of images at inference, in place of the detector's ``test_size``; the limit of the longer
            side changes in proportion.

    Returns:
        The path that was written.

    Raises:
        ConfigError: if the name ends otherwise, or the package of the format is not installed.
        RunError: if the exported model does not compute what the detector does.
    """
    path = Path(path)
    write = _format_of(path)[1]
    # A copy from plain values: on the CPU, not compiled, and free to change.
    detector = Checkpoint.of(detector).detector()
    if size is not None:
        shorter, longest = detector.test_size
        detector.test_size = (size, round(size * longest / shorter))
    write(detector, path)
    return path


def export_onnx(detector: Detector, path: str | Path, *, size: int | None = None) -> Path:
    """As :func:`export`, for an ONNX file of any name."""
    path = Path(path)
    if path.suffix.lower() == ".onnx":
        return export(detector, path, size=size)
    with tempfile.TemporaryDirectory() as folder:
        content = export(detector, Path(folder) / "model.onnx", size=size).read_bytes()
    write_whole(path, lambda file: file.write(content))
    return path


def load_exported(path: str | Path) -> "ExportedDetector":
    """The detector in a file of :func:`export`, run by what the name of the file says.

    Raises:
        ConfigError: if the name ends otherwise, or the package of the format is not installed.
        RunError: if the file is missing, damaged or not one of ours.
    """
    path = Path(path)
    if path.suffix.lower() == ".onnx":
        return OnnxDetector(path)
    return ExportedDetector(path, _format_of(path)[0](_existing(path)))


class ExportedDetector(ObjectDetector):
    """An exported detector: its network runs elsewhere, the rest as in the detector.

    Called with a list of images, float [3, h, w] in [0, 1], it gives the detections of each, as a
    :class:`~aploss.detectors.detector.Detector` in evaluation mode; :meth:`predict` applies the calibration.
    """

    def __init__(self, path: Path, heads: "_Runner") -> None:
        self._heads, metadata = heads, heads.metadata
        if not isinstance(metadata, dict) or metadata.get("aploss_format") != str(FORMAT):
            raise RunError(f"{path} was not written by 'aploss export' of this version")
        with wrap_untrusted(path):
            record = {key: json.loads(metadata[key]) for key in ("config", "calibration", "draw_threshold")}
        self._detector = detector = Checkpoint(weights=None, source=path, **record).detector()
        self._path = path
        self.calibration, self.draw_threshold = detector.calibration, detector.draw_threshold
        # Shapes of feature maps are still found from the modules, which need no memory for that.
        detector.backbone.to("meta")
        detector.head.to("meta")
        self.config = detector.config
        for name in ("class_names", "keeps_aspect_ratio", "test_size", "nms_iou", "detections_per_image"):
            setattr(self, name, getattr(detector, name))

    def __call__(self, images: Tensor | Sequence[Tensor]) -> list[Detections]:
        return self.detect(images)

    def detect(self, images: Tensor | Sequence[Tensor], *, size: tuple[int, int] | None = None) -> list[Detections]:
        """Detections of images of ``test_size`` or another size, see :meth:`Detector.detect`."""
        with torch.inference_mode():
            return self._detector.detect(images, size=size or self.test_size, heads=self._run)

    def _run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        height, width = self.test_size
        if not self.keeps_aspect_ratio and images.shape[2:] != (height, width):
            raise ConfigError(
                f"the exported model takes images of {width}x{height} pixels only, not "
                f"{images.shape[3]}x{images.shape[2]}: export it once more with another size"
            )
        with _one_line(f"{self._path} cannot be run"):
            logits, deltas = self._heads(images)
        detector, (count, _, batch_height, batch_width) = self._detector, images.shape
        anchors = sum(map(len, detector.anchors_for(batch_height, batch_width)))
        columns = detector.num_classes + detector.uses_softmax
        if logits.shape != (count, anchors, columns) or deltas.shape != (count, anchors, 4):
            raise RunError(
                f"{self._path} gives logits {list(logits.shape)} and deltas {list(deltas.shape)} where its metadata "
                f"promise {[count, anchors, columns]} and {[count, anchors, 4]}: it is damaged or not ours"
            )
        return logits, deltas


class OnnxDetector(ExportedDetector):
    """An exported detector that runs in onnxruntime.

    Args:
        path: a file of :func:`export_onnx`.
        providers: of onnxruntime, such as ``["CUDAExecutionProvider"]``; the CPU by default.

    Raises:
        RunError: if the file is missing, damaged or not one of ours.
    """

    def __init__(self, path: str | Path, *, providers: Iterable[str] | None = None) -> None:
        path = _existing(Path(path))
        super().__init__(path, _OnnxRunner(path.read_bytes(), str(path), providers))


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise RunError(f"there is no file {path}")
    return path


class _Runner:
    """Computes what a detector's ``heads`` do."""

    metadata: dict[str, str]

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class _OnnxRunner(_Runner):
    def __init__(self, content: bytes, name: str, providers: Iterable[str] | None = None) -> None:
        require_packages("onnx", "onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4  # what is fatal; the rest is raised
        with _one_line(f"{name} cannot be run by onnxruntime"):
            _check_onnx(content)
            self.session = onnxruntime.InferenceSession(
                content, options, providers=list(providers or ["CPUExecutionProvider"])
            )
            self.metadata = self.session.get_modelmeta().custom_metadata_map

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits, deltas = self.session.run(list(OUTPUTS), {INPUT: images.cpu().numpy()})
        return torch.from_numpy(logits), torch.from_numpy(deltas)


class _OpenVinoRunner(_Runner):
    def __init__(self, path: Path) -> None:
        require_packages("openvino")
        import openvino

        core = openvino.Core()
        # float32 where the processor would take bfloat16, as torch does
        settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
        with _one_line(f"{path} cannot be run by OpenVINO"):
            model = core.read_model(path)
            self.compiled = core.compile_model(model, "CPU", settings)
            info = model.get_rt_info()
            self.metadata = json.loads(info[METADATA].value) if METADATA in info else {}

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = self.compiled(images.cpu().numpy())
        logits, deltas = (torch.from_numpy(found[name].copy()) for name in OUTPUTS)
        return logits, deltas


class _TorchScriptRunner(_Runner):
    def __init__(self, path: Path) -> None:
        extra = {METADATA: ""}
        with _one_line(f"{path} cannot be run by TorchScript"), _silent():
            self.module = torch.jit.load(str(path), map_location="cpu", _extra_files=extra)  # type: ignore[no-untyped-call]
            self.metadata = json.loads(extra[METADATA] or "{}")

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits, deltas = self.module(images.cpu())
        return logits, deltas


def _check_onnx(content: bytes) -> None:
    """Refuses a model that would read other files, and weights that are NaN or infinite."""
    import onnx

    weights: list[tuple[str, bool]] = []
    for tensor in _tensors(onnx.load_model_from_string(content)):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise RunError(f"the tensor {tensor.name!r} lies in another file, which is never opened")
        if tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE):
            values = onnx.numpy_helper.to_array(tensor)
            weights.append((tensor.name, values.ndim == 0 or bool(np.isfinite(values).all())))  # scalars are limits
    refuse_non_finite(weights)


def _tensors(message: Any) -> Iterator[Any]:
    """Every tensor of an ONNX model, wherever it stands: initialisers, constants, functions, branches."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if isinstance(value, Iterable) else [value]:
                yield from _tensors(one)


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Errors of runtimes, which share no base class, as one of ours."""
    try:
        yield
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RunError(f"{what}: {reason.strip()}") from error


def _write_onnx(detector: Detector, path: Path) -> None:
    require_packages("onnx", "onnxscript", "onnxruntime")
    content = _onnx_content(detector)
    _compare(detector, _OnnxRunner(content, "the exported model"))
    write_whole(path, lambda file: file.write(content))


def _onnx_content(detector: Detector) -> bytes:
    open_dimensions = (0, 2, 3) if detector.keeps_aspect_ratio else (0,)
    with torch.no_grad(), _silent():
        program = torch.onnx.export(
            _Heads(detector),
            (_example(detector),),
            dynamo=True,
            verbose=False,
            input_names=[INPUT],
            output_names=list(OUTPUTS),
            dynamic_shapes={INPUT: dict.fromkeys(open_dimensions, torch.export.Dim.DYNAMIC)},
        )
    assert program is not None
    model = program.model_proto
    for key, value in _metadata(detector).items():
        model.metadata_props.add(key=key, value=value)
    return bytes(model.SerializeToString())


def _write_openvino(detector: Detector, path: Path) -> None:
    require_packages("onnx", "onnxscript", "openvino")
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "model.onnx", Path(folder) / "model.xml"
        source.write_bytes(_onnx_content(detector))
        model = openvino.Core().read_model(source)
        model.set_rt_info(json.dumps(_metadata(detector)), METADATA)
        openvino.save_model(model, made, compress_to_fp16=False)
        _compare(detector, _OpenVinoRunner(made))
        for suffix in (".bin", ".xml"):  # the one that is named comes last
            content = made.with_suffix(suffix).read_bytes()
            write_whole(path.with_suffix(suffix), lambda file, content=content: file.write(content))  # type: ignore[misc]


def _write_torchscript(detector: Detector, path: Path) -> None:
    with torch.no_grad(), _silent():
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            _Heads(detector), (_example(detector),), check_trace=False
        )
        content = io.BytesIO()
        torch.jit.save(traced, content, _extra_files={METADATA: json.dumps(_metadata(detector))})
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model.ts"
        made.write_bytes(content.getvalue())
        _compare(detector, _TorchScriptRunner(made))
    write_whole(path, lambda file: file.write(content.getvalue()))


# What the name of a file ends in: the class that runs it, and what writes it.
FORMATS: dict[str, tuple[Callable[[Any], _Runner], Callable[[Detector, Path], None]]] = {
    ".onnx": (lambda path: _OnnxRunner(path.read_bytes(), str(path)), _write_onnx),
    ".xml": (_OpenVinoRunner, _write_openvino),
    ".ts": (_TorchScriptRunner, _write_torchscript),
}


def _format_of(path: Path) -> tuple[Callable[[Any], _Runner], Callable[[Detector, Path], None]]:
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path}: end its name in .onnx, .xml (OpenVINO) or .ts (TorchScript)")
    return FORMATS[path.suffix.lower()]


class _Heads(nn.Module):
    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.detector.heads(images)


def _example(detector: Detector) -> Tensor:
    """Two images for tracing: a batch of one would become a fixed size."""
    sides = detector.test_size
    if detector.keeps_aspect_ratio:
        # Two different sides of several cells on the last level, as small as that allows.
        sides = (4 * detector.size_divisor, 5 * detector.size_divisor)
    return torch.rand(2, 3, *sides, generator=torch.Generator().manual_seed(0))


def _metadata(detector: Detector) -> dict[str, str]:
    """Everything besides the graph that detections need, each value as JSON."""
    record = Checkpoint.of(detector)
    values = {
        **{key: getattr(detector, key) for key in ("class_names", "test_size", "keeps_aspect_ratio", "size_divisor")},
        **{key: getattr(record, key) for key in ("calibration", "draw_threshold", "config")},
        "scores": "softmax" if detector.uses_softmax else "sigmoid",
        "box_code": detector.box_coder.weights,
    }
    texts = {key: json.dumps(value) for key, value in values.items()}
    return {"aploss_format": str(FORMAT), "about": ABOUT, **texts}


def _compare(detector: Detector, run: _Runner) -> None:
    images = _example(detector)
    with torch.no_grad():
        expected = detector.heads(images)
        _require_equal(expected, run(images))
        # one image of the two, which the detector need not compute again
        _require_equal([output[:1] for output in expected], run(images[:1]))
        if detector.keeps_aspect_ratio:
            lower = images[:1, :, : 3 * detector.size_divisor]
            _require_equal(detector.heads(lower), run(lower))


def _require_equal(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    for name, one, other in zip(OUTPUTS, expected, found, strict=True):
        difference = float((one - other).abs().max()) if one.shape == other.shape else np.inf
        if not difference <= TOLERANCE * max(1.0, float(one.abs().max())):
            raise RunError(
                f"the exported model gives other {name} than the detector (by {difference:.2g})"
                ": nothing was written; another format or version of its package may help"
            )


@contextmanager
def _silent() -> Iterator[None]:
    """The exporter's notes are for its developers."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
