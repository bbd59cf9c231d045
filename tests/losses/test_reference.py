"""The oracles themselves, against scikit-learn and examples worked by hand."""

import other_losses
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from aploss.losses import reference


def random_boxes(seed: int, count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, generator=generator, dtype=torch.float64)
    targets = torch.randint(-1, 2, (count,), generator=generator)
    return scores, targets


def test_piecewise_step_is_a_straight_line_between_minus_delta_and_delta():
    x = torch.tensor([-0.6, -0.5, -0.25, 0.0, 0.25, 0.5, 0.6], dtype=torch.float64)
    expected = torch.tensor([0, 0, 0.25, 0.5, 0.75, 1, 1], dtype=torch.float64)
    assert torch.equal(reference.piecewise_step(x, 0.5), expected)


@pytest.mark.parametrize("seed", range(5))
def test_without_smoothing_and_interpolation_it_is_average_precision(seed):
    scores, targets = random_boxes(seed)
    counted = targets >= 0
    loss, _ = reference.ap_loss(scores, targets, delta=0, interpolated=False)
    expected = 1 - average_precision_score(targets[counted], scores[counted])
    assert loss.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_auc_loss_without_smoothing_is_the_area_under_the_roc_curve(seed):
    scores, targets = random_boxes(seed)
    counted = targets >= 0
    loss, _ = reference.auc_loss(scores, targets, delta=0)
    expected = 1 - roc_auc_score(targets[counted], scores[counted])
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_interpolated_ap_by_hand():
    # Descending: P N P P, so the precisions from the lowest positive up are 3/4, 2/3, 1. The
    # interpolation lifts the second to 3/4. Errors: 1/4, 1/4, 0; their mean is 1/6.
    scores, targets = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([1, 0, 1, 1])
    loss, gradient = reference.ap_loss(scores, targets, delta=0)
    assert loss.item() == pytest.approx(1 / 6)
    assert gradient.tolist() == pytest.approx([0, 1 / 6, -1 / 12, -1 / 12])


def test_plain_ap_by_hand():
    scores, targets = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([1, 0, 1, 1])
    loss, gradient = reference.ap_loss(scores, targets, delta=0, interpolated=False)
    assert loss.item() == pytest.approx((1 / 4 + 1 / 3) / 3)
    assert gradient.tolist() == pytest.approx([0, (1 / 4 + 1 / 3) / 3, -1 / 9, -1 / 12])


def test_smoothed_ap_of_appendix_2_by_its_own_formula():
    # F(theta_1, theta_2) as printed, for scores 0 (negative), theta_1 and theta_2 - 3 theta_1.
    first, second = torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64)
    step = torch.sigmoid
    expected = 0.5 * (
        step(-first) / (1 + step(-first) + step(second - 4 * first))
        + step(3 * first - second) / (1 + step(4 * first - second) + step(3 * first - second))
    )
    scores = torch.stack([torch.zeros_like(first), first, second - 3 * first])
    loss, _ = reference.smooth_ap_loss(scores, torch.tensor([0, 1, 1]))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-14)


def test_hinge_is_an_upper_bound_of_one_minus_ap():
    for seed in range(5):
        scores, targets = random_boxes(seed, count=6)
        hinge, _ = other_losses.hinge_ap_loss(scores, targets)
        error, _ = reference.ap_loss(scores, targets, delta=0, interpolated=False)
        assert hinge >= error - 1e-12


def test_rank_sort_by_hand():
    # Descending: y = 0.5, negative, y = 1. The first has no error. The second positive has rank 3
    # with 1 negative above it: 1/3; its sorting error is (0.5 + 0) / 2 where 0 is possible: 0.25.
    scores, targets = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0.5, 0.0, 1.0])
    ranking, sorting, on_ranking, on_sorting = other_losses.rank_sort_loss(scores, targets, delta=0)
    assert (ranking.item(), sorting.item()) == pytest.approx((1 / 6, 1 / 8))
    assert on_ranking.tolist() == pytest.approx([0, 1 / 6, -1 / 6])
    assert on_sorting.tolist() == pytest.approx([1 / 8, 0, -1 / 8])


def test_alrp_by_hand():
    # Descending: positive (box loss 0.2), negative, positive (box loss 0.6), ranks 1 and 3.
    # Classification: (0 + 1/3) / 2. Localisation: (0.2 / 1 + (0.2 + 0.6) / 3) / 2.
    # The second positive's error above the desired one is (1 + 0.2) / 3, blamed on the negative.
    scores, targets = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1, 0, 1])
    classification, localisation, on_scores, on_boxes = other_losses.alrp_loss(
        scores, targets, torch.tensor([0.2, 0.6]), delta=0
    )
    assert classification.item() == pytest.approx(1 / 6)
    assert localisation.item() == pytest.approx((0.2 + 0.8 / 3) / 2)
    assert on_scores.tolist() == pytest.approx([0, 0.2, -0.2])
    assert on_boxes.tolist() == pytest.approx([(1 + 1 / 3) / 2, 1 / 6])


def test_ohem_counts_positives_and_three_times_as_many_hardest_negatives_of_each_image():
    # Two classes' logits 0 give log(3) a box; a background logit of -1 makes a negative harder.
    logits = torch.zeros(2, 6, 3, dtype=torch.float64)
    logits[0, 5, 0] = -1.0
    targets = torch.tensor([[1, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0]])
    loss, gradient = other_losses.ohem_cross_entropy(logits, targets)
    hard = torch.logsumexp(logits[0, 5], 0) + 1
    expected = 3 * torch.log(torch.tensor(3.0, dtype=torch.float64)) + hard
    assert loss.item() == pytest.approx(expected.item())
    assert (gradient[0].abs().sum(-1) > 0).sum() == 4
    assert (gradient[1] == 0).all()
