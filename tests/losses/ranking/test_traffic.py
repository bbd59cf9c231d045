"""The messages of a ranking over processes are those that docs/scaling.md lists."""

import tempfile

import pytest
import torch
import torch.distributed as dist

from aploss.losses import alrp_loss, ap_loss


@pytest.fixture
def group():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        yield dist.group.WORLD
        dist.destroy_process_group()


@pytest.mark.parametrize("loss", ["ap", "alrp"])
def test_bytes_handed_to_torch_distributed(group, monkeypatch, loss):
    sent = []

    def record(name, tensor_at):
        collective = getattr(dist, name)

        def recorded(*arguments, **options):
            sent.append(arguments[tensor_at].numel() * arguments[tensor_at].element_size())
            return collective(*arguments, **options)

        monkeypatch.setattr(dist, name, recorded)

    record("all_gather", 1)
    record("all_reduce", 0)
    scores, targets = torch.randn(300, requires_grad=True), (torch.arange(300) < 7).long()
    if loss == "alrp":
        values = sum(alrp_loss(scores, targets, torch.rand(7), process_group=group))
    else:
        values = ap_loss(scores, targets, process_group=group)
    values.backward()
    # Status; a score, and a box loss, of each of 7 positives; tallies of 2 R P + 2 rows.
    assert sent == [24, 8 * 7 * (1 if loss == "ap" else 2), 16 * (2 * 1 * 7 + 2)]
