"""The benchmark of training steps runs, and its two networks differ in nothing but the loss."""

import torch

from aploss.benchmarks import training_step


def test_quick_run_times_both_losses_and_fills_the_table() -> None:
    result = training_step.run(lambda step: None, quick=True)
    assert [row["name"] for row in result["rows"]] == [training_step.BASELINE, training_step.SWAPPED]
    assert all(row["best"] > 0 for row in result["rows"])
    assert result["rows"][0]["ratio"] == 1.0
    assert "ResNet-50, 96 px, batch 1, 3 classes" in training_step.table(result)


def test_both_networks_are_the_same_but_for_the_loss() -> None:
    models = training_step._models(training_step.QUICK).values()
    torch.manual_seed(0)
    image, target = torch.rand(1, 3, 96, 96), training_step._target(96, 3)
    for model in models:
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    focal, ap = (model(list(image), [target]) for model in models)
    torch.testing.assert_close(focal["bbox_regression"], ap["bbox_regression"])
    assert (focal["classification"] - ap["classification"]).abs() > 1e-3
