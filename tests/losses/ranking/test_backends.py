"""Every backend and the page against the literal reference; a rule from outside of the package."""

import pytest
import torch
from hypothesis import given, settings
from ranking_cases import DISTRIBUTIONS, assert_equals_reference, cases, computed

from aploss.losses import reference, use_backend
from aploss.losses.autograd import RankingOperator
from aploss.losses.ranking import explained_ap_loss
from aploss.losses.ranking.rules import Rule


@pytest.mark.parametrize("name", ["cpu", "torch"])
@given(case=cases())
@settings(deadline=None, max_examples=200)
def test_values_and_gradients_equal_the_reference(name, case):
    with use_backend(name):
        assert_equals_reference(case)


@pytest.mark.parametrize("name", ["cpu", "torch"])
@given(case=cases())
@settings(deadline=None, max_examples=30)
def test_results_are_the_same_bits_from_run_to_run(name, case):
    with use_backend(name):
        first, second = computed(case), computed(case)
    assert all(torch.equal(*pair) for pair in zip(first[0] + first[1], second[0] + second[1], strict=True))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("interpolated", [True, False])
@pytest.mark.parametrize("delta", [0.25, 1.0])
def test_the_page_equals_the_reference(make_boxes, distribution, interpolated, delta):
    scores, targets = make_boxes(distribution)
    loss, gradient = explained_ap_loss(scores, targets, delta, interpolated)
    expected, expected_gradient = reference.ap_loss(scores, targets, delta, interpolated)
    assert abs(loss - expected) <= 1e-12
    assert (gradient - expected_gradient).abs().max() <= 1e-12 * expected_gradient.abs().max()


def _discounted_gain_lost(p, n, negatives, f0, above):
    """A discount of 1 / sqrt(rank), as in a discounted cumulative gain: what the negatives above i cost it."""
    return (1 + p) ** -0.5 - (1 + p + n) ** -0.5


OUTSIDE = RankingOperator(Rule("discounted_gain_of_a_test", _discounted_gain_lost))


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_a_rule_from_outside_of_the_package_is_a_loss_on_every_backend(make_boxes, backend, delta):
    scores, targets = make_boxes("random", 10, 60)
    scores.requires_grad_()
    (loss,) = OUTSIDE.rank(scores, targets, delta=delta)
    loss.backward()
    s, t = scores.detach(), targets.tolist()
    positives, negatives = ([i for i, target in enumerate(t) if target == kind] for kind in (1, 0))
    expected, gradient = 0.0, torch.zeros_like(s)
    for i in positives:
        steps = reference.piecewise_step(s - s[i], delta)
        p, n = (sum(steps[j].item() for j in group if j != i) for group in (positives, negatives))
        error = ((1 + p) ** -0.5 - (1 + p + n) ** -0.5) / len(positives)
        expected += error
        for j in negatives if n else ():
            gradient[j] += error * steps[j] / n
            gradient[i] -= error * steps[j] / n
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(scores.grad, gradient, rtol=0, atol=1e-12)
