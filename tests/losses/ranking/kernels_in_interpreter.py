"""The Triton kernels against the literal losses, in Triton's interpreter on the CPU.

``test_triton.py`` runs this file in a process of its own: the interpreter is chosen when the
kernels are imported. It carries out one program after the other, so it finds no races.
"""

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from simulated_device import SimulatedGPU, measure
from torch import Tensor

from aploss.losses import alrp_loss, ap_loss, auc_loss, rank_sort_loss, reference, use_backend
from aploss.losses.ranking import triton
from aploss.losses.ranking.problem import Problem
from aploss.losses.ranking.triton import LIMIT, TritonBackend, supports

DISTRIBUTIONS = (
    "random", "separated", "tied", "all equal", "tiny spread", "huge spread", "offset",
    "one outlier",
)  # fmt: skip
DELTAS = (0.0, 0.25, 1.0)
LOSSES = ("ap", "auc", "rank-sort", "alrp")
INFINITE = [float("nan"), float("inf"), float("-inf")]


@pytest.fixture(autouse=True)
def triton_backend():
    assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_triton.py"
    with use_backend("triton"):
        yield


def soft(targets: Tensor) -> Tensor:
    """Qualities in (0, 1] for the positives."""
    quality = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)).clamp(min=0.01)
    return torch.where(targets == 1, quality, targets.float())


def box_losses(targets: Tensor) -> Tensor:
    return torch.rand(int((targets == 1).sum()), generator=torch.Generator().manual_seed(2))


def computed(loss: str, scores: Tensor, targets: Tensor, boxes: Tensor | None = None, **options) -> tuple[list, list]:
    """Values, and the gradient of each on the scores (and of the second on the box losses)."""
    scores = scores.clone().requires_grad_()
    if loss.startswith("ap"):
        values = [ap_loss(scores, targets, interpolated=loss == "ap", **options)]
    elif loss == "auc":
        values = [auc_loss(scores, targets, **options)]
    elif loss == "rank-sort":
        values = list(rank_sort_loss(scores, soft(targets), **options))
    else:
        boxes = (box_losses(targets) if boxes is None else boxes).requires_grad_()
        values = list(alrp_loss(scores, targets, boxes, **options))
        on_scores, on_boxes = torch.autograd.grad(sum(values), [scores, boxes])
        return [value.item() for value in values], [on_scores, on_boxes]
    gradients = [torch.autograd.grad(v, scores, retain_graph=True)[0] for v in values]
    return [value.item() for value in values], gradients


def expected(loss: str, scores: Tensor, targets: Tensor, delta: float) -> tuple[list, list]:
    if loss.startswith("ap"):
        value, gradient = reference.ap_loss(scores, targets, delta, loss == "ap")
        return [value.item()], [gradient]
    if loss == "auc":
        value, gradient = reference.auc_loss(scores, targets, delta)
        return [value.item()], [gradient]
    if loss == "rank-sort":
        first, second, *gradients = reference.rank_sort_loss(scores, soft(targets), delta)
    else:
        boxes = box_losses(targets)
        first, second, *gradients = reference.alrp_loss(scores, targets, boxes, delta)
    return [first.item(), second.item()], gradients


def assert_equals_reference(loss: str, scores: Tensor, targets: Tensor, delta: float) -> None:
    values, gradients = computed(loss, scores, targets, delta=delta)
    right_values, right_gradients = expected(loss, scores, targets, delta)
    assert values == pytest.approx(right_values, rel=0, abs=3e-8)
    for gradient, right in zip(gradients, right_gradients, strict=True):
        assert (gradient.double() - right).abs().max() <= 1e-7 * right.abs().max()


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_losses_and_gradients_equal_the_literal_ones(make_boxes, monkeypatch, distribution, delta):
    monkeypatch.setattr(triton, "TILE", 32)  # the interpreter scans a tile number by number
    boxes = make_boxes(distribution, 30, 300, dtype=torch.float32)
    for loss in LOSSES:
        assert_equals_reference(loss, *boxes, delta)


@pytest.mark.parametrize("positives", [1, 2])
@pytest.mark.parametrize("loss", [*LOSSES, "ap, not interpolated"])
def test_one_and_two_positives(make_boxes, loss, positives):
    boxes = make_boxes("random", positives, 60, dtype=torch.float32, seed=positives)
    assert_equals_reference(loss, *boxes, 0.3)


