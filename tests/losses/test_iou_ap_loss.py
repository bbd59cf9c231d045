"""AP-loss averaged over IoU thresholds against one AP-loss per threshold; ``test_engine.py`` has it on random cases."""

import pytest
import torch
import torch.distributed as dist
from processes import run_group
from ranking_cases import by_quantiles, random_boxes

from aploss.losses import IoUAPLoss, ap_loss, iou_ap_loss


def test_a_threshold_of_zero_is_ap_loss(backend):
    scores, qualities = random_boxes()
    hard = torch.where(qualities > 0, 1, qualities.long())
    for interpolated in (True, False):
        loss = iou_ap_loss(scores, qualities, thresholds=[0], interpolated=interpolated)
        assert loss.item() == pytest.approx(ap_loss(scores, hard, interpolated=interpolated).item(), abs=1e-12)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_quantiles_are_taken_within_each_class(backend, count):
    scores, qualities = (values.view(5, 12, 5) for values in random_boxes())
    qualities[..., 2].masked_fill_(qualities[..., 2] > 0, 0.0)  # a class without positives
    scores.requires_grad_()
    loss = IoUAPLoss(thresholds=count)(scores, qualities)
    right, right_gradient = by_quantiles(scores.detach(), qualities, count)
    assert loss.item() == pytest.approx(right.item(), abs=1e-12)
    assert torch.allclose(torch.autograd.grad(loss, scores)[0], right_gradient, rtol=0, atol=1e-12)


def _rank_part_of_a_batch(rank, first):
    scores, qualities = (values.view(60, 5) for values in random_boxes())
    own = slice(0, first) if rank == 0 else slice(first, None)
    scores = scores[own].clone().requires_grad_()
    loss = IoUAPLoss(thresholds=3, process_group=dist.group.WORLD)(scores, qualities[own])
    loss.backward()
    return loss.item(), scores.grad


def test_processes_take_quantiles_of_all_their_positives():
    results = run_group(2, _rank_part_of_a_batch, 25)
    scores, qualities = (values.view(60, 5) for values in random_boxes())
    right, right_gradient = by_quantiles(scores, qualities, 3)
    assert [loss for loss, _ in results] == pytest.approx([right.item()] * 2, abs=1e-12)
    gradient = torch.cat([gradient for _, gradient in results])
    assert torch.allclose(gradient, 2 * right_gradient, rtol=0, atol=1e-12)


def test_compiled_graphs_take_both_kinds_of_thresholds():
    scores, qualities = (values.view(60, 5) for values in random_boxes())
    for thresholds in (3, (0.2, 0.6)):
        loss = IoUAPLoss(thresholds=thresholds)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        assert compiled(scores, qualities).item() == loss(scores, qualities).item()


@pytest.mark.parametrize("thresholds", [0, -1, True, (), (0.5, 1.5), (float("nan"),), "0.5", None, 2.5])
def test_invalid_thresholds_are_refused(thresholds):
    with pytest.raises(ValueError, match="thresholds"):
        iou_ap_loss(torch.zeros(2), torch.ones(2), thresholds=thresholds)
    with pytest.raises(ValueError, match="thresholds"):
        IoUAPLoss(thresholds=thresholds)


def test_without_positives_the_loss_is_zero(backend):
    scores = torch.randn(4, 3, requires_grad=True)
    iou_ap_loss(scores, torch.zeros(4, 3)).backward()
    assert (scores.grad == 0).all()
    assert iou_ap_loss(scores, torch.full((4, 3), 0.4), thresholds=(0.5,)).item() == 0
