"""AP-loss against the literal Algorithm 1, scikit-learn, and numbers worked out by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranking_cases import DISTRIBUTIONS
from sklearn.metrics import average_precision_score
from torch import Tensor

from aploss.losses import ap_loss, reference


def loss_and_gradient(scores: Tensor, targets: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    scores = scores.clone().requires_grad_()
    loss = ap_loss(scores, targets, **options)
    loss.backward()
    assert scores.grad is not None
    assert scores.grad.dtype == scores.dtype
    return loss.detach(), scores.grad


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("delta", [0.25, 1.0])
def test_very_many_float32_scores_equal_algorithm_1(make_boxes, distribution, delta):
    # Not a multiple of eight, and some blocks hold nothing but negatives.
    scores, targets = make_boxes(distribution, 8, 140_000, ignored=1_001, dtype=torch.float32)
    loss, gradient = loss_and_gradient(scores, targets, delta=delta)
    expected_loss, expected_gradient = reference.ap_loss(scores, targets, delta)
    assert abs(loss.double() - expected_loss) <= 3e-8
    assert (gradient.double() - expected_gradient).abs().max() <= 1e-7 * expected_gradient.abs().max()


def test_gradient_scaling_reaches_half_precision_before_rounding():
    # 1 positive, 70,000 equal negatives: g_j = L / 70,000 ~ 1.4e-5 is subnormal in float16.
    scores = torch.zeros(70_001, dtype=torch.float16, requires_grad=True)
    targets = torch.zeros(70_001, dtype=torch.int8)
    targets[0] = 1
    (ap_loss(scores, targets) * 1024.0).backward()
    _, expected = reference.ap_loss(scores.detach(), targets)
    assert torch.allclose(scores.grad.double(), expected * 1024, rtol=1e-3, atol=0)


def test_heaviside_without_interpolation_is_average_precision(make_boxes, backend):
    for seed in range(10):
        scores, targets = make_boxes("random", 30, 400, ignored=0, seed=seed)
        loss, _ = loss_and_gradient(scores, targets, delta=0, interpolated=False)
        assert 1 - loss.item() == pytest.approx(average_precision_score(targets, scores), abs=1e-12)


def test_an_example_worked_by_hand(backend):
    # delta = 1, positives a = 0 and b = 1.5, negatives c = 0.5, d = 2.
    # f(x) = x/2 + 1/2 on [-1, 1].
    # a: f(c-a) = 0.75, f(d-a) = 1, f(b-a) = 1       L_a = 1.75 / (1 + 1 + 1.75) = 7/15
    # b: f(c-b) = 0,    f(d-b) = 0.75, f(a-b) = 0    L_b = 0.75 / (1 + 0 + 0.75) = 3/7
    # ascending order a, b; precision 8/15 then 4/7: it rises, so nothing is interpolated.
    scores = torch.tensor([0.0, 1.5, 0.5, 2.0], dtype=torch.float64)
    loss, gradient = loss_and_gradient(scores, torch.tensor([1, 1, 0, 0]))
    assert loss.item() == pytest.approx((7 / 15 + 3 / 7) / 2)
    c = 0.75 / 3.75 / 2
    d = (1 / 3.75 + 0.75 / 1.75) / 2
    assert gradient.tolist() == pytest.approx([-7 / 30, -3 / 14, c, d])


def test_an_interpolated_example_worked_by_hand(backend):
    # Heaviside; descending order: negative 3, positive 2, positive 1.
    # precision of the positive at 1: 2/3, of the one at 2: 1/2. Going up, 1/2 < 2/3, so
    # line 11 scales its error 1/2 by (1 - 2/3) / (1 - 1/2) = 2/3, to 1/3.
    scores = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    loss, gradient = loss_and_gradient(scores, torch.tensor([0, 1, 1]), delta=0)
    assert loss.item() == pytest.approx(1 / 3)
    assert gradient.tolist() == pytest.approx([1 / 3, -1 / 6, -1 / 6])


finite_scores = st.floats(-50, 50, width=32)
boxes = st.lists(st.tuples(finite_scores, st.sampled_from([1, 0, 0, -1])), min_size=1, max_size=60)
deltas = st.sampled_from([0.0, 0.3, 1.0, 4.0])


def as_tensors(drawn: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    scores, targets = zip(*drawn, strict=True)
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(targets)


@given(boxes, deltas)
@settings(deadline=None, max_examples=60)
def test_gradients_sum_to_zero_and_pull_positives_up(drawn, delta):
    scores, targets = as_tensors(drawn)
    _, gradient = loss_and_gradient(scores, targets, delta=delta)
    assert abs(gradient.sum().item()) < 1e-12
    assert (gradient[targets == 1] <= 0).all()
    assert (gradient[targets == 0] >= 0).all()


@given(boxes, st.just(0.0) | st.floats(1e-6, 2.0))
@settings(deadline=None, max_examples=60)
def test_perfect_ranking_has_zero_loss_and_zero_gradient(drawn, delta):
    scores, targets = as_tensors(drawn)
    scores = torch.where(targets == 1, scores + 200, scores)
    loss, gradient = loss_and_gradient(scores, targets, delta=delta)
    assert loss.item() == 0
    assert (gradient == 0).all()
