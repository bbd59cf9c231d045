"""The benchmark of several processes runs, and the traffic it computes is handed to torch.distributed."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from tiny_runs import start_process

from aploss.benchmarks import scaling
from aploss.losses import alrp_loss, ap_loss


@pytest.fixture
def group():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        yield dist.group.WORLD
        dist.destroy_process_group()


@pytest.mark.parametrize("loss", ["ap", "alrp"])
def test_computed_traffic_equals_recorded_traffic(group, monkeypatch, loss):
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
    expected = scaling.traffic(1, 7, extras=int(loss != "ap"))
    assert len(sent) == expected["messages"]
    assert sum(sent) == expected["bytes"]


def test_a_quick_run_measures_one_to_four_processes(tmp_path):
    start_process("", log=tmp_path / "log").join()  # the server of all tests, with the imports of all
    result = scaling.run(lambda step: None, quick=True)
    measured = [row for row in result["rows"] if "seconds" in row]
    assert sorted({row["processes"] for row in measured}) == [1, 2, 3, 4]
    assert all(row["seconds"] > 0 for row in measured)
    assert f"1024 {100:>14,}" in scaling.table(result)
