"""The loss benchmark runs, and what it times is what it says."""

import torch

from aploss.benchmarks import losses
from aploss.losses import ap_loss, reference


def test_a_quick_run_fills_table_and_plot(monkeypatch):
    monkeypatch.setattr(losses, "SECONDS_PER_CASE", 0.01)
    monkeypatch.setattr(losses, "QUICK_SIZES", (2000, 4000))
    steps = []
    result = losses.run(steps.append, quick=True)
    assert [row["scores"] for row in result["rows"]] == [2000] * 2 + [4000] * 2
    assert [row["positives"] for row in result["many_positives"]] == [10, 500, 2000]
    table = losses.table(result)
    assert "4,000 late" in table
    assert "2,000 positives: ap" in table
    assert losses.plot(result).count("<svg") == 1
    for row in result["rows"]:
        assert all(row[name] > 0 for name in ("ap_loss", "torch_operations", "focal_loss", "bce", "copy", "loop"))


def test_the_loop_that_ours_is_compared_with_is_algorithm_1():
    scores, targets = losses.make_scores(3000, 0.0, 500, "cpu")
    _, expected = reference.ap_loss(scores, targets)
    gradient = losses.loop(scores, targets) / 500
    assert torch.allclose(gradient.double(), expected[targets == 0], rtol=1e-3, atol=1e-8)


def test_torch_operations_give_the_same_loss():
    scores, targets = losses.make_scores(3000, 3.0, 500, "cpu")
    assert torch.isclose(losses.by_torch(scores, targets), ap_loss(scores, targets), rtol=1e-6)
