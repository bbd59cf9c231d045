"""What the losses cost on a GPU, counted on a simulated one: host reads, uploads, launches, bytes."""

import pytest
import torch
from simulated_device import measure
from torch import Tensor

from aploss.losses import alrp_loss, ap_loss, auc_loss, focal_loss, rank_sort_loss, use_backend

POSITIVES = 50
SIZES = (20_000, 60_000)
LOSSES = {
    "ap": ap_loss,
    "auc": auc_loss,
    "rank-sort": lambda *tensors, **options: torch.add(*rank_sort_loss(*tensors, **options)),
    "alrp": lambda *tensors, **options: torch.add(*alrp_loss(*tensors, **options)),
    "focal": focal_loss,
}
RANKING = [name for name in LOSSES if name != "focal"]


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
    logs = [measure(LOSSES[name], *arguments(name, size)) for size in SIZES]
    for forward, backward in logs:
        assert len(forward.host_reads) <= 1, forward.host_reads
        assert forward.uploads == backward.host_reads == backward.uploads == []
    assert logs[0][0].launches == logs[1][0].launches
    assert logs[0][1].launches == logs[1][1].launches


@pytest.mark.parametrize("name", RANKING)
def test_launches_and_bytes_stay_within_their_budget(name):
    small, large = (measure(LOSSES[name], *arguments(name, size)) for size in SIZES)
    assert small[0].launches <= 200  # the gradient included
    assert small[1].launches <= 4
    moved = sum(counts.bytes for counts in large) - sum(counts.bytes for counts in small)
    assert moved / (SIZES[1] - SIZES[0]) <= 210  # Rank & Sort has a second gradient of all scores
