"""Export a trained run to ONNX.

The file contains the network and, as metadata, everything else that detection needs: class names, image size, anchors,
calibration and drawing threshold. ``aploss predict FILE IMAGES...`` and ``aploss.detectors.export.OnnxDetector`` run it
without the run folder.
"""

import shlex
from argparse import Namespace
from pathlib import Path

from aploss.cli.command import Command, require_at_least, say_next
from aploss.cli.options import Parser
from aploss.errors import ConfigError

EXAMPLES = """
  aploss export runs/demo --out detector.onnx
  aploss export runs/demo/checkpoints/last.pt --out detector.onnx --size 320
"""


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=str, help="run folder or checkpoint of a detector")
    parser.add_argument("--out", type=Path, required=True, metavar="model.onnx", help="ONNX file to write")
    parser.add_argument("--size", type=int, help="shorter side of images in pixels (default: the detector's test_size)")


def _run(options: Namespace) -> int:
    """Exports, and prints what the file contains."""
    require_at_least(32, options, "size")
    if options.out.suffix.lower() != ".onnx":
        raise ConfigError(f"--out {options.out}: the name must end in .onnx")

    from aploss.detectors.checkpoint import load
    from aploss.detectors.export import OnnxDetector, export_onnx

    detector = load(options.run)
    path = export_onnx(detector, options.out, size=options.size)
    if options.quiet:
        return 0
    exported = OnnxDetector(path)
    shorter, longest = exported.test_size
    if exported.keeps_aspect_ratio:
        size = f"images of any size, resized to {shorter} pixels, at most {longest}"
    else:
        size = f"images resized to {longest}x{shorter} pixels"
    print(f"{path}: {detector.name}, {path.stat().st_size / 1e6:.1f} MB")
    print(f"  classes: {', '.join(exported.class_names)}")
    print(f"  {size}")
    print(f"  scores: {'calibrated' if exported.calibration is not None else 'not calibrated'}")
    print("  verified: its outputs equal the detector's", flush=True)
    say_next(options, f"aploss predict {shlex.quote(str(path))} PHOTOS --out found")
    return 0


EXPORT = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