@pytest.mark.parametrize("delta", [0.0, 1.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_more_positives_than_a_tile(make_boxes, monkeypatch, loss, delta):
    monkeypatch.setattr(triton, "TILE", 32)
    boxes = make_boxes("random", 80, 150, dtype=torch.float32)
    assert_equals_reference(loss, *boxes, delta)


@pytest.mark.parametrize("delta", [0.0, 1.0, 0.3, 1e4])
def test_every_finite_score_is_ranked_exactly(delta):
    scores = torch.tensor(
        [3e38, -1e17, 1e17, 1e-42, 0.0, -0.0, 1.0, -3.4e38, 3.3e38, -1e17, 1e17, 1.5, 1 + 2**-23,
         -3.4e38, 3e38, 2.0, 1e17 + 8.6e9, -1e-42, 2.0**-126, 16777216.0, 16777215.0, 16777217.0]
    )  # fmt: skip
    targets = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0])
    for loss in LOSSES:
        assert_equals_reference(loss, scores, targets, delta)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_are_ranked_in_float32(make_boxes, dtype):
    scores, targets = make_boxes(dtype=dtype)
    (value,), (gradient,) = computed("ap", scores, targets)
    (exact_value,), (exact_gradient,) = computed("ap", scores.float(), targets)
    assert value == exact_value
    assert gradient.dtype == dtype
    # The interpreter cuts bfloat16 off instead of rounding: one unit in the last place.
    unit = torch.finfo(dtype).eps * exact_gradient.abs() + torch.finfo(dtype).smallest_normal
    assert ((gradient.float() - exact_gradient).abs() <= unit).all()


def test_targets_of_every_dtype_mean_the_same(make_boxes):
    scores, targets = make_boxes(ignored=0, dtype=torch.float32)
    values, gradients = computed("ap", scores, targets)
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int32, torch.float16):
        same_values, same_gradients = computed("ap", scores, targets.to(dtype))
        assert values == same_values, dtype
        assert torch.equal(gradients[0], same_gradients[0]), dtype


def test_ignored_scores_never_matter(make_boxes):
    scores, targets = make_boxes(dtype=torch.float32)
    values, gradients = computed("ap", scores, targets)
    for ignored in INFINITE:
        scores[targets == -1] = ignored
        same_values, same_gradients = computed("ap", scores, targets)
        assert values == same_values, ignored
        assert torch.equal(gradients[0], same_gradients[0]), ignored
        assert (same_gradients[0][targets == -1] == 0).all(), ignored


def test_tensors_with_gaps_in_memory_are_ranked_as_their_copies(make_boxes):
    scores, targets = make_boxes(dtype=torch.float32)
    values, gradients = computed("ap", scores, targets)
    apart_scores, apart_targets = scores.repeat_interleave(2), targets.repeat_interleave(2)
    apart_scores[1::2], apart_targets[1::2] = 99.0, 1 - targets.clamp(min=0)
    apart = apart_scores.requires_grad_()
    loss = ap_loss(apart[::2], apart_targets[::2])
    loss.backward()
    assert loss.item() == values[0]
    assert torch.equal(apart.grad[::2], gradients[0])


