"""Detectors as ONNX files that say how to use them, and a runner for these files.

The graph is everything that has weights: images in, class logits and box regressions out. What
follows (anchors, decoding, NMS, calibration) is described in the file's metadata and done by :class:`OnnxDetector` with
the code that the detector itself uses.
"""

import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from aploss.detectors.build import build_detector
from aploss.detectors.checkpoint import detector_from_record, detector_record
from aploss.detectors.detector import Detector
from aploss.detectors.postprocess import Detections, ObjectDetector
from aploss.errors import ConfigError, RunError, require_packages
from aploss.evaluation import Calibration
from aploss.files import write_whole

FORMAT = 1  # of the metadata
INPUT, OUTPUTS = "images", ("logits", "deltas")
ABOUT = (
    "images: float32 RGB in [0, 1], [batch, 3, height, width], resized to test_size and padded at the right and bottom "
    "to a multiple of size_divisor. logits: [batch, anchors, columns]. deltas: [batch, anchors, 4], boxes relative to "
    "the anchors. aploss.detectors.export.OnnxDetector does the rest."
)
TOLERANCE = 1e-3  # of logits, between torch and onnxruntime: float32 sums in another order


def export_onnx(detector: Detector, path: str | Path, *, size: int | None = None) -> Path:
    """Writes a detector as one ONNX file, after comparing its output with the detector's.

    The number of images is open; so is their size, except for SSD with its fixed square.

    Args:
        detector: any detector; it is not changed.
        path: the file to write, such as ``model.onnx``.
        size: shorter side of images at inference, in place of the detector's ``test_size``; the limit of the longer
            side changes in proportion.

    Returns:
        The path that was written.

    Raises:
        RunError: if onnxruntime does not compute what the detector does.
        ConfigError: if the extra ``export`` is not installed.
    """
    require_packages("onnx", "onnxscript", "onnxruntime")
    # A copy from plain values: on the CPU, not compiled, and free to change.
    detector = detector_from_record(detector_record(detector))
    if size is not None:
        shorter, longest = detector.test_size
        detector.test_size = (size, round(size * longest / shorter))
    images = _example(detector)
    open_dimensions = (0, 2, 3) if detector.keeps_aspect_ratio else (0,)
    with torch.no_grad(), _silent():
        program = torch.onnx.export(
            _Heads(detector),
            (images,),
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
    content = model.SerializeToString()
    _compare(detector, content, images)
    path = Path(path)
    write_whole(path, lambda file: file.write(content))
    return path


class OnnxDetector(ObjectDetector):
    """An exported detector: the network runs in onnxruntime, the rest as in the detector.

    Called with a list of images, float [3, h, w] in [0, 1], it gives the detections of each, as a
    :class:`~aploss.detectors.detector.Detector` in evaluation mode; :meth:`predict` applies the calibration.

    Args:
        path: a file of :func:`export_onnx`.
        providers: of onnxruntime, such as ``["CUDAExecutionProvider"]``; the CPU by default.

    Raises:
        RunError: if the file is missing, damaged or not one of ours.
    """

    def __init__(self, path: str | Path, *, providers: Iterable[str] | None = None) -> None:
        path = Path(path)
        if not path.is_file():
            raise RunError(f"there is no file {path}")
        self._heads = _Session(path.read_bytes(), str(path), providers)
        metadata = self._heads.metadata
        if metadata.get("aploss_format") != str(FORMAT):
            raise RunError(f"{path} was not written by 'aploss export' of this version")
        calibration = json.loads(metadata["calibration"])
        self.calibration = None if calibration is None else Calibration.from_dict(calibration)
        self.draw_threshold = json.loads(metadata["draw_threshold"])
        self._detector = detector = build_detector(**json.loads(metadata["config"])).eval()
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
            return self._detector.detect(images, size=size or self.test_size, heads=self._heads)


class _Heads(nn.Module):
    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.detector.heads(images)


class _Session:
    """Computes what a detector's ``heads`` do, in onnxruntime."""

    def __init__(self, content: bytes, name: str, providers: Iterable[str] | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors only
        try:
            self.session = onnxruntime.InferenceSession(
                content, options, providers=list(providers or ["CPUExecutionProvider"])
            )
        except Exception as error:  # onnxruntime's errors share no base class of their own
            reason = str(error).splitlines()[0]
            raise RunError(f"{name} cannot be run by onnxruntime: {reason}") from error
        self.metadata: dict[str, str] = self.session.get_modelmeta().custom_metadata_map

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        height, width = self.session.get_inputs()[0].shape[2:]  # names, where they are open
        if isinstance(height, int) and images.shape[2:] != (height, width):
            raise ConfigError(
                f"the ONNX file takes images of {width}x{height} pixels only, not "
                f"{images.shape[3]}x{images.shape[2]}: export it once more with another size"
            )
        logits, deltas = self.session.run(list(OUTPUTS), {INPUT: images.cpu().numpy()})
        return torch.from_numpy(logits), torch.from_numpy(deltas)


def _example(detector: Detector) -> Tensor:
    """Two images for tracing: a batch of one would become a fixed size."""
    sides = detector.test_size
    if detector.keeps_aspect_ratio:
        # Two different sides of several cells on the last level, as small as that allows.
        sides = (4 * detector.size_divisor, 5 * detector.size_divisor)
    return torch.rand(2, 3, *sides, generator=torch.Generator().manual_seed(0))


def _metadata(detector: Detector) -> dict[str, str]:
    """Everything besides the graph that detections need, each value as JSON."""
    record = detector_record(detector)
    values = {
        **{key: getattr(detector, key) for key in ("class_names", "test_size", "keeps_aspect_ratio", "size_divisor")},
        **{key: record[key] for key in ("calibration", "draw_threshold", "config")},
        "scores": "softmax" if detector.uses_softmax else "sigmoid",
        "box_code": detector.box_coder.weights,
    }
    texts = {key: json.dumps(value) for key, value in values.items()}
    return {"aploss_format": str(FORMAT), "about": ABOUT, **texts}


def _compare(detector: Detector, content: bytes, images: Tensor) -> None:
    run = _Session(content, "the exported model")
    for batch in (images, images[:1]):
        with torch.no_grad():
            expected = detector.heads(batch)
        for name, one, other in zip(OUTPUTS, expected, run(batch), strict=True):
            difference = float((one - other).abs().max()) if one.shape == other.shape else np.inf
            if not difference <= TOLERANCE * max(1.0, float(one.abs().max())):
                raise RunError(
                    f"the exported model gives other {name} than the detector (by {difference:.2g})"
                    ": nothing was written; another version of torch or onnxruntime may help"
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
