"""The benchmarks run; torch operations compute the same loss, and the two networks differ in nothing but the loss."""

import torch

from aploss import benchmarks
from aploss.losses import ap_loss


def test_a_quick_run_fills_the_table(monkeypatch):
    monkeypatch.setattr(benchmarks, "SECONDS_PER_CASE", 0.01)
    monkeypatch.setattr(benchmarks, "QUICK_SIZES", (2000, 4000))
    result = benchmarks.measure_losses(lambda step: None, quick=True)
    assert [row["scores"] for row in result["rows"]] == [2000] * 2 + [4000] * 2
    assert [row["positives"] for row in result["many_positives"]] == [10, 500, 2000]
    table = benchmarks.losses_table(result)
    for words in ("4,000 late", "2,000 positives: ap", "1,000 groups: ", "30% positives: ap_loss"):
        assert words in table
    for row in (*result["rows"], result["dense"]):
        assert all(row[name] > 0 for name in benchmarks.NAMES)
    assert all(seconds > 0 for seconds in result["groups"].values())


def test_torch_operations_give_the_same_loss():
    scores, targets = benchmarks.make_scores(3000, 3.0, 500, "cpu")
    assert torch.isclose(benchmarks.by_torch(scores, targets), ap_loss(scores, targets), rtol=1e-6)


def test_a_quick_run_times_training_steps_with_both_losses():
    result = benchmarks.measure_training_step(lambda step: None, quick=True)
    assert [row["name"] for row in result["rows"]] == [benchmarks.BASELINE, benchmarks.SWAPPED]
    assert all(row["best"] > 0 for row in result["rows"])
    assert result["rows"][0]["ratio"] == 1.0
    assert "ResNet-50, 96 px, batch 1, 3 classes" in benchmarks.training_step_table(result)


def test_both_networks_are_the_same_but_for_the_loss():
    models = benchmarks._models(benchmarks.QUICK).values()
    torch.manual_seed(0)
    image, target = torch.rand(1, 3, 96, 96), benchmarks._target(96, 3)
    for model in models:
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    focal, ap = (model(list(image), [target]) for model in models)
    torch.testing.assert_close(focal["bbox_regression"], ap["bbox_regression"])
    assert (focal["classification"] - ap["classification"]).abs() > 1e-3
