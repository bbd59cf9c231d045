"""The short commands: ``aploss demo``, ``export``, ``theory`` and ``bench``."""

import time
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path

from aploss.cli.options import EXIT_PROBLEMS, free_folder, positive_int, progress
from aploss.errors import ConfigError
from aploss.files import write_json

BENCHMARKS = ("losses", "training-step")
STUDIES = ("convergence", "smoothed-failure", "inseparable", "consistency", "imbalance", "method")
DEMO_EXAMPLES = """
  aploss demo
  aploss demo --loss focal --seed 1 --out runs/second-demo
"""
EXPORT_EXAMPLES = """
  aploss export runs/demo --out detector.onnx
  aploss export runs/demo/checkpoints/last.pt --out detector.onnx --size 320
"""
THEORY_EXAMPLES = """
  aploss theory                     every study, on one page
  aploss theory smoothed-failure
"""
BENCH_EXAMPLES = """
  aploss bench                          everything (about 10 minutes on 2 cores)
  aploss bench losses                   AP-loss against focal loss and BCE
  aploss bench training-step --quick
"""


def add_demo_arguments(parser: ArgumentParser) -> None:
    from aploss.losses.traits import LOSSES

    parser.add_argument("--loss", default="ap", help=f"classification loss: {', '.join(LOSSES.names())}")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of initial weights and data order")
    parser.add_argument("--out", help="run folder; by default runs/demo, or the next free number")


def run_demo(options: Namespace) -> int:
    """Trains the demo recipe in a new folder."""
    from aploss.cli.train import run_training
    from aploss.losses.traits import LOSSES
    from aploss.training.config import load_config

    LOSSES.get(options.loss)
    folder = options.out or free_folder("demo", lambda path: not path.exists())
    settings = {"data": "builtin", "loss": options.loss, "seed": options.seed, "out": str(folder)}
    return run_training(load_config("demo", settings), options, resume=False)


def add_export_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", help="run folder or checkpoint of a detector")
    parser.add_argument("--out", type=Path, required=True, metavar="model.onnx", help="ONNX file to write")
    size = "shorter side of images in pixels; by default the detector's test_size"
    parser.add_argument("--size", type=positive_int, metavar="N", help=size)


def run_export(options: Namespace) -> int:
    """Exports, and prints what the file contains."""
    from aploss.detectors.checkpoint import load
    from aploss.detectors.export import export_onnx

    if options.out.suffix.lower() != ".onnx":
        raise ConfigError(f"--out {options.out}: the name must end in .onnx")
    detector = load(options.run)
    path = export_onnx(detector, options.out, size=options.size)
    if not options.quiet:
        scores = "calibrated" if detector.calibration is not None else "not calibrated"
        print(f"{path}: {detector.name}, {path.stat().st_size / 1e6:.1f} MB, verified against the detector")
        print(f"  classes: {', '.join(detector.class_names)}; scores: {scores}", flush=True)
    return 0


def add_theory_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", choices=["all", *STUDIES], default="all", help="which study")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the random problems")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/theory"), help="folder for the page")


def run_theory(options: Namespace) -> int:
    """Runs the studies, prints their verdicts and writes their page."""
    from aploss import theory

    studies = []
    for name in theory.STUDIES if options.name == "all" else [options.name]:
        start = time.perf_counter()
        with progress(name, quiet=options.quiet):
            study = theory.STUDIES[name](options.seed)
        studies.append(study)
        print(f"{study.title} ({study.place}), {time.perf_counter() - start:.0f} s")
        for verdict in study.verdicts:
            print(f"  {verdict.word}: {verdict.claim}", flush=True)
    print(f"report: {theory.write_studies(studies, options.out)}", flush=True)
    return 0 if all(study.holds for study in studies) else EXIT_PROBLEMS


def add_bench_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=["all", *BENCHMARKS], default="all", help="which benchmark")
    parser.add_argument("--quick", action="store_true", help="a short run with small sizes")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/bench"), help="folder for the JSON files")


def run_bench(options: Namespace) -> int:
    """Runs the benchmarks, prints their tables and writes their results as JSON."""
    for name in BENCHMARKS if options.what == "all" else [options.what]:
        benchmark = import_module(f"aploss.benchmarks.{name.replace('-', '_')}")
        with progress(name, quiet=options.quiet) as show:
            result = benchmark.run(lambda step: show(text=step), quick=options.quick)
        print(f"\n{name}\n{benchmark.table(result)}", flush=True)
        write_json(options.out / f"{name}.json", result)
    if not options.quiet:
        print(f"\nresults: {options.out}", flush=True)
    return 0
