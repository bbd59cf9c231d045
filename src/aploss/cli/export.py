"""Write a trained run as ONNX, OpenVINO or TorchScript.

The file holds the network and, as metadata, everything else that detections need: class names, size of images, anchors,
calibration and drawing threshold. ``aploss predict FILE IMAGES...`` and ``aploss.detectors.export.load_exported`` run
it without the run.
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
  aploss export runs/demo --out detector.xml
  aploss export runs/demo --out detector.ts
"""


def _add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=str, help="run folder or checkpoint of a detector")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="model.onnx",
        help="file to write: .onnx, .xml (OpenVINO, with a .bin beside it) or .ts (TorchScript)",
    )
    parser.add_argument(
        "--size", type=int, help="shorter side of images in pixels (default: as the detector was tested)"
    )


def _run(options: Namespace) -> int:
    """Exports, and says what is in the file."""
    require_at_least(32, options, "size")

    from aploss.detectors.checkpoint import load
    from aploss.detectors.export import FORMATS, export, load_exported

    if options.out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out {options.out}: end its name in .onnx, .xml (OpenVINO) or .ts (TorchScript)")
    detector = load(options.run)
    path = export(detector, options.out, size=options.size)
    if options.quiet:
        return 0
    exported = load_exported(path)
    shorter, longest = exported.test_size
    if exported.keeps_aspect_ratio:
        size = f"images of any size, resized to {shorter} pixels, at most {longest}"
    else:
        size = f"images resized to {longest}x{shorter} pixels"
    print(f"{path}: {detector.name}, {_bytes(path) / 1e6:.1f} MB")
    print(f"  classes: {', '.join(exported.class_names)}")
    print(f"  {size}")
    print(f"  scores: {'calibrated' if exported.calibration is not None else 'not calibrated'}")
    print("  checked: it gives what the detector gives", flush=True)
    say_next(options, f"aploss predict {shlex.quote(str(path))} PHOTOS --out found")
    return 0


def _bytes(path: Path) -> int:
    """Bytes of a file and of the weights beside it, where it has such."""
    weights = path.with_suffix(".bin")
    beside = weights.stat().st_size if path.suffix.lower() == ".xml" and weights.is_file() else 0
    return path.stat().st_size + beside


EXPORT = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
