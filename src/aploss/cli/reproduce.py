"""Make a table or figure of the paper again, small on a CPU or at the paper's own scale.

The small scale shows the effect on the built-in data (or --data) in minutes. The paper's scale has every setting of the
paper and is for GPUs. Runs are kept in a cache and shared by all tables.
"""

import os
from functools import partial
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from aploss.cli.command import Command, add_comparison_options, require_at_least, run_comparison, shared_settings
from aploss.experiments.paper import REPRODUCTIONS

EXAMPLES = """
  aploss reproduce table2                                  four losses, three seeds
  aploss reproduce table2 --data path/to/bccd --steps 1000
  aploss reproduce table2 --data path/to/photos --recipe any-cpu --tune-over criterion.box_weight=1,3
  aploss reproduce figure5b --scale small
  aploss reproduce table1a --seeds 5 --max-minutes 30      goes on when given again
  aploss reproduce table2 --scale paper --plan             what it would train, and how long
  torchrun --nproc-per-node 2 -m aploss reproduce table2 --scale paper --data VOCdevkit
  aploss reproduce table3 --scale paper --benchmark coco --data coco/
"""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", choices=list(REPRODUCTIONS), help="which table or figure")
    scales, benchmarks = Literal["small", "paper"], Literal["voc", "coco"]
    parser.add_argument("--scale", type=scales, default="small", help="minutes on a CPU, or the paper's settings")
    parser.add_argument("--benchmark", type=benchmarks, default="voc", help="which of the paper's data sets")
    parser.add_argument("--data", help="folder of the data; at small scale built-in by default")
    parser.add_argument("--detector", help="name of the detector at small scale; the recipe's by default")
    parser.add_argument("--recipe", help="settings of the small scale; demo for built-in data, else bccd-cpu")
    parser.add_argument("--seeds", help="how many, or which: 0,1,2; 3 at small scale, else 1")
    parser.add_argument("--steps", type=int, help="length of each training at small scale")
    no_tune = "take the recipe's learning rates; else they are searched where losses are compared"
    parser.add_argument("--no-tune", action="store_true", help=no_tune)
    parser.add_argument("--plan", action="store_true", help="show the runs and stop")
    parser.add_argument("--yes", action="store_true", help="start the paper's scale on a CPU, too")
    add_comparison_options(parser, trial=" of that search", out="runs/NAME-SCALE-DATA")


def _run(options: Namespace) -> int:
    """Trains what is missing, and prints the table and where the page is."""
    from aploss.experiments.plan import parse_searched, parse_seeds
    from aploss.experiments.reproduce import Request, check_time, default_out, describe_plan, reproduce

    require_at_least(1, options, "steps", "tune_steps")
    request = Request(
        **{name: options[name] for name in ("scale", "benchmark", "data", "recipe", "steps", "tune_steps", "device")},
        seeds=None if options.seeds is None else parse_seeds(options.seeds),
        tune=not options.no_tune,
        tune_over=parse_searched(options.tune_over),
        changes=_changes(options),
        processes=int(os.environ.get("WORLD_SIZE", "1")),
    )
    if options.plan:
        print(describe_plan(options.name, request))
        return 0
    say = (lambda line: None) if options.quiet else print
    check_time(options.name, request, say, start_anyway=options.yes)
    return run_comparison(options, default_out(options.name, request), partial(reproduce, options.name, request))


def _changes(options: Namespace) -> dict[str, Any]:
    """The settings that were given, by dotted key."""
    given = {} if options.detector is None else {"detector": options.detector}
    for name, value in shared_settings(options).items():
        given |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return given


REPRODUCE = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
