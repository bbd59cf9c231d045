"""The loss benchmark runs, and what it times is what it says."""

import torch

from aploss.benchmarks import losses
from aploss.losses import ap_loss, reference

NAMES = ("ap_loss", "torch_operations", "focal_loss", "bce", "read_read_write", "loop")


def test_a_quick_run_fills_table_and_plot(monkeypatch):
    monkeypatch.setattr(losses, "SECONDS_PER_CASE", 0.01)
    monkeypatch.setattr(losses, "QUICK_CASES", ((2000, 50, 0.0), (4000, 50, 0.0), (4000, 50, 4.0)))
    steps = []
    result = losses.run(steps.append, quick=True)
    assert [row["scores"] for row in result["rows"]] == [2000, 4000, 4000]
    assert len(steps) == 4
    assert losses.table(result).count("4,000        50") == 2
    assert losses.plot(result).count("<svg") == 1
    for row in result["rows"]:
        assert all(row[name] > 0 for name in NAMES)


def test_the_loop_that_ours_is_compared_with_is_algorithm_1():
    scores, targets = losses.make_boxes(3000, 500, 0.0)
    _, expected = reference.ap_loss(scores, targets)
    gradient = losses.algorithm_1(scores, targets) / 500
    assert torch.allclose(gradient.double(), expected[targets == 0], rtol=1e-3, atol=1e-8)


def test_torch_operations_give_the_same_loss():
    scores, targets = losses.make_boxes(3000, 500, 3.0)
    assert torch.isclose(losses.by_torch(scores, targets), ap_loss(scores, targets), rtol=1e-6)
