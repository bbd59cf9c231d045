"""One process or many: what a run needs to know of the others, through ``torchrun``'s environment.

``aploss train ...`` is a world of one; ``torchrun --nproc-per-node 8 -m aploss train ...`` one of
eight, on one machine or many. Small decisions (stop, skip a step) travel over a gloo group of their
own, so that they need no device and cannot disturb the gradients' traffic.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from aploss.errors import RunError
from aploss.training.heartbeat import Heartbeat

__all__ = ["World", "is_lost_connection", "start_world"]

# Others may wait while the first process evaluates COCO; a dead one is found by other means.
PATIENCE = timedelta(minutes=60)


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them.

    Attributes:
        rank: number of this process, from 0.
        size: how many there are.
        control: gloo group for decisions; None in a world of one.
    """

    rank: int = 0
    size: int = 1
    control: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over the processes, in every process."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes by rank; in processes other than the main one, none."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, found, dst=0, group=self.control)
        return found or []

    def from_main(self, value: Any) -> Any:
        """The main process's value, in every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process goes through the block before the others.

        An error of the main process is raised in all, so that nobody waits for it.
        """
        if self.size == 1:
            yield
            return
        if not self.is_main:
            problem = self.from_main(None)
            if problem is not None:
                raise problem
            yield
            return
        try:
            yield
        except Exception as error:
            self.from_main(RunError(f"the main process stopped: {error}"))
            raise
        self.from_main(None)


@contextmanager
def start_world(device: torch.device) -> Iterator[World]:
    """Joins the processes that ``torchrun`` started; a world of one without it.

    A process group that is already there is used and left as it is.

    Args:
        device: what this process computes on; decides between nccl and gloo.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 and not dist.is_initialized():
        yield World()
        return
    started = not dist.is_initialized()
    if started:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    try:
        control: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        world = World(rank=dist.get_rank(), size=dist.get_world_size(), control=control)
        with Heartbeat(world.rank, world.size):
            yield world
            dist.barrier(group=control)  # nobody's silence is mistaken for death at the end
    finally:
        if started:
            dist.destroy_process_group()


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says that another process of the run has gone."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset", "gloo", "nccl", "broken pipe")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
