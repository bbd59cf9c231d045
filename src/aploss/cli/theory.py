"""Puts the paper's theorems to the test."""

import time
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from aploss.cli.command import EXIT_PROBLEMS, Command

EXAMPLES = """
  aploss theory                     all five, a page each
  aploss theory smoothed-failure
"""


def _add_arguments(parser: ArgumentParser) -> None:
    names = Literal["all", "convergence", "smoothed-failure", "inseparable", "consistency", "imbalance"]
    parser.add_argument("name", nargs="?", type=names, default="all", help="which study")
    parser.add_argument("--seed", type=int, default=0, help="of the random problems")
    parser.add_argument("--out", type=Path, default=Path("runs/theory"), help="folder for the pages")


def _run(options: Namespace) -> int:
    from aploss.theory import STUDIES, write_study

    holds = True
    for name in STUDIES if options.name == "all" else [options.name]:
        start = time.perf_counter()
        study = STUDIES[name](options.seed)
        page = write_study(study, options.out / name)
        print(f"{study.title} ({study.place}), {time.perf_counter() - start:.0f} s")
        for verdict in study.verdicts:
            print(f"  {verdict.word}: {verdict.claim}")
        print(f"  {page}", flush=True)
        holds = holds and study.holds
    return 0 if holds else EXIT_PROBLEMS


THEORY = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run, plugins=False)
