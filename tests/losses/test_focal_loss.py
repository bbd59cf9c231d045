"""Focal loss against torchvision's and against the literal formula."""

import other_losses
import pytest
import torch
from torchvision.ops import sigmoid_focal_loss

from aploss.losses.focal_loss import focal_loss

# Of the largest gradient; a power in float32 costs a few units in the last place.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random_boxes(dtype=torch.float64, spread=3.0):
    torch.manual_seed(0)
    return (spread * torch.randn(4, 5, 60)).to(dtype), torch.randint(-1, 2, (4, 5, 60))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.5, 0.0), (0.9, 0.5), (0.3, 5.0)])
def test_value_and_gradient_equal_the_literal_formula(dtype, alpha, gamma):
    scores, targets = random_boxes(dtype)
    scores.requires_grad_()
    loss = focal_loss(scores, targets, alpha=alpha, gamma=gamma)
    loss.backward()
    expected, gradient = other_losses.focal_loss(scores, targets, alpha, gamma)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12 if dtype == torch.float64 else 1e-6)
    assert scores.grad.dtype == dtype
    largest = gradient.abs().max()
    assert (scores.grad - gradient).abs().max() <= TOLERANCE[dtype] * largest


def test_it_is_torchvisions_sum_over_the_positives():
    scores, targets = random_boxes(torch.float32)
    targets = targets.clamp(min=0)
    ours, theirs = (scores.clone().requires_grad_() for _ in range(2))
    loss = focal_loss(ours, targets)
    expected = sigmoid_focal_loss(theirs, targets.float(), reduction="sum") / targets.sum()
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_huge_logits_have_finite_gradients(gamma):
    scores = torch.tensor([-1e30, -200.0, 200.0, 1e30] * 2, requires_grad=True)
    loss = focal_loss(scores, torch.tensor([0] * 4 + [1] * 4), gamma=gamma)
    loss.backward()
    assert loss.isfinite()
    assert scores.grad.isfinite().all()
    # Far on the wrong side the slope is that of the logit itself, over 4 positives.
    assert scores.grad.tolist() == pytest.approx([0, 0, 0.75 / 4, 0.75 / 4, -0.25 / 4, -0.25 / 4, 0, 0])


def test_without_positives_the_negatives_are_summed():
    scores = torch.zeros(3, requires_grad=True)
    loss = focal_loss(scores, torch.zeros(3))
    assert loss.item() == pytest.approx(3 * 0.75 * 0.25 * torch.tensor(2.0).log().item())


def test_it_can_be_differentiated_twice():
    scores, targets = random_boxes()
    scores = scores.flatten()[:20].requires_grad_()
    assert torch.autograd.gradgradcheck(lambda s: focal_loss(s, targets.flatten()[:20]), scores)
