"""Rank & Sort against the literal version, alone and over processes."""

import other_losses
import pytest
import torch
import torch.distributed as dist
from processes import run_group
from ranking_cases import random_boxes

from aploss.losses.rank_sort_loss import RankSortLoss, rank_sort_loss


def test_each_part_has_its_own_weight():
    scores, targets = random_boxes()
    _, _, on_ranking, on_sorting = other_losses.rank_sort_loss(scores, targets)
    scores.requires_grad_()
    loss = rank_sort_loss(scores, targets)
    (2 * loss.ranking + 5 * loss.sorting).backward()
    assert torch.allclose(scores.grad, 2 * on_ranking + 5 * on_sorting, rtol=0, atol=1e-12)


def test_a_sorted_perfect_ranking_has_no_loss():
    scores = torch.tensor([9.0, 7.0, 5.0, 3.0, 1.0], requires_grad=True)
    loss = rank_sort_loss(scores, torch.tensor([0.9, 0.8, 0.8, 0.3, 0.0]))
    sum(loss).backward()
    assert loss.ranking.item() == 0
    assert loss.sorting.item() == pytest.approx(0, abs=1e-7)
    assert (scores.grad == 0).all()


def test_equal_qualities_have_nothing_to_sort():
    scores, targets = random_boxes()
    targets[targets > 0] = 0.7
    scores.requires_grad_()
    loss = rank_sort_loss(scores, targets)
    (gradient,) = torch.autograd.grad(loss.sorting, scores)
    assert loss.sorting.item() == 0
    assert (gradient == 0).all()


def _rank_part_of_a_batch(rank, sizes):
    scores, targets = (part.flatten() for part in random_boxes())
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    scores = scores[own].clone().requires_grad_()
    loss = RankSortLoss(process_group=dist.group.WORLD)(scores, targets[own])
    (2 * loss.ranking + 3 * loss.sorting).backward()
    return [part.item() for part in loss], scores.grad


def test_processes_rank_their_parts_as_one_batch():
    sizes = [120, 180]
    results = run_group(len(sizes), _rank_part_of_a_batch, sizes)
    scores, targets = (part.flatten() for part in random_boxes())
    ranking, sorting, on_ranking, on_sorting = other_losses.rank_sort_loss(scores, targets)
    gradient = torch.cat([gradient for _, gradient in results])
    for losses, _ in results:
        assert losses == pytest.approx([ranking.item(), sorting.item()], abs=1e-12)
    expected = len(sizes) * (2 * on_ranking + 3 * on_sorting)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
