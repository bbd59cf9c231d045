"""Rank & Sort against the literal version, alone and over processes."""

import pytest
import torch
import torch.distributed as dist
from processes import run_group

from aploss.losses import reference, use_backend
from aploss.losses.rank_sort_loss import RankSortLoss, rank_sort_loss
from aploss.losses.ranking import torch_backend

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random_boxes(dtype=torch.float64, count=300, positives=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.zeros(count)
    targets[:positives] = torch.rand(positives, generator=generator).clamp(min=0.01)
    targets[-20:] = -1
    order = torch.randperm(count, generator=generator)
    return scores[order].reshape(3, -1), targets[order].reshape(3, -1)


def check(scores, targets, delta, tolerance):
    scores = scores.clone().requires_grad_()
    loss = rank_sort_loss(scores, targets, delta=delta)
    (on_ranking,) = torch.autograd.grad(loss.ranking, scores, retain_graph=True)
    (on_sorting,) = torch.autograd.grad(loss.sorting, scores)
    expected = reference.rank_sort_loss(scores, targets, delta)
    for value, right in zip(loss, expected[:2], strict=True):
        assert value.dtype == (torch.float64 if scores.dtype == torch.float64 else torch.float32)
        assert value.item() == pytest.approx(right.item(), abs=max(1e-12, min(tolerance, 1e-6)))
    for gradient, right in zip((on_ranking, on_sorting), expected[2:], strict=True):
        assert gradient.dtype == scores.dtype
        assert (gradient - right).abs().max() <= tolerance * right.abs().max() + 1e-15


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.5, 10.0])
def test_values_and_gradients_equal_the_literal_version(backend, dtype, delta):
    check(*random_boxes(dtype), delta, TOLERANCE[dtype])


@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_unusual_scores(backend, make_unusual, delta):
    scores, targets = random_boxes(torch.float32)
    check(make_unusual(scores), targets, delta, 1e-6)


@pytest.mark.parametrize("positives", [1, 2, 250])
def test_few_and_many_positives(backend, positives):
    check(*random_boxes(positives=positives), 0.5, 1e-12)


def test_small_blocks_give_the_same(monkeypatch):
    monkeypatch.setattr(torch_backend, "PAIRS", 100)
    with use_backend("torch"):
        check(*random_boxes(), 0.5, 1e-12)


def test_each_part_has_its_own_weight():
    scores, targets = random_boxes()
    _, _, on_ranking, on_sorting = reference.rank_sort_loss(scores, targets)
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


@pytest.mark.parametrize("targets", [[0, 0], [-1, -1], []])
def test_no_positives_gives_connected_zeros(targets):
    scores = torch.ones(len(targets), requires_grad=True)
    loss = rank_sort_loss(scores, torch.tensor(targets))
    sum(loss).backward()
    assert (loss.ranking.item(), loss.sorting.item()) == (0, 0)
    assert (scores.grad == 0).all()


def test_without_negatives_the_sorting_part_remains():
    check(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0.2, 0.9, 0.5]), 0.5, 1e-6)


def test_module_has_the_options_of_the_function():
    scores, targets = random_boxes()
    module = RankSortLoss(delta=0.2)
    assert module(scores, targets) == rank_sort_loss(scores, targets, delta=0.2)
    assert "delta=0.2" in repr(module)


def test_it_compiles_as_one_graph():
    scores, targets = random_boxes(torch.float32)
    scores.requires_grad_()
    compiled = torch.compile(lambda s, t: sum(rank_sort_loss(s * 2, t)), fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(scores, targets), scores)
    (expected,) = torch.autograd.grad(sum(rank_sort_loss(scores * 2, targets)), scores)
    assert torch.allclose(gradient, expected, rtol=1e-6, atol=1e-9)


def test_second_derivative_is_refused():
    scores, targets = random_boxes()
    scores.requires_grad_()
    (gradient,) = torch.autograd.grad(rank_sort_loss(scores, targets).sorting, scores, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.sum().backward()


def test_mistakes_are_refused():
    scores = torch.zeros(2)
    with pytest.raises(ValueError, match="same shape"):
        rank_sort_loss(scores, torch.zeros(3))
    with pytest.raises(ValueError, match=r"got 1\.5 at flat index 1"):
        rank_sort_loss(scores, torch.tensor([0.5, 1.5]))
    with pytest.raises(ValueError, match="got nan at flat index 0"):
        rank_sort_loss(torch.tensor([torch.nan, 0.0]), torch.tensor([0.5, 0.0]))
    with pytest.raises(ValueError, match="delta"):
        RankSortLoss(delta=-0.5)


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
    ranking, sorting, on_ranking, on_sorting = reference.rank_sort_loss(scores, targets)
    gradient = torch.cat([gradient for _, gradient in results])
    for losses, _ in results:
        assert losses == pytest.approx([ranking.item(), sorting.item()], abs=1e-12)
    expected = len(sizes) * (2 * on_ranking + 3 * on_sorting)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("groups", [None, 0, 1])
def test_without_positives_the_loss_is_zero_also_in_groups(backend, groups):
    scores = torch.randn(3, 4, requires_grad=True)
    with use_backend(backend):
        loss = rank_sort_loss(scores, torch.zeros(3, 4), groups=groups)
        (loss.ranking + loss.sorting).backward()
    assert (loss.ranking.item(), loss.sorting.item()) == (0.0, 0.0)
    assert scores.grad.count_nonzero() == 0
