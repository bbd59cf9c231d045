"""Processes for tests, forked from a server that has made the imports and done nothing else.

What the test process did before, the threads of autograd among it, is not in them; and they start at once.
"""

import inspect
import multiprocessing
import os
import runpy
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# What a training imports, with its page, and what the files of tests do. The server takes the first list it is given.
PRELOADED = [
    "aploss.cli.train", "aploss.training.run", "aploss.losses.ranking.numba_backend", "aploss.reports.run_report",
    "matplotlib.backends.backend_svg", "matplotlib.figure", "torch.utils.tensorboard", "scipy.special", "pytest",
    "ready_numba",
]  # fmt: skip


def _forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path)):  # it does not look in our sys.path
        forkserver.ensure_running()
    return context


def start_process(program: str, *, log: Path, **values: Any) -> BaseProcess:
    """Starts a program that finds ``values`` and ``log``."""
    process = _forkserver().Process(target=_run, args=(program, {"values": values, "log": str(log)}))
    process.start()
    return process


def _run(program: str, names: dict[str, Any]) -> None:
    # As in any program: from the server it would have the way to start processes, and every worker import torch again.
    multiprocessing.set_start_method(None, force=True)
    exec(program, names)


def run_group(count: int, worker: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``worker(rank, *arguments)`` returns in each process of a gloo group; a function of a file of tests.

    As soon as one of them raises or dies, the others are ended and it is raised here.
    """
    _forkserver()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, f"{folder}/arguments.pt")
        place = count, folder, inspect.getfile(worker), worker.__name__
        mp.start_processes(_join_group, place, nprocs=count, start_method="forkserver")
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(count)]


def _join_group(rank: int, count: int, folder: str, file: str, name: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    worker = runpy.run_path(file)[name]  # pytest's name of the file is not one that can be imported
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(minutes=5))
    found = worker(rank, *torch.load(f"{folder}/arguments.pt"))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
