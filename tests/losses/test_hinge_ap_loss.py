"""The structured hinge loss: all rankings tried for a few scores, plain search for many."""

import other_losses
import pytest
import torch

from aploss.losses import reference
from aploss.losses.hinge_ap_loss import hinge_ap_loss


def boxes(seed, positives, negatives, spread=1.0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    count = positives + negatives
    scores = spread * torch.randn(count, generator=generator, dtype=torch.float64)
    targets = torch.zeros(count, dtype=torch.long)
    targets[:positives] = 1
    scores[:positives] += shift
    order = torch.randperm(count, generator=generator)
    return scores[order], targets[order]


def value_and_gradient(scores, targets):
    scores = scores.clone().requires_grad_()
    loss = hinge_ap_loss(scores, targets)
    loss.backward()
    return loss.detach(), scores.grad


def search_every_place(scores, targets):
    """Yue et al.: each negative on its own takes the best of all P + 1 places."""
    positives = scores[targets == 1].sort(descending=True).values
    negatives = scores[targets == 0].sort(descending=True).values
    p, n = len(positives), len(negatives)
    rank = torch.arange(1, p + 1, dtype=torch.float64)
    total, above = 0.0, torch.zeros(p)
    for j, score in enumerate(negatives, start=1):
        gains = (rank / (rank + j - 1) - rank / (rank + j)) / p - 2 * (positives - score) / (p * n)
        sums = torch.cat([gains.new_zeros(1), gains.flip(0).cumsum(0)])  # passing 0..p positives
        total += sums.max().item()
        above[p - int(sums.argmax()) :] += 1
    return total, above


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(("positives", "negatives"), [(1, 1), (1, 5), (2, 3), (3, 2), (3, 3), (5, 1), (2, 4)])
def test_value_and_gradient_equal_the_best_of_all_rankings(positives, negatives, spread):
    for seed in range(2):
        scores, targets = boxes(seed, positives, negatives, spread)
        loss, gradient = value_and_gradient(scores, targets)
        expected, expected_gradient = other_losses.hinge_ap_loss(scores, targets)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
        assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("positives", "negatives"), [(1, 400), (7, 300), (60, 500), (300, 40)])
@pytest.mark.parametrize("shift", [-2.0, 0.0, 3.0])
def test_many_boxes_equal_the_search_of_every_place(positives, negatives, shift):
    scores, targets = boxes(1, positives, negatives, spread=3.0, shift=shift)
    loss, gradient = value_and_gradient(scores, targets)
    expected, above = search_every_place(scores, targets)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    order = scores[targets == 1].argsort(descending=True)
    on_positives = gradient[targets == 1][order]
    assert torch.allclose(on_positives, -2 * above.double() / (positives * negatives), atol=1e-14)


def test_by_hand():
    # Scores 1 (negative), 0 (positive): raising the negative costs 1/2 of AP and the margin
    # -2 (0 - 1) = 2 of F. Both gradients are 2 / (1 * 1).
    loss, gradient = value_and_gradient(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))
    assert loss.item() == 2.5
    assert gradient.tolist() == [2, -2]


def test_it_bounds_one_minus_ap_from_above():
    for seed in range(10):
        scores, targets = boxes(seed, 10, 100)
        error, _ = reference.ap_loss(scores, targets, delta=0, interpolated=False)
        assert value_and_gradient(scores, targets)[0] >= error


@pytest.mark.parametrize("spread", [0.01, 1.0, 100.0])
def test_the_loss_lies_above_the_plane_of_its_subgradient(spread):
    # The loss is a maximum of linear functions, so it is convex: also where scores are tied.
    for seed in range(10):
        scores, targets = boxes(seed, 15, 60, spread=spread)
        scores = scores.round() if seed % 2 else scores
        elsewhere, _ = boxes(seed + 100, 15, 60, spread=spread)
        loss, gradient = value_and_gradient(scores, targets)
        plane = loss + (gradient * (elsewhere - scores)).sum()
        assert value_and_gradient(elsewhere, targets)[0] >= plane - 1e-9


def test_far_separated_boxes_have_no_loss():
    scores, targets = boxes(0, 10, 100, shift=1e4)
    loss, gradient = value_and_gradient(scores, targets)
    assert loss == 0
    assert (gradient == 0).all()


def test_gradients_sum_to_zero_and_an_offset_changes_nothing():
    scores, targets = boxes(0, 20, 200)
    loss, gradient = value_and_gradient(scores, targets)
    shifted, shifted_gradient = value_and_gradient(scores + 1e4, targets)
    assert gradient.sum().item() == pytest.approx(0, abs=1e-12)
    assert shifted.item() == pytest.approx(loss.item(), abs=1e-10)
    assert torch.equal(gradient, shifted_gradient)
