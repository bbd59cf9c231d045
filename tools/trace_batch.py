"""Counts the functions and files of aploss that a training batch passes, from image files to a checkpoint.

    python tools/trace_batch.py [--list]

A small RetinaNet trains on the built-in data with AP-loss, without workers, and writes a checkpoint after every step.
The calls between two checkpoints are recorded: reading and augmenting the images, forward pass, loss, backward pass,
optimizer step, checkpoint. Start-up (config, annotations, building the detector), logging and evaluation are not.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import aploss
from aploss.data.builtin import builtin_folder
from aploss.detectors.checkpoint import Checkpoint
from aploss.training import load_config, train

PACKAGE = Path(aploss.__file__).parent
WARM_UP_STEPS = 3  # the first ones compile and fill caches
INLINE = ("<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>")


def trace_batch() -> dict[str, list[str]]:
    """The functions that a step calls by file, both in the order of their first call."""
    called: dict[str, list[str]] = defaultdict(list)
    checkpoints = 0

    def record(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal checkpoints
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)) or code.co_name in INLINE:
            return
        if event == "call" and checkpoints == WARM_UP_STEPS:
            functions = called[str(Path(code.co_filename).relative_to(PACKAGE))]
            if code.co_qualname not in functions:
                functions.append(code.co_qualname)
        checkpoints += event == "return" and code is Checkpoint.write.__code__

    with tempfile.TemporaryDirectory() as folder:
        data = builtin_folder(cache=Path(folder) / "data", image_size=64, counts=(12, 4, 4))
        changes = {
            "data": str(data),
            "out": f"{folder}/run",
            "device": "cpu",
            "loss": "ap",
            "log_steps": 100,
            "checkpoint_steps": 1,
            "batches": {"size": 4, "image_size": 64, "workers": 0},
            "model": {"options": {"test_size": [64, 64]}},
            "schedule": {"length": WARM_UP_STEPS + 2, "unit": "steps", "warmup_steps": 1},
            "splits": {"validation": "none"},
            "evaluation": {"split": "none"},
        }
        config = load_config("demo", changes)
        sys.setprofile(record)
        try:
            train(config)
        finally:
            sys.setprofile(None)
    return called


def main() -> None:
    """Prints the numbers, and with ``--list`` every function."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the functions of each file")
    options = parser.parse_args()
    called = trace_batch()
    for file, functions in called.items():
        print(f"{len(functions):4} {file}")
        if options.list:
            print("".join(f"       {name}\n" for name in functions), end="")
    print(f"{sum(map(len, called.values()))} functions in {len(called)} files")


if __name__ == "__main__":
    main()
