"""``aploss theory``: verify the paper's theorems in experiments."""

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from aploss.cli.command import EXIT_PROBLEMS, Command, progress

EXAMPLES = """
  aploss theory                     every study, with an index page
  aploss theory smoothed-failure
"""
NAMES = ("convergence", "smoothed-failure", "inseparable", "consistency", "imbalance", "method")


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", choices=["all", *NAMES], default="all", help="which study")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the random problems")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/theory"), help="folder for the pages")


def _run(options: Namespace) -> int:
    from aploss.theory import STUDIES, write_index, write_study

    studies = []
    for name in STUDIES if options.name == "all" else [options.name]:
        start = time.perf_counter()
        with progress(name, quiet=options.quiet):
            study = STUDIES[name](options.seed)
            page = write_study(study, options.out / name)
        studies.append(study)
        print(f"{study.title} ({study.place}), {time.perf_counter() - start:.0f} s")
        for verdict in study.verdicts:
            print(f"  {verdict.word}: {verdict.claim}")
        print(f"  {page}", flush=True)
    if options.name == "all":
        print(f"index: {write_index(studies, options.out)}", flush=True)
    return 0 if all(study.holds for study in studies) else EXIT_PROBLEMS


THEORY = Command(examples=EXAMPLES, add_arguments=_add_arguments, run=_run)
