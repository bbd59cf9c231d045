"""Runs jobs that release the interpreter lock on as many threads as torch uses.

Best on torch's own. After each operation torch's threads wait for the next one by spinning, for
milliseconds; threads of ours would have to share the processor with them, and a loss comes right
after other operations. Where torch's threads are those of GNU's OpenMP, as on Linux, they can be
asked to run something else. Elsewhere, and in a forked process, which has inherited none of them, a
pool of our own does the work.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["run_together"]

_importing_process = os.getpid()
_pool: tuple[int, int, ThreadPoolExecutor] | None = None


def run_together(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of the jobs, in their order; the calling thread takes part."""
    threads = min(torch.get_num_threads(), len(jobs))
    if threads <= 1:
        return [job() for job in jobs]
    waiting = iter(list(enumerate(jobs)))  # threads may share the iterator of a list
    results: list[Any] = [None] * len(jobs)
    failures: list[BaseException] = []

    def take_turns() -> None:
        try:
            for place, job in waiting:
                results[place] = job()
        except BaseException as failure:  # what leaves a callback of OpenMP is lost
            failures.append(failure)

    (_on_torchs_threads if _openmp() is not None else _on_own_threads)(take_turns, threads)
    if failures:
        raise failures[0]
    return results


def _on_torchs_threads(work: Callable[[], None], threads: int) -> None:
    library = _openmp()
    assert library is not None
    library.GOMP_parallel(_Callback(lambda _: work()), None, threads, 0)


def _on_own_threads(work: Callable[[], None], threads: int) -> None:
    others = [_executor(threads - 1).submit(work) for _ in range(threads - 1)]
    work()
    for other in others:
        other.result()


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _openmp() -> Any:
    """GNU's OpenMP as torch has loaded it, or None."""
    return _torchs_openmp() if os.getpid() == _importing_process else None


@cache
def _torchs_openmp() -> Any:
    if sys.platform != "linux":
        return None
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        try:  # only if it is loaded already: another copy has threads of its own
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            library.GOMP_parallel.argtypes = [
                _Callback, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
            ]  # fmt: skip
            library.GOMP_parallel.restype = None
        except (OSError, AttributeError):
            continue
        return library
    return None


def _executor(threads: int) -> ThreadPoolExecutor:
    """The pool of this process (a fork inherits no threads) with that many threads."""
    global _pool
    if _pool is None or _pool[:2] != (os.getpid(), threads):
        _pool = (os.getpid(), threads, ThreadPoolExecutor(threads, thread_name_prefix="aploss"))
    return _pool[2]
