"""Train on built-in data in a few minutes, and show the result."""

from itertools import count
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from aploss.cli.command import Command, run_training
from aploss.losses.traits import LOSSES
from aploss.training.recipes import load_config
from aploss.training.run_folder import RunFolder

EXAMPLES = """
  aploss demo
  aploss demo --loss focal
  aploss demo --seed 1 --out runs/second-demo
"""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--loss", default="ap", help=f"classification loss: {', '.join(LOSSES.names())}")
    parser.add_argument("--seed", type=int, default=0, help="initial weights and data order")
    parser.add_argument("--out", help="run folder; by default runs/demo, or the next free number")


def _run(options: Namespace) -> int:
    """Trains the demo recipe; an unfinished demo goes on where it was."""
    LOSSES.get(options.loss)
    wanted = {"data": "builtin", "loss": options.loss, "seed": options.seed}
    folder = Path(options.out) if options.out else _free_or_unfinished(wanted)
    config = load_config("demo", {**wanted, "out": str(folder)})
    return run_training(config, options, resume=True)


def _free_or_unfinished(wanted: dict[str, object]) -> Path:
    """runs/demo, runs/demo-2, ...: the first that is free, or holds the same demo unfinished."""
    for number in count(1):
        folder = RunFolder(f"runs/demo-{number}" if number > 1 else "runs/demo")
        if not folder.exists:
            break
        config = folder.read_config()
        same = all(getattr(config, key) == value for key, value in wanted.items())
        if same and not folder.summary_file.is_file():
            break
    return folder.path


DEMO = Command(
    examples=EXAMPLES, add_arguments=_add_arguments, run=_run, otherwise="aploss train --recipe demo --data builtin"
)
