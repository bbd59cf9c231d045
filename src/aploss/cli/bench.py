"""``aploss bench``: benchmark the losses, alone and across processes, the data loading and the training step."""

import json
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path

from aploss.cli.command import Command, progress
from aploss.files import write_text

EXAMPLES = """
  aploss bench                          everything (about 10 minutes on 2 cores)
  aploss bench losses                   AP-loss against focal loss and BCE
  aploss bench training-step --quick
"""

BENCHMARKS = {"losses": "losses", "scaling": "scaling", "data": "data", "training-step": "training_step"}


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=["all", *BENCHMARKS], default="all", help="which benchmark")
    parser.add_argument("--quick", action="store_true", help="a short run with small sizes")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/bench"), help="folder for the JSON files")


def _run(options: Namespace) -> int:
    for name in BENCHMARKS if options.what == "all" else [options.what]:
        benchmark = import_module(f"aploss.benchmarks.{BENCHMARKS[name]}")
        with progress(name, quiet=options.quiet) as show:
            result = benchmark.run(lambda step: show(text=step), quick=options.quick)
        print(f"\n{name}\n{benchmark.table(result)}", flush=True)
        write_text(options.out / f"{name}.json", json.dumps(result, indent=2) + "\n")
    if not options.quiet:
        print(f"\nresults: {options.out}", flush=True)
    return 0


BENCH = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
