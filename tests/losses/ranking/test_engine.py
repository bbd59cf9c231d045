"""Groups, capacities, huge scores, and what goes wrong around a ranking."""

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from tiny_runs import start_process

from aploss.losses import (
    NonFiniteScoresError,
    alrp_loss,
    ap_loss,
    auc_loss,
    focal_loss,
    rank_sort_loss,
    reference,
    use_backend,
)

LOSSES = {
    "ap": lambda s, t, b, **options: (ap_loss(s, t, **options),),
    "auc": lambda s, t, b, **options: (auc_loss(s, t, **options),),
    "rank-sort": lambda s, t, b, **options: rank_sort_loss(s, t, **options),
    "alrp": lambda s, t, b, **options: alrp_loss(s, t, b, **options),
}


def anchors(name, size=300, dtype=torch.float64, seed=0):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(size, generator=random, dtype=torch.float64).to(dtype)
    targets = torch.multinomial(torch.tensor([0.1, 0.75, 0.15]), size, True, generator=random) - 1
    targets = -targets
    qualities = torch.rand(size, generator=random, dtype=torch.float64).clamp(min=0.01)
    boxes = qualities[targets == 1].clone()
    if name == "rank-sort":
        targets = torch.where(targets == 1, qualities, targets.double())
    return scores, targets, boxes


