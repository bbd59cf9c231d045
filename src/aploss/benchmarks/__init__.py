"""The benchmarks of ``aploss bench``, one per file, and the helpers they share.

A benchmark has ``run(progress, quick=False)``, which returns numbers for JSON, and ``table(result)``, which shows them;
``progress`` is called with a description of each measurement.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

Progress = Callable[[str], None]


def best_in_turns(cases: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The best time of each case; they take turns for ``seconds`` per case, so that all have the same conditions.

    Each timed call follows one of the same case, so that no case pays for the caches that another one has filled.
    """
    best = dict.fromkeys(cases, float("inf"))
    for case in cases.values():
        case()
    stop, rounds = time.perf_counter() + seconds * len(cases), 0
    while rounds < 3 or time.perf_counter() < stop:
        for name, case in cases.items():
            case()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            case()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[name] = min(best[name], time.perf_counter() - start)
        rounds += 1
    return best
