"""``aploss export``: export a trained run to ONNX.

The file contains the network and, as metadata, everything else that detection needs: class names, image size, anchors,
calibration and drawing threshold. ``aploss predict FILE IMAGES...`` and ``aploss.detectors.export.OnnxDetector`` run it
without the run folder.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from aploss.cli.command import Command, positive_int
from aploss.errors import ConfigError

EXAMPLES = """
  aploss export runs/demo --out detector.onnx
  aploss export runs/demo/checkpoints/last.pt --out detector.onnx --size 320
"""
MIN_SIZE = 32


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", help="run folder or checkpoint of a detector")
    parser.add_argument("--out", type=Path, required=True, metavar="model.onnx", help="ONNX file to write")
    size = "shorter side of images in pixels; by default the detector's test_size"
    parser.add_argument("--size", type=positive_int, metavar="N", help=size)


def _run(options: Namespace) -> int:
    """Exports, and prints what the file contains."""
    from aploss.detectors.checkpoint import load
    from aploss.detectors.export import export_onnx

    if options.out.suffix.lower() != ".onnx":
        raise ConfigError(f"--out {options.out}: the name must end in .onnx")
    if options.size is not None and options.size < MIN_SIZE:
        raise ConfigError(f"--size {options.size}: must be at least {MIN_SIZE}")
    detector = load(options.run)
    path = export_onnx(detector, options.out, size=options.size)
    if not options.quiet:
        scores = "calibrated" if detector.calibration is not None else "not calibrated"
        print(f"{path}: {detector.name}, {path.stat().st_size / 1e6:.1f} MB, verified against the detector")
        print(f"  classes: {', '.join(detector.class_names)}; scores: {scores}", flush=True)
    return 0


EXPORT = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
