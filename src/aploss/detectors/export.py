"""Detectors as ONNX files.

The graph contains the trainable modules: images in, class logits and box regressions out. The metadata of the file
describe the rest (anchors, decoding, NMS, calibration), which :class:`OnnxDetector` computes with the detector's own
code. A file is written only after its outputs were compared with the detector's.
"""

import json
import logging
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aploss.data.features import FeatureMaps
from aploss.detectors.checkpoint import Checkpoint, refuse_non_finite, wrap_untrusted
from aploss.detectors.detector import Detector
from aploss.detectors.postprocess import BOX_CODER
from aploss.errors import ConfigError, RunError, require_packages
from aploss.files import write_whole

FORMAT = "1"  # of the metadata
INPUT, OUTPUTS = "images", ("logits", "deltas")
ABOUT = (
    "images: float32 RGB in [0, 1], [batch, 3, height, width], resized to test_size and padded at the right and bottom "
    "to a multiple of size_divisor. logits: [batch, anchors, columns]. deltas: [batch, anchors, 4], boxes relative to "
    "the anchors. aploss.detectors.export.OnnxDetector does the rest."
)
TOLERANCE = 1e-3  # of outputs, since runtimes add float32 numbers in different orders


def export_onnx(detector: Detector, path: str | Path, *, size: int | None = None) -> Path:
    """Writes a detector to an ONNX file, after comparing their outputs.

    The batch size is dynamic, and so is the size of images except for SSD.

    Args:
        detector: any detector; it is not changed.
        path: the file to write.
        size: shorter side of images at inference, instead of the detector's ``test_size``; the limit of the longer
            side changes in proportion.

    Returns:
        The path of the file.

    Raises:
        ConfigError: if a package of the extra ``export`` is not installed.
        RunError: if the exported model computes something else than the detector.
    """
    require_packages("onnx", "onnxscript", "onnxruntime")
    path = Path(path)
    # A copy from plain values is on the CPU, not compiled, and may be changed.
    detector = Checkpoint.of(detector).detector()
    if size is not None:
        shorter, longest = detector.test_size
        detector.test_size = (size, round(size * longest / shorter))
    content = _onnx_model(detector)
    _compare(detector, _open_session(content, "the exported model"))
    write_whole(path, lambda file: file.write(content))
    return path


class OnnxDetector(Detector):
    """An exported detector that runs in onnxruntime, and otherwise is used like any detector in evaluation mode.

    Args:
        path: a file of :func:`export_onnx`.
        providers: onnxruntime's providers, such as ``["CUDAExecutionProvider"]``; the CPU by default.

    Raises:
        ConfigError: if a package of the extra ``export`` is not installed.
        RunError: if the file is missing, damaged or was not written by aploss.
    """

    def __init__(self, path: str | Path, *, providers: Iterable[str] | None = None) -> None:
        path = Path(path)
        if not path.is_file():
            raise RunError(f"there is no file {path}")
        session = _open_session(path.read_bytes(), str(path), providers)
        with wrap_untrusted(path):
            metadata = session.get_modelmeta().custom_metadata_map
            if metadata.get("aploss_format") != FORMAT:
                raise RunError("it was not written by 'aploss export' of this version")
            record = {key: json.loads(metadata[key]) for key in ("config", "calibration", "draw_threshold")}
        detector = Checkpoint(weights=None, source=path, **record).detector()
        vars(self).update(vars(detector))
        self._path, self._session = path, session
        # Only the shapes of feature maps are computed from the modules, on the meta device.
        self.backbone.to("meta")
        self.head.to("meta")
        self.eval()

    def heads(self, images: Tensor | FeatureMaps) -> tuple[Tensor, Tensor]:
        """Runs the exported model on images [B, 3, H, W], see :meth:`Detector.heads`."""
        assert isinstance(images, Tensor)
        count, _, height, width = images.shape
        if not self.keeps_aspect_ratio and (height, width) != self.test_size:
            raise ConfigError(
                f"the exported model takes images of {self.test_size[1]}x{self.test_size[0]} pixels only, not "
                f"{width}x{height}: export it with another size"
            )
        anchors = sum(map(len, self.anchors_for(height, width)))
        columns = len(self.class_names) + self.uses_softmax
        with wrap_untrusted(self._path):
            logits, deltas = _run(self._session, images)
            if logits.shape != (count, anchors, columns) or deltas.shape != (count, anchors, 4):
                raise RunError("its outputs do not have the shapes its metadata describe: it is damaged or was changed")
        return logits, deltas