@pytest.mark.parametrize("delta", [0.0, 1.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_capacity_gives_the_same_bits(make_boxes, loss, delta):
    scores, targets = make_boxes("tied", 20, 200, dtype=torch.float32)
    values, gradients = computed(loss, scores, targets, delta=delta)
    for capacity in (20, 21, 140):
        same_values, same_gradients = computed(loss, scores, targets, delta=delta, max_positives=capacity)
        assert values == same_values
        assert all(map(torch.equal, gradients, same_gradients))


def stages(backend: TritonBackend, problem: Problem, capacity: int) -> tuple[Tensor, Tensor]:
    found = backend.find(problem)
    positives = backend.positives(problem, found, capacity)
    ranked = backend.finish(problem, found, positives, backend.tally(problem, found, positives))
    upstream = (torch.ones(()),) * len(ranked.values)
    return ranked.values, backend.gradient(ranked, upstream, torch.float32)


@pytest.mark.parametrize("delta", [0.0, 0.3])
def test_every_block_size_gives_the_same_bits(make_boxes, delta):
    scores, targets = make_boxes("random", 20, 2000, dtype=torch.float32)
    problem = Problem(scores, targets, "ap", delta)
    results = [stages(TritonBackend(block), problem, 20) for block in (256, 1024, 4096)]
    for (value, gradient), (same_value, same_gradient) in pairwise(results):
        assert torch.equal(value, same_value)
        assert torch.equal(gradient, same_gradient)


@pytest.mark.parametrize("value", [0, 1, -1])
@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_nothing_to_rank_is_zero(value, delta):
    scores = torch.randn(70, requires_grad=True)
    loss = ap_loss(scores, torch.full((70,), value), delta=delta)
    loss.backward()
    assert loss.item() == 0
    assert (scores.grad == 0).all()


@pytest.mark.parametrize("bad", ["target", "positive", "negative", "too many"])
def test_with_max_positives_what_must_not_be_ranked_is_nan(make_boxes, bad):
    scores, targets = make_boxes(dtype=torch.float32)
    capacity = 10 if bad == "too many" else 32
    if bad == "target":
        targets[7] = 3
    elif bad != "too many":
        scores[(targets == (bad == "positive")).nonzero()[0]] = torch.nan
    scores.requires_grad_()
    loss = ap_loss(scores, targets, max_positives=capacity)
    loss.backward()
    assert loss.isnan()
    assert scores.grad[targets == 1].isnan().any()
    with pytest.raises(ValueError, match="max_positives"):  # says so at the next ordinary call
        ap_loss(torch.zeros(2), torch.tensor([0, 1]))


def test_what_is_wrong_is_refused_by_place(make_boxes):
    scores, targets = make_boxes(dtype=torch.float32)
    targets[7] = 3
    with pytest.raises(ValueError, match=r"got 3 at flat index 7$"):
        ap_loss(scores, targets)
    targets[7] = 0
    scores[7] = torch.inf
    with pytest.raises(ValueError, match=r"got inf at flat index 7$"):
        ap_loss(scores, targets)
    with pytest.raises(ValueError, match="one value per positive, 1, got 2"):
        alrp_loss(torch.zeros(2), torch.tensor([0, 1]), torch.zeros(2))
    with pytest.raises(ValueError, match="box_losses must be finite"):
        alrp_loss(torch.zeros(2), torch.tensor([0, 1]), torch.tensor([-1.0]))


def test_more_positives_than_the_limit_are_ranked_by_torch_operations():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(LIMIT + 100, generator=generator)
    targets = torch.ones(len(scores))
    targets[:50] = 0
    values, gradients = computed("ap", scores, targets)
    with use_backend("torch"):
        same_values, same_gradients = computed("ap", scores, targets)
    assert values == same_values
    assert torch.equal(gradients[0], same_gradients[0])


def test_what_the_kernels_do_not_support_is_left_to_torch_operations(make_boxes):
    scores, targets = make_boxes(dtype=torch.float32)
    assert supports(Problem(scores, targets, "ap", 1.0))
    assert not supports(Problem(scores.double(), targets, "ap", 1.0))
    assert not supports(Problem(scores, targets.double(), "ap", 1.0))
    assert not supports(Problem(scores, targets, "ap", 1.0, groups=targets))
    assert not supports(Problem(scores, targets, "ap", 1.0, max_positives=LIMIT + 1))


def rank_part(rank: int, folder: Path, parts: list, capacity: int | None) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", len(parts))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(parts))
    options = {"process_group": dist.group.WORLD, "max_positives": capacity}
    results = [computed(loss, *parts[rank], **options) for loss in ("ap", "auc", "alrp")]
    torch.save(results, folder / f"{rank}.pt")


@pytest.mark.parametrize("capacity", [None, 16])
def test_processes_rank_their_parts_as_one_batch(make_boxes, tmp_path, capacity):
    scores, targets = make_boxes("random", 20, 200, dtype=torch.float32)
    boxes = box_losses(targets)
    first = int((targets[:100] == 1).sum())
    parts = [(scores[:100], targets[:100], boxes[:first]), (scores[100:], targets[100:], boxes[first:])]
    mp.start_processes(rank_part, (tmp_path, parts, capacity), nprocs=2, start_method="fork")
    by_process = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for place, loss in enumerate(("ap", "auc", "alrp")):
        right_values, right_gradients = expected(loss, scores, targets, 1.0)
        for values, _ in (results[place] for results in by_process):
            assert values == pytest.approx(right_values, rel=0, abs=3e-8)
        for k, right in enumerate(right_gradients):
            gradient = torch.cat([results[place][1][k] for results in by_process]).double()
            assert (gradient - 2 * right).abs().max() <= 2e-7 * right.abs().max()


@pytest.mark.parametrize("capacity", [None, 32])
@pytest.mark.parametrize("loss", LOSSES)
def test_launches_and_bytes_on_a_gpu(make_boxes, monkeypatch, loss, capacity):
    def compute(scores: Tensor, targets: Tensor, *boxes: Tensor) -> Tensor:
        function = {"ap": ap_loss, "auc": auc_loss, "rank-sort": rank_sort_loss, "alrp": alrp_loss}
        value = function[loss](scores, targets, *boxes, max_positives=capacity)
        return value if isinstance(value, Tensor) else sum(value)

    monkeypatch.setattr(TritonBackend, "launch", SimulatedGPU.launch_triton)
    passes = []
    for size in (8192, 16384):
        scores, targets = make_boxes("random", 20, size - 20, ignored=0, dtype=torch.float32)
        boxes = [box_losses(targets)] if loss == "alrp" else []
        passes.append(measure(compute, scores, targets.float(), *boxes))
    for forward, backward in passes:
        assert len(forward.host_reads) == (capacity is None)
        assert forward.uploads == backward.host_reads == backward.uploads == []
        assert forward.launches <= 20
        assert backward.launches <= 8
    small, large = (sum(counts.bytes for counts in both) for both in passes)
    assert (large - small) / 8192 <= 21
