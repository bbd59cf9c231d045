"""AUC-loss against scikit-learn and numbers worked out by hand."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from aploss.losses import auc_loss


def test_heaviside_is_one_minus_roc_auc(make_boxes):
    scores, targets = make_boxes("random", ignored=0)
    assert 1 - auc_loss(scores, targets, delta=0).item() == pytest.approx(roc_auc_score(targets, scores), abs=1e-12)


def test_an_example_worked_by_hand():
    # positives 0 and 1.5, negatives 0.5 and 2, delta 1:
    # f(0.5 - 0) = .75, f(2 - 0) = 1, f(0.5 - 1.5) = 0, f(2 - 1.5) = .75; 4 pairs.
    scores = torch.tensor([0.0, 1.5, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    loss = auc_loss(scores, torch.tensor([1, 1, 0, 0]))
    loss.backward()
    assert loss.item() == pytest.approx(2.5 / 4)
    assert scores.grad.tolist() == pytest.approx([-1.75 / 4, -0.75 / 4, 0.75 / 4, 1.75 / 4])
