"""``aploss demo``: train on built-in data in a few minutes, and show the result."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from aploss.cli.command import Command, free_folder
from aploss.cli.train import run_training
from aploss.losses.traits import LOSSES
from aploss.training.recipes import load_config
from aploss.training.run_folder import RunFolder

EXAMPLES = """
  aploss demo
  aploss demo --loss focal --seed 1 --out runs/second-demo
"""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--loss", default="ap", help=f"classification loss: {', '.join(LOSSES.names())}")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of initial weights and data order")
    parser.add_argument("--out", help="run folder; by default runs/demo, or the next free number")


def _run(options: Namespace) -> int:
    """Trains the demo recipe, or resumes an unfinished demo."""
    LOSSES.get(options.loss)
    settings = {"data": "builtin", "loss": options.loss, "seed": options.seed}
    folder = options.out or free_folder("demo", lambda path: _is_free_or_unfinished(path, settings))
    config = load_config("demo", {**settings, "out": str(folder)})
    return run_training(config, options, resume=True)


def _is_free_or_unfinished(path: Path, settings: dict[str, object]) -> bool:
    """Whether a folder holds no run, or the same demo unfinished."""
    folder = RunFolder(path)
    if not folder.exists or folder.summary_file.is_file():
        return not folder.exists
    config = folder.read_config()
    return all(getattr(config, key) == value for key, value in settings.items())


DEMO = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
