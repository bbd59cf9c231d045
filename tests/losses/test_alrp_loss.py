"""aLRP against the literal version, alone and over processes."""

import other_losses
import pytest
import torch
import torch.distributed as dist
from processes import run_group

from aploss.losses import reference
from aploss.losses.alrp_loss import ALRPLoss, alrp_loss


def random_boxes(dtype=torch.float64, count=300, positives=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.zeros(count, dtype=torch.long)
    targets[:positives] = 1
    targets[-20:] = -1
    order = torch.randperm(count, generator=generator)
    box_losses = torch.rand(positives, generator=generator, dtype=torch.float64)
    return scores[order].reshape(3, -1), targets[order].reshape(3, -1), box_losses.to(dtype)


def test_without_box_losses_it_is_the_ap_loss_without_interpolation():
    scores, targets, box_losses = random_boxes()
    scores.requires_grad_()
    loss = alrp_loss(scores, targets, 0 * box_losses)
    sum(loss).backward()
    expected, gradient = reference.ap_loss(scores, targets, interpolated=False)
    assert loss.classification.item() == pytest.approx(expected.item(), abs=1e-12)
    assert loss.localisation.item() == 0
    assert torch.allclose(scores.grad, gradient, rtol=0, atol=1e-12)


def test_the_error_never_exceeds_one_where_no_box_loss_does():
    scores, targets, box_losses = random_boxes()
    loss = alrp_loss(0 * scores, targets, torch.ones_like(box_losses))
    assert sum(loss).item() == pytest.approx(1)


def test_each_part_has_its_own_weight():
    scores, targets, box_losses = random_boxes()
    _, _, on_scores, on_boxes = other_losses.alrp_loss(scores, targets, box_losses)
    scores.requires_grad_()
    box_losses.requires_grad_()
    loss = alrp_loss(scores, targets, box_losses)
    (2 * loss.classification + 5 * loss.localisation).backward()
    assert torch.allclose(scores.grad, 2 * on_scores, rtol=0, atol=1e-12)
    assert torch.allclose(box_losses.grad, 5 * on_boxes, rtol=0, atol=1e-12)


def test_gradients_flow_into_what_the_box_losses_came_from():
    scores, targets, box_losses = random_boxes(torch.float64)
    boxes = box_losses.clone().requires_grad_()
    alrp_loss(scores, targets, boxes**2).localisation.backward()
    _, _, _, on_boxes = other_losses.alrp_loss(scores, targets, box_losses.double() ** 2)
    assert torch.allclose(boxes.grad, on_boxes * 2 * box_losses.double(), rtol=0, atol=1e-12)


def test_without_negatives_the_localisation_part_remains():
    scores = torch.tensor([2.0, 1.0], requires_grad=True)
    loss = alrp_loss(scores, torch.ones(2), torch.tensor([0.2, 0.6]), delta=0)
    sum(loss).backward()
    assert loss.classification.item() == 0
    assert loss.localisation.item() == pytest.approx((0.2 + (0.2 + 0.6) / 2) / 2)
    assert (scores.grad == 0).all()


def _rank_part_of_a_batch(rank, sizes):
    scores, targets, box_losses = random_boxes()
    scores, targets = scores.flatten(), targets.flatten()
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    first = int((targets[: own.start] == 1).sum())
    own_losses = box_losses[first : first + int((targets[own] == 1).sum())].requires_grad_()
    own_scores = scores[own].clone().requires_grad_()
    module = ALRPLoss(process_group=dist.group.WORLD)
    loss = module(own_scores, targets[own], own_losses)
    (2 * loss.classification + 3 * loss.localisation).backward()
    message = ""
    try:  # A mistake of one process is an error in all of them.
        module(own_scores, targets[own], own_losses[1:] if rank == 0 else own_losses)
    except ValueError as error:
        message = str(error)
    return [part.item() for part in loss], own_scores.grad, own_losses.grad, message


def test_processes_rank_their_parts_as_one_batch():
    sizes = [100, 200]
    results = run_group(len(sizes), _rank_part_of_a_batch, sizes)
    scores, targets, box_losses = random_boxes()
    classification, localisation, on_scores, on_boxes = other_losses.alrp_loss(scores, targets, box_losses)
    for losses, *_ in results:
        assert losses == pytest.approx([classification.item(), localisation.item()], abs=1e-12)
    on_all_scores, on_all_boxes = (torch.cat([result[place] for result in results]) for place in (1, 2))
    assert torch.allclose(on_all_scores, 2 * 2 * on_scores.flatten(), rtol=0, atol=1e-12)
    assert torch.allclose(on_all_boxes, 2 * 3 * on_boxes, rtol=0, atol=1e-12)
    assert "one value per positive" in results[0][3]
    assert "another process" in results[1][3]