def weighted(values):
    return sum((k + 1) * value for k, value in enumerate(values))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("delta", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_equal_a_loop_over_them(backend, name, delta, dtype):
    scores, targets, boxes = anchors(name, dtype=dtype)
    groups = torch.randint(0, 9, scores.shape, generator=torch.Generator().manual_seed(1))
    groups = groups * 1_000_003 - 77
    together, alone = (scores.clone().requires_grad_() for _ in range(2))
    value = weighted(LOSSES[name](together, targets, boxes, delta=delta, groups=groups))
    value.backward()
    parts = []
    for number in groups.unique():
        own = groups == number
        if (targets[own] > 0).any():
            own_boxes = boxes[own[targets > 0]]
            parts.append(weighted(LOSSES[name](alone[own], targets[own], own_boxes, delta=delta)))
    (sum(parts) / len(parts)).backward()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert abs(value.item() - sum(parts).item() / len(parts)) <= 3 * tolerance
    assert (together.grad - alone.grad).abs().max() <= tolerance


@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_a_dimension_groups_by_its_index(backend, dimension):
    scores, targets, _ = anchors("ap", 120)
    scores, targets = scores.view(4, 5, 6), targets.view(4, 5, 6)
    slices = zip(scores.unbind(dimension), targets.unbind(dimension), strict=True)
    expected = [ap_loss(s, t).item() for s, t in slices if (t == 1).any()]
    loss = ap_loss(scores, targets, groups=dimension)
    assert loss.item() == pytest.approx(sum(expected) / len(expected), abs=1e-12)


@pytest.mark.parametrize("groups", [False, True])
def test_tensors_with_gaps_in_memory_are_ranked_as_their_copies(backend, groups):
    scores, targets, _ = anchors("ap", 120)
    numbers = torch.arange(60) % 3
    results = []
    for change in (lambda tensor: tensor, torch.Tensor.clone):
        leaf = scores.clone().requires_grad_()
        own = {"groups": change(numbers.repeat_interleave(2)[::2])} if groups else {}
        loss = ap_loss(change(leaf[::2]), change(targets[::2]), **own)
        loss.backward()
        results.append((loss.item(), leaf.grad))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (torch.zeros(3), "shape and device of scores"),
        (torch.zeros(4), "integers, got torch.float32"),
        (2, "dimension of scores, which have 1, got 2"),
        ("image", "integer tensor or a dimension, got str"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        ap_loss(torch.zeros(4), torch.tensor([1, 0, 0, 0]), groups=groups)


@pytest.mark.parametrize("name", LOSSES)
def test_a_capacity_changes_nothing(backend, name):
    scores, targets, boxes = anchors(name)
    results = []
    for max_positives in (None, int((targets > 0).sum()), 200):
        leaf = scores.clone().requires_grad_()
        values = LOSSES[name](leaf, targets, boxes, max_positives=max_positives)
        weighted(values).backward()
        results.append((weighted(values).item(), leaf.grad))
    for value, gradient in results[1:]:
        assert value == pytest.approx(results[0][0], abs=1e-12)
        assert torch.allclose(gradient, results[0][1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("wrong", ["positives", "target", "score"])
def test_what_is_wrong_without_a_read_is_nan_and_told_by_the_next_call(backend, wrong):
    scores, targets = torch.randn(20, requires_grad=True), (torch.arange(20) < 5).long()
    bad_scores, bad_targets = scores.detach().clone(), targets.clone()
    if wrong == "target":
        bad_targets[7] = 3
    if wrong == "score":
        bad_scores[7] = torch.nan
    bad_scores.requires_grad_()
    loss = ap_loss(bad_scores, bad_targets, max_positives=4 if wrong == "positives" else 10)
    loss.backward()
    assert loss.isnan()
    assert bad_scores.grad[:4].isnan().all()
    kind = NonFiniteScoresError if wrong == "score" else ValueError
    with pytest.raises(kind, match="in an earlier call"):
        ap_loss(scores, targets)
    assert ap_loss(scores, targets).isfinite()


def test_focal_loss_can_be_checked_later():
    assert focal_loss(torch.tensor([torch.inf]), torch.tensor([1]), check_later=True).isnan()
    with pytest.raises(NonFiniteScoresError, match="in an earlier call"):
        focal_loss(torch.zeros(1), torch.tensor([1]))


@pytest.mark.parametrize("max_positives", [0, -3, 1.5, True])
def test_a_capacity_that_is_none_is_refused(max_positives):
    with pytest.raises(ValueError, match="max_positives must be an integer >= 1"):
        ap_loss(torch.zeros(1), torch.zeros(1), max_positives=max_positives)


@pytest.mark.parametrize("delta", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [1e17, 3.4e38, "max"])
def test_every_finite_score_is_ranked_exactly(backend, delta, dtype, largest):
    huge = torch.finfo(dtype).max if largest == "max" else largest
    for numbers, targets in (
        ([1, 2, 3, -huge], [1, 0, 0, 1]),
        ([1, 2, 3, huge], [1, 0, 1, 0]),
        ([huge, huge, huge, -huge, 0], [1, 0, 1, 0, 1]),
        ([-huge, huge, 1, 1.5, -huge], [0, 1, 0, 1, 1]),
    ):
        scores, labels = torch.tensor(numbers, dtype=dtype), torch.tensor(targets)
        for name in LOSSES:
            leaf = scores.clone().requires_grad_()
            boxes = torch.full((sum(targets),), 0.5, dtype=dtype)
            values = LOSSES[name](leaf, labels, boxes, delta=delta)
            sum(values).backward()
            literal = getattr(reference, name.replace("-", "_") + "_loss")
            extra = (boxes,) if name == "alrp" else ()
            expected = literal(scores, labels, *extra, delta=delta)
            count = len(values)
            for value, right in zip(values, expected[:count], strict=True):
                assert value.item() == pytest.approx(right.item(), abs=1e-6)
            gradients = expected[2:4] if name == "rank-sort" else expected[count : count + 1]
            assert torch.allclose(leaf.grad.double(), sum(gradients), rtol=0, atol=1e-6)


def test_backends_are_chosen_for_a_block_or_for_good():
    with pytest.raises(ValueError, match="backend must be one of cpu, torch, triton or None"):
        use_backend("cuda")
    scores, targets, _ = anchors("ap")
    with use_backend("torch"):
        inside = ap_loss(scores, targets)
    assert inside.item() == pytest.approx(ap_loss(scores, targets).item(), abs=1e-12)


def _rank_in_child(queue, scores, targets):
    torch.set_num_threads(2)
    queue.put(float(ap_loss(scores, targets)))


def test_the_first_call_may_be_in_a_forked_process(tmp_path):
    code = (
        "import multiprocessing, torch, sys\n"
        "from aploss.losses import ap_loss\n"
        "torch.set_num_threads(2); torch.randn(1000, 1000).exp()\n"
        "scores, targets = torch.randn(300000), (torch.rand(300000) < 1e-3).long()\n"
        "def child(): ap_loss(scores, targets)\n"  # torch's own threads do not survive a fork
        "process = multiprocessing.get_context('fork').Process(target=child)\n"
        "process.start(); process.join(100); sys.exit(process.exitcode)\n"
    )
    process = start_process(code, log=tmp_path / "log")
    process.join()
    assert process.exitcode == 0


def test_without_numba_torch_operations_rank_and_a_warning_names_the_remedy():
    code = (
        "import sys, warnings; sys.modules['numba'] = None\n"
        "import torch\nfrom aploss.losses import ap_loss\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(2): loss = ap_loss(torch.tensor([2.0, 1.0]), torch.tensor([0, 1]), "
        "delta=0)\n"
        "assert loss.item() == 0.5\n"
        "assert [str(w.message) for w in caught if 'pip install numba' in str(w.message)] != []\n"
        "assert len(caught) == 1, caught\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=200, check=True)


def test_probabilities_in_the_place_of_logits_are_remarked_on_once(tmp_path):
    code = (
        "import multiprocessing, warnings, torch\nfrom aploss.losses import ap_loss\n"
        "targets = (torch.arange(2000) < 9).long()\n"
        "def look(first):\n"
        "    with warnings.catch_warnings(record=True) as caught:\n"
        "        warnings.simplefilter('always')\n"
        "        ap_loss(torch.rand(10), targets[:10])\n"  # too few to tell
        "        assert caught == []\n"
        "        for _ in range(2): ap_loss(first, targets)\n"
        "    print(sum('leave out the sigmoid' in str(w.message) for w in caught), file=open(log, 'a'))\n"
        "for first in (torch.randn(2000).sigmoid(), torch.randn(2000), torch.zeros(2000)):\n"
        "    process = multiprocessing.get_context('fork').Process(target=look, args=(first,))\n"
        "    process.start(); process.join()\n"
    )
    start_process(code, log=tmp_path / "log").join()  # what has been looked at is remembered in a process
    assert (tmp_path / "log").read_text().split() == ["1", "0", "0"]


def test_a_truncated_cache_is_done_without_and_told_of_once(tmp_path):
    (tmp_path / "kernels.py").write_text("def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n")
    code = (
        "from pathlib import Path\nfrom aploss.losses.ranking import cpu, cpu_kernels\nimport kernels\n"
        "def call(): return [cpu_kernels.Compiled(kernels.add)(1, 2), cpu_kernels.Compiled(kernels.double)(4)]\n"
        "assert call() == [3, 8]\n"
        "files = [path for path in Path('cache').rglob('*.nb?')]\n"
        "assert len(files) == 4\n"  # an index and a function for each
        "for path in files: path.write_bytes(path.read_bytes()[:20])\n"
        "assert call() == [3, 8]\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, cwd=tmp_path, timeout=300, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr.count("cache of compiled functions cannot be used") == 1


def test_a_cache_that_has_no_folder_is_done_without(tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    code = (
        "import numpy as np\nfrom aploss.losses.ranking import cpu, cpu_kernels\ngradient = np.zeros(3)\n"
        # of the kernels the one that is compiled soonest
        "cpu_kernels.write_positives(np.array([2]), np.full((2, 1), 3.0), 1.0, 0.5, gradient)\n"
        "print(gradient.tolist())\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, timeout=300, check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "[0.0, 0.0, 4.5]"
    assert result.stderr.count("cache of compiled functions cannot be used") <= 1  # numba may know another folder


def test_multiprocessing_children_rank_like_their_parent():
    scores, targets, _ = anchors("ap", 200_000, torch.float32)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_rank_in_child, args=(queue, scores, targets))
    expected = float(ap_loss(scores, targets))
    child.start()
    assert queue.get(timeout=100) == expected
    child.join(timeout=60)
