"""``aploss reproduce``: a table or figure of the paper, small on a CPU or at the paper's own scale.

The small scale shows the effect on the built-in data (or --data) in minutes. The paper's scale uses every setting of
the paper and is for GPUs. Runs are cached and shared by all tables.
"""

import os
from argparse import ArgumentParser, Namespace
from functools import partial

from aploss.cli.command import positive_int
from aploss.cli.compare import add_comparison_options, run_comparison
from aploss.experiments.paper import BENCHMARKS, REPRODUCTIONS

REPRODUCE_EXAMPLES = """
  aploss reproduce table2
  aploss reproduce table2 --data path/to/bccd --steps 1000 --seeds 5
  aploss reproduce table3 --scale paper --benchmark coco --data coco/ --plan
  aploss reproduce table2 --seeds-until-decided 10 --workers 2
  torchrun --nproc-per-node 2 -m aploss reproduce table2 --scale paper --data VOCdevkit
"""


def add_reproduce_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", choices=list(REPRODUCTIONS), help="table or figure")
    parser.add_argument("--scale", choices=["small", "paper"], default="small", help="minutes on a CPU, or the paper's")
    benchmark = "dataset of the paper; voc12 is VOC 2012 test, trained on 07++12"
    parser.add_argument("--benchmark", choices=list(BENCHMARKS), default="voc", help=benchmark)
    parser.add_argument("--data", help="dataset; built-in by default at small scale")
    parser.add_argument("--recipe", help="settings at small scale; by default demo for built-in data, else bccd-cpu")
    parser.add_argument("--seeds", help="number of seeds, or a list: 0,1,2; by default 3 at small scale, else 1")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="length of each training at small scale")
    parser.add_argument("--no-tune", action="store_true", help="do not search learning rates, use the recipe's")
    parser.add_argument("--yes", action="store_true", help="start the paper's scale even on a CPU")
    add_comparison_options(parser, out="runs/NAME-SCALE-DATA")


def run_reproduce(options: Namespace) -> int:
    """Trains missing runs, and prints the table and the path of the report."""
    from aploss.experiments.plan import parse_seeds
    from aploss.experiments.reproduce import Request, check_start, default_out, describe_reproduction, reproduce

    names = ("scale", "benchmark", "data", "recipe", "steps", "tune_steps", "device")
    request = Request(
        **{name: getattr(options, name) for name in names},
        seeds=None if options.seeds is None else parse_seeds(options.seeds),
        max_seeds=options.seeds_until_decided,
        tune=not options.no_tune,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
    )
    if options.plan:
        print(describe_reproduction(options.name, request, workers=options.workers))
        return 0
    check_start(request, start_anyway=options.yes)
    return run_comparison(options, default_out(options.name, request), partial(reproduce, options.name, request))
