"""The short commands: ``aploss export``, ``theory`` and ``bench``."""

import sys
import time
from argparse import Namespace

from aploss.errors import ConfigError
from aploss.files import write_json


def run_export(options: Namespace) -> int:
    """Exports, and prints what the file contains."""
    from aploss.detectors import checkpoint, export

    if options.out.suffix.lower() != ".onnx":
        raise ConfigError(f"--out {options.out}: the name must end in .onnx")
    detector = checkpoint.load(options.run)
    path = export.export_onnx(detector, options.out, size=options.size)
    if not options.quiet:
        scores = "calibrated" if detector.calibration is not None else "not calibrated"
        print(f"{path}: {detector.name}, {path.stat().st_size / 1e6:.1f} MB, verified against the detector")
        print(f"  classes: {', '.join(detector.class_names)}; scores: {scores}", flush=True)
    return 0


def run_theory(options: Namespace) -> int:
    """Runs the studies, prints their verdicts and writes their page."""
    from aploss import theory

    studies = []
    for name in theory.STUDIES if options.name == "all" else [options.name]:
        start = time.perf_counter()
        study = theory.STUDIES[name](options.seed)
        studies.append(study)
        print(f"{study.title} ({study.place}), {time.perf_counter() - start:.0f} s")
        for verdict in study.verdicts:
            print(f"  {verdict.word}: {verdict.claim}", flush=True)
    print(f"report: {theory.write_studies(studies, options.out)}", flush=True)
    return int(not all(study.holds for study in studies))


def run_bench(options: Namespace) -> int:
    """Runs the benchmarks, prints their tables and writes their results as JSON."""
    from aploss.benchmarks import BENCHMARKS

    for name in BENCHMARKS if options.what == "all" else [options.what]:
        measure, table = BENCHMARKS[name]
        show = (lambda step: None) if options.quiet else (lambda step: print(step, file=sys.stderr))
        result = measure(show, quick=options.quick)
        print(f"\n{name}\n{table(result)}", flush=True)
        write_json(options.out / f"{name}.json", result)
    if not options.quiet:
        print(f"\nresults: {options.out}", flush=True)
    return 0