def _open_session(content: bytes, name: str, providers: Iterable[str] | None = None) -> Any:
    """A session of onnxruntime, after checking the model; RunError if it is damaged."""
    require_packages("onnx", "onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # fatal; other errors are raised
    with wrap_untrusted(name):
        _check_onnx(content)
        return onnxruntime.InferenceSession(content, options, providers=list(providers or ["CPUExecutionProvider"]))


def _run(session: Any, images: Tensor) -> list[Tensor]:
    """Logits and deltas."""
    return [torch.from_numpy(output) for output in session.run(list(OUTPUTS), {INPUT: images.cpu().numpy()})]


def _check_onnx(content: bytes) -> None:
    """Raises RunError for a model with external data, or with NaN or infinite weights."""
    import onnx

    weights: dict[str, Tensor] = {}
    for tensor in _tensors(onnx.load_model_from_string(content)):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise RunError(f"the tensor {tensor.name!r} is in another file, which is never opened")
        if tensor.dims:  # scalars may be limits
            weights[tensor.name] = torch.from_numpy(onnx.numpy_helper.to_array(tensor).astype(np.float64))
    refuse_non_finite(weights)


def _tensors(message: Any) -> Iterator[Any]:
    """All tensors of an ONNX model: initialisers, constants, and the ones in functions and branches."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if isinstance(value, Iterable) else [value]:
                yield from _tensors(one)


def _onnx_model(detector: Detector) -> bytes:
    detector.forward = detector.heads  # type: ignore[method-assign, assignment]  # of this copy
    dynamic = (0, 2, 3) if detector.keeps_aspect_ratio else (0,)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # its other messages are for developers of the exporter
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                detector,
                (_example(detector),),
                dynamo=True,
                verbose=False,
                input_names=[INPUT],
                output_names=list(OUTPUTS),
                dynamic_shapes={INPUT: dict.fromkeys(dynamic, torch.export.Dim.DYNAMIC)},
            )
    finally:
        logger.setLevel(level)
    assert program is not None
    model = program.model_proto
    record = Checkpoint.of(detector)
    values = {  # everything besides the graph that detection needs
        **{key: getattr(detector, key) for key in ("class_names", "test_size", "keeps_aspect_ratio", "size_divisor")},
        **{key: getattr(record, key) for key in ("calibration", "draw_threshold", "config")},
        "scores": "softmax" if detector.uses_softmax else "sigmoid",
        "box_code": BOX_CODER.weights,
    }
    texts = {key: json.dumps(value) for key, value in values.items()}
    for key, text in {"aploss_format": FORMAT, "about": ABOUT, **texts}.items():
        model.metadata_props.add(key=key, value=text)
    return bytes(model.SerializeToString())


def _example(detector: Detector) -> Tensor:
    """Two images for tracing: a batch of one would become a fixed size."""
    sides = detector.test_size
    if detector.keeps_aspect_ratio:  # different sides with several cells on the last level, but small
        sides = (4 * detector.size_divisor, 5 * detector.size_divisor)
    return torch.rand(2, 3, *sides, generator=torch.Generator().manual_seed(0))


def _compare(detector: Detector, session: Any) -> None:
    """Raises RunError unless the outputs agree for two images, for one, and for one of another size."""
    images = _example(detector)
    batches = [images, images[:1]]
    if detector.keeps_aspect_ratio:
        batches.append(images[:1, :, : 3 * detector.size_divisor])
    for batch in batches:
        with torch.no_grad():
            expected = detector.heads(batch)
        for name, one, other in zip(OUTPUTS, expected, _run(session, batch), strict=True):
            difference = float((one - other).abs().max()) if one.shape == other.shape else np.inf
            if not difference <= TOLERANCE * max(1.0, float(one.abs().max())):
                raise RunError(
                    f"the {name} of the exported model differ from the detector's by {difference:.2g}: nothing was "
                    "written; another version of torch or onnxruntime may help"
                )
