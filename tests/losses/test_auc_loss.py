"""AUC-loss against scikit-learn and numbers worked out by hand."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from aploss.losses import AUCLoss, auc_loss


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


def test_module_has_the_options_of_the_function(make_boxes):
    scores, targets = make_boxes()
    assert AUCLoss(delta=0.5)(scores, targets) == auc_loss(scores, targets, delta=0.5)
    with pytest.raises(ValueError, match="delta must be"):
        AUCLoss(delta=-1)
