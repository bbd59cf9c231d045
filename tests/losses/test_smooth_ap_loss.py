"""Smoothed AP against the literal formula with autograd's own derivative."""

import sys

import pytest
import torch

from aploss.losses import reference
from aploss.losses.smooth_ap_loss import smooth_ap_loss

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random_boxes(dtype=torch.float64, count=120, offset=0.0, spread=1.0):
    torch.manual_seed(0)
    scores = offset + spread * torch.randn(count, dtype=torch.float64)
    return scores.to(dtype).reshape(4, -1), torch.randint(-1, 2, (count,)).reshape(4, -1)


def check(scores, targets, tolerance, **options):
    scores = scores.clone().requires_grad_()
    loss = smooth_ap_loss(scores, targets, **options)
    loss.backward()
    expected, gradient = reference.smooth_ap_loss(scores, targets, **options)
    assert loss.item() == pytest.approx(expected.item(), rel=max(tolerance, 1e-12))
    assert scores.grad.dtype == scores.dtype
    assert (scores.grad - gradient).abs().max() <= tolerance * gradient.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("log_space", [False, True])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_value_and_gradient_equal_the_literal_version(dtype, log_space, temperature):
    scores, targets = random_boxes(dtype)
    check(scores, targets, TOLERANCE[dtype], temperature=temperature, log_space=log_space)


@pytest.mark.parametrize(("offset", "spread"), [(1e4, 1.0), (0.0, 1e3), (0.0, 1e-3), (0.0, 0.0)])
def test_offset_huge_tiny_and_equal_scores(offset, spread):
    scores, targets = random_boxes(torch.float32, offset=offset, spread=spread)
    check(scores, targets, 2e-6)


def test_small_blocks_give_the_same(monkeypatch):
    scores, targets = random_boxes()
    monkeypatch.setattr(sys.modules[smooth_ap_loss.__module__], "_BLOCK", 150)
    check(scores, targets, 1e-12)


def test_with_a_small_temperature_it_is_one_minus_average_precision():
    scores, targets = random_boxes()
    expected, _ = reference.ap_loss(scores, targets, delta=0, interpolated=False)
    assert smooth_ap_loss(scores, targets, temperature=1e-6).item() == pytest.approx(expected.item())


def test_log_space_and_eps_by_hand():
    # One positive and one negative of equal score: AP = 1 - 0.5 / 1.5 = 2/3.
    scores = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss = smooth_ap_loss(scores, torch.tensor([1, 0]), log_space=True, eps=1 / 3)
    assert loss.item() == pytest.approx(0, abs=1e-15)
