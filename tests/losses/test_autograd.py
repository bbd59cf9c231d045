"""Ranking losses behave like any torch loss: compile, autocast, threads, forks, one derivative."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from aploss.losses import ap_loss, auc_loss

LOSSES = [ap_loss, auc_loss]


@pytest.fixture
def boxes(make_boxes):
    return make_boxes("random", 50, 5000, dtype=torch.float32)


def gradient_of(loss, scores, targets):
    scores = scores.clone().requires_grad_()
    loss(scores, targets).backward()
    return scores.grad


@pytest.mark.parametrize("loss", LOSSES)
def test_torch_compile_takes_it_in_one_graph(loss, boxes):
    scores, targets = boxes

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(scores, targets):
        return loss(scores * 2, targets) + scores.mean()

    expected = gradient_of(lambda s, t: loss(s * 2, t) + s.mean(), scores, targets)
    assert torch.allclose(gradient_of(compiled, scores, targets), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_operator_passes_the_checks_of_torch(loss, make_boxes):
    scores, targets = make_boxes(positives=3, negatives=20, dtype=torch.float32)
    scores.requires_grad_()
    operator = {ap_loss: torch.ops.aploss.ap_loss, auc_loss: torch.ops.aploss.auc_loss}[loss]
    arguments = (scores, targets, None, 1.0, True, None, None, None, "")
    # Its gradient is no derivative, so all of opcheck but the comparison with one.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    results = torch.library.opcheck(operator, arguments, test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}


def test_autocast_leaves_the_ranking_in_float32(boxes):
    scores, targets = boxes
    weight = torch.eye(8)
    leaf = scores[:4000].view(-1, 8).clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = leaf @ weight
        loss = ap_loss(logits, targets[:4000].view(-1, 8))
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    expected = gradient_of(ap_loss, logits.detach().float(), targets[:4000].view(-1, 8))
    assert torch.allclose(leaf.grad, expected.bfloat16().float(), atol=0)


def test_the_gradient_follows_what_comes_from_above(boxes):
    scores, targets = boxes
    expected = gradient_of(ap_loss, scores, targets)
    assert torch.allclose(gradient_of(lambda s, t: -3 * ap_loss(s, t), scores, targets), -3 * expected)


def test_backward_twice_on_a_retained_graph_adds_up(boxes):
    scores, targets = boxes
    scores.requires_grad_()
    loss = ap_loss(scores, targets)
    loss.backward(retain_graph=True)
    once = scores.grad.clone()
    loss.backward()
    assert torch.equal(scores.grad, 2 * once)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_second_derivative_is_refused(loss, boxes):
    scores, targets = boxes
    scores.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(scores, targets), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.square().sum().backward()


def test_results_are_the_same_with_any_number_of_threads(make_boxes):
    scores, targets = make_boxes("random", 300, 300_000, dtype=torch.float32)
    results = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.append(gradient_of(ap_loss, scores, targets))
    torch.set_num_threads(1)
    assert all(torch.equal(result, results[0]) for result in results)


def test_several_python_threads_may_rank_at_once(make_boxes):
    scores, targets = make_boxes("random", 100, 200_000, dtype=torch.float32)
    expected = gradient_of(ap_loss, scores, targets)
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: gradient_of(ap_loss, scores, targets), range(8)))
    torch.set_num_threads(1)
    assert all(torch.equal(result, expected) for result in results)


def _rank_in_child(queue, scores, targets):
    torch.set_num_threads(2)
    queue.put(float(ap_loss(scores, targets)))


def test_a_forked_process_may_rank_after_its_parent_did(make_boxes):
    scores, targets = make_boxes("random", 100, 200_000, dtype=torch.float32)
    torch.set_num_threads(2)
    expected = float(ap_loss(scores, targets))
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_rank_in_child, args=(queue, scores, targets))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(timeout=60)
    assert child.exitcode == 0
