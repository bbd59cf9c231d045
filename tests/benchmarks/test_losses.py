"""The loss benchmark runs, and torch operations compute the same loss."""

import torch

from aploss.benchmarks import losses
from aploss.losses import ap_loss


def test_a_quick_run_fills_the_table(monkeypatch):
    monkeypatch.setattr(losses, "SECONDS_PER_CASE", 0.01)
    monkeypatch.setattr(losses, "QUICK_SIZES", (2000, 4000))
    result = losses.run(lambda step: None, quick=True)
    assert [row["scores"] for row in result["rows"]] == [2000] * 2 + [4000] * 2
    assert [row["positives"] for row in result["many_positives"]] == [10, 500, 2000]
    table = losses.table(result)
    for words in ("4,000 late", "2,000 positives: ap", "1,000 groups: ", "30% positives: ap_loss"):
        assert words in table
    for row in (*result["rows"], result["dense"]):
        assert all(row[name] > 0 for name in losses.NAMES)
    assert all(seconds > 0 for seconds in result["groups"].values())


def test_torch_operations_give_the_same_loss():
    scores, targets = losses.make_scores(3000, 3.0, 500, "cpu")
    assert torch.isclose(losses.by_torch(scores, targets), ap_loss(scores, targets), rtol=1e-6)
