"""How often the losses make the host wait for a GPU, counted on a simulated one."""

import pytest
import torch
from simulated_device import measure
from torch import Tensor

from aploss.losses import alrp_loss, ap_loss, auc_loss, focal_loss, rank_sort_loss, use_backend

POSITIVES = 50
SIZE = 20_000
LOSSES = {
    "ap": ap_loss,
    "auc": auc_loss,
    "rank-sort": lambda *tensors, **options: torch.add(*rank_sort_loss(*tensors, **options)),
    "alrp": lambda *tensors, **options: torch.add(*alrp_loss(*tensors, **options)),
    "focal": focal_loss,
}


@pytest.fixture(autouse=True)
def torch_backend():
    with use_backend("torch"):
        yield


def arguments(name: str, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.zeros(size)
    targets[torch.randperm(size, generator=generator)[:POSITIVES]] = 1
    targets[torch.randperm(size, generator=generator)[:100]] = -1
    boxes = [torch.rand(int((targets == 1).sum()), generator=generator)] if name == "alrp" else []
    return [torch.randn(size, generator=generator), targets, *boxes]


@pytest.mark.parametrize("name", LOSSES)
def test_a_forward_pass_reads_once_and_a_backward_pass_never(name):
    forward, backward = measure(LOSSES[name], *arguments(name, SIZE))
    assert len(forward.host_reads) <= 1, forward.host_reads
    assert forward.uploads == backward.host_reads == backward.uploads == []
