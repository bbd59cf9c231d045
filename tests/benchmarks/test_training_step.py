"""The benchmark of training steps runs, and its competitors differ in nothing but the loss."""

import torch

from aploss.benchmarks import training_step


def test_quick_run_times_all_competitors_and_fills_the_table() -> None:
    steps: list[str] = []
    result = training_step.run(steps.append, quick=True)
    names = [(row["what"], row["name"]) for row in result["rows"]]
    assert names == [
        ("whole step", training_step.BASELINE),
        ("whole step", training_step.SWAPPED),
        ("whole step", "retinanet-r18, AP-loss"),
        ("loss alone", training_step.BASELINE),
        ("loss alone", training_step.SWAPPED),
    ]
    assert all(row["best"] > 0 for row in result["rows"])
    assert result["rows"][0]["ratio"] == 1.0
    assert steps[0] == "building the networks"
    assert "ResNet-18, 96 px, batch 1, 3 classes" in training_step.table(result)


def test_competitors_are_the_same_network_but_for_the_loss() -> None:
    torch.manual_seed(0)
    models = training_step._models(training_step.QUICK)
    baseline, swapped, ours = models.values()
    image = torch.rand(1, 3, 96, 96)
    # One object: where objects compete for anchors, our labels keep what torchvision's lose.
    target = {key: value[:1] for key, value in training_step._target(96, 3).items()}
    for model in (baseline, swapped, ours):
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    losses = [model(list(image), [target]) for model in (baseline, swapped, ours)]
    torch.testing.assert_close(losses[0]["bbox_regression"], losses[1]["bbox_regression"])
    torch.testing.assert_close(losses[1]["classification"], losses[2]["classification"])
    assert (losses[0]["classification"] - losses[1]["classification"]).abs() > 1e-3
